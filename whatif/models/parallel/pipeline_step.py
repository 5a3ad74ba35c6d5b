"""One step of a pipeline: its tasks and their dependencies, without durations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from whatif.graph.types import (
    SYNC_NAME,
    Anchor,
    Array,
    Dependencies,
    DependencyKind,
    Float64,
    Int32,
    Int64,
    Phase,
    TaskKind,
)
from whatif.models.exchange.exchanges import SUM
from whatif.models.parallel.pipeline_schedule import Pass, in_possible_order, needed, order
from whatif.models.parallel.stage_work import Pieces, Work
from whatif.simulation.simulator import swept

# After this many steps the CPUs' lead over their streams is steady.
REPEATED = 3
BATCH, UPDATE, SEND, SEND_CALL, RECEIVE_CALL = "load the batch", "update", "send", "c10d::send", "c10d::recv_"


class Shape(NamedTuple):
    """The properties that decide the tasks of a step, besides the order of the passes: kinds of work, and threads."""

    on_gpu: bool
    launch_lag_ns: int
    loads: str  # where the batch is loaded: gpu, cpu or "" for nowhere
    updates: bool
    waits: bool
    channels: tuple[tuple[tuple[int, int], int], ...]  # (source, target) stages and the thread of their messages
    sums: tuple[int, ...]  # the thread of each stage's tensor parallel exchanges; () for none

    @staticmethod
    def of(
        work: Work, *, on_gpu: bool, launch_lag_ns: int, channels: dict[tuple[int, int], int], sums: Sequence[int]
    ) -> Shape:
        """Return the shape of a step with the given work."""
        loads = "gpu" if on_gpu and work.batch.gpu_ns.any() else "cpu" if work.batch.cpu_ns.any() else ""
        updates = bool(work.update.cpu_ns.any() or work.update.gpu_ns.any())
        return Shape(on_gpu, launch_lag_ns, loads, updates, work.waits, tuple(channels.items()), tuple(sums))


class Times(NamedTuple):
    """Durations of each sort of task, ns: tables of pieces, (n_steps, n_pieces), and of messages and calls at a cut."""

    cpu: Float64
    gpu: Float64
    sum: Float64
    send: npt.ArrayLike = 0.0
    call: npt.ArrayLike = 0.0


class Frame(Struct, frozen=True, dict=True):
    """The tasks of a step, shape (n,) each, in the order of their ids, and their dependencies.

    A task's duration is the entry ``piece`` of a table; ``of`` lists the tasks of each table (``Times``). ``edges``
    (n_edges, 5): source, target, kind, lag in ns, and the piece whose lag counts from the source's start, or -1.
    ``backward`` (n_stages,): the last backward pass of each stage. ``last``: the work with which the first one ends.
    """

    thread: Int64
    kind: Int64
    phase: Int64
    name: Int64
    names: tuple[str, ...]
    of: dict[str, Int64]
    piece: Int64
    edges: Int64
    backward: Int64
    last: int

    def __len__(self) -> int:
        return len(self.thread)

    def column(self, times: Times) -> Int64:
        """Return one number per task of all steps, rounded; 0 without a table."""
        found = np.zeros((len(times.cpu), len(self)))
        for sort, table in times._asdict().items():
            tasks = self.of[sort]
            table = np.asarray(table, dtype=np.float64)
            found[:, tasks] = table if table.ndim == 0 else table[..., self.piece[tasks]]
        return np.rint(found).astype(np.int64).reshape(-1)

    def dependencies(self, start_lag_ns: Float64) -> Dependencies:
        """Return the dependencies of all steps; a piece's kernels follow their launches' start by the piece's lag.

        ``start_lag_ns``: of each step's pieces, (n_steps, n_pieces).
        """
        n_steps = len(start_lag_ns)
        source, target, kind, lag_ns, piece = self.edges.T
        first = np.repeat(np.arange(n_steps) * len(self), len(source))
        of_piece = piece >= 0
        lags = np.tile(lag_ns.astype(np.float64), (n_steps, 1))
        lags[:, of_piece] = start_lag_ns[:, piece[of_piece]]
        anchor = np.where(of_piece, Anchor.START, Anchor.END)
        return Dependencies(
            (np.tile(source, n_steps) + first).astype(np.int32),
            (np.tile(target, n_steps) + first).astype(np.int32),
            np.tile(kind, n_steps).astype(np.int8),
            np.rint(lags).astype(np.int64).reshape(-1),
            np.tile(anchor, n_steps).astype(np.int8),
        )

    @cached_property
    def _incoming(self) -> tuple[Int32, Int32, Int64]:
        """Edges by target over ``REPEATED`` steps: offsets, indices into (starts, ends), and the row of each edge."""
        source, target, _, _, piece = self.edges.T
        rows = np.argsort(target, kind="stable")
        first = np.arange(REPEATED)[:, np.newaxis]
        counts = np.tile(np.bincount(target, minlength=len(self)), REPEATED)
        points = (source + np.where(piece >= 0, 0, REPEATED * len(self)))[rows] + first * len(self)
        offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
        return offsets, points.reshape(-1).astype(np.int32), np.tile(rows, REPEATED)

    def step_ns(self, times: Times, start_lag_ns: Float64) -> int:
        """Return the first stage's time of one of many equal steps, end to end; threads run in the order of ids."""
        offsets, points, rows = self._incoming
        lag_ns, piece = self.edges[:, 3], self.edges[:, 4]
        lag_ns = np.where(piece >= 0, np.rint(start_lag_ns[0, piece]), lag_ns).astype(np.int64)
        thread = np.tile(self.thread.astype(np.int32), REPEATED)
        times_ns = swept(thread, np.tile(self.column(times), REPEATED), offsets, points, lag_ns[rows])
        end_ns = times_ns.reshape(2 * REPEATED, -1)[:, self.last]
        return int(end_ns[-1] - end_ns[-2])


