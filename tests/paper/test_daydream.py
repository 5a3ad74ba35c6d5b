"""Daydream (Zhu et al., USENIX ATC 2020), checked against what it prints: algorithm 1, figure 2, algorithms 2 and 3."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.helpers import CPU, STREAM, Build, starts
from whatif import TaskGraph, TaskKind, Thread, ThreadKind, simulate

NETWORK = Thread("network", ThreadKind.CHANNEL)


@dataclass
class Task:
    """A task as the paper has it (§4.2.1): its gap is a property of it."""

    thread: str
    duration: int
    gap: int = 0
    children: list[str] = field(default_factory=list)
    ref: int = 0
    start: int = 0


def algorithm_1(tasks: dict[str, Task]) -> dict[str, int]:
    """Algorithm 1, line by line; ``schedule`` picks the earliest start."""
    for u in tasks.values():
        for c in u.children:
            tasks[c].ref += 1
    frontier = [name for name, u in tasks.items() if u.ref == 0]
    progress = dict.fromkeys((u.thread for u in tasks.values()), 0)
    while frontier:
        name = min(frontier, key=lambda n: max(progress[tasks[n].thread], tasks[n].start))
        frontier.remove(name)
        u = tasks[name]
        u.start = max(progress[u.thread], u.start)
        progress[u.thread] = u.start + u.duration + u.gap
        for c in u.children:
            child = tasks[c]
            child.ref -= 1
            child.start = max(child.start, u.start + u.duration + u.gap)
            if child.ref == 0:
                frontier.append(c)
    return {name: u.start for name, u in tasks.items()}


def ours(tasks: dict[str, Task]) -> TaskGraph:
    """The same graph with every gap as a task of its own behind its task."""
    threads = list(dict.fromkeys(u.thread for u in tasks.values()))
    build = Build(*[CPU if t == "CPU" else STREAM for t in threads])
    ids = {}
    for name, u in tasks.items():
        ids[name] = build.task(threads.index(u.thread), u.duration, name)
        if u.gap:
            build.task(threads.index(u.thread), u.gap, f"gap behind {name}", TaskKind.GAP)
    for name, u in tasks.items():
        for child in u.children:
            if tasks[child].thread != u.thread:  # the order of a thread is not an edge
                build.edge(ids[name], ids[child])
    return build.graph()


def test_algorithm_1_on_one_thread_gives_our_timeline() -> None:
    """
    ::

        CPU   |a---|gap|b--|c----|gap-|d|
    """
    tasks = {
        "a": Task("CPU", 4, 3, ["b"]),
        "b": Task("CPU", 3, 0, ["c"]),
        "c": Task("CPU", 5, 4, ["d"]),
        "d": Task("CPU", 1),
    }
    expected = algorithm_1(tasks)
    found = starts(simulate(ours(tasks)))
    assert expected == {"a": 0, "b": 7, "c": 10, "d": 19}
    assert {name: found[name] for name in tasks} == expected


def test_algorithm_1_adds_a_gap_to_children_on_other_threads_and_we_do_not() -> None:
    """The gap behind a launch is CPU time: the kernel does not wait for it, though line 16 lets it (docs/design.md).

    ::

        paper   CPU     |launch|gap.....|next|       ours   CPU     |launch|gap.....|next|
                stream                  |K----|             stream         |K----|
    """
    tasks = {
        "launch": Task("CPU", 3, 6, ["next", "K"]),
        "next": Task("CPU", 2),
        "K": Task("stream", 5),
    }
    assert algorithm_1(tasks) == {"launch": 0, "next": 9, "K": 9}
    found = starts(simulate(ours(tasks)))
    assert (found["next"], found["K"]) == (9, 3)


def figure_2() -> TaskGraph:
    """Two layers; the gradient of each is reduced over the network while the backward pass goes on.

    ::

        GPU       |fwd 1|fwd 2|bwd 2---|bwd 1---|                    |update|
        network                        |all-reduce 2--|all-reduce 1--|
        ns        0     4     8        14       20    24             34     36
    """
    build = Build(STREAM, NETWORK)
    build.task(0, 4, "forward 1")
    build.task(0, 4, "forward 2")
    second = build.task(0, 6, "backward 2")
    reduce_2 = build.task(1, 10, "all-reduce 2", TaskKind.COMMUNICATION)
    first = build.task(0, 6, "backward 1")
    reduce_1 = build.task(1, 10, "all-reduce 1", TaskKind.COMMUNICATION)
    update = build.task(0, 2, "update")
    build.edge(second, reduce_2)
    build.edge(first, reduce_1)
    build.edge(reduce_2, update)
    build.edge(reduce_1, update)
    return build.graph()


def test_figure_2_what_if_the_network_were_twice_as_fast() -> None:
    """Half as long transfers: 11 ns of 36 are saved, though 10 of 20 are, because the network then waits for the GPU.

    ::

        GPU       |fwd 1|fwd 2|bwd 2---|bwd 1---|        |update|
        network                        |ar 2-|  |ar 1----|
        ns        0     4     8        14    19 20       25     27
    """
    graph = figure_2()
    before = starts(simulate(graph))
    assert (before["all-reduce 2"], before["all-reduce 1"], before["update"]) == (14, 24, 34)
    faster = graph.scale(graph.select(kind=TaskKind.COMMUNICATION), 0.5)
    after = starts(simulate(faster))
    assert (after["all-reduce 2"], after["all-reduce 1"], after["update"]) == (14, 20, 25)


def test_algorithms_2_and_3_mixed_precision_in_four_lines() -> None:
    """Compute-intensive kernels (sgemm, scudnn) take a third, all other GPU tasks a half; the CPU stays as it is."""
    build = Build(CPU, STREAM)
    for name in ("volta_sgemm_128x64_nn", "volta_scudnn_128x128_relu", "elementwise_kernel", "batch_norm"):
        build.launch(7, 600, name)
    graph = build.graph()

    compute = graph.on_gpu & graph.select(name="sgemm|scudnn")
    memory = graph.on_gpu & ~compute
    predicted = graph.scale(compute, 1 / 3).scale(memory, 1 / 2)

    assert predicted.duration_ns[predicted.on_gpu].tolist() == [200, 200, 300, 300]
    assert predicted.duration_ns[predicted.on_cpu].tolist() == [7, 7, 7, 7]
    assert (simulate(graph).makespan_ns, simulate(predicted).makespan_ns) == (2407, 1007)
    assert np.array_equal(predicted.on_gpu, graph.on_gpu)
