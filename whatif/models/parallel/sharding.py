"""Sharded data parallel training: each worker keeps a part of the optimizer state, the gradients, the parameters.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020; Zhao et
al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; torch.distributed.fsdp of torch
2.13 (fully_shard: _fsdp_param_group.py), DeepSpeed's documentation of its stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Int64, Phase
from whatif.hardware.cluster.network import Network
from whatif.models.durations.estimator import Estimates, Source, put, shortest_kernel_ns
from whatif.models.exchange.beside_kernels import slow_kernels_beside
from whatif.models.exchange.buckets import StepGradients
from whatif.models.exchange.collective_tasks import CALL_LOW_NS, CALL_NS, with_workers
from whatif.models.exchange.exchanges import REDUCE_SCATTER, CallTime, Exchange, exchange
from whatif.models.exchange.stragglers import with_slowest
from whatif.models.layers.calls import calls_of, task_before
from whatif.models.layers.columns import with_values
from whatif.models.layers.gradients import step_of
from whatif.models.layers.memory_effects import change_memory
from whatif.models.layers.update_tasks import step_kernels
from whatif.models.parallel.passes import Passes, Use, passes
from whatif.models.parallel.sharded_memory import with_sharded_gradients, with_sharded_parameters, with_sharded_state
from whatif.models.parallel.sharded_units import Units, units_of
from whatif.runtime.errors import WhatifError
from whatif.simulation.transfers import workers_of
from whatif.units import counted

CHANNEL, ACROSS = "network", "network across nodes"
Prefetch = Literal["pre", "post", "none"]
# The hooks, views and bookkeeping of fully_shard around one unit in one direction, collective included: 0.8 ms forward
# and 1.1 ms backward for a unit of two tensors, up to three times as much for sixteen (torch 2.13, collectives that do
# nothing, no profiler, on one core of a slow virtual machine; our measurement). The centre is half of that.
UNIT_CALL = CallTime(500_000, 150_000, 1_500_000)
BUCKET_CALL = CallTime(CALL_NS, CALL_LOW_NS, CALL_NS)


class FullSharding(NamedTuple):
    """Options of gathering parameters: prefetching of the next unit, and resharding."""

    backward_prefetch: Prefetch = "pre"
    forward_prefetch: bool = False
    reshard_after_forward: bool = True
    limit: int = 2  # units that may be gathered at once, including the working one
    share: float = 1.0  # the share of a parameter's bytes that is sent: half in 16 bits
    hybrid: bool = False  # sharded within a node, replicated across nodes


def fully_sharded(
    graph: TaskGraph, name: str, gradients: StepGradients, network: Network, fsdp: FullSharding,
    unit: str | None = None, unit_bytes: int | None = None,
) -> TaskGraph:  # fmt: skip
    """Return the graph, including its memory, of one of several workers that each keep a part of the parameters.

    ``unit`` and ``unit_bytes`` are those of ``units_of``; ``name`` is the what-if's. Raises WhatifError if hybrid
    sharding has no nodes.
    """
    units = units_of(graph, name, gradients, passes(graph), unit, unit_bytes)
    within, across = nodes_of(network, name) if fsdp.hybrid else (network, None)
    workers = within.workers
    unit_of, sizes = units_in_memory(graph, units)
    graph = change_memory(
        graph,
        lambda memory: with_sharded_parameters(
            memory, workers, unit_of, sizes, limit=fsdp.limit, resharded=fsdp.reshard_after_forward, share=fsdp.share
        ),
    )
    mean_mb = sum(units.size_bytes.tolist()) / max(len(units.names), 1) / 1e6
    graph = _shard_parameters(with_slowest(with_workers(graph, network.workers), network), units, within, fsdp)
    if across is not None:
        graph = _summed_across(graph, across)
    return slow_kernels_beside(graph).note(
        f"{name}: {counted(len(units.names), 'unit')} of {mean_mb:,.1f} MB each and {units.root_bytes / 1e6:,.1f} MB "
        f"of the root, network: {network.described}; the batch is per worker ({counted(network.workers, 'worker')})"
        + (f"; {workers} of a node share the parameters, of which each node has all" if fsdp.hybrid else "")
    )


def nodes_of(network: Network, name: str) -> tuple[Network, Network | None]:
    """The network within a node and across nodes (None for a single node). Raises WhatifError without nodes."""
    if len(network.levels) < 2 or network.table is not None:
        got = "a table of measured times" if network.table is not None else "links that are all equal"
        raise WhatifError(f"{name}: expected a cluster of nodes for hybrid=true, as in cluster=dgx-a100, got {got}.")
    within = replace(network, levels=network.levels[:1])
    if within.workers < 2:
        raise WhatifError(f"{name}: expected nodes of several workers for hybrid=true, got one of each node.")
    across = network.around(within.workers)
    return within, across if across.workers > 1 else None


def _summed_across(graph: TaskGraph, network: Network) -> TaskGraph:
    """All-reduce each reduce-scatter's output among the same parts of all nodes (Zhao et al., §3.2.2)."""
    scattered = np.array([row == REDUCE_SCATTER for row in graph.names], dtype=np.bool_).take(graph.name)
    tasks = np.flatnonzero(scattered & (workers_of(graph) > 0))
    edges = graph.dependencies
    of = np.isin(edges.source, tasks) & graph.on_gpu[edges.target]
    waiting: dict[int, list[int]] = {}
    for task, user in zip(edges.source[of].tolist(), edges.target[of].tolist(), strict=True):
        waiting.setdefault(task, []).append(user)
    parts = graph.size_bytes[tasks] // workers_of(graph)[tasks]
    rows = [
        Exchange("all_reduce", size, call, Phase.BACKWARD, (task,), tuple(waiting.get(task, ())))
        for task, size, call in zip(tasks.tolist(), parts.tolist(), graph.launch_of[tasks].tolist(), strict=True)
    ]
    return exchange(graph, rows, network, ACROSS, BUCKET_CALL)


