"""The rules of what operators keep, beside what torch's autograd says that it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need

torch = need("torch")

from torch import nn  # noqa: E402 - behind the check that torch is there
from torch.nn import functional  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import whatif  # noqa: E402
from whatif.graph.memory import Memory  # noqa: E402
from whatif.models.layers.memory_effects import without_scores  # noqa: E402


class Attention(nn.Module):
    """Self-attention over (batch, length, 32) with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Any) -> Any:
        q, k, v = (p(x).view(6, 10, 2, 16).transpose(1, 2) for p in (self.query, self.key, self.value))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Residual(nn.Module):
    """A sum around a layer that normalises first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Any) -> Any:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


IMAGES, SEQUENCES = (6, 3, 20, 20), (6, 10, 32)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear, relu": (lambda: nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 7)), SEQUENCES),
    "in place": (lambda: nn.Sequential(nn.Linear(32, 40), nn.ReLU(inplace=True), nn.Linear(40, 7)), SEQUENCES),
    "convolution, batch norm, pool": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 5, 3, stride=2),
        ),
        IMAGES,
    ),
    "average pool": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2), nn.Conv2d(8, 5, 3)), IMAGES),
    "gelu, silu, sigmoid": (
        lambda: nn.Sequential(
            nn.Linear(32, 41), nn.GELU(), nn.Linear(41, 42), nn.SiLU(), nn.Linear(42, 43), nn.Sigmoid(),
        ),
        SEQUENCES,
    ),
    "layer norm": (lambda: nn.Sequential(nn.Linear(32, 33), nn.LayerNorm(33), nn.Linear(33, 7)), SEQUENCES),
    "softmax": (lambda: nn.Sequential(nn.Linear(32, 33), nn.Softmax(-1), nn.Linear(33, 7)), SEQUENCES),
    "dropout": (lambda: nn.Sequential(nn.Linear(32, 33), nn.Dropout(0.3), nn.Linear(33, 7)), SEQUENCES),
    "attention": (lambda: nn.Sequential(nn.Linear(32, 32), Attention(), nn.Linear(32, 7)), SEQUENCES),
    "residual": (lambda: nn.Sequential(nn.Linear(32, 32), Residual(), Residual(), nn.Linear(32, 7)), SEQUENCES),
}  # fmt: skip


def saved_bytes(model: nn.Module, batch: Any, loss: Callable[[], Any]) -> int:
    """Bytes of the distinct storages that autograd saves, without parameters and the batch."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()} | {batch.untyped_storage().data_ptr()}
    found: dict[int, int] = {}
    kept = []

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no other one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(found.values())


def recorded(path: Path, model: nn.Module, batch: Any, step: Callable[[], None]) -> Memory:
    """The memory that a trace with shapes and without allocations gives."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(3):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text(encoding="utf-8"))
    trace["whatif"] = {
        "version": 1, "input_shape": list(batch.shape), "input_dtype": "float32",
        "layers": [{
            "name": "(root)", "type": "Sequential", "shapes": {},
            "parameters": sum(p.numel() for p in model.parameters()),
            "gradient_bytes": 4 * sum(p.numel() for p in model.parameters()),
        }],
    }  # fmt: skip
    path.write_text(json.dumps(trace), encoding="utf-8")
    memory = whatif.read(path).info.memory
    assert memory is not None
    assert memory.source == "shapes"
    return memory


@pytest.mark.parametrize("name", NETWORKS)
def test_shapes_show_what_autograd_saves(name: str, tmp_path: Path) -> None:
    """To a kilobyte: scalars and statistics aside."""
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model, batch = build(), torch.randn(*shape)

    def loss() -> Any:
        return model(batch).sum()

    def step() -> None:
        model.zero_grad()
        loss().backward()

    expected = saved_bytes(model, batch, loss)
    assert expected > 4000
    assert recorded(tmp_path / "trace.json", model, batch, step).activations == pytest.approx(expected, abs=1024)


def test_a_fused_attention_keeps_what_that_of_products_keeps_but_for_scores(tmp_path: Path) -> None:
    """The same network by both: 2 heads of 10 x 10 for 6 samples, twice; the fused one keeps a sum for each row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Attention(), Attention(), nn.Linear(32, 7))
    batch = torch.randn(*SEQUENCES)

    def step() -> None:
        model.zero_grad()
        model(batch).sum().backward()

    def loss() -> Any:
        return model(batch).sum()

    fused, saved_by_fused = recorded(tmp_path / "fused.json", model, batch, step), saved_bytes(model, batch, loss)
    with sdpa_kernel(SDPBackend.MATH):
        products = recorded(tmp_path / "products.json", model, batch, step)
        saved_by_products = saved_bytes(model, batch, loss)
    row_sums = 2 * 6 * 2 * 10 * 4
    scores = products.activations - without_scores(products).activations
    assert scores == 2 * 6 * 2 * 10 * 10 * 4
    assert saved_by_products - scores == saved_by_fused - row_sums
    assert without_scores(fused) == fused
