"""The simulator against a slow twin, against timelines drawn by hand, and against what must always hold."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.helpers import CHANNEL, CPU, STREAM, Build, loops_in_form, replace, starts
from whatif import (
    Anchor,
    Dependencies,
    Frontier,
    TaskGraph,
    Thread,
    ThreadKind,
    Timeline,
    WhatifError,
    simulate_scenarios,
)

simulator: Any = sys.modules[Frontier.__module__]
simulate, simulate_bounds = simulator.simulate, simulator.simulate_bounds


def _exits(frontier: Frontier) -> int:
    sys.exit(0)


def _float(frontier: Frontier) -> Any:
    return float(frontier.earliest())


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        (_exits, "SystemExit: 0"),
        (_float, "TypeError"),
        (lambda _: 1 // 0, "ZeroDivisionError"),
        (lambda _: [], "TypeError"),
    ],
)
def test_a_schedule_that_fails_is_named(schedule: Any, what: str) -> None:
    build = Build(CPU, STREAM)
    build.launch(1, 10, "k")
    with pytest.raises(WhatifError, match=rf"{schedule.__name__}\(\) of .*test_simulate\.py failed: {what}"):
        simulate(build.graph(), schedule)


@st.composite
def graphs(
    draw: st.DrawFn,
    *,
    free: bool = True,
    min_lag: int = -3,
    anchors: tuple[Anchor, ...] = (Anchor.END, Anchor.START),
    max_tasks: int = 14,
) -> TaskGraph:
    """A graph of a few tasks with small numbers, so that ties are frequent."""
    lags = st.integers(min_lag, 3)
    threads = draw(
        st.lists(
            st.builds(
                Thread,
                name=st.just("t"),
                kind=st.just(ThreadKind.CHANNEL),
                lag_ns=lags,
                ordered=st.booleans() if free else st.just(True),
            ),
            min_size=1,
            max_size=4,
        )
    )
    build = Build(*threads)
    n = draw(st.integers(1, max_tasks))
    for _ in range(n):
        build.task(draw(st.integers(0, len(threads) - 1)), draw(st.integers(0, 4)))
    if n > 1:
        for _ in range(draw(st.integers(0, 2 * n))):
            source = draw(st.integers(0, n - 2))
            target = draw(st.integers(source + 1, n - 1))
            build.edge(source, target, draw(lags), anchor=draw(st.sampled_from(anchors)))
    return build.graph()


def by_oracle(graph: TaskGraph) -> list[tuple[int, int]]:
    d = graph.dependencies
    edges = list(
        zip(d.source.tolist(), d.target.tolist(), d.lag_ns.tolist(), (d.anchor == Anchor.START).tolist(), strict=True)
    )
    done = oracle.simulate(
        list(zip(graph.thread.tolist(), graph.duration_ns.tolist(), strict=True)),
        edges,
        [(t.lag_ns, t.ordered) for t in graph.threads],
    )
    return [done[task] for task in range(len(graph))]


def pairs(timeline: Timeline) -> list[tuple[int, int]]:
    return list(zip(timeline.start_ns.tolist(), timeline.end_ns.tolist(), strict=True))


def compiled(graph: TaskGraph) -> Timeline:
    with loops_in_form("compiled"):
        return simulate(graph)


def plain(graph: TaskGraph) -> Timeline:
    with loops_in_form("plain"):
        return simulate(graph)


def freed(graph: TaskGraph) -> TaskGraph:
    """The same order with one more, empty thread that may choose: then the frontier simulation has to run it."""
    return graph.replace(threads=(*graph.threads, CHANNEL))


# -- against the slow twin -----------------------------------------------------------------------------------------


@given(graphs())
@settings(max_examples=200, deadline=None)
def test_every_path_equals_the_slow_twin(graph: TaskGraph) -> None:
    expected = by_oracle(graph)
    assert pairs(plain(graph)) == expected
    assert pairs(compiled(graph)) == expected
    assert pairs(simulate(graph, Frontier.earliest)) == expected


@given(graphs(free=False))
@settings(max_examples=100, deadline=None)
def test_the_sweep_equals_the_frontier_where_every_order_is_fixed(graph: TaskGraph) -> None:
    expected = by_oracle(graph)
    assert pairs(plain(graph)) == expected
    assert pairs(compiled(graph)) == expected
    assert pairs(compiled(freed(graph))) == expected
    assert pairs(plain(freed(graph))) == expected


@pytest.mark.parametrize("n_threads", [1, 2, 3, 5, 8, 9])
def test_wide_frontiers_equal_the_slow_twin(n_threads: int) -> None:
    """Many tasks ready at once, many ties: the heaps have to keep them apart."""
    random = np.random.default_rng(n_threads)
    build = Build(*[replace(CHANNEL, ordered=t % 3 == 1) for t in range(n_threads)])
    for _ in range(60):
        build.task(int(random.integers(n_threads)), int(random.integers(3)))
    for _ in range(40):
        source = int(random.integers(0, 50))
        build.edge(source, int(random.integers(source + 1, 60)), int(random.integers(-1, 3)))
    graph = build.graph()
    assert pairs(compiled(graph)) == by_oracle(graph)


def test_what_starts_first_is_picked_before_what_is_ready_first() -> None:
    """x is ready before y, and can start only behind a; y's end makes z ready before x was, which then comes first.

    ::

        ns     0                 49 50        60                       100
        A      |a------------------------------------------------------|z|x|
        B                           |y--------|
    """
    a, b, c, d = (replace(CHANNEL, name=name) for name in "abcd")
    build = Build(a, b, c, d)
    build.task(0, 100, "a")
    before_x, before_y = build.task(2, 49, "before x"), build.task(3, 50, "before y")
    x, y = build.task(0, 1, "x"), build.task(1, 10, "y")
    build.edge(before_x, x, 0)
    build.edge(before_y, y, 0)
    build.edge(y, build.task(0, 1, "z"), -13)
    graph = build.graph()
    for timeline in (plain(graph), compiled(graph), simulate(graph, Frontier.earliest)):
        assert (starts(timeline)["z"], starts(timeline)["x"]) == (100, 101)
    assert pairs(plain(graph)) == by_oracle(graph)


def test_an_empty_graph_has_an_empty_timeline() -> None:
    timeline = simulate(Build(CPU).graph())
    assert timeline.makespan_ns == 0
    assert len(timeline.critical_path) == 0


# -- drawn by hand -------------------------------------------------------------------------------------------------


def test_a_step_drawn_by_hand() -> None:
    """Launch lag 2, stream lag 1, a synchronisation whose call needs 5 to return once the GPU is done.

    ::

        ns      0         10        20        30        40
        CPU     |a---|b---|s|.................w|c--|
        stream         2|A------------|1|B----|5
    """
    build = Build(CPU, Thread("stream", ThreadKind.STREAM, lag_ns=1), launch_lag_ns=2)
    build.launch(5, 14, "A")
    build.launch(5, 6, "B")
    build.sync(2, lag_ns=5)
    build.task(0, 4, "c")
    timeline = simulate(build.graph())
    assert starts(timeline) == {"launch A": 0, "launch B": 5, "sync": 10, "A": 7, "B": 22, "wait": 33, "c": 33}
    assert timeline.makespan_ns == 37
    assert timeline.busy_ns.tolist() == [16, 20]
    assert starts_on(timeline, timeline.critical_path) == ["launch A", "A", "B", "wait", "c"]


def starts_on(timeline: Timeline, tasks: Any) -> list[str]:
    graph = timeline.graph
    return [graph.names[graph.name[task]] for task in tasks]


def test_a_start_anchor_counts_from_the_start() -> None:
    """B may start 3 after A started, though A runs on::

    A  |-----------|
    B     |--|
    """
    build = Build(CPU, STREAM)
    a, b = build.task(0, 12, "A"), build.task(1, 3, "B")
    build.edge(a, b, 3, anchor=Anchor.START)
    assert starts(simulate(build.graph())) == {"A": 0, "B": 3}


def test_a_negative_thread_lag_lets_tasks_overlap_but_never_starts_before_zero() -> None:
    build = Build(Thread("t", ThreadKind.STREAM, lag_ns=-4))
    for name in "abc":
        build.task(0, 3 if name == "a" else 10, name)
    assert starts(simulate(build.graph())) == {"a": 0, "b": 0, "c": 6}


def free_channel() -> tuple[TaskGraph, list[int]]:
    """Two transfers become ready while the first is under way; the default takes the one that was ready first.

    ::

        ready   big at 0, early at 1, urgent at 2
        default |big-----|early--|urgent|
        urgent  |big-----|urgent|early--|
    """
    build = Build(CPU, CHANNEL)
    one = build.task(0, 1, "one")
    two = build.task(0, 1, "two")
    ids = [build.task(1, 8, "big"), build.task(1, 7, "early"), build.task(1, 6, "urgent")]
    build.edge(one, ids[1])
    build.edge(two, ids[2])
    return build.graph(), ids


def test_the_default_schedule_takes_what_was_ready_first() -> None:
    graph, _ = free_channel()
    assert starts(simulate(graph)) == {"one": 0, "two": 1, "big": 0, "early": 8, "urgent": 15}


def most_urgent(frontier: Frontier) -> int:
    priority = frontier.graph.attached["priority"]
    return min(frontier.ready_ns, key=lambda task: (frontier.start_ns(task), -priority[task], task))


def test_a_schedule_by_priority_changes_the_order_of_a_free_thread() -> None:
    graph, ids = free_channel()
    priority = np.zeros(len(graph))
    priority[ids[2]] = 1
    timeline = simulate(graph.attach(priority=priority), most_urgent)
    assert starts(timeline) == {"one": 0, "two": 1, "big": 0, "urgent": 8, "early": 14}


def test_a_schedule_cannot_change_the_order_of_an_ordered_thread() -> None:
    build = Build(CPU)
    for _ in range(5):
        build.task(0, 1)
    seen = []

    def last(frontier: Frontier) -> int:
        seen.append(sorted(frontier.ready_ns))
        return max(frontier.ready_ns)

    timeline = simulate(build.graph(), last)
    assert seen == [[0], [1], [2], [3], [4]]
    assert timeline.start_ns.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("answer", [3, -1, 10**6, None])
def test_a_schedule_that_picks_what_is_not_ready_is_reported(answer: Any) -> None:
    build = Build(CPU)
    for _ in range(4):
        build.task(0, 1)
    with pytest.raises(WhatifError, match=r"schedule: expected a task of the frontier \(1 are ready\)|schedule"):
        simulate(build.graph(), lambda frontier: answer)


@pytest.mark.parametrize("thread", [CPU, CHANNEL], ids=["ordered", "free"])
@pytest.mark.parametrize("schedule", [None, Frontier.earliest], ids=["default", "override"])
def test_a_cycle_is_an_error(thread: Thread, schedule: Any) -> None:
    build = Build(thread, thread)
    build.task(0, 1)
    build.task(1, 1)
    build.edge(0, 1)
    build.edge(1, 0)
    with pytest.raises(WhatifError, match="cycle"):
        simulate(build.graph(check=False), schedule)


def test_a_cycle_is_an_error_in_the_compiled_loops() -> None:
    build = Build(CHANNEL, CHANNEL)
    build.task(0, 1)
    build.task(1, 1)
    build.edge(0, 1)
    build.edge(1, 0)
    with pytest.raises(WhatifError, match="cycle"):
        compiled(build.graph(check=False))


# -- scenarios and bounds ------------------------------------------------------------------------------------------


@given(graphs(free=False), st.data())
@settings(max_examples=60, deadline=None)
def test_scenarios_equal_separate_simulations(graph: TaskGraph, data: st.DataObject) -> None:
    n = len(graph)
    slope = np.array(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    x = list(range(data.draw(st.integers(1, 35))))
    observed = data.draw(st.lists(st.integers(0, n - 1), max_size=3))
    ends, makespans = simulate_scenarios(graph, slope, x, observed)
    assert ends.shape == (len(observed), len(x))
    for s, value in enumerate(x):
        alone = simulate(graph.replace(duration_ns=graph.duration_ns + slope * value))
        assert ends[:, s].tolist() == alone.end_ns[observed].tolist()
        assert makespans[s] == alone.makespan_ns


def test_scenarios_need_fixed_orders() -> None:
    graph, _ = free_channel()
    with pytest.raises(WhatifError, match="one by one"):
        simulate_scenarios(graph, np.zeros(len(graph)), [1.0])


def test_what_cannot_be_simulated_is_refused_in_a_sentence() -> None:
    build = Build(CPU)
    build.task(0, 5)
    graph = build.graph()
    given: Any
    for given in ("trace.json.gz", None):
        with pytest.raises(WhatifError, match=r"simulate: expected a TaskGraph, got .*; whatif.read\(path\) gives one"):
            simulate(given)
    with pytest.raises(WhatifError, match=r"got Timeline; take its \.graph"):
        simulate_scenarios(simulate(graph), [1], [1])  # type: ignore[arg-type]
    for slopes, x in ((1, [1.0]), ([1, 2], [1.0]), ([1], 1.0), ([1], ["2"])):
        with pytest.raises(WhatifError, match="simulate_scenarios: expected"):
            simulate_scenarios(graph, slopes, x)  # type: ignore[arg-type]
    with pytest.raises(WhatifError, match="expected ids of tasks"):
        simulate_scenarios(graph, [1], [1.0], [7])


def test_no_scenarios_give_no_results() -> None:
    build = Build(CPU)
    build.task(0, 1)
    ends, makespans = simulate_scenarios(build.graph(), [0], [], [0])
    assert ends.shape == (1, 0)
    assert makespans.shape == (0,)


def test_bounds_simulate_the_low_and_the_high_durations() -> None:
    build = Build(CPU)
    build.task(0, 10, low_ns=4, high_ns=30)
    build.task(0, 5)
    low, high = simulate_bounds(build.graph())
    assert (low.makespan_ns, high.makespan_ns) == (9, 35)


# -- what must always hold -----------------------------------------------------------------------------------------


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_dependencies_are_respected(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    d = graph.dependencies
    reached = np.where(d.anchor == Anchor.START, timeline.start_ns[d.source], timeline.end_ns[d.source]) + d.lag_ns
    assert (timeline.start_ns[d.target] >= reached).all()
    assert (timeline.start_ns >= 0).all()
    assert (timeline.end_ns - timeline.start_ns == graph.duration_ns).all()


@given(graphs(min_lag=0))
@settings(max_examples=150, deadline=None)
def test_a_thread_runs_one_task_at_a_time(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    for code, thread in enumerate(graph.threads):
        mine = np.flatnonzero(graph.thread == code)
        order = np.lexsort((timeline.end_ns[mine], timeline.start_ns[mine]))
        first, second = mine[order][:-1], mine[order][1:]
        assert (timeline.start_ns[second] >= timeline.end_ns[first]).all()
        if thread.ordered:
            assert (np.diff(timeline.start_ns[mine]) >= 0).all()


@given(graphs(min_lag=0, anchors=(Anchor.END,)))
@settings(max_examples=150, deadline=None)
def test_the_makespan_lies_between_its_bounds(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    path = timeline.critical_path
    busiest = int(np.bincount(graph.thread, weights=graph.duration_ns).max())
    most_lag = int(graph.dependencies.lag_ns.sum()) + sum(graph.threads[t].lag_ns for t in graph.thread)
    assert graph.duration_ns[path].sum() <= timeline.makespan_ns
    assert busiest <= timeline.makespan_ns <= graph.duration_ns.sum() + most_lag


@given(st.one_of(graphs(min_lag=0), graphs(free=False)))
@settings(max_examples=200, deadline=None)
def test_each_task_of_the_critical_path_starts_when_the_one_before_lets_it(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    path = timeline.critical_path.tolist()
    assert timeline.end_ns[path[-1]] == timeline.makespan_ns
    assert timeline.start_ns[path[0]] == 0, "a path that begins later leaves time unexplained"
    d = graph.dependencies
    rows = zip(d.source.tolist(), d.target.tolist(), d.lag_ns.tolist(), d.anchor.tolist(), strict=True)
    allowed: dict[tuple[int, int], set[int]] = {}
    for source, target, lag, anchor in rows:
        time = timeline.start_ns[source] if anchor == Anchor.START else timeline.end_ns[source]
        allowed.setdefault((source, target), set()).add(int(time) + lag)
    for first, second in itertools.pairwise(path):
        times = allowed.get((first, second), set())
        if graph.thread[first] == graph.thread[second]:
            times = times | {int(timeline.end_ns[first]) + graph.threads[graph.thread[first]].lag_ns}
        assert timeline.start_ns[second] in times


def test_the_critical_path_leads_over_a_busy_free_thread() -> None:
    """Both transfers are ready at 0, the channel takes one at a time: the first one is why the second is late."""
    build = Build(CHANNEL)
    build.task(0, 8, "first")
    build.task(0, 5, "second")
    timeline = simulate(build.graph())
    assert timeline.critical_path.tolist() == [0, 1]


@given(graphs(), st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_scaling_everything_scales_everything(graph: TaskGraph, k: int) -> None:
    d = graph.dependencies
    scaled = graph.replace(
        duration_ns=graph.duration_ns * k,
        low_ns=graph.low_ns * k,
        high_ns=graph.high_ns * k,
        dependencies=Dependencies(d.source, d.target, d.kind, d.lag_ns * k, d.anchor),
        threads=tuple(replace(t, lag_ns=t.lag_ns * k) for t in graph.threads),
    )
    before, after = simulate(graph), simulate(scaled)
    assert (after.end_ns == before.end_ns * k).all() or k == 0
    assert after.makespan_ns == before.makespan_ns * k


@given(graphs(free=False), st.data())
@settings(max_examples=100, deadline=None)
def test_a_longer_task_makes_nothing_earlier(graph: TaskGraph, data: st.DataObject) -> None:
    """Where orders are fixed; a free choice may gain by a delay (Graham's anomalies)."""
    longer = graph.duration_ns.copy()
    longer[data.draw(st.integers(0, len(graph) - 1))] += data.draw(st.integers(1, 5))
    after = simulate(graph.replace(duration_ns=longer, high_ns=np.maximum(longer, graph.high_ns)))
    assert (after.start_ns >= simulate(graph).start_ns).all()


def test_every_public_name_stays_what_it_is_once_everything_is_imported() -> None:
    """A submodule that is imported becomes an attribute of its package, over a function of the same name."""
    program = """
import whatif, inspect
before = {name: getattr(whatif, name) for name in whatif.__all__}
after = {name: getattr(whatif, name) for name in whatif.__all__}
modules = [name for name in after if inspect.ismodule(after[name])]
assert not modules, modules
assert before == after
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
