"""Recurrent layers on meta tensors as devices run them: beside the operators that a CPU itself calls."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need

pytestmark = pytest.mark.slow

MODELS = """
from torch import nn

class Last(nn.Module):
    def __init__(self, kind="LSTM", **options):
        super().__init__()
        self.layer = getattr(nn, kind)(8, 16, batch_first=True, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2], batch_first=True)
        return self.layer(packed)[0].data.sum()
"""
LAYERS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "dropout": 0.5},
    {"bias": False},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bidirectional": True, "bias": False, "batch_first": True},
]


def called(options: dict[str, Any], device: str) -> Counter[str]:
    """Operators that a forward and backward pass calls, with the shapes of what they read, by how often."""
    torch = need("torch")
    from torch.utils._python_dispatch import TorchDispatchMode
    from whatif.instrumentation.trace_module.stand_ins import AsOnDevice

    found: Counter[str] = Counter()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args if not is_workspace(a)]
            found[f"{func} {shapes}" if "rnn" in str(func) else str(func)] += 1
            return result

    def is_workspace(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype == torch.uint8

    layer = torch.nn.LSTM(8, 16, **options).to(device)
    x = torch.randn(5, 3, 8, device=device)
    with AsOnDevice(None) if device == "meta" else nullcontext(), Seen():
        layer(x)[0].sum().backward()
    # On meta tensors both biases get one gradient, which is copied for the second of them.
    small = ("aten.detach", "aten.new_empty_strided", "aten.copy_")
    return Counter({name: count for name, count in found.items() if not name.startswith(small)})


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_an_lstm_calls_what_a_cpu_calls(options: dict[str, Any]) -> None:
    torch = need("torch")
    if not torch.backends.mkldnn.is_available():
        pytest.skip("a build without oneDNN runs single steps")
    on_meta = called(options, "meta")
    assert on_meta == called(options, "cpu")
    layers = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    passes = [name.split()[0] for name in on_meta.elements() if "mkldnn_rnn" in name]
    assert Counter(passes) == {
        "aten.mkldnn_rnn_layer.default": layers,
        "aten.mkldnn_rnn_layer_backward.default": layers,
    }


@pytest.mark.parametrize(
    ("keywords", "capability", "note"),
    [
        ({}, None, None),
        ({"kind": "GRU"}, None, "GRU and RNN layers are traced step by step"),
        ({}, 8.0, "recurrent layers are traced step by step"),
    ],
    ids=["lstm-cpu", "gru-cpu", "lstm-amd"],
)
def test_layers_that_run_otherwise_are_noted(
    tmp_path: Path, keywords: dict[str, Any], capability: float | None, note: str | None
) -> None:
    graph = taken_down(tmp_path, "Last", keywords, capability=capability, cudnn=False)
    said = [text for text in graph.notes if "step by step" in text]
    assert len(said) == (note is not None)
    assert note is None or said[0].startswith(note)
    fused = sum(operation.name.startswith("aten::mkldnn_rnn_layer") for operation in graph.operations)
    assert fused == (2 if note is None else 0)


def taken_down(folder: Path, model: str, keywords: dict[str, Any], **how: Any) -> Any:
    """The step of one of ``MODELS``."""
    need("torch")
    from whatif.instrumentation.trace_module.step import Wanted, take_down_step

    (folder / "net.py").write_text(MODELS, encoding="utf-8")
    return take_down_step(Wanted(f"{folder / 'net.py'}:{model}", [("", (3, 5, 8), "")], keywords, **how))


@pytest.mark.parametrize(
    ("model", "keywords"),
    [
        ("Last", {"bidirectional": True, "num_layers": 2, "dropout": 0.1}),
        ("Last", {"kind": "GRU", "bias": False}),
        ("Last", {"kind": "RNN"}),
        ("Packed", {}),
    ],
    ids=["lstm", "gru", "rnn", "packed"],
)
def test_an_nvidia_gpu_runs_one_call_forward_and_one_backward(
    tmp_path: Path, model: str, keywords: dict[str, Any]
) -> None:
    graph = taken_down(tmp_path, model, keywords)
    called = [operation for operation in graph.operations if "cudnn_rnn" in operation.name]
    assert [operation.name for operation in called] == ["aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"]
    assert sum("as cuDNN runs them" in note for note in graph.notes) == 1
    assert not any(operation.name.startswith(("aten::tanh", "aten::sigmoid")) for operation in graph.operations)
    # The gates, outputs and cells that the backward pass reads are kept between the two calls.
    rows = 11 if model == "Packed" else 15
    both, layers = keywords.get("bidirectional", 0), keywords.get("num_layers", 1)
    gates = {"GRU": 3, "RNN": 1}.get(keywords.get("kind", ""), 4)
    kept = -(-rows * (1 + both) * layers * (gates + 2) * 16 * 4 // 512) * 512
    assert any(block.size_bytes == kept for block in graph.allocations)


def test_a_model_that_turns_cudnn_off_is_traced_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(need("torch").backends.cudnn, "enabled", False)
    graph = taken_down(tmp_path, "Last", {})
    assert not any("cudnn" in operation.name for operation in graph.operations)
