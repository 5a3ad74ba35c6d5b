"""Calibration: the profiler's cost is taken out where it lies, and the simulated step meets the untraced one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, Event, call, kernel, mark, names, op, read_events, step, with_metadata
from whatif import DependencyKind, NewTasks, TaskGraph, TaskKind
from whatif.graph.types import GPU_KINDS, Phase
from whatif.prediction.calibrate import (
    MET,
    PACE_HIGH,
    PACE_LOW,
    calibrate,
    corrected,
)
from whatif.prediction.predict import Baseline
from whatif.prediction.ranges import RUN_TO_RUN

STEPS = 6


def steps() -> list[Event]:
    """Six steps of 100 us. Every bar is a task; a star ends one that holds the cost of the event that begins there.

    ::

        us       0     10     20     30     40     50     60        100
        step     |step-------------------------------------------------*
        parent         |parent----------------------------|
        child                 |child-|      |child-|
        tasks    |     *      *      |      *      |      |            *
    """
    events = []
    for at in range(0, 100 * STEPS, 100):
        events += [mark(f"ProfilerStep#{at // 100}", at, 100), op("parent", at + 10, 50)]
        events += [op("child", at + 20, 10), op("child", at + 40, 10)]
    return events


def recorded(folder: Path, **metadata: Any) -> TaskGraph:
    graph = read_events(folder, steps())
    # JSON has no NaN: what no file can hold is put in behind the reader.
    return with_metadata(graph, **{"threads": 1, **metadata})


def time(median_ms: float, **quartiles: float) -> dict[str, float]:
    return {"median": median_ms, **quartiles}


def second_step_us(graph: TaskGraph) -> list[float]:
    return [float(d) / 1e3 for d in graph.duration_ns[graph.step == 1]]


# -- which task holds which event ----------------------------------------------------------------------------------


def test_an_event_is_counted_in_the_task_that_ends_where_it_begins(tmp_path: Path) -> None:
    graph = recorded(tmp_path)
    assert second_step_us(graph) == [10, 10, 10, 10, 10, 10, 40]
    assert graph.profiler_events[graph.step == 1].tolist() == [1, 1, 0, 1, 0, 0, 1]
    # No step begins behind the last one, and the first one's beginning lies before the recording.
    assert int(graph.profiler_events.sum()) == 4 * STEPS - 1


def test_on_a_gpu_a_gap_holds_many_events_and_a_call_its_own(tmp_path: Path) -> None:
    """The outer operator begins before the first task, the three others within the gap from 3 to 9.

    ::

        us      0   1   2   3   4   5   6   7   8   9  10
        ops     |outer---------------------------------|
                            |a-----|   |b--------------|
                                         |c------------|
        CPU     |gap|launch-|gap-------------------|launch-|
    """
    events = [op("outer", 0, 10), op("a", 4, 1), op("b", 6, 4), op("c", 7, 3)]
    events += [call("cudaLaunchKernel", 1, 2, 1), kernel("k", 4, 2, 1)]
    events += [call("cudaLaunchKernel", 9, 1, 2), kernel("k", 11, 2, 2)]
    graph = read_events(tmp_path, events)
    held = {k.name: graph.profiler_events[graph.kind == k].tolist() for k in TaskKind}
    assert held["RUNTIME"] == [1, 1]
    assert held["GAP"] == [0, 3]
    assert held["KERNEL"] == [0, 0]


def test_edits_keep_the_count(tmp_path: Path) -> None:
    graph = recorded(tmp_path)
    halves = graph.split(graph.on_cpu, 2)
    assert int(halves.profiler_events.sum()) == int(graph.profiler_events.sum())
    more = graph.insert(NewTasks([3], "new", TaskKind.CPU_OP, 5))
    assert more.graph.profiler_events[more.ids].tolist() == [0]
    assert int(more.graph.profiler_events.sum()) == int(graph.profiler_events.sum())


# -- the correction, to the nanosecond ------------------------------------------------------------------------------


def test_a_measured_cost_is_taken_out_where_it_lies(tmp_path: Path) -> None:
    """5 us an event, four events a step: 100 us with the profiler, 80 without, and the operators keep their times."""
    graph = recorded(tmp_path, untraced_step_ms=time(0.08), profiler_cost_ns={"per_event": 5_000})
    found = calibrate(graph, "mark")
    assert second_step_us(found.graph) == [5, 5, 10, 5, 10, 10, 35]
    assert (found.replayed_ns, found.corrected_ns) == (100_000, 80_000)
    assert (found.event_cost_ns, found.cost_measured, found.pace, found.reason) == (5_000, True, 1.0, "")
    assert found.removed_ns == pytest.approx((4 * STEPS - 1) * 5_000 / STEPS)


def test_what_the_cost_leaves_is_one_factor_on_the_rest(tmp_path: Path) -> None:
    graph = recorded(tmp_path, untraced_step_ms=time(0.04), profiler_cost_ns={"per_event": 5_000})
    found = calibrate(graph, "mark")
    assert second_step_us(found.graph) == [2.5, 2.5, 5, 2.5, 5, 5, 17.5]
    assert (found.corrected_ns, found.pace) == (40_000, 0.5)


def test_a_faster_recording_is_slowed_down(tmp_path: Path) -> None:
    found = calibrate(recorded(tmp_path, untraced_step_ms=time(0.12)), "mark")
    assert (found.corrected_ns, found.removed_ns) == (120_000, 0)
    assert found.pace == pytest.approx(1.2)


def test_no_task_loses_more_than_it_lasts(tmp_path: Path) -> None:
    graph = recorded(tmp_path, untraced_step_ms=time(0.03), profiler_cost_ns={"per_event": 50_000})
    found = calibrate(graph, "mark")
    assert second_step_us(found.graph) == [0, 0, 10, 0, 10, 10, 0]
    assert found.pace == 1.0


def test_a_cost_that_nobody_measured_is_taken_only_as_far_as_needed(tmp_path: Path) -> None:
    """The default is 0.5 us; 99 us need a quarter of a microsecond of each of the four events."""
    found = calibrate(recorded(tmp_path, untraced_step_ms=time(0.099)), "mark")
    assert found.event_cost_ns == pytest.approx(250)
    assert (found.corrected_ns, found.pace, found.cost_measured) == (99_000, 1.0, False)
    found = calibrate(recorded(tmp_path, untraced_step_ms=time(0.049)), "mark")
    assert found.event_cost_ns == 500
    assert found.pace == pytest.approx(0.5)


def test_a_pace_beyond_the_bounds_is_reported(tmp_path: Path) -> None:
    for target_ms, bound in ((0.02, PACE_LOW), (0.3, PACE_HIGH)):
        found = calibrate(recorded(tmp_path, untraced_step_ms=time(target_ms)), "mark")
        assert found.pace == bound
        assert "of its recorded time, the limit" in found.reason
        assert found.reason in found.sentence
        assert not found.met
        low, high = found.spread
        assert found.corrected_ns * (1 - low) <= target_ms * 1e6 * (1 + 1e-9)
        assert found.corrected_ns * (1 + high) >= target_ms * 1e6 * (1 - 1e-9)


def test_what_other_programs_took_while_recording_does_not_count_against_the_bounds(tmp_path: Path) -> None:
    """The thread ran for a quarter of the recorded 100 us: 20 us of CPU time are no strange pace."""
    untraced = {"untraced_step_ms": time(0.1), "untraced_cpu_ms": time(0.02)}
    graph = recorded(tmp_path, **untraced, traced_step_ms=time(0.1), traced_cpu_ms=time(0.025))
    found = calibrate(graph, "mark")
    assert found.met
    assert found.corrected_ns == pytest.approx(20_000, rel=MET)
    assert found.own_pace == pytest.approx(4 * found.pace)
    assert "(other programs took 75 % of that)" in found.sentence
    # By the wall clock of several threads nobody knows.
    several = recorded(tmp_path, **untraced, threads=2, traced_step_ms=time(0.1), traced_cpu_ms=time(0.025))
    assert calibrate(several, "mark").own_pace == pytest.approx(1.0, abs=0.05)
    odd = recorded(tmp_path, **untraced, traced_step_ms=time(0.1), traced_cpu_ms={"median": math.nan})
    assert calibrate(odd, "mark").pace == PACE_LOW


def test_a_bound_at_the_recorded_pace_is_no_pace(tmp_path: Path) -> None:
    """Others took a third of the machine, so the largest pace is 1: a slower step without the profiler is not met."""
    untraced = {"untraced_step_ms": time(0.12), "untraced_cpu_ms": time(0.12)}
    graph = recorded(
        tmp_path, **untraced, traced_step_ms=time(0.3), traced_cpu_ms=time(0.2), profiler_cost_ns={"per_event": 1}
    )
    found = calibrate(graph, "mark")
    assert found.pace == 1
    assert "still differs" in found.reason


# -- which clock is to be met ---------------------------------------------------------------------------------------


def test_one_cpu_thread_is_met_by_its_cpu_clock(tmp_path: Path) -> None:
    both = {"untraced_step_ms": time(0.09), "untraced_cpu_ms": time(0.08)}
    found = calibrate(recorded(tmp_path, **both), "mark")
    assert found.untraced is not None
    assert (found.untraced.clock, found.untraced.median_ns) == ("cpu", 80_000)
    loader = mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 1, 2)
    several = [
        recorded(tmp_path, **{**both, "threads": 2}),
        recorded(tmp_path, untraced_step_ms=time(0.09), untraced_cpu_ms=time(math.nan)),
        read_events(tmp_path, [*steps(), loader], whatif={"threads": 1, **both}),
        read_events(tmp_path, steps(), whatif={"threads": 1, **both}, distributedInfo={"rank": 0, "world_size": 2}),
        read_events(tmp_path, [*steps(), op("other", 0, 600, tid=2)], whatif={"threads": 1, **both}),
    ]
    for graph in several:
        wall = calibrate(graph, "mark").untraced
        assert wall is not None
        assert (wall.clock, wall.median_ns) == ("wall", 90_000)


def test_a_span_is_calibrated_by_its_steps(tmp_path: Path) -> None:
    baseline = Baseline.of(recorded(tmp_path, untraced_step_ms=time(0.05)), "span")
    assert baseline.calibration is not None
    assert baseline.calibration.corrected_ns == 50_000
    assert baseline.replay_error_pct == 0
    assert baseline.step_ns == pytest.approx(STEPS * 50_000, rel=0.01)


def test_without_steps_nothing_is_corrected(tmp_path: Path) -> None:
    graph = read_events(tmp_path, [op("a", 0, 10)], whatif={"untraced_step_ms": time(0.01)})
    found = calibrate(graph, "span")
    assert found.graph is graph
    assert "no steps" in found.reason


# -- with a GPU -----------------------------------------------------------------------------------------------------


def gpu_steps(call_ns: int, gap_ns: int, kernel_ns: int, *, measured_ns: int, untraced_ms: float) -> TaskGraph:
    """Six steps of one launch and one kernel each: whichever side is longer sets the pace."""
    build = Build(
        CPU, STREAM, n_steps=STEPS, steady=(1, STEPS - 1), path="gpu",
        measured_step_ns={"gpu": (measured_ns,) * (STEPS - 1), "mark": (measured_ns,) * STEPS},
        metadata={"untraced_step_ms": time(untraced_ms), "profiler_cost_ns": {"per_event": 100}},
    )  # fmt: skip
    for number in range(STEPS):
        launch = build.task(0, call_ns, "launch", step=number, profiler_events=1)
        build.task(0, gap_ns, "gap", TaskKind.GAP, step=number, profiler_events=3)
        done = build.task(1, kernel_ns, "kernel", step=number, low_ns=kernel_ns // 2, high_ns=2 * kernel_ns)
        build.edge(launch, done, 0, DependencyKind.LAUNCH)
    return build.graph()


def test_a_host_bound_step_is_met_and_kernels_keep_their_times() -> None:
    """1,000 + 1,000 ns of CPU a step, 400 of them the profiler's; 1,200 without it leave three quarters of the rest."""
    graph = gpu_steps(1_000, 1_000, 500, measured_ns=2_000, untraced_ms=0.0012)
    found = calibrate(graph, "gpu")
    assert found.corrected_ns == pytest.approx(1_200, rel=MET)
    assert found.pace == pytest.approx(0.75, rel=MET)
    assert found.reason == ""
    for column in ("duration_ns", "low_ns", "high_ns"):
        assert np.array_equal(getattr(found.graph, column)[graph.on_gpu], getattr(graph, column)[graph.on_gpu])


