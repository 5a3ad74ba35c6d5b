"""Pieces of a stage's work: the forward or backward pass of a micro-batch, loading the batch, the update.

A piece has three times. Its CPU time is that of the thread that launches it, its GPU time the stream's busy time with
all launches done. On an idle GPU a piece ends after its last kernel, which waits for its launch and the kernels before
it: the kernels lag the begin of the CPU's work by ``start_lag_ns``. So a CPU-bound piece takes the CPU time, and one
with early launches the GPU time. Exchanges between the parts of a layer in a piece (``tensor_parallel``) are added as a
transfer after it: the work waits for it, except for the part hidden by kernels of the piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Float64,
    Int64,
    Phase,
)
from whatif.models.durations.estimator import Source
from whatif.models.kernels.batch import at_batch, batch_tasks
from whatif.models.layers.added_gradients import additions
from whatif.models.layers.gradients import step_of
from whatif.models.parallel.stages import Model, working_threads
from whatif.simulation.simulator import simulate
from whatif.simulation.transfers import grown_ns, hidden_ns, of_activations, parts_of


class Pieces(NamedTuple):
    """Pieces of work, ns, shape (n_steps, n_pieces) each; ``low`` and ``high`` bound the durations.

    ``sum_ns`` is the time of a piece's collectives, of which ``sum_latency_ns`` does not depend on their ``sum_bytes``.
    On a CPU they take ``sum_network_ns`` on the network alone and ``sum_cpu_ns`` of the CPU, of which
    ``sum_messages_ns`` does not depend on their bytes.
    """

    cpu_ns: Float64
    cpu_low_ns: Float64
    cpu_high_ns: Float64
    gpu_ns: Float64
    gpu_low_ns: Float64
    gpu_high_ns: Float64
    start_lag_ns: Float64
    sum_ns: Float64
    sum_low_ns: Float64
    sum_high_ns: Float64
    sum_latency_ns: Float64
    sum_network_ns: Float64
    sum_cpu_ns: Float64
    sum_messages_ns: Float64
    sum_bytes: Float64

    def take(self, columns: Array) -> Pieces:
        """The given pieces, in the order of ``columns``."""
        return Pieces(*(column[:, columns] for column in self))

    def times(self, share: npt.ArrayLike) -> Pieces:
        """The pieces scaled by ``share``, shape (n_pieces,): a piece cut into equal ones."""
        return Pieces(*(column * np.asarray(share) for column in self))

    @staticmethod
    def side_by_side(parts: Sequence[Pieces]) -> Pieces:
        """The pieces of several tables, one table after the other."""
        return Pieces(*(np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)))

    def then(self, other: Pieces) -> Pieces:
        """Each piece joined with the one of ``other`` right after it."""
        # On an idle GPU: its kernels follow those before it, or wait for their launches.
        after_ns = np.where(other.gpu_ns > 0, self.cpu_ns + other._idle_ns, 0.0)
        idle_ns = np.maximum(self._idle_ns + other.gpu_ns, after_ns)
        busy_ns = self.gpu_ns + other.gpu_ns
        sums = (one + more for one, more in zip(self, other, strict=True))
        return Pieces(*sums)._replace(start_lag_ns=idle_ns - busy_ns)

    @property
    def busy_ns(self) -> Float64:
        """The time of a piece on the busier of CPU and GPU, transfers included."""
        return np.maximum(self.cpu_ns, self.gpu_ns) + self.sum_ns

    @property
    def _idle_ns(self) -> Float64:
        """From the begin of the CPU's work to the end of the GPU's, on an idle GPU."""
        return self.start_lag_ns + self.gpu_ns


class Work(Struct, frozen=True):
    """The pieces of a model's parts at one micro-batch, and the pieces once per step.

    ``forward`` and ``backward``: (n_steps, n_parts). ``batch``: loading and copying it, (n_steps, 1). ``update`` and
    ``added`` (adding up the gradients of all micro-batches): of the whole model, (n_steps, 1). ``steps`` (n_steps,) are
    their numbers; ``source`` is the source of a micro-batch's times.
    """

    steps: Int64
    forward: Pieces
    backward: Pieces
    batch: Pieces
    update: Pieces
    added: Pieces
    source: Source
    waits: bool  # whether the CPU waits for the GPU once a step or more often


def one_step(work: Work) -> Work:
    """Return the work of the middle step alone."""
    middle = len(work.steps) // 2

    def of_middle(pieces: Pieces) -> Pieces:
        return Pieces(*(column[middle : middle + 1] for column in pieces))

    return replace(
        work, steps=work.steps[middle : middle + 1], forward=of_middle(work.forward),
        backward=of_middle(work.backward), batch=of_middle(work.batch), update=of_middle(work.update),
        added=of_middle(work.added),
    )  # fmt: skip


class StepWork(Struct, frozen=True, dict=True):
    """The tasks of the steps with the times of a micro-batch; ``of_parts`` sums them by the parts of a cut.

    Duration and its bounds, ns, and traffic of each task, shape (n_tasks,) each, and the source of the times.
    """

    graph: TaskGraph
    model: Model
    duration_ns: Float64
    low_ns: Float64
    high_ns: Float64
    size_bytes: Float64
    source: Source

    def of_parts(self, part: Int64, n_parts: int) -> Work:
        """Return the work of the parts; ``part`` (n_tasks,) is the part of each task of a pass, -1 for others.

        Waiting is not work, so synchronisations inside a pass are free; so are threads that do not train.
        """
        graph, steps = self.graph, self._steps[0]
        n_pieces = 2 * n_parts + 3
        in_pass = np.flatnonzero(part >= 0)
        piece = self._steps[1] * n_pieces + 2 * n_parts  # tasks outside of passes and update come first
        backward = np.where(graph.phase[in_pass] == Phase.BACKWARD, n_parts, 0)
        piece[in_pass] += part[in_pass] + backward - 2 * n_parts
        updates, added = self._updates
        piece[updates[part[updates] < 0]] += 1
        piece[added] = self._steps[1][added] * n_pieces + 2 * n_parts + 2
        every = self._pieces(piece, len(steps) * n_pieces)
        kept = np.flatnonzero(steps >= 0)
        every = Pieces(*(column.reshape(len(steps), n_pieces)[kept] for column in every))
        parts = np.arange(n_parts)
        return Work(
            steps=steps[kept] if graph.info.n_steps else np.full(len(kept), -1, dtype=np.int64),
            forward=every.take(parts),
            backward=every.take(parts + n_parts),
            batch=every.take(np.array([2 * n_parts])),
            update=every.take(np.array([2 * n_parts + 1])),
            added=every.take(np.array([2 * n_parts + 2])),
            source=self.source,
            waits=bool(len(graph.waits.task)),
        )

    @property
    def _bounds(self) -> tuple[Float64, Float64, Float64]:
        return self.duration_ns, self.low_ns, self.high_ns

    @cached_property
    def _steps(self) -> tuple[Int64, Int64]:
        """The numbers of the steps, -1 for tasks outside, and the place of each task's among them, (n_tasks,)."""
        steps, step = np.unique(step_of(self.graph), return_inverse=True)
        return steps, np.asarray(step, dtype=np.int64).reshape(-1)

    @cached_property
    def _updates(self) -> tuple[Int64, Int64]:
        """The ids of the tasks of the update, and of those that add gradients."""
        return np.flatnonzero(self.graph.phase == Phase.UPDATE), np.flatnonzero(additions(self.graph))

    @cached_property
    def _working(self) -> tuple[Int64, Int64]:
        """The ids of the calls of the threads that train, and of the GPU's tasks, in steps."""
        graph, (steps, step) = self.graph, self._steps
        counted = steps[step] >= 0
        cpu = graph.on_cpu & working_threads(graph, self.model).take(graph.thread) & counted
        return np.flatnonzero(cpu.mask), np.flatnonzero((graph.on_gpu & counted).mask)

    @cached_property
    def _gpu_ns(self) -> list[Float64]:
        """The time that each of the GPU's tasks adds, and its bounds, (n_tasks,).

        Tasks concurrent with another stream add none; else a kernel follows the one before it.
        """
        lag_ns, alone = self.graph.thread_lag_ns[self.graph.thread], np.ones(len(self.graph))
        tasks = self._working[1]
        alone[tasks] = _alone(self.graph, tasks)
        return [np.maximum((column + lag_ns) * alone, 0) for column in self._bounds]

    @cached_property
    def _sums(self) -> tuple[Int64, list[Float64]]:
        """The ids of the exchanges between parts of layers, and the last columns of ``Pieces`` for each."""
        graph, (steps, step) = self.graph, self._steps
        sums = np.flatnonzero(of_activations(graph) & (steps[step] >= 0))
        hidden = hidden_ns(graph, sums, self.duration_ns)
        waited = [np.maximum(column[sums] - hidden, 0) for column in self._bounds]
        parts = parts_of(graph, sums).grown(self.size_bytes[sums] / np.maximum(graph.size_bytes[sums], 1))
        parts = parts._replace(latency_ns=np.minimum(parts.latency_ns, waited[0]))
        return sums, [*waited, *parts, np.maximum(self.size_bytes[sums], 0)]

    def _gpu_sums(self, tasks: Int64, piece: Int64, n_pieces: int) -> list[Float64]:
        """The GPU's time of each piece and its bounds, shape (n_pieces,).

        In a predicted step all kernels of a family have the same error, and those of different families independent
        ones (``whatif.prediction.ranges``): their widths add as squares.
        """
        duration_ns, low_ns, high_ns = (column[tasks] for column in self._gpu_ns)
        families = len(KernelFamily) + 1 if self.graph.info.is_predicted else 1
        group = piece[tasks] * families + np.where(families > 1, self.graph.family[tasks] + 1, 0)  # no family is -1

        def width_ns(most_ns: Float64, least_ns: Float64) -> Float64:
            by_family = np.bincount(group, weights=most_ns - least_ns, minlength=n_pieces * families)
            return np.asarray(np.linalg.norm(by_family.reshape(n_pieces, families), axis=1), dtype=np.float64)

        sums_ns = np.bincount(piece[tasks], weights=duration_ns, minlength=n_pieces).astype(np.float64)
        return [sums_ns, sums_ns - width_ns(duration_ns, low_ns), sums_ns + width_ns(high_ns, duration_ns)]

    def _pieces(self, piece: Int64, n_pieces: int) -> Pieces:
        """Sums over each piece, shape (n_pieces,), and the lag of its kernels after its begin."""
        graph, (calls, tasks) = self.graph, (_by_piece(ids, piece) for ids in self._working)

        def summed(of: Int64, weights: Float64) -> Float64:
            return np.bincount(piece[of], weights=weights, minlength=n_pieces).astype(np.float64)

        cpu_sums = [summed(calls, column[calls]) for column in self._bounds]
        gpu_sums = self._gpu_sums(tasks, piece, n_pieces)
        # The end of each task's call, from the begin of its piece.
        ended_ns = np.zeros(len(graph))
        total_ns = np.cumsum(self.duration_ns[calls])
        before_ns = np.cumsum(cpu_sums[0]) - cpu_sums[0]
        ended_ns[calls] = total_ns - before_ns[piece[calls]]
        launch = graph.launch_of[tasks].astype(np.int64)
        same_piece = (launch >= 0) & (piece[launch] == piece[tasks])
        called_ns = np.where(same_piece, ended_ns[launch], 0.0)
        # A kernel starts after its call and after the earlier kernels of the piece.
        work_ns = self._gpu_ns[0][tasks]
        ahead_ns = np.cumsum(work_ns) - work_ns - (np.cumsum(gpu_sums[0]) - gpu_sums[0])[piece[tasks]]
        behind_ns = np.full(n_pieces, -np.inf)
        np.maximum.at(behind_ns, piece[tasks], called_ns - ahead_ns)
        behind_ns = np.where(np.isfinite(behind_ns), behind_ns + graph.info.launch_lag_ns, 0.0)
        sums, columns = self._sums
        return Pieces(*[*cpu_sums, *gpu_sums, behind_ns, *(summed(sums, column) for column in columns)])


