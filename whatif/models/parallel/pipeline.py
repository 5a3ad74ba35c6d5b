"""A pipeline of stages: each step of one worker becomes one of several workers that pass micro-batches on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

from whatif.graph.columns import filled as filled_columns
from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Change,
    Float64,
    Int64,
    TaskKind,
    Thread,
    ThreadKind,
    Waits,
)
from whatif.hardware.cluster.collectives import Cost
from whatif.hardware.cluster.network import Network
from whatif.models.durations.estimator import mark
from whatif.models.exchange import gloo
from whatif.models.exchange.collective_tasks import (
    CALL_LOW_NS,
    CALL_NS,
    FAMILY,
    attach_model,
    estimated,
)
from whatif.models.exchange.exchanges import SUM, gathering_ns
from whatif.models.parallel.pipeline_plan import Plan, by_stage
from whatif.models.parallel.pipeline_schedule import Pass
from whatif.models.parallel.pipeline_step import Frame, Shape, Times, frame_of, times_of, usual_frame
from whatif.models.parallel.stage_work import Pieces, Work, one_step
from whatif.simulation.simulator import simulate
from whatif.simulation.transfers import ACTIVATIONS, GRADIENTS, Parts, workers_of


class _Filled(NamedTuple):
    """A pipeline's step with its durations: the threads, the tasks, tables of pieces and of messages."""

    threads: tuple[Thread, ...]
    frame: Frame
    pieces: Pieces
    sends: Cost


def fastest_of(
    graph: TaskGraph, planned: Sequence[Plan], orders: list[list[Pass]], network: Network
) -> tuple[Plan, TaskGraph]:
    """Return the plan with the shortest simulated step of all stages over the network, and its pipeline.

    The stages run ``orders``, one list of passes for each. Each stage is a rank with a CPU thread and, if the recording
    has a GPU, a stream; a step ends with the last one's update. A stage sends while it computes. The bytes of its
    gradients are at its last backward pass in the column ``GRADIENTS``.
    """
    frames: dict[Shape, Frame] = {}  # plans differ in durations, not in tasks

    def frame(shape: Shape) -> Frame:
        if shape not in frames:
            frames[shape] = frame_of(orders, shape)
        return frames[shape]

    def pipeline(plan: Plan, work: Work) -> TaskGraph:
        filled = _filled(graph, plan, work, len(orders), network, frame)
        changed = _repeated(graph, work, filled, plan.crossing_bytes)
        return _with_gradients(changed, filled.frame, plan.stage_gradients(len(orders)))

    def step_ns(plan: Plan) -> int:
        return simulate(pipeline(plan, one_step(plan.work))).makespan_ns

    best = planned[0] if len(planned) == 1 else min(planned, key=step_ns)
    made = pipeline(best, best.work)
    return best, made.replace(info=made.info.cut_across(len(orders)))


def steady_step_ns(
    graph: TaskGraph, plan: Plan, schedule: str, stages: int, micro_batches: int, chunks: int, network: Network,
    updates: Pieces | None,
) -> int:  # fmt: skip
    """Return the time of a step among many equal ones, ns, without a graph.

    Like ``fastest_of``, except that messages on half-duplex links have a fixed order. ``updates`` (1, n_stages): the
    work of each stage after its passes, instead of its share of the recorded update.
    """

    def frame(shape: Shape) -> Frame:
        return usual_frame(schedule, stages, micro_batches, chunks, shape)

    filled = _filled(graph, plan, one_step(plan.work), stages, network, frame, updates)
    call_ns = _call_ns(graph, plan.crossing_bytes)[0]
    times = times_of(filled.pieces)._replace(send=estimated(filled.sends).duration_ns, call=call_ns)
    return filled.frame.step_ns(times, filled.pieces.start_lag_ns)


def _filled(
    graph: TaskGraph, plan: Plan, work: Work, stages: int, network: Network, frame: Callable[[Shape], Frame],
    updates: Pieces | None = None,
) -> _Filled:  # fmt: skip
    n_parts = work.forward.cpu_ns.shape[1]
    threads, channels = _threads(graph, stages, n_parts, network)
    sums = range(0)
    if work.forward.sum_ns.any() or work.backward.sum_ns.any():
        sums = range(len(threads), len(threads) + stages)
        threads += tuple(Thread(f"stage {s}: {SUM}", ThreadKind.CHANNEL, ordered=True, rank=s) for s in range(stages))
    shape = Shape.of(work, on_gpu=graph.has_gpu, launch_lag_ns=graph.info.launch_lag_ns, channels=channels, sums=sums)
    if updates is None:
        updates = stage_updates(plan, work, stages)
    pieces = [work.forward, work.backward, work.batch, updates]
    ends = [(part % stages, (part + 1) % stages) for part in range(n_parts - 1)]
    costs = [
        _between(network, pair).cost("send", size)
        for pair, size in zip(ends, plan.crossing_bytes.tolist(), strict=True)
    ]
    latency_ns, transfer_ns = (
        np.array([float(getattr(cost, name)[0]) for cost in costs]) for name in ("latency_ns", "transfer_ns")
    )
    transfer_ns = transfer_ns + gathering_ns(graph, plan.crossing_bytes)
    return _Filled(threads, frame(shape), Pieces.side_by_side(pieces), Cost(latency_ns, transfer_ns))