@pytest.mark.parametrize("untraced_ms", [0.004, 0.006])
def test_a_gpu_bound_step_is_left_to_the_gpu_and_the_difference_is_reported(untraced_ms: float) -> None:
    graph = gpu_steps(1_000, 1_000, 5_000, measured_ns=5_000, untraced_ms=untraced_ms)
    found = calibrate(graph, "gpu")
    assert found.pace == 1.0
    assert found.corrected_ns == 5_000
    assert "the GPU's work bounds it" in found.reason
    assert found.event_cost_ns == 100
    assert found.missed == pytest.approx(0.005 / untraced_ms - 1)
    # Without quartiles nothing else widens a GPU's range: what is missed does, both ways, up to the step that ran.
    longer = max(abs(found.missed), untraced_ms / 0.005 - 1)
    assert found.spread == pytest.approx((abs(found.missed), longer))
    prediction = whatif.apply(graph, "scale:kind=all,factor=0.5")
    assert found.reason in prediction.warnings
    assert prediction.low_ms <= prediction.predicted_ms * (1 - abs(found.missed)) + 1e-9


def test_a_step_that_becomes_gpu_bound_on_the_way_is_not_met_by_the_cpu() -> None:
    """2,000 ns of CPU against 1,800 of GPU: no CPU is fast enough for 1,000."""
    graph = gpu_steps(1_000, 1_000, 1_800, measured_ns=2_000, untraced_ms=0.001)
    found = calibrate(graph, "gpu")
    assert found.pace == 1.0
    assert "the GPU's work bounds it" in found.reason