def times_of(pieces: Pieces, bound: str = "") -> Times:
    """Return the tables of pieces; ``bound`` is "low" or "high"."""
    at = f"_{bound}_ns" if bound else "_ns"
    return Times(*(getattr(pieces, f"{side}{at}") for side in ("cpu", "gpu", "sum")))


class _Step(Struct):
    shape: Shape
    channels: dict[tuple[int, int], int]
    # A row for each task: thread, kind, name, phase, table of ``Times`` or "none", and piece.
    rows: list[tuple[int, TaskKind, str, Phase, str, int]] = field(default_factory=list)
    edges: list[int] = field(default_factory=list)  # those of a frame, one after the other
    summed: dict[int, int] = field(default_factory=dict)  # the latest exchange of each stage
    last_backward: dict[int, int] = field(default_factory=dict)

    def task(self, thread: int, kind: TaskKind, name: str, phase: Phase, of: str, piece: int) -> int:
        self.rows.append((thread, kind, name, phase, of, piece))
        return len(self.rows) - 1

    def edge(self, source: int, target: int, kind: DependencyKind, lag_ns: int = 0, piece: int = -1) -> None:
        self.edges += (source, target, kind, lag_ns, piece)

    def cpu(self, stage: int) -> int:
        return 2 * stage if self.shape.on_gpu else stage

    def work(self, stage: int, name: str, phase: Phase, piece: int, waits_for: int | None) -> int:
        """Add a piece of a stage's work: launches and kernels, or on a CPU one task; return the task that ends it.

        That is the exchange between the parts of its layers, if there is one; the stage continues after it.
        """
        launch = self.task(self.cpu(stage), TaskKind.CPU_OP, name, phase, "cpu", piece)
        task = launch
        if self.shape.on_gpu:
            task = self.task(self.cpu(stage) + 1, TaskKind.KERNEL, name, phase, "gpu", piece)
            self.edge(launch, task, DependencyKind.LAUNCH, piece=piece)
        for before in (waits_for, self.summed.pop(stage, None)):
            if before is not None:
                self.edge(before, task, DependencyKind.COMMUNICATION)
        if phase == Phase.BACKWARD:
            self.last_backward[stage] = task
        sums = self.shape.sums
        if not sums or phase not in (Phase.FORWARD, Phase.BACKWARD):
            return task
        self.summed[stage] = self.task(sums[stage], TaskKind.COMMUNICATION, SUM, phase, "sum", piece)
        self.edge(task, self.summed[stage], DependencyKind.COMMUNICATION)
        return self.summed[stage]

    def send(self, source: int, target: int, done: int, phase: Phase, boundary: int) -> int:
        """Add a message from one stage to another, sent after the task ``done``."""
        call = self.task(self.cpu(source), TaskKind.RUNTIME, SEND_CALL, phase, "call", boundary)
        sent = self.task(self.channels[source, target], TaskKind.COMMUNICATION, SEND, phase, "send", boundary)
        lag_ns = self.shape.launch_lag_ns if self.shape.on_gpu else 0
        self.edge(call, sent, DependencyKind.LAUNCH, lag_ns)
        if self.shape.on_gpu:
            self.edge(done, sent, DependencyKind.COMMUNICATION)
        return sent


