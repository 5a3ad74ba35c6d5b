"""The network that is trained, from a recording of one worker: a chain of layers that can be cut between any two."""

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
from whatif.models.exchange.buckets import step_of
from whatif.models.layers.layer_facts import gradient_bytes
from whatif.models.layers.segments import prefixes
from whatif.runtime.errors import WhatifError
from whatif.simulation.simulator import simulate
from whatif.simulation.steps import MIN_STEPS

# A backward pass takes two products for each of the forward pass.
PASSES = 3


class Part(Struct, frozen=True):
    """Some layers that follow one another, as one processor has them; times of one batch on the recorded machine."""

    forward_ns: float
    backward_ns: float  # the update of its weights included
    weights_bytes: int
    memory_bytes: int
    in_bytes: int  # what flows in, and its gradient out
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
    fetch_ns: float  # what the step does ahead of its forward pass
    weights_bytes: Int64
    in_bytes: Int64  # what flows into each layer; of the first one the batch itself
    kept_bytes: Int64  # what its forward pass keeps for its backward pass
    state_ratio: float = 0.0  # optimizer state for each byte of weights
    copy_byte_s: float = 1e10  # of averaging: bytes read and written a second
    gflop_s: float | None = None  # of the recorded machine at this very training
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
        """Return the time of averaging so many models: each is read, and one is written. Memory bounds it."""
        return (models + 1) * weights_bytes * 1e9 / self.copy_byte_s

    @cached_property
    def total_ns(self) -> float:
        """The whole step on the recorded machine, ns."""
        return self.fetch_ns + self.whole.work_ns

    def layer_number(self, text: str, what_if: str) -> int:
        """Return how many layers lie ahead of a cut: ``text`` is that number, or the name of the last one ahead of it.

        Raises WhatifError where neither fits, or where nothing would lie on one side.
        """
        if text.isdecimal():
            number = int(text)
        elif text in self.layers:
            number = self.layers.index(text) + 1
        else:
            known = ", ".join(self.layers[:6]) + (", ..." if len(self) > 6 else "")
            raise WhatifError(f"{what_if}: expected a cut after one of the layers {known}, got {text!r}.")
        if not 0 < number < len(self):
            raise WhatifError(
                f"{what_if}: expected a cut with layers on both sides, from 1 to {len(self) - 1}, got {number}."
            )
        return number


def dnn_of(graph: TaskGraph, what_if: str = "dts") -> Dnn:
    """Return the network of a recording of one worker: the median of its steady steps.

    A moment of a step belongs to the task that ends next: so do waiting and the gaps between tasks, and the parts add
    up to the step. Raises WhatifError where the recording names no layers, or does not tell what flows between them.
    """
    if bool((graph.kind == TaskKind.COMMUNICATION).any()):
        raise WhatifError(f"{what_if}: expected a recording of one worker, got one whose steps communicate already.")
    tasks, elapsed_ns = _elapsed(graph)
    place, layers = _places(graph, tasks)
    if len(layers) < 2:
        raise WhatifError(
            f"{what_if}: expected a recording that names the layers of its model, two at least, got {len(layers)}; "
            "record it with `whatif collect`."
        )
    times = _times(graph, tasks, elapsed_ns, place, len(layers))
    weights = gradient_bytes(graph)[[graph.layers.index(layer) for layer in layers]]
    in_bytes, kept_bytes = _flows(graph, layers, what_if)
    share = weights / max(int(weights.sum()), 1)
    fetch_ns, forward_ns, backward_ns, update_ns = times
    memory = graph.info.memory
    parameters = memory.parameters if memory else int(weights.sum())
    state = memory.optimizer_state if memory else 0
    # A gigabyte a second is a byte a nanosecond.
    copy_ns = float(moving(graph, [1e9]).duration_ns[0])
    flops = _flops(graph)
    step_ns = graph.info.untraced_step_ns or fetch_ns + forward_ns.sum() + backward_ns.sum() + update_ns
    return Dnn(
        layers, forward_ns, backward_ns, update_ns * share, fetch_ns, weights, in_bytes, kept_bytes,
        state_ratio=state / parameters if parameters else 0.0, copy_byte_s=1e18 / copy_ns,
        gflop_s=PASSES * flops / step_ns if flops else None, batch_size=graph.info.batch_size,
    )  # fmt: skip


