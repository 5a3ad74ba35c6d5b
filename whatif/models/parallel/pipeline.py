"""A pipeline of stages: each step of one worker becomes that of several, which pass micro-batches to one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.graph.columns import filled
from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    SYNC_NAME,
    Anchor,
    Array,
    Dependencies,
    DependencyKind,
    Float64,
    Int64,
    Phase,
    TaskKind,
    Thread,
    ThreadKind,
    Waits,
)
from whatif.hardware.cluster.collectives import Cost
from whatif.hardware.cluster.network import Network
from whatif.ingest.ranks.merge import ranks_of
from whatif.models.durations.estimator import mark
from whatif.models.exchange import gloo
from whatif.models.exchange.collective_tasks import (
    CALL_LOW_NS,
    CALL_NS,
    FAMILY,
    estimated,
    tell,
)
from whatif.models.exchange.exchanges import SUM
from whatif.models.parallel.pipeline_plan import Plan, by_stage
from whatif.models.parallel.pipeline_schedule import Pass, in_possible_order, needed
from whatif.models.parallel.stage_work import Pieces, Work, one_step
from whatif.simulation.simulator import simulate
from whatif.simulation.transfers import ACTIVATIONS, workers_of

# The attached column that holds the bytes of a stage's gradients beside the task with which they are finished.
GRADIENTS = "gradients of a stage"
BATCH, UPDATE, SEND, SEND_CALL, RECEIVE_CALL = "load the batch", "update", "send", "c10d::send", "c10d::recv_"


class Row(NamedTuple):
    """One task of a step. It lasts what row ``piece`` of a table says: of pieces, on the CPU or GPU, or of messages."""

    thread: int
    kind: TaskKind
    name: str
    phase: Phase
    of: str  # cpu, gpu, sum, send, call, none: which times
    piece: int


class Edge(NamedTuple):
    """One dependency of a step; with ``piece`` it counts from the start, with the lag of that piece."""

    source: int
    target: int
    kind: DependencyKind
    lag_ns: int = 0
    piece: int = -1


@dataclass
class _Step:
    """The tasks of one step and what they wait for, in the order of their ids; all steps have the same ones."""

    on_gpu: bool
    launch_lag_ns: int
    channels: dict[tuple[int, int], int]
    sums: dict[int, int]  # the channel of each stage on which the parts of its layers exchange, where they do
    rows: list[Row]
    edges: list[Edge]
    summed: dict[int, int] = field(default_factory=dict)  # the last exchange of each stage so far
    last_backward: dict[int, int] = field(default_factory=dict)

    def task(self, thread: int, kind: TaskKind, name: str, phase: Phase, of: str, piece: int) -> int:
        self.rows.append(Row(thread, kind, name, phase, of, piece))
        return len(self.rows) - 1

    def cpu(self, stage: int) -> int:
        return 2 * stage if self.on_gpu else stage

    def work(self, stage: int, name: str, phase: Phase, piece: int, waits_for: int | None) -> int:
        """A piece of a stage's work: its launches and its kernels, or on a CPU one task; gives the one that ends it.

        That is the exchange between the parts of its layers where there is one; the stage goes on behind it.
        """
        launch = self.task(self.cpu(stage), TaskKind.CPU_OP, name, phase, "cpu", piece)
        task = launch
        if self.on_gpu:
            task = self.task(self.cpu(stage) + 1, TaskKind.KERNEL, name, phase, "gpu", piece)
            self.edges.append(Edge(launch, task, DependencyKind.LAUNCH, piece=piece))
        for before in (waits_for, self.summed.pop(stage, None)):
            if before is not None:
                self.edges.append(Edge(before, task, DependencyKind.COMMUNICATION))
        if phase == Phase.BACKWARD:
            self.last_backward[stage] = task
        if stage not in self.sums or phase not in (Phase.FORWARD, Phase.BACKWARD):
            return task
        self.summed[stage] = self.task(self.sums[stage], TaskKind.COMMUNICATION, SUM, phase, "sum", piece)
        self.edges.append(Edge(task, self.summed[stage], DependencyKind.COMMUNICATION))
        return self.summed[stage]

    def send(self, source: int, target: int, done: int, phase: Phase, boundary: int) -> int:
        """A message from one stage to another, sent when the task ``done`` is."""
        call = self.task(self.cpu(source), TaskKind.RUNTIME, SEND_CALL, phase, "call", boundary)
        sent = self.task(self.channels[source, target], TaskKind.COMMUNICATION, SEND, phase, "send", boundary)
        self.edges.append(Edge(call, sent, DependencyKind.LAUNCH, self.launch_lag_ns if self.on_gpu else 0))
        if self.on_gpu:
            self.edges.append(Edge(done, sent, DependencyKind.COMMUNICATION))
        return sent


def pipelined(
    graph: TaskGraph, work: Work, orders: list[list[Pass]], shares: Float64, boundary_bytes: Int64, network: Network,
    gradient_bytes: Int64,
) -> TaskGraph:  # fmt: skip
    """Return the graph of a pipeline whose stages work through ``orders``, one list of passes for each stage.

    Each stage has a CPU thread and, where the recording has a GPU, a stream of its own, and is a rank; the first one's
    steps are timed. ``shares`` (n_stages,): of the update. ``boundary_bytes`` (n_parts - 1,): what a micro-batch sends
    from each part to the next, as much as comes back as its gradient. A stage sends while it computes.
    ``gradient_bytes`` (n_stages,) stand beside the last backward pass of each stage, in the column ``GRADIENTS``.
    """
    stages, on_gpu = len(orders), bool(graph.on_gpu.any())
    n_parts = work.forward.cpu_ns.shape[1]
    threads, channels = _threads(graph, orders, n_parts, network)
    sums: dict[int, int] = {}
    if work.forward.sum_ns.any() or work.backward.sum_ns.any():
        sums = {stage: len(threads) + stage for stage in range(stages)}
        threads += tuple(Thread(f"stage {s}: {SUM}", ThreadKind.CHANNEL, ordered=True, rank=s) for s in range(stages))
    step = _one_step(graph, work, orders, n_parts, _Step(on_gpu, graph.info.launch_lag_ns, channels, sums, [], []))
    pieces = [work.forward, work.backward, work.batch, work.update.take(np.zeros(stages, dtype=np.int64)).times(shares)]
    every = Pieces.side_by_side(pieces)
    ends = [(part % stages, (part + 1) % stages) for part in range(n_parts - 1)]
    costs = [
        _between(network, pair).cost("send", size) for pair, size in zip(ends, boundary_bytes.tolist(), strict=True)
    ]
    latency_ns, transfer_ns = (
        np.array([float(getattr(cost, name)[0]) for cost in costs]) for name in ("latency_ns", "transfer_ns")
    )
    sends = Cost(latency_ns, transfer_ns)
    changed = _repeated(graph, work, step, threads, every, sends, boundary_bytes)
    return _with_gradients(changed, step, gradient_bytes)


def fastest_of(
    graph: TaskGraph, planned: Sequence[Plan], orders: list[list[Pass]], network: Network
) -> tuple[Plan, TaskGraph]:
    """Return the plan whose first stage ends one step soonest over the network, by simulation, and its pipeline."""
    stages = len(orders)

    def pipeline(plan: Plan, work: Work) -> TaskGraph:
        shares, sizes = by_stage(plan.shares, stages), plan.stage_gradients(stages)
        return pipelined(graph, work, orders, shares, plan.crossing_bytes, network, sizes)

    def step_ns(plan: Plan) -> int:
        timeline = simulate(pipeline(plan, one_step(plan.work)))
        return int(timeline.end_ns[ranks_of(timeline.graph) == 0].max())

    best = planned[0] if len(planned) == 1 else min(planned, key=step_ns)
    made = pipeline(best, best.work)
    return best, made.replace(info=made.info.cut_across(stages))


def _threads(
    graph: TaskGraph, orders: list[list[Pass]], n_parts: int, network: Network
) -> tuple[tuple[Thread, ...], dict[tuple[int, int], int]]:
    """The threads of all stages, and the channel from one to another: one each way where a link is full duplex."""
    stages, threads = len(orders), list[Thread]()
    streams = [thread for thread in graph.threads if thread.kind == ThreadKind.STREAM]
    for stage in range(stages):
        threads.append(Thread(f"stage {stage}: CPU", ThreadKind.CPU, rank=stage))
        if graph.on_gpu.any():
            threads.append(Thread(f"stage {stage}: GPU", ThreadKind.STREAM, stage, streams[0].stream, rank=stage))
    channels: dict[tuple[int, int], int] = {}
    pairs = dict.fromkeys((part % stages, (part + 1) % stages) for part in range(n_parts - 1))
    for one, other in pairs:
        for pair in ((one, other), (other, one)):
            if pair in channels:
                continue
            shared = not _between(network, pair).levels[-1].link.full_duplex
            channels[pair] = len(threads)
            if shared:
                channels[pair[::-1]] = len(threads)
            between = f"stage {pair[0]} and {pair[1]}" if shared else f"stage {pair[0]} to {pair[1]}"
            threads.append(Thread(f"network: {between}", ThreadKind.CHANNEL, ordered=not shared, rank=pair[0]))
    return tuple(threads), channels


def _between(network: Network, pair: tuple[int, int]) -> Network:
    """The part of a network over which two workers talk: levels up to the first that has both in one member."""
    members = 1
    for number, level in enumerate(network.levels):
        members *= level.workers
        if pair[0] // members == pair[1] // members:
            return replace(network, levels=network.levels[: number + 1])
    return network


def _one_step(graph: TaskGraph, work: Work, orders: list[list[Pass]], n_parts: int, step: _Step) -> _Step:
    stages, last = len(orders), n_parts - 1
    batch, update = 2 * n_parts, 2 * n_parts + 1
    ends = [-1] * stages
    if step.on_gpu and work.batch.gpu_ns.any():
        step.work(0, BATCH, Phase.DATA, batch, None)
    elif work.batch.cpu_ns.any():
        step.task(step.cpu(0), TaskKind.CPU_OP, BATCH, Phase.DATA, "cpu", batch)
    sent: dict[Pass, int] = {}
    for one in in_possible_order(orders):
        stage, phase = one.part % stages, Phase.BACKWARD if one.backward else Phase.FORWARD
        before = needed(one, last)
        if before in sent:
            boundary = min(one.part, before.part) if before else 0
            step.task(step.cpu(stage), TaskKind.RUNTIME, RECEIVE_CALL, phase, "call", boundary)
        chunk = f", chunk {one.part // stages}" if n_parts > stages else ""
        name = f"{'backward' if one.backward else 'forward'} {one.micro_batch}{chunk}"
        piece = one.part + (n_parts if one.backward else 0)
        done = step.work(stage, name, phase, piece, sent.get(before) if before else None)
        ends[stage] = done
        towards = one.part + (-1 if one.backward else 1)
        if 0 <= towards <= last:
            boundary = min(one.part, towards)
            sent[one] = step.send(stage, towards % stages, done, phase, boundary)
    for stage in reversed(range(stages)):
        if work.update.cpu_ns.any() or work.update.gpu_ns.any():
            ends[stage] = step.work(stage, UPDATE, Phase.UPDATE, update + stage, None)
        if work.waits and step.on_gpu:
            wait = step.task(step.cpu(stage), TaskKind.WAIT, SYNC_NAME, Phase.UPDATE, "none", 0)
            step.edges.append(Edge(ends[stage], wait, DependencyKind.SYNC))
    return step


def _repeated(
    graph: TaskGraph, work: Work, step: _Step, threads: tuple[Thread, ...], pieces: Pieces, sends: Cost,
    boundary_bytes: Int64,
) -> TaskGraph:  # fmt: skip
    """All steps: the same tasks with each step's own times."""
    n_steps, n = len(work.steps), len(step.rows)
    piece = np.array([row.piece for row in step.rows])
    of = np.array([row.of for row in step.rows])
    message = estimated(sends)

    def rows(send: npt.ArrayLike = 0.0, call: npt.ArrayLike = 0.0, **tables: Float64) -> Int64:
        """One number a task: of its piece in one of ``tables``, of its message, or of a call."""
        column = np.zeros((n_steps, n))
        for which, table in tables.items():
            column[:, of == which] = table[:, piece[of == which]]
        for which, values in (("send", send), ("call", call)):
            each = np.broadcast_to(np.asarray(values), max(len(boundary_bytes), 1))
            column[:, of == which] = each[piece[of == which]]
        return np.rint(column).astype(np.int64).reshape(-1)

    call, call_low, call_high = _call_ns(graph, boundary_bytes)
    duration_ns = rows(message.duration_ns, call, cpu=pieces.cpu_ns, gpu=pieces.gpu_ns, sum=pieces.sum_ns)
    low_ns = rows(message.low_ns, call_low, cpu=pieces.cpu_low_ns, gpu=pieces.gpu_low_ns, sum=pieces.sum_low_ns)
    high_ns = rows(message.high_ns, call_high, cpu=pieces.cpu_high_ns, gpu=pieces.gpu_high_ns, sum=pieces.sum_high_ns)
    sent = np.tile((of == "send") | (of == "sum"), n_steps)
    names = tuple(dict.fromkeys(row.name for row in step.rows))
    code = {name: number for number, name in enumerate(names)}
    kind = np.array([row.kind for row in step.rows])
    family = np.where(kind == TaskKind.COMMUNICATION, FAMILY, int(KernelFamily.OTHER))
    family[(of == "call") | (of == "none") | ((of == "cpu") & step.on_gpu)] = -1
    each: dict[str, Array] = {
        "name": np.array([code[row.name] for row in step.rows]),
        "kind": kind,
        "thread": np.array([row.thread for row in step.rows]),
        "phase": np.array([row.phase for row in step.rows]),
        "family": family,
    }
    given = {
        **{name: np.tile(values, n_steps) for name, values in each.items()},
        "step": np.repeat(work.steps, n),
        "duration_ns": duration_ns,
        "low_ns": np.minimum(low_ns, duration_ns),
        "high_ns": np.maximum(high_ns, duration_ns),
        "size_bytes": np.where(sent, rows(boundary_bytes, sum=pieces.sum_bytes), -1),
    }
    changed = graph.replace(
        **filled(n_steps * n, given), threads=threads, names=names, attached={},
        dependencies=_dependencies(step, pieces, n_steps),
        waits=Waits(*(np.empty(0, dtype=getattr(graph.waits, name).dtype) for name in Waits.__slots__)),
        info=replace(graph.info, queue_depth=0),
    )  # fmt: skip
    changed = mark(changed, np.tile((of == "cpu") | (of == "gpu"), n_steps), int(work.source))
    latency_ns = rows(sends.latency_ns, sum=pieces.sum_latency_ns)
    summed = np.tile(of == "sum", n_steps)
    changed = tell(changed, np.flatnonzero(sent & ~summed), latency_ns[sent & ~summed], 2)
    changed = tell(changed, np.flatnonzero(summed), latency_ns[summed], int(workers_of(graph).max(initial=0)))
    return changed.attach(**{ACTIVATIONS: sent})