def test_a_step_that_hardly_follows_the_cpu_is_not_met_by_its_pace() -> None:
    """1,000 ns of CPU and 9,000 of GPU take turns: a CPU 15 % faster would meet 9,850, and explain nothing."""
    build = Build(
        CPU, STREAM, n_steps=STEPS, steady=(1, STEPS - 1), path="gpu",
        measured_step_ns={"gpu": (10_000,) * (STEPS - 1), "mark": (10_000,) * STEPS},
        metadata={"untraced_step_ms": time(0.00985)},
    )  # fmt: skip
    for number in range(STEPS):
        launch = build.task(0, 1_000, "launch", step=number)
        done = build.task(1, 9_000, "kernel", step=number)
        build.edge(launch, done, 0, DependencyKind.LAUNCH)
        build.edge(done, build.task(0, 0, "wait", TaskKind.WAIT, step=number), 0, DependencyKind.SYNC)
    found = calibrate(build.graph(), "gpu")
    assert (found.pace, found.corrected_ns) == (1.0, 10_000)
    assert "the GPU's work bounds it" in found.reason


# -- properties -----------------------------------------------------------------------------------------------------


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(list(TaskKind)), st.integers(0, 10**6), st.integers(0, 9)), min_size=1, max_size=20
    ),
    cost_ns=st.floats(0, 1e5),
    pace=st.floats(PACE_LOW, PACE_HIGH),
)
def test_a_correction_never_breaks_a_graph(
    rows: Sequence[tuple[TaskKind, int, int]], cost_ns: float, pace: float
) -> None:
    build = Build(CPU, STREAM)
    for kind, duration_ns, events in rows:
        build.task(
            int(kind in GPU_KINDS), duration_ns, str(kind), kind, profiler_events=events,
            low_ns=duration_ns // 2, high_ns=duration_ns * 3,
        )  # fmt: skip
    graph = build.graph()
    changed = corrected(graph, cost_ns, pace).check()
    kept = ~graph.on_cpu
    for column in ("duration_ns", "low_ns", "high_ns"):
        old, new = getattr(graph, column), getattr(changed, column)
        assert np.array_equal(new[kept], old[kept])
        assert np.all(new >= 0)
        assert np.all(new <= np.ceil(old * max(pace, 1.0)))
        least = (old - cost_ns * graph.profiler_events - 1) * pace - 1
        assert np.all(new[graph.on_cpu] >= np.floor(least)[graph.on_cpu])
    assert names(changed) == names(graph)
    assert not changed.profiler_events[graph.on_cpu].any()


