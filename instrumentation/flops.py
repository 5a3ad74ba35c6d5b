"""FLOPs of the forward pass by layer, from the shapes in the trace: without an extra call of the model."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from whatif.ingest.op_cost import OF_SPARSE, op_cost

from .layers import LAYER_PREFIX

_RECURRENT = frozenset({"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"})
_TRANSPOSED = frozenset({"aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d"})


@dataclass(frozen=True, slots=True)
class _Scope:
    """What encloses an operator: the innermost layer; `closed` under a counted operator or one of autograd."""

    end_us: float
    layer: str | None
    closed: bool


def forward_flops(events: list[dict[str, Any]], steps: int) -> dict[str, Any] | None:
    """Return `forward` (FLOPs of one step's forward passes, a multiply-add is two) and `layers`, those of each layer.

    Counts matrix products, convolutions, attention and recurrent layers, by the innermost layer that encloses them;
    not operators outside all layers or recomputed in a backward pass, nor products with sparse matrices, whose shapes
    do not show how many elements are stored. None if there is nothing to count: no operators, no shapes, or no layers
    (a compiled model).
    """
    layers: Counter[str] = Counter()
    stack: list[_Scope] = []
    spans = list(_on_main_thread(events))
    sparse_us = [event["ts"] for event in spans if event["name"].startswith(OF_SPARSE)]
    for event in spans:
        while stack and stack[-1].end_us <= event["ts"]:
            stack.pop()
        layer, closed = (stack[-1].layer, stack[-1].closed) if stack else (None, False)
        name = event["name"]
        if name.startswith(LAYER_PREFIX):
            layer = name.removeprefix(LAYER_PREFIX)
        elif name.startswith(("autograd::", *OF_SPARSE)):
            closed = True
        elif layer is not None and not closed and event["cat"] == "cpu_op":
            flops = 0 if _calls_within(event, sparse_us) else _flops(name, event.get("args", {}))
            layers[layer] += flops
            closed = flops > 0  # The operators it calls do the same work.
        stack.append(_Scope(event["ts"] + event.get("dur", 0), layer, closed))
    per_step = {layer: round(flops / steps) for layer, flops in layers.items() if flops}
    return {"forward": sum(per_step.values()), "layers": per_step} if per_step else None


def _on_main_thread(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the operators and annotations of the thread that has the step marks, outer ones before inner ones."""
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")]
    main = {(e["pid"], e["tid"]) for e in spans if e["name"].startswith("ProfilerStep#")}
    yield from sorted((e for e in spans if (e["pid"], e["tid"]) in main), key=lambda e: (e["ts"], -e.get("dur", 0)))


def _calls_within(event: dict[str, Any], calls_us: list[float]) -> bool:
    """Return whether one of ``calls_us``, ascending, begins while ``event`` lasts."""
    begin_us = event["ts"]
    return bisect_left(calls_us, begin_us) < bisect_left(calls_us, begin_us + event.get("dur", 0))


def _flops(name: str, args: dict[str, Any]) -> int:
    dims = args.get("Input Dims")
    if not dims:
        return 0
    if name in _RECURRENT:
        return _recurrent(dims)
    if name in _TRANSPOSED:
        return int(2 * prod(dims[0]) * prod(dims[1][1:]))
    cost = op_cost(name, dims, args.get("Input type"), args.get("Concrete Inputs"))
    return (cost.flops or 0) if cost else 0


def _recurrent(dims: list[Any]) -> int:
    """Count every weight matrix once for each row of the input: (time, batch, features), or packed (rows, features)."""
    rows = prod(dims[0][:-1])
    lists = [shape for shape in dims[1:] if shape and isinstance(shape[0], list)]
    matrices = [shape for shapes in lists for shape in shapes if len(shape) == 2]
    return int(2 * rows * sum(prod(shape) for shape in matrices))