def _call_ns(graph: TaskGraph, boundary_bytes: Int64) -> tuple[Float64, Float64, Float64]:
    """What a call that sends or receives at each boundary costs the CPU, ns, and its range, shape (n_boundaries,) each.

    On a CPU gloo's threads do the work on the core of the stage.
    """
    if graph.on_gpu.any():
        same = np.ones(len(boundary_bytes))
        return same * CALL_NS, same * CALL_LOW_NS, same * CALL_NS
    work_ns = gloo.one_way_ns(graph, boundary_bytes)
    return work_ns, work_ns / gloo.SPREAD, work_ns * gloo.SPREAD


def _with_gradients(graph: TaskGraph, step: _Step, gradient_bytes: Int64) -> TaskGraph:
    column = np.zeros(len(step.rows), dtype=np.int64)
    column[[step.last_backward[stage] for stage in range(len(gradient_bytes))]] = gradient_bytes
    return graph.attach(**{GRADIENTS: np.tile(column, len(graph) // len(step.rows))})


def _dependencies(step: _Step, pieces: Pieces, n_steps: int) -> Dependencies:
    """The dependencies of all steps; kernels of a piece lie behind the start of their launches by its own lag."""
    columns = np.array([tuple(edge) for edge in step.edges], dtype=np.int64).reshape(-1, 5).T
    source, target, kind, lag_ns, piece = columns
    first = np.repeat(np.arange(n_steps) * len(step.rows), len(source))
    of_piece = piece >= 0
    lags = np.tile(lag_ns.astype(np.float64), (n_steps, 1))
    lags[:, of_piece] = pieces.start_lag_ns[:, piece[of_piece]]
    anchor = np.where(of_piece, Anchor.START, Anchor.END)
    return Dependencies(
        (np.tile(source, n_steps) + first).astype(np.int32),
        (np.tile(target, n_steps) + first).astype(np.int32),
        np.tile(kind, n_steps).astype(np.int8),
        np.rint(lags).astype(np.int64).reshape(-1),
        np.tile(anchor, n_steps).astype(np.int8),
    )