def _elapsed(graph: TaskGraph) -> tuple[Int64, Int64]:
    """The tasks that a step consists of, in order, and the time from the end of the one before to the end of each."""
    timeline = simulate(graph)
    working = graph.on_gpu if graph.has_gpu else graph.on_cpu & (graph.thread == 0)
    tasks = np.flatnonzero(working & (step_of(graph) >= 0))
    tasks = tasks[np.argsort(timeline.end_ns[tasks], kind="stable")]
    if not len(tasks):
        return tasks, tasks
    begin_ns = int(timeline.start_ns[tasks[0]])
    return tasks, np.diff(np.maximum.accumulate(timeline.end_ns[tasks]), prepend=begin_ns)


def _leaves(graph: TaskGraph) -> Bool:
    """The layers that no other layer is inside of, by their names, shape (n_layers,)."""
    outer = {"", "(root)"}.union(*(prefixes(name)[:-1] for name in graph.layers))
    return np.array([name not in outer for name in graph.layers], dtype=np.bool_)


def _places(graph: TaskGraph, tasks: Int64) -> tuple[Int64, tuple[str, ...]]:
    """The place in the chain of each of ``tasks``, and the chain: the layers in the order of their first forward work.

    Work of no layer of the chain goes with the one before it; at the begin of a backward pass (the loss) that is the
    last layer.
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
    """Time ahead of the forward pass, of each layer's forward and backward work, and of the update: medians, ns."""
    steps, phase = step_of(graph)[tasks], graph.phase[tasks].astype(np.int64)
    n_steps = int(steps.max()) + 1
    first, last = graph.info.steady if graph.info.n_steps >= MIN_STEPS else (0, n_steps)
    key = (steps * len(Phase) + phase) * n_layers + place
    total = np.bincount(key, weights=elapsed_ns, minlength=n_steps * len(Phase) * n_layers)
    by_step = total.reshape(n_steps, len(Phase), n_layers)[first:last]
    forward, backward = (np.median(by_step[:, phase], axis=0) for phase in (Phase.FORWARD, Phase.BACKWARD))
    rest = by_step.sum(axis=2)
    fetch = np.median(rest[:, Phase.DATA] + rest[:, Phase.UNKNOWN])
    update = np.median(rest[:, Phase.UPDATE])
    # Layer by layer a median is steady, but medians do not add up to that of the step: they give its parts.
    parts = fetch + forward.sum() + backward.sum() + update
    scale = np.median(rest.sum(axis=1)) / parts if parts else 1.0
    return float(fetch * scale), forward * scale, backward * scale, float(update * scale)


def _flows(graph: TaskGraph, layers: tuple[str, ...], what_if: str) -> tuple[Int64, Int64]:
    """What flows into each layer and what it keeps, bytes, from the memory of the recording."""
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
            f"{what_if}: {graph.info.path or 'this recording'} lacks the shapes of what flows between its "
            "layers; record it with `whatif collect`."
        )
    # A layer that keeps nothing and computes in place passes on what flows in.
    for number in range(len(layers) - 2, -1, -1):
        in_bytes[number] = in_bytes[number] or in_bytes[number + 1]
    in_bytes[in_bytes == 0] = in_bytes[in_bytes > 0][-1]
    return in_bytes, kept


def _flops(graph: TaskGraph) -> float:
    """FLOPs of the forward pass of a step, as the recorder wrote them, else of its own products; 0 where none is.

    On a CPU an operator calls others for the same work: of a layer the operator with the most counts.
    """
    recorded = graph.info.recorded.flops
    if recorded is not None and recorded.forward is not None:
        return float(recorded.forward)
    tasks = np.flatnonzero((graph.phase == Phase.FORWARD) & (graph.flops > 0))
    each = graph.layer[tasks].astype(np.int64) * len(graph.names) + (0 if graph.has_gpu else graph.name[tasks])
    keys, group = np.unique(each, return_inverse=True)
    by_operator = np.bincount(group, weights=graph.flops[tasks], minlength=len(keys))
    most = np.zeros(len(graph.layers))
    np.maximum.at(most, keys // len(graph.names), by_operator)
    return float(most.sum()) / max(graph.info.n_steps, 1)
