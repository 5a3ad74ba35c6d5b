"""``p3`` and its schedule on steps drawn by hand, and as properties."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CHANNEL, Build, apply, makespan_ns, replace
from tests.transforms.communication_graphs import (
    SERVERS,
    SLICED,
    drawn,
    kept_order,
    on_cpu,
    rows,
    training,
    two_layers,
)
from whatif import Anchor, ByPriority, Frontier, Phase, TaskGraph, TaskKind, simulate
from whatif.models.exchange.priority import attached_priority

pytestmark = pytest.mark.usefixtures("round_v100", "equal_gpus")


def used(graph: TaskGraph, spec: str) -> dict[str, int]:
    """The starts of the second step's forward kernels under the schedule of ``spec``."""
    transform = whatif.load_transform(spec)
    timeline = simulate(transform(graph).check(), transform.schedule)
    kernels = drawn(timeline, "stream 7")
    return {name: start for name, start, _ in kernels[len(kernels) // 2 :] if name.startswith("f")}


def test_p3_by_hand() -> None:
    """Slices of 200,000 ns; with a server beside each of two workers a slice passes both links once.

    ::

        us        301       401       501       701       901      1101     1201      1301
        stream  b2-|b1-------|                                       |f1-------|        |f2---
        send       |push 2a----------|push 1a---|push 1b---|push 2b--|
        receive                      |pull 2a---|pull 1a---|pull 1b--|pull 2b-----------|
    """
    graph = two_layers(2, kernel_ns=100_000, **SLICED)
    durations = np.where(graph.select(name="^b"), 100_000, graph.duration_ns)
    graph = graph.with_duration(np.ones(len(graph), dtype=np.bool_), durations)
    assert used(graph, SERVERS) == {"f1": 1_101_000, "f2": 1_301_000}
    # The baseline: whole gradients in turn, layer 2's (301 to 701 to 1101) before layer 1's (to 1101 to 1501).
    assert used(graph, f"{SERVERS},priority=false") == {"f1": 1_501_000, "f2": 1_601_000}
    # Two machines of their own: nothing but pushes is sent and nothing but pulls received, 1.6 MB in all.
    alone = apply(graph, f"{SERVERS},servers=2")
    send = alone.duration_ns[alone.thread == len(alone.threads) - 2]
    assert send.tolist() == [200_000] * 8
    # One machine for two workers takes twice as long for a slice.
    assert set(apply(graph, f"{SERVERS},servers=1").duration_ns[alone.kind == TaskKind.COMMUNICATION]) == {400_000}


def test_servers_update_the_weights() -> None:
    graph = apply(two_layers(2, **SLICED), SERVERS)
    assert not graph.select(name="^u$|^launch u$").any()


def test_big_arrays_are_split_over_the_servers() -> None:
    """MXNet's rule: an array of more than a million parameters has a part on each server, a small one a place."""
    graph = apply(two_layers(2, grad_ready_order=rows(8_000_001, 400_000)), "p3:workers=4,priority=false")
    pushes = graph.size_bytes[graph.select(name="^push$") & (graph.step == 0)]
    assert sorted(pushes.tolist()) == [400_000, 2_000_000, 2_000_000, 2_000_000, 2_000_001]


def test_each_link_carries_as_much_as_in_a_ring() -> None:
    """Daydream §6.6's cluster of four: 2 (n - 1) / n of the gradients over each link, in either direction."""
    four = SERVERS.replace("workers=2", "workers=4")
    graph = apply(two_layers(2, grad_ready_order=rows(4_000_000, 4_000_000)), f"{four},slice_size=100kB")
    for channel in (len(graph.threads) - 2, len(graph.threads) - 1):
        carried = graph.duration_ns[(graph.thread == channel) & (graph.step == 0)].sum()
        assert carried == 2 * 3 / 4 * 8_000_000


@settings(max_examples=20, deadline=None)
@given(training(), st.sampled_from(["p3:", "p3:priority=false,", "parameter_server:", "parameter_server:servers=0,"]))
def test_more_workers_never_end_sooner(graph: TaskGraph, spec: str) -> None:
    """But for a slice of each step that begins just before a more urgent one is there."""
    graphs = [apply(graph, f"{spec}bandwidth=1Gbps,workers={workers}") for workers in (2, 3, 4, 7, 16, 64)]
    times_ns = [simulate(changed, ByPriority(attached_priority)).makespan_ns for changed in graphs]
    for changed, before, after in zip(graphs[1:], times_ns[:-1], times_ns[1:], strict=True):
        largest = int(changed.duration_ns[changed.kind == TaskKind.COMMUNICATION].max(initial=0))
        assert before <= after + (largest * graph.info.n_steps if spec == "p3:" else 1_000)


@settings(max_examples=60, deadline=None)
@given(training(), st.sampled_from(["", ",servers=1", ",servers=3"]), st.booleans())
def test_p3_keeps_the_step_and_gains_with_bandwidth(graph: TaskGraph, servers: str, priority: bool) -> None:
    spec = f"p3:workers=3{servers},priority={priority},bandwidth="
    changed = apply(graph, f"{spec}1Gbps")
    kept_order(graph, changed)
    updates = graph.select(phase=Phase.UPDATE)
    without = graph.remove(updates) if updates.any() else graph
    slow, fast, free = (makespan_ns(graph, f"{spec}{link}") for link in ("1Gbps", "4Gbps", "900TB/s,latency_us=0"))
    # A link that is free sooner may begin a slice just before a more urgent one is there: at most that slice of each
    # step is lost.
    largest = int(changed.duration_ns[changed.kind == TaskKind.COMMUNICATION].max())
    assert fast <= slow + largest * graph.info.n_steps
    assert free <= fast
    # On a CPU what sockets take of the core is left.
    core_ns = int(changed.duration_ns[changed.select(name="^sending and receiving$")].sum())
    assert free <= simulate(without).makespan_ns + core_ns + 1_000


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4_000_000), min_size=1, max_size=1), st.integers(0, 3))
def test_a_larger_slice_never_lowers_the_overhead_of_a_gradient(sizes: list[int], doublings: int) -> None:
    """Without latency: the pull of a slice runs beside the push of the next one, so that small slices fill the pipe."""
    graph = two_layers(2, grad_ready_order=[{**row, "layer": "layer1"} for row in rows(*sizes)])
    spec = "p3:workers=2,servers=2,latency_us=0,bandwidth=1GB/s,slice_size={}B"
    small, large = (makespan_ns(graph, spec.format(50_000 * 2**n)) for n in (doublings, doublings + 1))
    assert small <= large + 1_000  # whole nanoseconds of every slice


