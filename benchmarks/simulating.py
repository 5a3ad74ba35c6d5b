"""Times of the simulator: default order, free choices, a schedule in Python, many scenarios at once."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import synthetic
from inputs import trace
from measure import Row, candidate, least_cpu_s
from rivals import algorithm_1, as_networkx
from synthetic import DEPENDENCIES_PER_TASK

from whatif import read
from whatif.graph.columns import TASK_COLUMNS, bytes_of
from whatif.graph.task_graph import TaskGraph
from whatif.runtime.loops import Loops
from whatif.simulation.simulator import Frontier, _prepared, simulate, simulate_scenarios, sweeps
from whatif.simulation.timeline import Timeline

MANY = 1_000_000


def _simulate_anew(graph: TaskGraph) -> Timeline:
    """Simulate without the caches of an earlier simulation."""
    return simulate(dataclasses.replace(graph))


def default_order(rounds: int, quick: bool, large: bool) -> Iterator[Row]:
    """The default schedule without choices: one sweep in the order of the ids."""
    for n in (10**5, 10**6) if quick else (10**5, 10**6, 10**7):
        graph = synthetic.in_order(n)
        prepared = _prepared(graph)
        times = np.zeros(2 * n, dtype=np.int64)
        cpu_s = least_cpu_s({
            "simulate": partial(_simulate_anew, graph),
            "again": partial(simulate, graph),
            "sweep": partial(sweeps.sweep, graph.thread, graph.duration_ns, *prepared, times),
        }, rounds)  # fmt: skip
        size = f"10^{len(str(n)) - 1} tasks"
        budget, stretch = (16, 8) if n == 10**6 else (None, None)
        yield Row("simulate", f"{size}, in all", 1e9 * cpu_s["simulate"] / n, "ns/task", budget, stretch, True)
        yield Row("simulate", f"{size}, durations changed", 1e9 * cpu_s["again"] / n, "ns/task")
        yield Row("simulate", f"{size}, the sweep alone", 1e9 * cpu_s["sweep"] / n, "ns/task")
        if n == 10**5:
            yield from _rivals(graph, cpu_s, rounds)
        if n == 10**6:
            yield from _memory(graph, f"{size}, {DEPENDENCIES_PER_TASK} dependencies each")

    if large:
        yield from _largest()

    recorded = read(trace("v100-50"))
    density = (len(recorded.dependencies) + len(recorded.derived)) / len(recorded)
    yield from _memory(recorded, f"V100 recording, {density:.2g} dependencies a task")


def _largest() -> Iterator[Row]:
    """The largest graph that fits in 24 GB, once, in a separate process."""
    found = candidate("simulate_synthetic", Path("8"))
    if "error" in found:
        yield Row("simulate", "10^8 tasks, in all", None, "ns/task", note=found["error"])
        return
    yield Row("simulate", "10^8 tasks, in all", 1e9 * found["cpu_s"] / found["tasks"], "ns/task")
    yield Row("simulate", "10^8 tasks, peak memory of the process", found["peak_bytes"] / 1e9, "GB", 24, None, True)


def _rivals(graph: TaskGraph, ours_s: dict[str, float], rounds: int) -> Iterator[Row]:
    arrays = (graph.thread, graph.duration_ns, *_prepared(graph))
    as_nx = as_networkx(graph)
    times = np.zeros(2 * len(graph), dtype=np.int64)
    plain = partial(Loops(sweeps.module, plain=True).sweep, *arrays, times)
    plain()
    assert algorithm_1(as_nx) == times.max() == simulate(graph).makespan_ns
    cpu_s = least_cpu_s({"python": plain, "nx": partial(algorithm_1, as_nx)}, rounds)
    for key, title in (("python", "the sweep in plain Python"), ("nx", "Algorithm 1 on networkx with a heap")):
        yield Row("simulate", f"10^5 tasks, {title}", 1e9 * cpu_s[key] / len(graph), "ns/task")
        yield Row("simulate", f"10^5 tasks, in all faster than {title}", cpu_s[key] / ours_s["simulate"], "x")


def _memory(graph: TaskGraph, title: str) -> Iterator[Row]:
    n = len(graph)
    prepared = _prepared(graph)
    dependencies = graph.dependencies
    stored = [getattr(graph, name) for name in TASK_COLUMNS]
    stored += [getattr(dependencies, name) for name in ("source", "target", "kind", "lag_ns", "anchor")]
    stored_bytes = bytes_of(stored)
    result_bytes = 2 * 8 * n
    extra = sum(array.nbytes for array in prepared) + result_bytes
    own_bytes = graph.thread.nbytes + graph.duration_ns.nbytes + extra
    yield Row("simulate", f"{title}: arrays of the sweep", own_bytes / n, "B/task", None, 70, True)
    total_bytes = stored_bytes + extra
    yield Row("simulate", f"{title}: graph and arrays of the sweep", total_bytes / n, "B/task", 102, None, True)
    tracemalloc.start()
    _simulate_anew(graph)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    yield Row("simulate", f"{title}: peak beside the graph while simulating", peak / n, "B/task")


def free_choices(rounds: int, quick: bool, large: bool) -> Iterator[Row]:
    """The default schedule with threads that choose among ready tasks."""
    graphs = {width: synthetic.with_choices(MANY, width) for width in (1_000, 10_000)}
    cpu_s = least_cpu_s({str(w): partial(_simulate_anew, g) for w, g in graphs.items()}, rounds)
    wide = cpu_s["10000"]
    yield Row("choices", "10^6 tasks, 10,000 ready at a time", MANY / wide / 1e6, "M tasks/s", 2.5, 4)
    # Not from the budget table: a quadratic heap would be 10.
    yield Row("choices", "10,000 ready over 1,000 ready, time", wide / cpu_s["1000"], "x", 2, None, True)


def python_schedule(rounds: int, quick: bool, large: bool) -> Iterator[Row]:
    """A schedule function in Python that looks at every ready task."""
    n = 10**5
    graph = synthetic.in_order(n)
    widths: list[int] = []

    def earliest(frontier: Frontier) -> int:
        return frontier.earliest()

    def first(frontier: Frontier) -> int:
        return next(iter(frontier.ready_ns))

    def watched(frontier: Frontier) -> int:
        widths.append(len(frontier.ready_ns))
        return frontier.earliest()

    simulate(graph, watched)
    cpu_s = least_cpu_s({"all": partial(simulate, graph, earliest), "one": partial(simulate, graph, first)}, rounds)
    title = f"10^5 tasks, {np.mean(widths):.1f} ready on average, at most {max(widths)}"
    yield Row("schedule", f"{title}: looks at all of them", n / cpu_s["all"], "tasks/s", 300_000)
    yield Row("schedule", f"{title}: takes the first", n / cpu_s["one"], "tasks/s")


def scenarios(rounds: int, quick: bool, large: bool) -> Iterator[Row]:
    """Many scenarios in one sweep; durations are affine in the scenario."""
    for n, count in ((10**5, 64), (10**6, 64)) if quick else ((10**5, 64), (10**5, 256), (10**6, 64), (10**6, 256)):
        graph = synthetic.in_order(n)
        slope_ns = np.where(np.arange(n) % 33 == 0, 1_000.0, 0.0)
        x = np.linspace(0.1, 10, count)
        simulate_scenarios(graph, slope_ns, x[:2])
        cpu_s = least_cpu_s({"": partial(simulate_scenarios, graph, slope_ns, x)}, rounds)[""]
        title = f"10^{len(str(n)) - 1} tasks, {count} scenarios"
        yield Row("sweep", title, n * count / cpu_s / 1e6, "M task·scenarios/s", 1_500)