def units_in_memory(graph: TaskGraph, units: Units) -> tuple[dict[str, int], dict[int, int]]:
    """Return the unit of each layer by name, and the bytes of each unit, the root's under -1."""
    table = units.of_layer.tolist()
    unit_of = {layer: part for layer, part in zip(graph.layers, table, strict=True) if part >= 0}
    return unit_of, {-1: units.root_bytes, **dict(enumerate(units.size_bytes.tolist()))}


def _shard_parameters(graph: TaskGraph, units: Units, network: Network, fsdp: FullSharding) -> TaskGraph:
    """Return a graph that gathers each unit before its forward and backward work, then reduce-scatters its gradients.

    The root's parameters are gathered once a pass. An all-gather waits until the unit ``fsdp.limit`` places before it
    is freed; a unit's gradient buffer waits for the previous reduce-scatter.
    """
    found = passes(graph)
    rows: list[Exchange] = []
    by_pass: dict[int, list[Use]] = {}
    for use in units.uses:
        by_pass.setdefault(use.number, []).append(use)
    ends = _pass_ends(found)
    around = [(use.first, use.last) for use in units.uses] + [(pass_ends.first, pass_ends.last) for pass_ends in ends]
    calls = _calls(graph, [task for pair in around for task in pair])
    for number, pass_ends in enumerate(ends):
        rows += _one_pass(graph, units, by_pass.get(number, []), pass_ends, fsdp, calls, len(rows))
    exchanged = exchange(graph, rows, network, CHANNEL, UNIT_CALL)
    return update_share(exchanged, 1 / network.workers)


class _Ends(NamedTuple):
    """First forward and last backward work of a pass (-1: none); whether it is the first, and the last, of its step."""

    first: int
    last: int
    begins: bool
    closes: bool


def _pass_ends(found: Passes) -> list[_Ends]:
    rows = []
    for number, step in enumerate(found.step.tolist()):
        in_pass = found.number == number
        forward, backward = found.task[in_pass & ~found.backward], found.task[in_pass & found.backward]
        begins = number == 0 or found.step[number - 1] != step
        closes = number == len(found.step) - 1 or found.step[number + 1] != step
        first, last = int(forward.min()) if len(forward) else -1, int(backward.max(initial=-1))
        rows.append(_Ends(first, last, bool(begins), bool(closes)))
    return rows


