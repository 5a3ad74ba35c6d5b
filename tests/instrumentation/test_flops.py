"""FLOPs of the forward pass from the recorded shapes, against torch's own counter and by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need

torch = need("torch")
instrumentation = need("whatif.instrumentation")
counter = need("torch.utils.flop_counter")
need("torch.nn.attention")
nn = torch.nn


def flops_of(model: Any, path: Path, *inputs: Any, passes: int = 1, checkpoint: bool = False) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with instrumentation.record(model, optimizer, path, steps=3, warmup_steps=1, untraced_steps=2) as recording:
        while not recording.done:
            for _ in range(passes):
                if checkpoint:
                    out = torch.utils.checkpoint.checkpoint(model, *inputs, use_reentrant=False)
                else:
                    out = model(*inputs)
                (out[0] if isinstance(out, tuple) else out).square().mean().backward()
            optimizer.step()
            recording.step()
    return json.loads(path.read_text())["whatif"]["flops"]


def counted(model: Any, *inputs: Any) -> int:
    # Torch's counter does not know the CPU's own attention kernel; the plain products are the same work.
    plain = nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)
    with counter.FlopCounterMode(display=False) as mode, plain:
        model(*inputs)
    return mode.get_total_flops()


MODELS = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, dilation=2),
        nn.ConvTranspose2d(8, 5, 4, stride=2),
        nn.Flatten(),
        nn.LazyLinear(7),
    ),
    "attention": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.TransformerEncoderLayer(20, 4, 40, dropout=0.0, batch_first=True), nn.Linear(20, 3)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_torchs_counter(name: str, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 20, 20)
    model = MODELS[name]()
    expected = counted(model, x)
    found = flops_of(model, tmp_path / "run.json", x)
    assert found["forward"] == expected == sum(found["layers"].values()) > 0
    assert "(root)" not in found["layers"]


def test_counts_the_forward_passes_of_a_step_and_not_what_is_computed_anew(tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    once = {"forward": 2 * 4 * 6 * 5, "layers": {"(root)": 2 * 4 * 6 * 5}}
    assert flops_of(nn.Linear(6, 5), tmp_path / "once.json", x) == once
    assert flops_of(nn.Linear(6, 5), tmp_path / "again.json", x, checkpoint=True) == once
    assert flops_of(nn.Linear(6, 5), tmp_path / "twice.json", x, passes=2)["forward"] == 2 * once["forward"]


def test_recurrent_layers_count_their_matrices_once_a_row(tmp_path: Path) -> None:
    model = nn.LSTM(5, 7, num_layers=2, bidirectional=True, batch_first=True)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert flops_of(model, tmp_path / "run.json", torch.randn(3, 4, 5))["forward"] == 2 * 3 * 4 * matrices


def test_a_model_without_products_has_none(tmp_path: Path) -> None:
    assert flops_of(nn.LayerNorm(6), tmp_path / "run.json", torch.randn(4, 6)) is None


def test_products_with_sparse_matrices_are_not_counted_as_dense_ones(tmp_path: Path) -> None:
    class Neighbours(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 5)

        def forward(self, x: Any) -> Any:
            edges = torch.eye(4).to_sparse()
            return torch.sparse.mm(edges, self.inner(x)) + edges @ self.inner(x)

    linear = 2 * 2 * 4 * 6 * 5
    found = flops_of(Neighbours(), tmp_path / "run.json", torch.randn(4, 6))
    assert found == {"forward": linear, "layers": {"inner": linear}}
