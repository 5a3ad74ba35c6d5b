"""Random graphs with every kind of dependency: each simulator and each edit beside a brute-force simulator.

    python -m tests.trust.random_graphs [COUNT] [FIRST SEED]

The brute-force simulator derives waits and the launch queue from their definitions, not with the library's code.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator

import networkx as nx
import numpy as np

from tests.helpers import CHANNEL, CPU, STREAM, Build, replace
from whatif import (
    Anchor,
    DependencyKind,
    Frontier,
    NewTasks,
    TaskGraph,
    TaskKind,
    ThreadKind,
    Timeline,
    WhatifError,
    simulate,
)

Times = tuple[list[int], list[int]]
# Waits for all streams of its rank.
ALL_STREAMS = -1


@dataclasses.dataclass(frozen=True)
class Edge:
    source: int
    target: int
    lag_ns: int
    from_start: bool


def brute_force(graph: TaskGraph) -> Times:
    """Return start and end of every task, ns: list scheduling, the earliest start first, then ready time, then id."""
    edges, following = _edges(graph), _following(graph)
    missing = collections.Counter([edge.target for edge in edges] + list(following.values()))
    check = nx.DiGraph([(edge.source, edge.target) for edge in edges] + list(following.items()))
    assert nx.is_directed_acyclic_graph(check), "the dependencies form a cycle"
    outgoing = collections.defaultdict(list)
    for edge in edges:
        outgoing[edge.source].append(edge)
    n = len(graph)
    ready = {task: 0 for task in range(n) if not missing[task]}
    reached, start, end = [0] * n, [0] * n, [0] * n
    free = [0] * len(graph.threads)

    def key(task: int) -> tuple[int, int, int]:
        return max(ready[task], free[graph.thread[task]]), ready[task], task

    def arrived(task: int) -> None:
        missing[task] -= 1
        if not missing[task]:
            ready[task] = reached[task]

    while ready:
        task = min(ready, key=key)
        thread = int(graph.thread[task])
        start[task] = max(ready.pop(task), free[thread])
        end[task] = start[task] + int(graph.duration_ns[task])
        free[thread] = max(end[task] + graph.threads[thread].lag_ns, 0)
        for edge in outgoing[task]:
            time_ns = (start if edge.from_start else end)[task] + edge.lag_ns
            reached[edge.target] = max(reached[edge.target], time_ns)
            arrived(edge.target)
        if task in following:
            arrived(following[task])
    return start, end


def _following(graph: TaskGraph) -> dict[int, int]:
    last: dict[int, int] = {}
    following = {}
    for task, thread in enumerate(graph.thread.tolist()):
        if graph.threads[thread].ordered and thread in last:
            following[last[thread]] = task
        last[thread] = task
    return following


def _edges(graph: TaskGraph) -> list[Edge]:
    deps = graph.dependencies
    rows = zip(deps.source.tolist(), deps.target.tolist(), deps.lag_ns.tolist(), deps.anchor.tolist(), strict=True)
    edges = [Edge(source, target, lag, bool(anchor)) for source, target, lag, anchor in rows]
    launch: dict[int, int] = {}
    for source, target, kind in zip(deps.source.tolist(), deps.target.tolist(), deps.kind.tolist(), strict=True):
        if kind == DependencyKind.LAUNCH:
            launch[target] = max(launch.get(target, -1), source)
    streams = collections.defaultdict(list)
    for task, thread in enumerate(graph.thread.tolist()):
        if graph.threads[thread].kind == ThreadKind.STREAM:
            streams[thread].append(task)
    return [*edges, *_waits(graph, streams, launch), *_queue(graph, streams, launch)]


def _waits(graph: TaskGraph, streams: dict[int, list[int]], launch: dict[int, int]) -> Iterator[Edge]:
    """A synchronisation waits for the last task of a stream that was launched before it."""
    launched = {}
    for tasks in streams.values():
        latest = -1
        for task in tasks:
            latest = max(latest, launch.get(task, -1))
            launched[task] = latest
    waits = graph.waits
    for wait, scope, lag in zip(waits.task.tolist(), waits.scope.tolist(), waits.lag_ns.tolist(), strict=True):
        rank = graph.threads[graph.thread[wait]].rank
        for stream, tasks in streams.items():
            if scope == stream or (scope == ALL_STREAMS and graph.threads[stream].rank == rank):
                before = [task for task in tasks if launched[task] < wait]
                if before:
                    yield Edge(before[-1], wait, lag, False)


def _queue(graph: TaskGraph, streams: dict[int, list[int]], launch: dict[int, int]) -> Iterator[Edge]:
    """A launch waits until the one that is a queue's depth ahead of it has begun."""
    depth = graph.info.queue_depth
    for tasks in streams.values() if depth else ():
        firsts: dict[int, int] = {}  # of the tasks of one launch
        launches = []
        for task in tasks:
            call = launch.get(task, -1)
            if call < 0 or call not in firsts:
                firsts[call] = task
                launches.append((task, call))
        for ahead, (_, call) in zip(launches, launches[depth:], strict=False):
            if call >= 0:
                yield Edge(ahead[0], call, 0, True)