def _one_pass(
    graph: TaskGraph, units: Units, in_pass: list[Use], ends: _Ends, fsdp: FullSharding, calls: dict[int, _Call],
    done: int,
) -> list[Exchange]:  # fmt: skip
    """The collectives of one forward and backward pass; ``done``: the number in the list before them."""
    rows: list[Exchange] = []
    on_gpu = graph.has_gpu
    root = round(units.root_bytes * fsdp.share)
    updated = _last_update(graph, ends.first) if on_gpu and ends.begins and ends.first >= 0 else ()
    if root and ends.first >= 0:
        rows.append(
            Exchange("all_gather", root, calls[ends.first].before, Phase.FORWARD, updated, (ends.first,),
                     copied_out=ends.first)
        )  # fmt: skip
    gathers = [use for use in in_pass if not use.backward or fsdp.reshard_after_forward]
    place = {(use.backward, use.part): number for number, use in enumerate(gathers)}
    following = {id(use): after for use, after in pairwise(in_pass) if use.backward == after.backward}
    requested: set[tuple[bool, int]] = set()

    def gather(use: Use | None, call: int) -> None:
        """Gather a unit, unless it was already requested or is still gathered."""
        key = (use.backward, use.part) if use else (False, -1)
        if use is None or key not in place or key in requested:
            return
        requested.add(key)
        at = place[key]
        freed = gathers[at - fsdp.limit].last if at >= fsdp.limit else use.first
        ready = () if not on_gpu else (freed,) if freed < use.first else updated if not at else ()
        phase = Phase.BACKWARD if use.backward else Phase.FORWARD
        rows.append(
            Exchange("all_gather", size(use), call, phase, ready, use.firsts, copied_out=use.first)
        )  # fmt: skip

    def size(use: Use, sizes: Int64 = units.size_bytes) -> int:
        return round(int(sizes[use.part]) * fsdp.share)

    root_gradients = round(units.root_gradient_bytes * fsdp.share)
    scatter, scattered = -1, sum(use.backward and size(use, units.gradient_bytes) > 0 for use in in_pass)
    # The begins and ends of units: a unit that works several times per pass may enclose others.
    moments = [(use.first, True, use) for use in in_pass] + [(use.last, False, use) for use in in_pass if use.backward]
    for _, begins, use in sorted(moments, key=lambda moment: (moment[0], not moment[1])):
        if begins:
            gather(use, calls[use.first].before)
            if on_gpu and (fsdp.backward_prefetch == "pre" if use.backward else fsdp.forward_prefetch):
                gather(following.get(id(use)), calls[use.first].before)
            continue
        if on_gpu and fsdp.backward_prefetch == "post":
            gather(following.get(id(use)), calls[use.last].after)
        if not size(use, units.gradient_bytes):
            continue
        scattered -= 1
        waiting = () if root_gradients or scattered else _behind_pass(graph, ends)
        rows.append(
            Exchange("reduce_scatter", size(use, units.gradient_bytes), calls[use.last].after, Phase.BACKWARD,
                     (use.last,), waiting, copied_in=use.last, buffer=scatter if on_gpu else -1)
        )  # fmt: skip
        scatter = done + len(rows) - 1
    if root_gradients and ends.last >= 0:
        rows.append(
            Exchange("reduce_scatter", root_gradients, calls[ends.last].after, Phase.BACKWARD, (ends.last,),
                     _behind_pass(graph, ends), copied_in=ends.last, buffer=scatter if on_gpu else -1)
        )  # fmt: skip
    return rows


class _Call(NamedTuple):
    """The CPU tasks after which calls are placed: ``before`` for calls before some work, ``after`` for calls after."""

    before: int
    after: int


def _calls(graph: TaskGraph, tasks: Iterable[int]) -> dict[int, _Call]:
    """The places for calls around each of ``tasks``: around its launch, on a CPU around itself."""
    ids = np.array(sorted({task for task in tasks if task >= 0}), dtype=np.int64)
    behind = calls_of(graph, ids) if graph.has_gpu else ids
    before = task_before(graph, behind)
    rows = zip(ids.tolist(), before.tolist(), behind.tolist(), strict=True)
    return {task: _Call(*places) for task, *places in rows}


def _last_update(graph: TaskGraph, first: int) -> tuple[int, ...]:
    """The last task of an update before the pass that begins with the task ``first``."""
    update = np.flatnonzero(graph.on_gpu & (graph.phase == Phase.UPDATE))
    at = int(np.searchsorted(update, first))
    return (int(update[at - 1]),) if at else ()


def _behind_pass(graph: TaskGraph, ends: _Ends) -> tuple[int, ...]:
    """The tasks that wait for the gradients: after the backward pass, and of the update on every other stream."""
    if not graph.has_gpu or ends.last < 0:
        return ()
    following = int(graph.neighbours[1][ends.last])
    found = {int(graph.thread[ends.last]): following} if following >= 0 else {}
    if ends.closes:
        update = graph.on_gpu & (graph.phase == Phase.UPDATE) & (step_of(graph) == step_of(graph)[ends.last])
        tasks = np.flatnonzero(update)
        tasks = tasks[tasks > ends.last]
        threads, at = np.unique(graph.thread[tasks], return_index=True)
        for thread, task in zip(threads.tolist(), tasks[at].tolist(), strict=True):
            found.setdefault(thread, task)
    return tuple(found.values())