@settings(max_examples=30, deadline=None)  # each reads a file
@given(untraced_us=st.floats(45, 130), cost_ns=st.none() | st.floats(1, 3_000))
def test_calibrating_twice_changes_nothing_more(
    tmp_path_factory: pytest.TempPathFactory, untraced_us: float, cost_ns: float | None
) -> None:
    folder = tmp_path_factory.mktemp("twice")
    cost = {"profiler_cost_ns": {"per_event": cost_ns}} if cost_ns else {}
    once = calibrate(recorded(folder, untraced_step_ms=time(untraced_us / 1e3), **cost), "mark")
    again = calibrate(once.graph, "mark")
    assert again.corrected_ns == pytest.approx(once.corrected_ns, rel=2 * MET)
    assert again.pace == pytest.approx(1, rel=2 * MET)
    assert again.removed_ns == 0


# -- what the recording does not hold, or gives wrongly ---------------------------------------------------------------


def test_without_an_untraced_step_everything_is_as_it_was(tmp_path: Path) -> None:
    graph = recorded(tmp_path, profiler_cost_ns={"per_event": 600})
    baseline = Baseline.of(graph)
    assert baseline.calibration is None
    assert baseline.graph is graph
    assert "calibration" not in whatif.apply(baseline, "scale:factor=2").to_dict()


