"""The trained network, from a recording of one worker: a chain of layers that can be cut between any two."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Bool,
    Float64,
    Int64,
    Phase,
    TaskKind,
)
from whatif.models.durations.estimator import moving
from whatif.models.layers.gradients import step_of
from whatif.models.layers.layer_facts import gradient_bytes
from whatif.models.layers.segments import prefixes
from whatif.runtime.errors import WhatifError
from whatif.simulation.simulator import simulate
from whatif.simulation.steps import MIN_STEPS

# The backward pass computes two products for each of the forward pass: three times its FLOPs in all.
PASSES = 3


class Part(Struct, frozen=True):
    """Consecutive layers on one processor; times of one batch on the recorded machine."""

    forward_ns: float
    backward_ns: float  # including the weight update
    weights_bytes: int
    memory_bytes: int
    in_bytes: int  # its input, and the gradient that it sends back
    out_bytes: int

    @property
    def work_ns(self) -> float:
        """Both passes of a batch, ns."""
        return self.forward_ns + self.backward_ns


class Dnn(Struct, frozen=True, dict=True):
    """Layers in the order of the forward pass; columns of shape (n_layers,), of one batch on the recorded machine."""

    layers: tuple[str, ...]
    forward_ns: Float64
    backward_ns: Float64
    update_ns: Float64
    fetch_ns: float  # the step's work before its forward pass
    weights_bytes: Int64
    in_bytes: Int64  # each layer's input; the first layer's is the batch
    kept_bytes: Int64  # kept by the forward pass for the backward pass
    state_ratio: float = 0.0  # bytes of optimizer state per byte of weights
    copy_byte_s: float = 1e10  # for averaging: bytes read and written per second
    gflop_s: float | None = None  # of the recorded machine at this training
    batch_size: int | None = None

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def whole(self) -> Part:
        """All layers."""
        return self.part(0, len(self))

    def part(self, first: int, last: int) -> Part:
        """Return the layers from ``first`` up to, not including, ``last``."""
        chosen = slice(first, last)
        weights = int(self.weights_bytes[chosen].sum())
        return Part(
            float(self.forward_ns[chosen].sum()),
            float(self.backward_ns[chosen].sum() + self.update_ns[chosen].sum()),
            weights,
            round(weights * (2 + self.state_ratio)) + int(self.kept_bytes[chosen].sum()) + int(self.in_bytes[first]),
            int(self.in_bytes[first]),
            int(self.in_bytes[last]) if last < len(self) else 0,
        )

    def average_ns(self, models: int, weights_bytes: int) -> float:
        """Return the time of averaging ``models`` models, bounded by memory: each is read, and one is written."""
        return (models + 1) * weights_bytes * 1e9 / self.copy_byte_s

    @cached_property
    def total_ns(self) -> float:
        """The whole step on the recorded machine, ns."""
        return self.fetch_ns + self.whole.work_ns

    def layer_number(self, text: str) -> int:
        """Return the number of layers before a cut: ``text`` is that number, or the name of the last layer before it.

        Raises WhatifError if it is neither, or if no layer would be on one side.
        """
        if text.isdecimal():
            number = int(text)
        elif text in self.layers:
            number = self.layers.index(text) + 1
        else:
            known = ", ".join(self.layers[:6]) + (", ..." if len(self) > 6 else "")
            raise WhatifError(f"dts: expected a cut after one of the layers {known}, got {text!r}.")
        if not 0 < number < len(self):
            raise WhatifError(
                f"dts: expected a cut with layers on both sides, from 1 to {len(self) - 1}, got {number}."
            )
        return number


def dnn_of(graph: TaskGraph) -> Dnn:
    """Return the network of a recording of one worker: the median of its steady steps.

    All time of a step is attributed to the task that ends next, including waits and gaps between tasks, so that the
    parts add up to the step. Raises WhatifError if the recording names no layers, or lacks the sizes of their inputs.
    """
    if bool((graph.kind == TaskKind.COMMUNICATION).any()):
        raise WhatifError("dts: expected a recording of one worker, got one whose steps communicate already.")
    tasks, elapsed_ns = _elapsed(graph)
    place, layers = _places(graph, tasks)
    if len(layers) < 2:
        raise WhatifError(
            f"dts: expected a recording that names the layers of its model, two at least, got {len(layers)}; "
            "record it with `whatif collect`."
        )
    times = _times(graph, tasks, elapsed_ns, place, len(layers))
    weights = gradient_bytes(graph)[[graph.layers.index(layer) for layer in layers]]
    in_bytes, kept_bytes = _flows(graph, layers)
    share = weights / max(int(weights.sum()), 1)
    fetch_ns, forward_ns, backward_ns, update_ns = times
    memory = graph.info.memory
    parameters = memory.parameters if memory else int(weights.sum())
    state = memory.optimizer_state if memory else 0
    # 1 GB takes n ns: the rate is 1e18 / n bytes per second.
    copy_ns = float(moving(graph, [1e9]).duration_ns[0])
    flops = _flops(graph)
    step_ns = graph.info.untraced_step_ns or fetch_ns + forward_ns.sum() + backward_ns.sum() + update_ns
    return Dnn(
        layers, forward_ns, backward_ns, update_ns * share, fetch_ns, weights, in_bytes, kept_bytes,
        state_ratio=state / parameters if parameters else 0.0, copy_byte_s=1e18 / copy_ns,
        gflop_s=PASSES * flops / step_ns if flops else None, batch_size=graph.info.batch_size,
    )  # fmt: skip


def _elapsed(graph: TaskGraph) -> tuple[Int64, Int64]:
    """The tasks of the steps in order of their ends, and the time from the previous task's end to each end, ns."""
    timeline = simulate(graph)
    working = graph.on_gpu if graph.has_gpu else graph.on_cpu & (graph.thread == 0)
    tasks = np.flatnonzero(working & (step_of(graph) >= 0))
    tasks = tasks[np.argsort(timeline.end_ns[tasks], kind="stable")]
    if not len(tasks):
        return tasks, tasks
    begin_ns = int(timeline.start_ns[tasks[0]])
    return tasks, np.diff(np.maximum.accumulate(timeline.end_ns[tasks]), prepend=begin_ns)