def _by_piece(tasks: Int64, piece: Int64) -> Int64:
    """The ids ``tasks`` by piece, those of one piece in their order."""
    return tasks[np.argsort(piece[tasks], kind="stable")]


def at_micro_batch(graph: TaskGraph, model: Model, factor: float) -> StepWork:
    """Return the tasks with their times in the pass of a micro-batch, which is ``factor`` times the recorded batch.

    By the model of ``whatif.models.kernels.batch``; transfers keep their latency, and the rest follows their bytes.
    """
    duration_ns, low_ns, high_ns, size_bytes = (
        column.astype(np.float64) for column in (graph.duration_ns, graph.low_ns, graph.high_ns, graph.size_bytes)
    )
    if factor == 1:
        return StepWork(graph, model, duration_ns, low_ns, high_ns, size_bytes, Source.RECORDED)
    grown = batch_tasks(graph) & (model.position >= 0)
    estimates = at_batch(graph, grown, factor)
    duration_ns[grown], low_ns[grown], high_ns[grown] = estimates.duration_ns, estimates.low_ns, estimates.high_ns
    sent = of_activations(graph)
    for column in (duration_ns, low_ns, high_ns):
        column[sent] = grown_ns(graph, sent, column[sent], factor)
    size_bytes[sent] *= factor
    source = Source(int(estimates.source.max(initial=0)))
    return StepWork(graph, model, duration_ns, low_ns, high_ns, size_bytes, source)


def _alone(graph: TaskGraph, tasks: Int64) -> Float64:
    """The share of each GPU task's time without a concurrent task that started earlier, shape (n,)."""
    streams = np.unique(graph.thread[tasks])
    if len(streams) < 2:
        return np.ones(len(tasks))
    timeline = simulate(graph)
    start_ns, end_ns = timeline.start_ns[tasks], timeline.end_ns[tasks]
    order = np.lexsort((tasks, start_ns))
    covered_ns = np.append(0, np.maximum.accumulate(end_ns[order])[:-1])
    alone_ns = np.clip(end_ns[order] - np.maximum(start_ns[order], covered_ns), 0, None)
    share = np.ones(len(tasks))
    share[order] = alone_ns / np.maximum(end_ns[order] - start_ns[order], 1)
    return share


def with_added(work: Work, share: Float64, micro_batches: int) -> Work:
    """Add the accumulation of gradients to each micro-batch's backward pass; ``share`` of each part, (n_parts,)."""
    each = work.added.take(np.zeros(len(share), dtype=np.int64)).times(share / micro_batches)
    return replace(work, backward=work.backward.then(each))