ABSURD = [math.nan, math.inf, -1, 0, 1e300, 10**400, True, "5", None, [], {}, {"median": {}}]


@pytest.mark.parametrize("odd", ABSURD, ids=lambda odd: str(odd)[:9])
def test_an_absurd_step_is_reported_and_not_used(tmp_path: Path, odd: Any) -> None:
    graph = recorded(tmp_path, untraced_step_ms={"median": odd})
    baseline = Baseline.of(graph)
    assert baseline.graph is graph
    assert baseline.step_ns == 100_000
    assert [w for w in whatif.apply(baseline).warnings if "untraced_step_ms holds no usable time" in w]
    # The same damage beside a sound step: the wall clock's is met.
    sound = calibrate(recorded(tmp_path, untraced_step_ms=time(0.09), untraced_cpu_ms=time(odd)), "mark")
    assert sound.corrected_ns == 90_000
    quartiles = calibrate(recorded(tmp_path, untraced_step_ms=time(0.09, q25=odd, q75=odd)), "mark")
    assert quartiles.spread == pytest.approx((0.0, 0.0), abs=MET)


@pytest.mark.parametrize("odd", [o for o in ABSURD if o is not None], ids=lambda odd: str(odd)[:9])
def test_an_absurd_cost_is_reported_and_replaced_by_the_default(tmp_path: Path, odd: Any) -> None:
    for cost in (odd, {"per_event": odd}):
        graph = recorded(tmp_path, untraced_step_ms=time(0.08), profiler_cost_ns=cost)
        found = calibrate(graph, "mark")
        assert (found.event_cost_ns, found.cost_measured) == (500, False)
        assert "profiler_cost_ns holds no usable time" in found.reason
        assert found.corrected_ns == pytest.approx(80_000, rel=MET)


@pytest.mark.parametrize("untraced_ms", [1e-9, 0.009, 1.1, 1e9])
def test_a_step_of_another_program_is_not_met(tmp_path: Path, untraced_ms: float) -> None:
    graph = recorded(tmp_path, untraced_step_ms=time(untraced_ms))
    found = calibrate(graph, "mark")
    assert found.graph is graph
    assert "implausible" in found.reason


