"""Rounds of each architecture: by hand, against the equations, and on the simulator."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.dts.networks import clusters, equal, estimated, network, networks
from tests.helpers import CPU, STREAM, Build
from whatif import Phase, ThreadKind
from whatif.models.dts.built_in import BUILT_IN
from whatif.models.dts.check import equation_ns
from whatif.models.dts.estimate import Estimate
from whatif.models.dts.machines import Machines, Processor, Wire
from whatif.models.dts.plan import Activity, Plan, run
from whatif.models.dts.step_graph import step_graph
from whatif.prediction.transform import load_transform


def simulated_ns(found: Estimate, batches: int = 1) -> int:
    """The time of a round on the simulator."""
    return whatif.simulate(graph_of(found, batches)).makespan_ns


def graph_of(found: Estimate, batches: int = 1) -> whatif.TaskGraph:
    recording = Build(CPU, n_steps=1)
    recording.task(0, 1)
    return step_graph(recording.graph(), found.plan(batches).activities, list(found.assignment.values())).check()


def times(found: Estimate, batches: int = 1) -> dict[str, tuple[int, int]]:
    """Start and end of each activity by its name; names are distinct in a round of one batch."""
    activities = found.plan(batches).activities
    done = run(activities)
    return {a.name: (s, e) for a, s, e in zip(activities, done.start_ns, done.end_ns, strict=True)}


def test_pipeline_learning_by_hand() -> None:
    """Workers with layers 1-2, 3 and 4; 50 and 70 bytes cross the two cuts, 0.1 ns each and 3 ns a message.

    worker 1  fetch 0-5  F 5-35                                                             B 318-378
    1 -> 2                      35-43                                                  310-318 (back)
    worker 2                         F 43-73                                 B 250-310
    2 -> 3                                  73-83                    240-250 (back)
    worker 3                                     F 83-123   B 123-203
    """
    found = times(estimated("pipeline_learning", equal()))
    assert found["worker 1: fetch"] == (0, 5)
    assert found["worker 1: forward"] == (5, 35)
    assert found["worker 1 -> worker 2: activations"] == (35, 43)
    assert found["worker 2: forward"] == (43, 73)
    assert found["worker 2 -> worker 3: activations"] == (73, 83)
    assert found["worker 3: forward"] == (83, 123)
    assert found["worker 3: backward"] == (123, 203)
    assert found["worker 3 -> worker 2: gradients"] == (203, 213)
    assert found["worker 2: backward"] == (213, 273)
    assert found["worker 2 -> worker 1: gradients"] == (273, 281)
    assert found["worker 1: backward"] == (281, 341)


def test_federated_by_hand() -> None:
    """Three equal clients; 120 bytes of weights take 15 ns, averaging reads three models and writes one.

    clients   fetch 0-5  F 5-105  B 105-305
    up                                      305-320
    server                                          average 320-344
    down                                                            344-359
    """
    found = estimated("federated", equal())
    by_name = times(found)
    for number in (1, 2, 3):
        assert by_name[f"client {number}: backward"] == (105, 305)
        assert by_name[f"client {number} -> server: weights"] == (305, 320)
        assert by_name[f"server -> client {number}: weights"] == (344, 359)
    assert by_name["server: averaging"] == (320, 344)
    # With a second batch all of it comes one fetch and two passes later.
    assert found.spread(2).time_ns == 359 + 305


def test_split_by_hand() -> None:
    """A client has 30 + 60, the server 70 + 140; 50 bytes through the cut take 8 ns, 20 bytes of weights 5 ns.

    client 1  fetch 0-5 F 5-35 | 35-43 | server F 43-113 B 113-253 | 253-261 | B 261-321 | weights 321-326 | ...
    """
    found = estimated("split", equal())
    by_name = times(found)
    assert by_name["client 1: forward"] == (5, 35)
    assert by_name["client 1 -> server: activations"] == (35, 43)
    assert by_name["server -> client 1: gradients"] == (253, 261)
    assert by_name["client 1: backward"] == (261, 321)
    assert by_name["client 1 -> client 2: weights"] == (321, 326)
    assert by_name["client 2: fetch"] == (326, 331)
    assert found.batch_ns == 3 * 321 + 2 * 5
    assert found.spread(4).time_ns == 4 * 3 * 321 + 2 * 5  # the weights are handed on once an epoch


def test_parallel_split_by_hand() -> None:
    """All activations are there at 43; the server takes 210 for each client.

    clients  fetch 0-5  F 5-35                                               1: B 261-321   2: B 471-531   3: B 681-741
    up                        35-43
    server                         1: 43-253   2: 253-463   3: 463-673
    down                                    1: 253-261  2: 463-471  3: 673-681
    """
    found = estimated("parallel_split", equal())
    by_name = times(found)
    assert [by_name[f"server: both passes for client {n}"] for n in (1, 2, 3)] == [(43, 253), (253, 463), (463, 673)]
    assert [by_name[f"client {n}: backward"] for n in (1, 2, 3)] == [(261, 321), (471, 531), (681, 741)]
    # All clients have to be done before the next batch begins.
    assert found.spread(3).time_ns == 3 * 741


def test_federated_split_by_hand() -> None:
    """Pairs as in split learning end at 321; 100 bytes of an edge's weights take 13 ns, averaging four of them 20 ns.

    pairs   0-321 | edge -> server 321-334 | average 334-354 | back 354-367
    """
    by_name = times(estimated("federated_split", equal()))
    for number in (1, 2, 3):
        assert by_name[f"client {number}: backward"] == (261, 321)
        assert by_name[f"edge {number} -> server: weights"] == (321, 334)
        assert by_name[f"server -> edge {number}: weights"] == (354, 367)


def test_a_server_begins_with_the_client_that_is_there_first() -> None:
    """One client's processor is slow: the server serves the others while it computes; (4) lets it wait for all."""
    like = equal(4)
    found = estimated(
        "parallel_split", Machines((Processor("slow", 1.0), *like.processors[1:]), anywhere=like.anywhere)
    )
    by_equation = equation_ns(found)
    assert by_equation is not None
    assert found.batch_ns < by_equation