def frame_of(orders: list[list[Pass]], shape: Shape) -> Frame:
    """Return the step of a pipeline whose stages run ``orders``, one list of passes for each stage."""
    stages, last = len(orders), max(current.part for passes in orders for current in passes)
    n_parts = last + 1
    batch, update = 2 * n_parts, 2 * n_parts + 1
    step = _Step(shape, dict(shape.channels))
    ends = [-1] * stages
    if shape.loads == "gpu":
        step.work(0, BATCH, Phase.DATA, batch, None)
    elif shape.loads:
        step.task(step.cpu(0), TaskKind.CPU_OP, BATCH, Phase.DATA, "cpu", batch)
    sent: dict[Pass, int] = {}
    for current in in_possible_order(orders):
        stage, phase = current.part % stages, Phase.BACKWARD if current.backward else Phase.FORWARD
        before = needed(current, last)
        if before in sent:
            boundary = min(current.part, before.part) if before else 0
            step.task(step.cpu(stage), TaskKind.RUNTIME, RECEIVE_CALL, phase, "call", boundary)
        chunk = f", chunk {current.part // stages}" if n_parts > stages else ""
        name = f"{'backward' if current.backward else 'forward'} {current.micro_batch}{chunk}"
        piece = current.part + (n_parts if current.backward else 0)
        done = step.work(stage, name, phase, piece, sent.get(before) if before else None)
        ends[stage] = done
        neighbour = current.part + (-1 if current.backward else 1)
        if 0 <= neighbour <= last:
            boundary = min(current.part, neighbour)
            sent[current] = step.send(stage, neighbour % stages, done, phase, boundary)
    for stage in reversed(range(stages)):
        if shape.updates:
            ends[stage] = step.work(stage, UPDATE, Phase.UPDATE, update + stage, None)
        if shape.waits and shape.on_gpu:
            wait = step.task(step.cpu(stage), TaskKind.WAIT, SYNC_NAME, Phase.UPDATE, "none", 0)
            step.edge(ends[stage], wait, DependencyKind.SYNC)
    return _framed(step, ends[0])


@lru_cache(maxsize=64)
def usual_frame(schedule: str, stages: int, micro_batches: int, chunks: int, shape: Shape) -> Frame:
    """Return the step of a ``schedule``, cached."""
    return frame_of(order(schedule, stages, micro_batches, chunks), shape)


def _framed(step: _Step, last: int) -> Frame:
    thread, kind, name, phase, table, piece = zip(*step.rows, strict=True)
    names = tuple(dict.fromkeys(name))
    code = {name: number for number, name in enumerate(names)}
    of: Array = np.array(table)

    def integers(values: Iterable[int]) -> Int64:
        return np.fromiter(values, dtype=np.int64)

    return Frame(
        integers(thread), integers(kind), integers(phase), integers(map(code.__getitem__, name)), names,
        {sort: np.flatnonzero(of == sort) for sort in Times._fields}, integers(piece),
        integers(step.edges).reshape(-1, 5),
        integers(task for _, task in sorted(step.last_backward.items())), last,
    )  # fmt: skip