def test_a_graph_without_tasks_or_facts_is_given_back() -> None:
    for graph in (step(), Build(CPU, metadata={"untraced_step_ms": time(1.0)}).graph()):
        assert calibrate(graph, "span").graph is graph


# -- the whole way ---------------------------------------------------------------------------------------------------


def test_ranges_are_as_wide_as_the_untraced_step_is_uncertain(tmp_path: Path) -> None:
    sharp = recorded(tmp_path, untraced_step_ms=time(0.08))
    blurred = recorded(tmp_path, untraced_step_ms=time(0.08, q25=0.072, q75=0.1))
    narrow, wide = (whatif.apply(graph, "scale:factor=0.5") for graph in (sharp, blurred))
    # Half of 0.08 ms, and what two runs of one program differ.
    low_ms, high_ms = 0.04 * (1 - RUN_TO_RUN), 0.04 * (1 + RUN_TO_RUN)
    assert (narrow.low_ms, narrow.high_ms) == pytest.approx((low_ms, high_ms), rel=2 * MET)
    # And its quartiles: a tenth below, a quarter above.
    low_ms, high_ms = 0.04 * (1 - math.hypot(RUN_TO_RUN, 0.1)), 0.04 * (1 + math.hypot(RUN_TO_RUN, 0.25))
    assert (wide.low_ms, wide.high_ms) == pytest.approx((low_ms, high_ms), rel=2 * MET)
    assert wide.predicted_ms == narrow.predicted_ms


def test_a_prediction_states_both_steps_and_can_be_had_without(tmp_path: Path) -> None:
    metadata = {"threads": 1, "untraced_step_ms": time(0.05), "profiler_cost_ns": {"per_event": 5_000}}
    graph = read_events(tmp_path, steps(), whatif=metadata)
    prediction = whatif.apply(graph, "scale:factor=0.5").to_dict()
    assert (prediction["measured_ms"], prediction["untraced_ms"]) == (0.1, 0.05)
    assert (prediction["baseline_ms"], prediction["predicted_ms"]) == pytest.approx((0.05, 0.025), rel=MET)
    assert prediction["replay_error_pct"] == 0
    assert prediction["calibration"]["calibrated_ms"] == pytest.approx(0.05)
    assert prediction["calibration"]["removed_cpu_ms"] > 0
    without = whatif.apply(graph, "scale:factor=0.5", calibrated=False).to_dict()
    assert (without["baseline_ms"], without["predicted_ms"]) == (0.1, 0.05)
    assert "calibration" not in without


def test_every_recording_of_ours_is_met_within_one_percent(own_traces: Path) -> None:
    paths = sorted(own_traces.glob("*.json.gz"))
    assert len(paths) >= 9
    for path in paths:
        graph = whatif.read(path)
        plain, baseline = Baseline.of(graph, calibrated=False), Baseline.of(graph)
        found = baseline.calibration
        assert found is not None, path.name
        assert found.untraced is not None, path.name
        recorded = graph.info.recorded
        untraced = recorded.untraced_cpu if found.untraced.clock == "cpu" else recorded.untraced_step
        assert untraced is not None
        assert (found.untraced.clock == "wall") == ("loader2" in path.name)
        assert baseline.step_ns / 1e6 == pytest.approx(untraced.median_ms, rel=0.01), path.name
        assert found.met, path.name
        assert found.removed_ns > 0, path.name
        # Out of sample nothing is known, so the replay error stays that of the recording itself.
        assert baseline.replay_error_pct == plain.replay_error_pct, path.name
        assert baseline.measured_ns == plain.measured_ns, path.name
        update = graph.phase == Phase.UPDATE
        assert int(baseline.graph.duration_ns[update].sum()) < int(graph.duration_ns[update].sum()), path.name


def test_what_is_missed_by_less_than_is_shown_is_not_shown_as_nothing(own_traces: Path) -> None:
    calibration = Baseline.of(whatif.read(own_traces / "ranks_cpu" / "twice_the_batch")).calibration
    assert calibration is not None
    assert abs(calibration.missed) < 5e-5
    assert calibration.missed_pct == 0.01