def random_graph(dice: random.Random, *, unordered: bool) -> TaskGraph:
    """Return a graph of up to some 70 tasks; ``unordered`` adds a channel whose order the simulation decides."""
    cpus, n_streams = dice.randint(1, 3), dice.randint(1, 4)
    threads = [CPU] * cpus + [
        replace(STREAM, stream=7 + i, name=f"stream {7 + i}", lag_ns=dice.choice([0, 0, 1, 3, -1]))
        for i in range(n_streams)
    ]
    if dice.random() < 0.3:
        threads = [replace(thread, rank=i % 2) for i, thread in enumerate(threads)]
    channel = len(threads)
    threads += [CHANNEL] * unordered
    build = Build(*threads, launch_lag_ns=dice.randint(-1, 3), queue_depth=dice.choice([0, 0, 1, 2, 3, 5]))
    n_tasks = 0

    def add(kind: str) -> int:
        cpu, stream = dice.randrange(cpus), cpus + dice.randrange(n_streams)
        if kind == "launch":
            return build.launch(dice.randint(0, 4), dice.randint(0, 12), "kernel", cpu, stream)[1]
        if kind == "synchronize":
            return build.sync(dice.randint(0, 2), ALL_STREAMS, dice.randint(0, 2), cpu)[1]
        if kind == "synchronize stream":
            return build.sync(dice.randint(0, 2), stream, dice.randint(0, 2), cpu)[1]
        if kind == "gap":
            return build.task(cpu, dice.randint(0, 4), "gap", TaskKind.GAP)
        if kind == "operator":
            return build.task(cpu, dice.randint(0, 4), "operator", TaskKind.CPU_OP)
        if kind == "kernel without a launch":
            return build.task(stream, dice.randint(0, 9), "unlaunched")
        if kind == "collective":
            return build.task(channel, dice.randint(0, 9), "collective", TaskKind.COMMUNICATION)
        call = build.task(cpu, dice.randint(0, 3), "graph")
        for _ in range(dice.randint(2, 4)):
            last = build.task(cpus + dice.randrange(n_streams), dice.randint(0, 5), "graph kernel")
            build.edge(call, last, build.info.launch_lag_ns, DependencyKind.LAUNCH)
        return last

    kinds = ["launch"] * 4 + [
        "synchronize",
        "synchronize stream",
        "gap",
        "operator",
        "CUDA graph",
        "kernel without a launch",
    ]
    for _ in range(dice.randint(1, 25)):
        n_tasks = add(dice.choice(kinds + ["collective"] * (3 * unordered))) + 1
        for _ in range(dice.choice([0, 0, 1, 2]) if n_tasks > 1 else 0):
            target = dice.randrange(1, n_tasks)
            source = dice.randrange(target)
            kind = dice.choice([DependencyKind.USER, DependencyKind.EVENT])
            anchor = dice.choice([Anchor.END, Anchor.END, Anchor.START])
            build.edge(source, target, dice.choice([0, 0, 2, -2, 5]), kind, anchor)
    return build.graph()


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    graph: TaskGraph
    unordered: bool
    times: Times
    edits: dict[str, Callable[[], TaskGraph]]


def cases(first_seed: int, count: int) -> Iterator[Case]:
    """Return random graphs with their true times and edits of random tasks; a graph with a cycle is no case."""
    for seed in range(first_seed, first_seed + count):
        dice = random.Random(seed)
        unordered = dice.random() < 0.35
        try:
            graph = random_graph(dice, unordered=unordered)
            times = brute_force(graph)
        except (WhatifError, AssertionError):  # a random edge points against the order of a thread
            continue
        share = dice.choice([0.1, 0.5, 0.9])
        some = np.array([dice.random() < share for _ in range(len(graph))])
        yield Case(seed, graph, unordered, times, _edits(graph, some, dice.randint(1, 4)))


def _edits(graph: TaskGraph, some: np.ndarray, parts: int) -> dict[str, Callable[[], TaskGraph]]:
    launched = np.flatnonzero(some & graph.on_gpu & (graph.launch_of >= 0))
    kernels = NewTasks(np.flatnonzero(some & graph.on_gpu), "new", TaskKind.KERNEL, 4)
    with_calls = NewTasks(launched, "new", TaskKind.KERNEL, 4, launched_after=graph.launch_of[launched])
    operators = NewTasks(np.flatnonzero(some & graph.on_cpu), "new", TaskKind.CPU_OP, 4)
    return {
        "remove": lambda: graph.remove(some),
        "split": lambda: graph.split(some, parts),
        "scale": lambda: graph.scale(some, 0.5),
        "insert kernels": lambda: graph.insert(kernels).graph,
        "insert kernels with their calls": lambda: graph.insert(with_calls).graph,
        "insert operators": lambda: graph.insert(operators).graph,
    }


def times_of(timeline: Timeline) -> Times:
    """Return start and end of every task as lists."""
    return timeline.start_ns.tolist(), timeline.end_ns.tolist()


def faults(case: Case) -> Iterator[tuple[str, str]]:
    """Return (what, how) for everything that is wrong with the simulation and the edits of a case."""
    if times_of(simulate(case.graph)) != case.times:
        yield "simulate", "differs from brute force"
    if times_of(simulate(case.graph, Frontier.earliest)) != case.times:
        yield "simulate with a schedule", "differs from brute force"
    for name, edit in case.edits.items():
        try:
            edited = edit().check()
            expected = brute_force(edited)
        except (WhatifError, AssertionError) as error:
            yield name, f"refused: {error}"
            continue
        if times_of(simulate(edited)) != expected:
            yield name, "its simulation differs from brute force"
        if name == "scale" and not case.unordered and max(expected[1]) > max(case.times[1]):
            yield name, "faster tasks, longer run"
        if name == "split" and edited.duration_ns.sum() != case.graph.duration_ns.sum():
            yield name, "work is lost"


def main(count: int = 2000, first_seed: int = 0) -> None:
    """Print the first three faults of each kind, and how many there are."""
    start_s, found, n_cases = time.process_time(), collections.Counter[str](), 0
    for case in cases(first_seed, count):
        n_cases += 1
        for what, how in faults(case):
            found[what] += 1
            if found[what] <= 3:
                print(f"seed {case.seed}: {what}: {how}")
    print(f"{n_cases} graphs of {count} seeds, {time.process_time() - start_s:.1f} s; faults: {dict(found)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
