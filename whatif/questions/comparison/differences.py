"""Compare the facts of two recordings: what differs, and what makes their steps incomparable."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from whatif.graph.info import GraphInfo
from whatif.graph.recorded import Optimizer, Precision, Recorded
from whatif.graph.task_graph import TaskGraph
from whatif.models.exchange.collective_tasks import communicates
from whatif.models.layers.layer_facts import gradient_bytes, layer_rows
from whatif.questions.comparison.constraints import adds_workers, what_ifs_of

# What DistributedDataParallel and compiled modules prefix to the names of the layers that they wrap.
WRAPPERS = ("module", "_orig_mod")
# Our choice: models with a smaller share of layer names in common, or with more times the parameters, are different.
SAME_LAYERS = 0.5
SAME_PARAMETERS = 2.0
# Longer values are truncated.
SHOWN_CHARACTERS = 60

BATCH, OPTIMIZER = "batch size", "optimizer"

# Facts about the machine and its software from the recorder, in report order.
_ENVIRONMENT = (
    ("cpu", "CPU"), ("threads", "threads"), ("cpu_cores", "CPU cores"), ("driver", "driver"), ("torch", "torch"),
    ("cuda", "CUDA"), ("cudnn", "cuDNN"), ("python", "Python"), ("input_dtype", "input type"),
)  # fmt: skip
_PRECISION = ("parameters", "autocast", "matmul", "conv")
_OPTIMIZER = ("foreach", "fused", "capturable")


class Difference(Struct, frozen=True):
    """Something in which two recordings differ. If it ``blocks``, their steps are of different work or machines."""

    what: str
    before: str
    after: str
    blocks: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.before} → {self.after}"

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as a JSON object."""
        return {"what": self.what, "a": self.before, "b": self.after, "blocks": self.blocks}


def differences(before: TaskGraph, after: TaskGraph, clock: str) -> tuple[Difference, ...]:
    """Return what differs: device, model, workers, batch and input block a comparison by ``clock``, the rest does not.

    A fact that only one of the two records is not a difference.
    """
    found: list[Difference] = []

    def compare(what: str, old_value: Any, new_value: Any, blocks: bool = False) -> None:
        if old_value is not None and new_value is not None and old_value != new_value:
            found.append(Difference(what, _shown(old_value), _shown(new_value), blocks))

    a, b = before.info, after.info
    if bool(a.ranks) != bool(b.ranks):
        compare("ranks that were read", len(a.ranks) or "one alone", len(b.ranks) or "one alone", blocks=True)
    # A prediction keeps the facts of its recording: nothing is known of what its what-ifs changed there.
    both = [Recorded() if what_ifs_of(info) else info.recorded for info in (a, b)]
    on_cpu = not before.has_gpu and not after.has_gpu
    if before.has_gpu != after.has_gpu:
        compare("device", a.gpu or _device(before), b.gpu or _device(after), blocks=True)
    else:
        compare("device", a.gpu, b.gpu, blocks=True)
    found += _models(before, after)
    compare("workers", _workers(before), _workers(after), blocks=not any(map(adds_workers, (a, b))))
    compare(BATCH, _batch(a), _batch(b), blocks=True)
    if a.batch_size == b.batch_size:
        old, new = (list(recorded.input_shape) if recorded.input_shape else None for recorded in both)
        compare("input shape", old, new, blocks=True)
    if clock == "span":
        compare("number of steps", a.n_steps, b.n_steps, blocks=True)
    compare("execution", " and ".join(a.execution), " and ".join(b.execution))
    compare(OPTIMIZER, a.optimizer, b.optimizer)
    for key in _OPTIMIZER:
        compare(f"optimizer's {key}", *(_setting(recorded.optimizer, key, missing="default") for recorded in both))
    for key in _PRECISION:
        old, new = (_setting(recorded.precision, key, missing="none") for recorded in both)
        compare(f"precision of {key}" if key != "autocast" else key, old, new)
    for key, what in _ENVIRONMENT:
        # Without a GPU the CPU is the device.
        compare(what, getattr(a.recorded, key), getattr(b.recorded, key), blocks=on_cpu and key == "cpu")
    return tuple(found)


def without_wrappers(layer: str) -> str:
    """Return a layer's name without what wrappers of the whole model put before it."""
    parts = layer.split(".")
    while len(parts) > 1 and parts[0] in WRAPPERS:
        del parts[0]
    return ".".join(parts)


def _models(before: TaskGraph, after: TaskGraph) -> list[Difference]:
    """Whether the two are of one model, judged by their layers and parameters."""
    if before.info.execution != after.info.execution and not (layer_rows(before) and layer_rows(after)):
        return []  # a compiled region has no layers in it
    old, new = _layers(before), _layers(after)
    sizes = [int(gradient_bytes(graph).sum()) for graph in (before, after)]
    common = len(old & new) / len(old | new) if old and new else 1.0
    counts = f"{len(old):,} layers", f"{len(new):,} layers, {len(old & new):,} of them in both"
    if common < SAME_LAYERS:
        return [Difference("model", *counts, blocks=True)]
    if all(sizes) and max(sizes) > SAME_PARAMETERS * min(sizes):
        one_size, other_size = (f"{size / 1e6:,.2f} MB of gradients" for size in sizes)
        return [Difference("model", one_size, other_size, blocks=True)]
    return [Difference("layers", *counts)] if common < 1 else []


def _layers(graph: TaskGraph) -> set[str]:
    names = set(layer_rows(graph)) or set(graph.layers)
    return {without_wrappers(name) for name in names if name and not name.startswith("(")}


def _device(graph: TaskGraph) -> str:
    return "a GPU" if graph.has_gpu else "CPU"


def _workers(graph: TaskGraph) -> int | None:
    """The number of workers: one if nothing indicates others; None if collectives indicate an unknown number."""
    return graph.info.workers or (None if communicates(graph) else 1)


def _batch(info: GraphInfo) -> Any:
    """The batch of a pass, or of each rank if they differ."""
    batches = tuple(rank.batch_size for rank in info.ranks)
    return batches if len(set(batches)) > 1 and None not in batches else info.batch_size


def _setting(table: Precision | Optimizer | None, key: str, missing: str) -> Any:
    if table is None or key not in table.present:
        return None
    value = getattr(table, key)
    return missing if value is None else value


def _shown(value: Any) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