def _leaves(graph: TaskGraph) -> Bool:
    """A mask of the layers that contain no other layer (by name), shape (n_layers,)."""
    outer = {"", "(root)"}.union(*(prefixes(name)[:-1] for name in graph.layers))
    return np.array([name not in outer for name in graph.layers], dtype=np.bool_)


def _places(graph: TaskGraph, tasks: Int64) -> tuple[Int64, tuple[str, ...]]:
    """Each task's place in the chain, and the chain: the layers in the order of their first forward task.

    Tasks of no layer of the chain belong to the previous task's layer; at the start of a backward pass (the loss) to
    the last layer.
    """
    phase, layer = graph.phase[tasks], graph.layer[tasks]
    known = _leaves(graph)[layer]
    forward = np.flatnonzero(known & (phase == Phase.FORWARD))
    codes, first = np.unique(layer[forward], return_index=True)
    codes = codes[np.argsort(first)]
    number = np.full(len(graph.layers), -1, dtype=np.int64)
    number[codes] = np.arange(len(codes))
    place = np.where(known, number[layer], -1)
    marks = np.flatnonzero((place >= 0) | (np.diff(phase, prepend=-1) != 0))
    starts = np.where(phase[marks] == Phase.BACKWARD, len(codes) - 1, 0)
    if not len(marks):
        return place, ()
    known_places = np.where(place[marks] >= 0, place[marks], starts)
    place = known_places[np.searchsorted(marks, np.arange(len(tasks)), side="right") - 1]
    return place, tuple(graph.layers[code] for code in codes)


def _times(
    graph: TaskGraph, tasks: Int64, elapsed_ns: Int64, place: Int64, n_layers: int
) -> tuple[float, Float64, Float64, float]:
    """Medians of the time before the forward pass, of each layer's two passes, and of the update, ns."""
    steps, phase = step_of(graph)[tasks], graph.phase[tasks].astype(np.int64)
    n_steps = int(steps.max()) + 1
    first, last = graph.info.steady if graph.info.n_steps >= MIN_STEPS else (0, n_steps)
    key = (steps * len(Phase) + phase) * n_layers + place
    total = np.bincount(key, weights=elapsed_ns, minlength=n_steps * len(Phase) * n_layers)
    by_step = total.reshape(n_steps, len(Phase), n_layers)[first:last]
    forward, backward = (np.median(by_step[:, phase], axis=0) for phase in (Phase.FORWARD, Phase.BACKWARD))
    by_phase = by_step.sum(axis=2)
    fetch = np.median(by_phase[:, Phase.DATA] + by_phase[:, Phase.UNKNOWN])
    update = np.median(by_phase[:, Phase.UPDATE])
    # Medians by layer are stable but do not add up to the step's median: scale them to it.
    parts = fetch + forward.sum() + backward.sum() + update
    scale = np.median(by_phase.sum(axis=1)) / parts if parts else 1.0
    return float(fetch * scale), forward * scale, backward * scale, float(update * scale)


def _flows(graph: TaskGraph, layers: tuple[str, ...]) -> tuple[Int64, Int64]:
    """Bytes of each layer's input and of what it keeps, from the recording's memory."""
    rows = graph.info.memory.layers if graph.info.memory else ()
    in_bytes, kept = (np.zeros(len(layers), dtype=np.int64) for _ in range(2))
    place = {layer: number for number, layer in enumerate(layers)}
    for row in rows:
        number = place.get(row.name, -1)
        if number >= 0:
            in_bytes[number] = in_bytes[number] or row.input
            kept[number] += row.activations
    if not (in_bytes > 0).any():
        raise WhatifError(
            f"dts: {graph.info.path or 'this recording'} lacks the shapes of what flows between its "
            "layers; record it with `whatif collect`."
        )
    # A layer without an input size computes in place: use the next layer's.
    for number in range(len(layers) - 2, -1, -1):
        in_bytes[number] = in_bytes[number] or in_bytes[number + 1]
    in_bytes[in_bytes == 0] = in_bytes[in_bytes > 0][-1]
    return in_bytes, kept


def _flops(graph: TaskGraph) -> float:
    """FLOPs of a step's forward pass: the recorder's, else summed from the tasks; 0 if there are none.

    On a CPU operators call others for the same work: of each layer only the operator with the most FLOPs counts.
    """
    recorded = graph.info.recorded.flops
    if recorded is not None and recorded.forward is not None:
        return float(recorded.forward)
    tasks = np.flatnonzero((graph.phase == Phase.FORWARD) & (graph.flops > 0))
    each = graph.layer[tasks].astype(np.int64) * len(graph.names) + (0 if graph.has_gpu else graph.name[tasks])
    keys, group = np.unique(each, return_inverse=True)
    by_operator = np.bincount(group, weights=graph.flops[tasks], minlength=len(keys))
    by_layer = np.zeros(len(graph.layers))
    np.maximum.at(by_layer, keys // len(graph.names), by_operator)
    return float(by_layer.sum()) / max(graph.info.n_steps, 1)