def sharded_gradients(
    graph: TaskGraph, gradients: StepGradients, bucket_bytes: int, network: Network, *, stage: int, overlap: bool
) -> TaskGraph:
    """Return the graph that reduce-scatters gradient buckets, updates a part per worker and gathers the parameters.

    A bucket is full once it holds ``bucket_bytes``. ``overlap``: it is sent then, during the backward pass; else after
    that pass. ``stage`` 1 keeps full gradients, and sends them in the last pass of a step; 2 keeps only the worker's
    part, and sends them in each (DeepSpeed, stage_1_and_2.py: overlapping_partition_gradients_reduce_epilogue).
    """
    workers = network.workers
    if stage == 1:
        graph = change_memory(graph, lambda memory: with_sharded_state(memory, workers))
    else:
        graph = change_memory(graph, lambda memory: with_sharded_gradients(memory, workers, bucket_bytes))
    graph = with_workers(graph, workers)
    graph, found = with_slowest(graph, network), passes(graph)
    every = _pass_ends(found)
    first = {step: ends.first for step, ends in zip(found.step.tolist(), every, strict=True) if ends.begins}
    rows: list[Exchange] = []
    for step in np.unique(gradients.step).tolist():
        numbers = [number for number in np.flatnonzero(found.step == step).tolist() if every[number].last >= 0]
        if not numbers:
            continue  # its backward pass was launched before the recording began
        in_step = gradients.step == step
        sizes, task = gradients.size_bytes[in_step], gradients.task[in_step]
        for number in numbers if stage == 2 else numbers[-1:]:
            ready = _as_far(found, task, numbers[-1], number)
            rows += _buckets(graph, sizes, ready, every[number], bucket_bytes, overlap=overlap)
        rows.append(_gather_updated(graph, int(sizes.sum()), step, every[numbers[-1]], first.get(step + 1, -1)))
    exchanged = exchange(graph, rows, network, CHANNEL, BUCKET_CALL)
    return update_share(slow_kernels_beside(exchanged) if overlap else exchanged, 1 / workers)


def _as_far(found: Passes, task: Int64, of: int, number: int) -> Int64:
    """Return the backward work of the pass ``number`` that is as far in it as each ``task`` is in the pass ``of``."""
    if number == of:
        return task
    here, there = (found.task[found.backward & (found.number == each)] for each in (of, number))
    share = np.searchsorted(here, task).clip(0, len(here) - 1) / max(len(here) - 1, 1)
    return np.asarray(there[np.rint(share * (len(there) - 1)).astype(np.int64)], dtype=np.int64)


def _buckets(
    graph: TaskGraph, size_bytes: Int64, task: Int64, ends: _Ends, bucket_bytes: int, *, overlap: bool
) -> list[Exchange]:
    rows: list[Exchange] = []
    filled, ready = 0, -1
    for at, (size, when) in enumerate(zip(size_bytes.tolist(), task.tolist(), strict=True)):
        filled, ready = filled + size, max(ready, when)
        if filled < bucket_bytes and at + 1 < len(task):
            continue
        sent = ready if overlap else max(ends.last, ready)
        waiting = _behind_pass(graph, ends) if at + 1 == len(task) else ()
        rows.append(
            Exchange("reduce_scatter", filled, _calls(graph, [sent])[sent].after, Phase.BACKWARD, (sent,), waiting,
                     copied_in=sent)
        )  # fmt: skip
        filled = 0
    return rows


def _gather_updated(graph: TaskGraph, size_bytes: int, step: int, ends: _Ends, following: int) -> Exchange:
    """The all-gather of the updated parameters: after the update, and before ``following``, the next forward work."""
    worker = graph.on_device
    update = np.flatnonzero(worker & (step_of(graph) == step) & (graph.phase == Phase.UPDATE))
    update = update[update > ends.last]
    last = int(update[-1]) if len(update) else ends.last
    waiting = tuple(task for task in (following, int(graph.neighbours[1][last])) if task > last)
    return Exchange("all_gather", size_bytes, _calls(graph, [last])[last].after, Phase.UPDATE, (last,), waiting)


def update_share(graph: TaskGraph, share: float) -> TaskGraph:
    """Return the graph whose update works on ``share`` of its bytes, in as many kernels (on a CPU operators)."""
    update = np.flatnonzero(step_kernels(graph))
    if not len(update):
        return graph
    floor_ns = shortest_kernel_ns(graph)

    def left(column: Int64, floor: float) -> Int64:
        kept = np.minimum(column[update], floor)
        return np.asarray(np.rint(kept + (column[update] - kept) * share), dtype=np.int64)

    # Kernels of many small tensors may be all start-up; otherwise they shrink with their bytes.
    estimates = Estimates.of(
        left(graph.duration_ns, floor_ns), Source.ASSUMED, left(graph.low_ns, 0), left(graph.high_ns, 2 * floor_ns)
    )
    known = update[graph.size_bytes[update] > 0]
    return with_values(put(graph, update, estimates), known, size_bytes=np.rint(graph.size_bytes[known] * share))