@pytest.mark.parametrize("name", BUILT_IN)
@given(dnn=networks(), count=st.integers(1, 4), byte_s=st.integers(1, 100), latency_ns=st.integers(0, 50))
@settings(deadline=None, max_examples=30)
def test_equal_machines_take_what_the_equations_say(
    name: str, dnn: whatif.models.dts.dnn.Dnn, count: int, byte_s: int, latency_ns: int
) -> None:
    cuts = {"pipeline_learning": (1,), "federated": ()}.get(name, (len(dnn) - 1,))
    found = estimated(name, equal(9, byte_s * 1e9, latency_ns), dnn, count, cuts=cuts)
    assert found.batch_ns == equation_ns(found)


@pytest.mark.parametrize("name", BUILT_IN)
@given(dnn=networks(), machines=clusters(), max_paths=st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_the_equations_are_never_shorter(
    name: str, dnn: whatif.models.dts.dnn.Dnn, machines: Machines, max_paths: int
) -> None:
    cuts = {"pipeline_learning": (1,), "federated": ()}.get(name, (1,))
    found = estimated(name, machines, dnn, cuts=cuts, max_paths=max_paths)
    by_equation = equation_ns(found)
    assert by_equation is not None
    # Half a nanosecond: the equations halve the way there and back.
    assert found.batch_ns <= by_equation + 0.5
    if name in ("pipeline_learning", "split", "federated_split"):
        assert abs(found.batch_ns - by_equation) <= 0.5


@pytest.mark.parametrize("name", BUILT_IN)
@given(machines=clusters(), batches=st.integers(1, 3))
@settings(deadline=None, max_examples=20)
def test_the_simulator_gives_the_same_time(name: str, machines: Machines, batches: int) -> None:
    found = estimated(name, machines, max_paths=2)
    assert simulated_ns(found, batches) == found.spread(batches).time_ns


@st.composite
def plans(draw: st.DrawFn) -> list[Activity]:
    n = draw(st.integers(1, 25))
    found = []
    for number in range(n):
        after = draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []
        place = draw(st.sampled_from(["a", "b", "a -> b"]))
        found.append(
            Activity(place, draw(st.integers(0, 5)), tuple(after), f"x{number}: y", Phase.FORWARD, -1, 0, 0.0, 0)
        )
    return found


@given(plans())
@settings(deadline=None, max_examples=200)
def test_a_plan_runs_as_on_the_simulator(activities: list[Activity]) -> None:
    """Every processor and link takes first what can start first: two implementations, every tie."""
    recording = Build(CPU, n_steps=1)
    recording.task(0, 1)
    graph = step_graph(recording.graph(), activities, ["a", "b"]).check()
    timeline = whatif.simulate(graph)
    done = run(activities)
    expected = sorted(zip((a.name for a in activities), done.start_ns, done.end_ns, strict=True))
    names = [graph.names[code] for code in graph.name.tolist()]
    rows = zip(names, timeline.start_ns.tolist(), timeline.end_ns.tolist(), strict=True)
    assert sorted(row for row in rows if row[0].startswith("x")) == expected


def test_every_step_is_a_round_on_both_clocks() -> None:
    for thread in (CPU, STREAM):
        recording = Build(CPU, thread, n_steps=4)
        for step in range(4):
            recording.task(1, 10, step=step)
        found = estimated("federated", equal())
        graph = step_graph(recording.graph(), found.plan().activities, list(found.assignment.values())).check()
        clock = "gpu" if thread is STREAM else "mark"
        assert set(whatif.simulate(graph).step_times_ns(clock)) == {found.batch_ns}
        kinds = {graph.threads[code].kind for code in graph.thread[graph.size_bytes >= 0].tolist()}
        assert kinds == {ThreadKind.CHANNEL}


def test_one_link_for_both_directions_takes_turns() -> None:
    """Two transfers that meet on half a link follow one another, and a third on its own link does not wait."""
    half = Wire("a - b", 1e9)
    machines = Machines(
        tuple(Processor(name) for name in "abc"),
        {("a", "b"): half, ("b", "a"): half, ("a", "c"): Wire("a > c", 1e9), ("c", "a"): Wire("c > a", 1e9)},
    )
    plan = Plan(network(), machines, {"one": "a", "two": "b", "three": "c"})
    plan.send("one", "two", 100, "x")
    plan.send("two", "one", 100, "y")
    plan.send("one", "three", 100, "z")
    assert run(plan.activities).start_ns == [0, 100, 0]
    # Between b and c there is a way over a: as slow as the narrowest of its links.
    assert plan.wire("two", "three").byte_s == 1e9


def test_wrong_plans_are_reported() -> None:
    plan = Plan(network(), Machines((Processor("a"), Processor("b"))), {"one": "a", "two": "b"})
    with pytest.raises(whatif.WhatifError, match=r"expected a link from 'a' to 'b', which one needs, got none"):
        plan.send("one", "two", 10, "x")
    with pytest.raises(whatif.WhatifError, match="does not come before it"):
        plan.compute("one", 5.0, "x", after=[0])


def test_the_transform_offers_every_architecture() -> None:
    offered = load_transform("dts").parameters["architecture"].annotation
    assert get_args(offered) == tuple(BUILT_IN)
    assert all(one.summary.endswith(".") for one in BUILT_IN.values())