def slowly(frontier: Frontier) -> int:
    """Algorithm 7's Schedule as a search: the earliest start, channels last and the lowest first, the most urgent."""
    threads, urgency = frontier.graph.threads, frontier.graph.attached["priority"]

    def key(task: int) -> tuple[int, int, int, int, int]:
        start, ready, thread = frontier.start_ns(task), frontier.ready_ns[task], frontier.thread[task]
        free = not threads[thread].ordered
        return start, 1 + thread if free else 0, -int(urgency[task]) if free else ready, ready, task

    return min(frontier.ready_ns, key=key)


@settings(max_examples=60, deadline=None)
@given(training(), st.sampled_from(["", ",servers=2", ",slice_size=900kB"]), st.data())
def test_the_schedule_is_algorithm_7s(graph: TaskGraph, options: str, data: st.DataObject) -> None:
    changed = apply(graph, f"p3:bandwidth=10Gbps{options}")
    urgency = np.array(data.draw(st.lists(st.integers(-3, 3), min_size=len(changed), max_size=len(changed))))
    changed = changed.attach(priority=urgency)
    fast, slow = simulate(changed, ByPriority(attached_priority)), simulate(changed, slowly)
    np.testing.assert_array_equal(fast.start_ns, slow.start_ns)


@pytest.mark.parametrize("least_lag", [0, -1, -3])
@pytest.mark.parametrize("seed", range(6))
def test_the_schedule_is_algorithm_7s_beside_threads_in_fixed_order(seed: int, least_lag: int) -> None:
    """Whether or not the simulator runs the tasks of those threads ahead of time."""
    random = np.random.default_rng(seed)
    build = Build(*[replace(CHANNEL, ordered=t % 2 == 0) for t in range(5)])
    for _ in range(80):
        build.task(int(random.integers(5)), int(random.integers(4)))
    for _ in range(70):
        source = int(random.integers(0, 70))
        lag_ns, anchor = int(random.integers(least_lag, 3)), Anchor(int(random.integers(2)))
        build.edge(source, int(random.integers(source + 1, 80)), lag_ns, anchor=anchor)
    graph = build.graph().attach(priority=random.integers(-2, 3, 80))
    fast, slow = simulate(graph, ByPriority(attached_priority)), simulate(graph, slowly)
    np.testing.assert_array_equal(fast.start_ns, slow.start_ns)


@pytest.mark.parametrize("make", [two_layers, on_cpu])
@pytest.mark.parametrize("spec", [SERVERS, f"{SERVERS},priority=false", "parameter_server:bandwidth=10Gbps"])
def test_one_recorded_step_takes_as_long_as_the_second_of_two(make: Callable[[int], TaskGraph], spec: str) -> None:
    """The time between the ends of the backward passes of two steps."""
    schedule = whatif.load_transform(spec).schedule
    two, one = apply(make(2), spec), apply(make(1), spec)
    times = simulate(two, schedule)
    ends = [times.end_ns[(two.phase == Phase.BACKWARD) & (two.step == step) & two.select(name="^b")].max()
            for step in range(2)]  # fmt: skip
    (span_ns,) = simulate(one, schedule).step_times_ns("span")
    assert span_ns == ends[1] - ends[0]


def test_latencies_of_slices_may_overlap() -> None:
    """Four slices a step of 200,000 each way, 100,000 of latency each: at the lower end only the bytes take time."""
    graph = apply(two_layers(2, **SLICED), SERVERS.replace("latency_us=0", "latency_us=100") + ",servers=2")
    sent = graph.kind == TaskKind.COMMUNICATION
    assert set(graph.duration_ns[sent].tolist()) == {300_000}
    assert set(graph.low_ns[sent].tolist()) == {200_000}
    assert set(graph.high_ns[sent].tolist()) == {402_000}
