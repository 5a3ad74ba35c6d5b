"""One step of a pipeline: its tasks and their dependencies, without durations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from whatif.graph.types import (
    SYNC_NAME,
    Anchor,
    Bool,
    Dependencies,
    DependencyKind,
    Float64,
    Int32,
    Int64,
    Phase,
    TaskKind,
)
from whatif.models.exchange.exchanges import SUM
from whatif.models.parallel.pipeline_schedule import Pass, in_possible_order, order
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


class _Works(NamedTuple):
    """All works of a step in the order in which they are issued: the batch, the passes, the update of each stage.

    Shape (n_works,) each; the part and micro-batch of a pass, -1 for other work.
    """

    stage: Int64
    phase: Int64
    part: Int64
    micro_batch: Int64
    piece: Int64

    @staticmethod
    def of(passes: Sequence[Pass], stages: int, n_parts: int) -> _Works:
        backward, part, micro_batch = np.array(passes, dtype=np.int64).T
        last_first = np.arange(stages)[::-1]
        return _Works(
            np.concatenate([[0], part % stages, last_first]),
            np.concatenate([[Phase.DATA], np.where(backward, Phase.BACKWARD, Phase.FORWARD), [Phase.UPDATE] * stages]),
            np.pad(part, (1, stages), constant_values=-1),
            np.pad(micro_batch, (1, stages), constant_values=-1),
            np.concatenate([[2 * n_parts], part + n_parts * backward, 2 * n_parts + 1 + last_first]),
        )

    def needed(self, last: int) -> Int64:
        """The work whose message each pass waits for, (n_works,); -1 for none."""
        forward, backward = self.phase == Phase.FORWARD, self.phase == Phase.BACKWARD
        at = np.full((2, last + 3, self.micro_batch.max() + 2), -1)
        rows = np.flatnonzero(forward | backward)
        at[backward[rows].astype(np.int64), self.part[rows] + 1, self.micro_batch[rows]] = rows
        found = at[backward.astype(np.int64), self.part + 1 + np.where(forward, -1, 1), self.micro_batch]
        return np.where(forward | backward, found, -1)

    @property
    def before(self) -> Int64:
        """The work before each one on the same stage, (n_works,); -1 for none."""
        order = np.argsort(self.stage, kind="stable")
        same = self.stage[order[1:]] == self.stage[order[:-1]]
        found = np.full(len(order), -1)
        found[order[1:][same]] = order[:-1][same]
        return found


# The tasks of a work in their order, and for each the kind, and the table of ``Times``.
_RECEIVE, _LAUNCH, _KERNEL, _SUM, _CALL, _SENT, _WAIT = range(7)
_KINDS = (
    TaskKind.RUNTIME, TaskKind.CPU_OP, TaskKind.KERNEL, TaskKind.COMMUNICATION, TaskKind.RUNTIME,
    TaskKind.COMMUNICATION, TaskKind.WAIT,
)  # fmt: skip
_TABLES = ("call", "cpu", "gpu", "sum", "call", "send", "none")


def frame_of(orders: list[list[Pass]], shape: Shape) -> Frame:
    """Return the step of a pipeline whose stages run ``orders``, one list of passes for each stage.

    A work is launches and kernels, or on a CPU one task. It ends with the exchange between the parts of its layers, if
    there is one: the stage continues after it, and sends what the next part needs.
    """
    passes, stages = in_possible_order(orders), len(orders)
    last = max(one.part for one in passes)
    works = _Works.of(passes, stages, last + 1)
    needed = works.needed(last)
    there = _tasks(works, needed >= 0, last, shape)
    ids = (np.cumsum(there) - 1).reshape(there.shape)
    done = np.where(there[:, _KERNEL], ids[:, _KERNEL], ids[:, _LAUNCH])
    backward = works.phase == Phase.BACKWARD
    last_backward = np.zeros(stages, dtype=np.int64)
    last_backward[works.stage[backward]] = done[backward]  # of equal places the last one stays
    edges, last_of_first = _edges(works, needed, there, ids, done, shape)
    names, name = _names(works, stages, last, there)
    kind, table = (np.broadcast_to(each, there.shape)[there] for each in (np.array(_KINDS), np.array(_TABLES)))
    return Frame(
        _threads(works, shape)[there], kind.astype(np.int64), np.repeat(works.phase, there.sum(axis=1)), name, names,
        {sort: np.flatnonzero(table == sort) for sort in Times._fields}, _pieces(works)[there], edges,
        last_backward, last_of_first,
    )  # fmt: skip


def _tasks(works: _Works, receives: Bool, last: int, shape: Shape) -> Bool:
    """Whether each work has each of the tasks, (n_works, n_tasks)."""
    forward, backward, updates, loads = (
        works.phase == phase for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.DATA)
    )
    sends = (forward & (works.part < last)) | (backward & (works.part > 0))
    worked = forward | backward | (loads & bool(shape.loads)) | (updates & shape.updates)
    on_gpu = worked & shape.on_gpu & (~loads | (shape.loads == "gpu"))
    summed = (forward | backward) & bool(shape.sums)
    waits = updates & (shape.waits and shape.on_gpu)
    return np.column_stack([receives, worked, on_gpu, summed, sends, sends, waits])


def _edges(works: _Works, needed: Int64, there: Bool, ids: Int64, done: Int64, shape: Shape) -> tuple[Int64, int]:
    """The edges of a frame, in the order of the works, and the last task of the first stage.

    ``needed`` (n_works,): as ``_Works.needed``; ``ids`` (n_works, n_tasks): of the tasks; ``done`` (n_works,): the task
    that does the work.
    """
    ends = np.where(there[:, _SUM], ids[:, _SUM], done)
    of_stage = there[:, _LAUNCH] & (works.phase != Phase.DATA)
    stage_ends = np.zeros(int(works.stage.max()) + 1, dtype=np.int64)
    stage_ends[works.stage[of_stage]] = ends[of_stage]  # of equal places the last one stays
    before = works.before
    launch_lag_ns = shape.launch_lag_ns if shape.on_gpu else 0

    def edge(
        source: Int64, target: Int64, kind: DependencyKind, where: Bool, lag_ns: int = 0, piece: Int64 | int = -1
    ) -> Int64:
        return np.column_stack(np.broadcast_arrays(source, target, int(kind), lag_ns, piece, where))

    every = np.stack([
        edge(ids[:, _LAUNCH], done, DependencyKind.LAUNCH, there[:, _KERNEL], piece=works.piece),
        edge(ids[needed, _SENT], done, DependencyKind.COMMUNICATION, there[:, _RECEIVE]),
        edge(ids[before, _SUM], done, DependencyKind.COMMUNICATION, of_stage & (before >= 0) & there[before, _SUM]),
        edge(done, ids[:, _SUM], DependencyKind.COMMUNICATION, there[:, _SUM]),
        edge(ids[:, _CALL], ids[:, _SENT], DependencyKind.LAUNCH, there[:, _SENT], launch_lag_ns),
        edge(ends, ids[:, _SENT], DependencyKind.COMMUNICATION, there[:, _SENT] & shape.on_gpu),
        edge(stage_ends[works.stage], ids[:, _WAIT], DependencyKind.SYNC, there[:, _WAIT]),
    ], axis=1)  # fmt: skip
    return every[..., :5][every[..., 5] > 0], int(stage_ends[0])


def _threads(works: _Works, shape: Shape) -> Int64:
    """The thread of each task of the works, (n_works, n_tasks)."""
    stages = int(works.stage.max()) + 1
    cpu = 2 * works.stage if shape.on_gpu else works.stage
    sums = np.array(shape.sums or (0,) * stages)[works.stage]
    channels = np.zeros((stages, stages), dtype=np.int64)
    for (source, target), thread in shape.channels:
        channels[source, target] = thread
    neighbour = works.stage + np.where(works.phase == Phase.BACKWARD, -1, 1)
    return np.column_stack([cpu, cpu, cpu + 1, sums, cpu, channels[works.stage, neighbour % stages], cpu])


def _pieces(works: _Works) -> Int64:
    """The piece of each task of the works, (n_works, n_tasks): for messages and their calls the boundary they cross."""
    backward = works.phase == Phase.BACKWARD
    received, sent = works.part - ~backward, works.part - backward
    return np.column_stack([received, *[works.piece] * 3, sent, sent, np.zeros_like(sent)])


def _names(works: _Works, stages: int, last: int, there: Bool) -> tuple[tuple[str, ...], Int64]:
    """The names in the order of the tasks, and the name of each task, (n_tasks,)."""
    fixed = (RECEIVE_CALL, SUM, SEND_CALL, SEND, SYNC_NAME, BATCH, UPDATE)
    chunks, backward = (last + 1) // stages, works.phase == Phase.BACKWARD
    own = len(fixed) + (works.micro_batch * 2 + backward) * chunks + works.part // stages
    own = np.where(works.phase == Phase.DATA, fixed.index(BATCH), own)
    own = np.where(works.phase == Phase.UPDATE, fixed.index(UPDATE), own)
    same = np.ones_like(own)
    name = np.column_stack([0 * same, own, own, 1 * same, 2 * same, 3 * same, 4 * same])[there]
    codes, first, code = np.unique(name, return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))

    def text(number: int) -> str:
        if number < len(fixed):
            return fixed[number]
        way, chunk = divmod(number - len(fixed), chunks)
        of_chunk = f", chunk {chunk}" if last >= stages else ""
        return f"{'backward' if way % 2 else 'forward'} {way // 2}{of_chunk}"

    return tuple(text(number) for number in codes[np.argsort(first)].tolist()), place[code]


@lru_cache(maxsize=64)
def usual_frame(schedule: str, stages: int, micro_batches: int, chunks: int, shape: Shape) -> Frame:
    """Return the step of a ``schedule``, cached."""
    return frame_of(order(schedule, stages, micro_batches, chunks), shape)