def stage_updates(plan: Plan, work: Work, stages: int) -> Pieces:
    """Return the share of the update of each stage, (n_steps, n_stages)."""
    return work.update.take(np.zeros(stages, dtype=np.int64)).times(by_stage(plan.shares, stages))


def _threads(
    graph: TaskGraph, stages: int, n_parts: int, network: Network
) -> tuple[tuple[Thread, ...], dict[tuple[int, int], int]]:
    """The threads of all stages, and the channel between each pair: one each way if a link is full duplex."""
    threads = list[Thread]()
    streams = [thread for thread in graph.threads if thread.kind == ThreadKind.STREAM]
    for stage in range(stages):
        threads.append(Thread(f"stage {stage}: CPU", ThreadKind.CPU, rank=stage))
        if graph.has_gpu:
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
    """The part of a network between two workers: levels up to the first with both in one member."""
    members = 1
    for number, level in enumerate(network.levels):
        members *= level.workers
        if pair[0] // members == pair[1] // members:
            return structs.replace(network, levels=network.levels[: number + 1])
    return network


def _repeated(graph: TaskGraph, work: Work, filled: _Filled, boundary_bytes: Int64) -> TaskGraph:
    """All steps: the same tasks with the times of each step."""
    threads, frame, pieces, sends = filled
    n_steps, n = len(work.steps), len(frame)
    message, none = estimated(sends), np.zeros_like(pieces.cpu_ns)
    duration_ns, low_ns, high_ns = (
        frame.column(times_of(pieces, bound)._replace(send=send, call=call))
        for bound, send, call in zip(
            ("", "low", "high"), (message.duration_ns, message.low_ns, message.high_ns),
            _call_ns(graph, boundary_bytes), strict=True,
        )
    )  # fmt: skip
    of_step = np.zeros((2, n), dtype=np.bool_)
    for place, sort in enumerate(("send", "sum")):
        of_step[place, frame.of[sort]] = True
    sent, summed = np.tile(of_step[0] | of_step[1], n_steps), np.tile(of_step[1], n_steps)
    family = np.full(n, -1)
    family[frame.of["gpu" if frame.of["gpu"].size else "cpu"]] = int(KernelFamily.OTHER)
    family[frame.kind == TaskKind.COMMUNICATION] = FAMILY
    each: dict[str, Array] = {
        "name": frame.name, "kind": frame.kind, "thread": frame.thread, "phase": frame.phase, "family": family,
    }  # fmt: skip
    size_bytes = frame.column(Times(none, none, pieces.sum_bytes, boundary_bytes))
    given = {
        **{name: np.tile(values, n_steps) for name, values in each.items()},
        "step": np.repeat(work.steps, n),
        "duration_ns": duration_ns,
        "low_ns": np.minimum(low_ns, duration_ns),
        "high_ns": np.maximum(high_ns, duration_ns),
        "size_bytes": np.where(sent, size_bytes, -1),
    }
    changed = graph.replace(
        **filled_columns(n_steps * n, given), threads=threads, names=frame.names, attached={},
        dependencies=frame.dependencies(pieces.start_lag_ns),
        waits=Waits(*(np.empty(0, dtype=getattr(graph.waits, name).dtype) for name in Waits.__slots__)),
        info=replace(graph.info, queue_depth=0),
    )  # fmt: skip
    worked = np.zeros(n, dtype=np.bool_)
    worked[np.concatenate([frame.of["cpu"], frame.of["gpu"]])] = True
    changed = mark(changed, np.tile(worked, n_steps), int(work.source))
    latency_ns = frame.column(Times(none, none, pieces.sum_latency_ns, sends.latency_ns))
    changed = attach_model(changed, np.flatnonzero(sent & ~summed), Parts.of_network(latency_ns[sent & ~summed]), 2)
    no_call = np.zeros_like(boundary_bytes)
    of_sums = (pieces.sum_latency_ns, pieces.sum_network_ns, pieces.sum_cpu_ns, pieces.sum_messages_ns)
    parts = Parts(*(frame.column(Times(none, none, column, no_call))[summed] for column in of_sums))
    changed = attach_model(changed, np.flatnonzero(summed), parts, int(workers_of(graph).max(initial=0)))
    return changed.attach(**{ACTIVATIONS: sent})


def _call_ns(graph: TaskGraph, boundary_bytes: Int64) -> tuple[Float64, Float64, Float64]:
    """The CPU time of a call that sends or receives at each boundary, ns, and its range, shape (n_boundaries,) each.

    On a CPU gloo's threads do the work on the core of the stage.
    """
    if graph.has_gpu:
        same = np.ones(len(boundary_bytes))
        return same * CALL_NS, same * CALL_LOW_NS, same * CALL_NS
    work_ns = gloo.one_way_ns(graph, boundary_bytes)
    return work_ns, work_ns / gloo.SPREAD, work_ns * gloo.SPREAD


def _with_gradients(graph: TaskGraph, frame: Frame, gradient_bytes: Int64) -> TaskGraph:
    column = np.zeros(len(frame), dtype=np.int64)
    column[frame.backward] = gradient_bytes
    tiled = graph.attach(**{GRADIENTS: np.tile(column, len(graph) // len(frame))})
    return tiled.with_change(Change.IN_STAGES)
