"""What a step gains where a part of it is faster: by hand, as properties, and against one simulation each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, OTHER, STREAM, Build, loops_in_form
from tests.test_simulate import freed, graphs
from whatif import DependencyKind, Phase, TaskGraph, TaskKind, Timeline, WhatifError, apply, simulate
from whatif.graph.kernels import KernelFamily
from whatif.prediction.predict import Baseline
from whatif.questions.sensitivity import (
    CHANGES_NOTHING,
    CPU_SIDE,
    GPU_SIDE,
    HIDDEN,
    SPEEDUPS_PCT,
    Sensitive,
    Sensitivity,
    at_speedups,
    sensitivity,
)
from whatif.simulation.group_scenarios import GroupTimes, simulate_groups

simulator: Any = sys.modules[simulate.__module__]
NONE = np.empty(0, dtype=np.int64)
US = 1_000


def by_name(found: Sensitivity) -> dict[tuple[str, str], Sensitive]:
    return {(part.kind, part.name): part for part in found.parts}


def baseline(build: Build, **info: Any) -> Baseline:
    """A baseline on the span, whose measured time is the simulated one; or with what ``info`` says."""
    build.info = type(build.info)(path="hand.json", **info)
    build.info = type(build.info)(
        path="hand.json", **{"measured_step_ns": {"span": simulate(build.graph()).step_times_ns("span")}, **info}
    )
    return Baseline.of(build.graph())


def three_kernels() -> Baseline:
    """Times in us; the span begins with the first kernel, at 2, and lasts 9.

    ::

        CPU       |launch a|launch b|launch c|
        stream 7           |a (layer A)            |b (layer B)|
        stream 8                             |c (layer C)   |
                  0        2        4        6     8        10 11
    """
    build = Build(CPU, STREAM, OTHER)
    layers = {"a": (KernelFamily.GEMM, 6, 1), "b": (KernelFamily.ELEMENTWISE, 3, 1), "c": (KernelFamily.GEMM, 4, 2)}
    for name, (family, length_us, stream) in layers.items():
        call = build.task(0, 2 * US, f"launch {name}", phase=Phase.FORWARD)
        kernel = build.task(
            stream, length_us * US, name, layer=name.upper(), phase=Phase.FORWARD, family=family,
        )  # fmt: skip
        build.edge(call, kernel, kind=DependencyKind.LAUNCH)
    return baseline(build)


@pytest.fixture(params=["plain", "compiled"])
def loops(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same test with the loops in plain Python and with the compiled ones."""
    with loops_in_form(request.param):
        yield str(request.param)


# -- by hand -------------------------------------------------------------------------------------------------------


def test_the_drawn_step(loops: str) -> None:
    found = sensitivity(three_kernels())
    gains_us = {key: tuple(round(gain * 1e3, 9) for gain in part.gain_ms) for key, part in by_name(found).items()}
    assert gains_us == {
        # 10 %: a ends at 7.4, b at 10.1. 50 %: a 5, b 6.5, c 6 to 8. 100 %: c is launched at 6, and that is the end.
        ("side", GPU_SIDE): (0.9, 3.0, 5.0),
        # The span begins as much earlier as it ends.
        ("side", CPU_SIDE): (0.0, 0.0, 0.0),
        # All of it: 10 %: 1.8 to 9.9. 50 %: a 1 to 4, b to 5.5, c 3 to 5. 100 %: nothing is left.
        ("phase", "forward"): (0.9, 4.5, 9.0),
        ("thread", "stream 7"): (0.9, 1.0, 1.0),
        ("thread", "stream 8"): (0.0, 0.0, 0.0),
        ("thread", "CPU"): (0.0, 0.0, 0.0),
        # a and c: 50 %: a 5, b 8, c 8. 100 %: b 4 (its launch) to 7, c 6.
        ("family", "gemm"): (0.6, 3.0, 4.0),
        ("family", "elementwise"): (0.3, 1.0, 1.0),
        # c ends at 10, whatever becomes of a and b.
        ("layer", "A"): (0.6, 1.0, 1.0),
        ("layer", "B"): (0.3, 1.0, 1.0),
        ("layer", "C"): (0.0, 0.0, 0.0),
    }


def test_parts_are_ranked_and_noted() -> None:
    found = sensitivity(three_kernels())
    assert [part.name for part in found.of_kind("layer")] == ["A", "B", "C"]  # A works more than B
    assert [part.name for part in found.of_kind("family")] == ["gemm", "elementwise"]
    notes = {key: found.note(part) for key, part in by_name(found).items()}
    assert notes["layer", "A"] == HIDDEN  # 1 of 6 us
    assert notes["layer", "B"] == ""  # 1 of 3 us
    assert notes["layer", "C"] == CHANGES_NOTHING
    assert notes["side", CPU_SIDE] == CHANGES_NOTHING
    assert notes["phase", "forward"] == ""
    side = by_name(found)["side", CPU_SIDE]
    assert (side.gpu_ms, side.cpu_ms) == (0, 0.004)  # what of it lies in the span
    assert found.pct(side.cpu_ms) == pytest.approx(100 * 4 / 9)
    assert found.n_parts == {"side": 2, "phase": 1, "thread": 3, "family": 2, "layer": 3}


def test_only_the_top_is_kept() -> None:
    found = sensitivity(three_kernels(), top=1)
    assert [(part.kind, part.name) for part in found.parts] == [
        ("side", GPU_SIDE), ("phase", "forward"), ("thread", "stream 7"), ("family", "gemm"), ("layer", "A"),
    ]  # fmt: skip
    assert found.n_parts["layer"] == 3


def test_the_curve_of_a_part() -> None:
    """Layer A holds the step until c does, from a sixth of its 6 us on."""
    found = at_speedups(sensitivity(three_kernels(), top=1), (0, 10, 15, 20, 100))
    part = by_name(found)["layer", "A"]
    assert [round(gain * 1e3, 9) for gain in part.gain_ms] == [0, 0.6, 0.9, 1.0, 1.0]


def launches(n_steps: int, call_ns: int, kernel_ns: int) -> Build:
    build = Build(CPU, STREAM)
    for step in range(n_steps):
        call = build.task(0, call_ns, "launch", step=step)
        kernel = build.task(1, kernel_ns, "kernel", step=step, family=KernelFamily.GEMM)
        build.edge(call, kernel, kind=DependencyKind.LAUNCH)
    return build


@pytest.mark.parametrize(
    ("call_ns", "kernel_ns", "gpu_ns", "cpu_ns"),
    [
        # GPU-bound: 40 ns a step, until the calls bound it at 10.
        (10, 40, (4, 20, 30), (0, 0, 0)),
        # Host-bound: 40 ns a step, until the kernels bound it at 30.
        (40, 30, (0, 0, 0), (4, 10, 10)),
    ],
)
def test_by_the_clock_of_the_gpu(
    loops: str, call_ns: int, kernel_ns: int, gpu_ns: tuple[int, ...], cpu_ns: tuple[int, ...]
) -> None:
    """Five steps of one launch: a step is what lies between the ends of their kernels, the longer of the two."""
    steps = {"n_steps": 5, "steady": (1, 4), "measured_step_ns": {"gpu": (40,) * 4}}
    found = by_name(sensitivity(baseline(launches(5, call_ns, kernel_ns), **steps)))
    for side, expected_ns in ((GPU_SIDE, gpu_ns), (CPU_SIDE, cpu_ns)):
        assert [round(gain * 1e6, 6) for gain in found["side", side].gain_ms] == list(expected_ns)


def test_by_marks_the_median_of_unlike_steps() -> None:
    """CPU only, five steps of op + tail: 10+2, 10+2, 30+2, 10+2, 10+2 ns; the median one is 12."""
    build = Build(CPU)
    for step, length_ns in enumerate((10, 10, 30, 10, 10)):
        build.task(0, length_ns, "op", TaskKind.CPU_OP, step=step, phase=Phase.FORWARD, family=KernelFamily.GEMM)
        build.task(0, 2, "tail", TaskKind.GAP, step=step, phase=Phase.UPDATE)
    found = sensitivity(baseline(build, n_steps=5, steady=(1, 4), measured_step_ns={"mark": (12, 12, 32, 12, 12)}))
    assert found.baseline.clock == "mark"
    gains = {key: [round(gain * 1e6, 6) for gain in part.gain_ms] for key, part in by_name(found).items()}
    assert gains == {
        ("phase", "forward"): [1, 5, 10],
        ("phase", "update"): [0, 1, 2],  # whole nanoseconds: 90 % of 2 are 2
        ("thread", "CPU"): [1, 6, 12],
        ("family", "gemm"): [1, 5, 10],
    }


def test_a_recording_without_work_has_no_parts() -> None:
    build = Build(CPU)
    build.task(0, 0, "nothing", TaskKind.CPU_OP)
    found = sensitivity(baseline(build))
    assert found.parts == ()
    assert found.to_dict() == {}
    assert at_speedups(found, (10,)).parts == ()


@pytest.mark.parametrize("wrong", [(), (-1,), (101,), (float("nan"),)])
def test_a_speedup_out_of_range_is_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(WhatifError, match="expected speed-ups from 0 to 100 %"):
        at_speedups(sensitivity(three_kernels()), wrong)


def test_a_factor_above_one_is_refused() -> None:
    graph = three_kernels().graph
    with pytest.raises(WhatifError, match="expected factors from 0 to 1"):
        simulate_groups(graph, np.zeros((1, len(graph)), np.int32), 1, [1.1], observed=NONE, counted=graph.on_gpu)


# -- the batch equals one simulation each --------------------------------------------------------------------------

FACTORS = (1.0, 0.9, 0.5, 0.0)


def one_by_one(graph: TaskGraph, groups: Any, n_groups: int, counted: Any) -> list[list[Timeline]]:
    def run(group: int, factor: float) -> Timeline:
        return simulate(graph.scale((groups == group).any(axis=0), factor))

    return [[run(group, factor) for factor in FACTORS] for group in range(n_groups)]


def drawn_groups(data: st.DataObject, n_tasks: int, n_columns: int, each: int) -> Any:
    """Columns of groups: column c has the groups from c * each on, and tasks in none."""
    columns = [
        [code + column * each if code >= 0 else -1 for code in data.draw(
            st.lists(st.integers(-1, each - 1), min_size=n_tasks, max_size=n_tasks)
        )]
        for column in range(n_columns)
    ]  # fmt: skip
    return np.array(columns, dtype=np.int32)


@pytest.mark.parametrize("form", ["plain", "compiled", "free"])
@given(graphs(free=False), st.data())
@settings(max_examples=60, deadline=None)
def test_every_scenario_equals_its_own_simulation(form: str, graph: TaskGraph, data: st.DataObject) -> None:
    graph = freed(graph) if form == "free" else graph
    n_groups = 6
    groups = drawn_groups(data, len(graph), 2, n_groups // 2)
    counted = np.array(data.draw(st.lists(st.booleans(), min_size=len(graph), max_size=len(graph))))
    observed = np.array(data.draw(st.lists(st.integers(0, len(graph) - 1), max_size=4)), dtype=np.int64)
    with loops_in_form("plain" if form == "plain" else "compiled"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("whatif.simulation.group_scenarios.BLOCK", 2 * len(FACTORS))  # several blocks
        seen = simulate_groups(graph, groups, n_groups, FACTORS, observed=observed, counted=counted)
    for group, row in enumerate(one_by_one(graph, groups, n_groups, counted)):
        for place, alone in enumerate(row):
            assert seen.start_ns[:, group, place].tolist() == alone.start_ns[observed].tolist()
            assert seen.end_ns[:, group, place].tolist() == alone.end_ns[observed].tolist()
            if counted.any():
                assert seen.begin_ns[group, place] == alone.start_ns[counted].min()
                assert seen.until_ns[group, place] == alone.end_ns[counted].max()


# -- what must always hold: of the makespan, which no clock takes the begin from ------------------------------------


def makespans(graph: TaskGraph, groups: Any, n_groups: int) -> tuple[GroupTimes, int]:
    everything = np.ones(len(graph), dtype=np.bool_)
    seen = simulate_groups(graph, groups, n_groups, FACTORS, observed=NONE, counted=everything)
    return seen, simulate(graph).makespan_ns


@given(graphs(free=False), st.data())
@settings(max_examples=100, deadline=None)
def test_gains_are_monotone_and_no_larger_than_the_time_of_the_part(graph: TaskGraph, data: st.DataObject) -> None:
    groups = drawn_groups(data, len(graph), 1, 3)
    seen, makespan_ns = makespans(graph, groups, 3)
    gain_ns = makespan_ns - seen.until_ns
    assert (gain_ns[:, 0] == 0).all()  # a factor of 1 changes nothing
    assert (np.diff(gain_ns, axis=1) >= 0).all()
    work_ns = np.bincount(groups[0] + 1, weights=graph.duration_ns, minlength=4)[1:]
    assert (gain_ns <= work_ns[:, None]).all()


@given(graphs(free=False))
@settings(max_examples=60, deadline=None)
def test_all_of_everything_leaves_only_lags(graph: TaskGraph) -> None:
    seen, _ = makespans(graph, np.zeros((1, len(graph)), dtype=np.int32), 1)
    empty = simulate(graph.with_duration(np.ones(len(graph), dtype=np.bool_), 0))
    assert seen.until_ns[0, -1] == empty.makespan_ns


# -- real traces ---------------------------------------------------------------------------------------------------


def faster(part: Sensitive, found: Sensitivity, factor: float) -> Callable[[TaskGraph], TaskGraph]:
    """The what-if that a part represents, applied directly."""

    def transform(graph: TaskGraph) -> TaskGraph:
        side = graph.on_gpu if part.name == GPU_SIDE else graph.on_cpu
        tasks = {
            "side": side,
            "phase": graph.phase == part.code,
            "thread": graph.thread == part.code,
            "family": (graph.family == part.code) & (graph.on_gpu | ~graph.on_gpu.any()) & (graph.kind != TaskKind.GAP),
            "layer": graph.layer == part.code,
        }[part.kind]
        return graph.scale(tasks & (graph.on_gpu | graph.on_cpu), factor)

    return transform


NANOGPT = "modded-nanogpt-8xh100/current.rank0.json.gz"
BERT = "tracelens-h100-mi300/h100.gaunernst_bert-small-uncased__1016001.json.gz"


@pytest.mark.parametrize(("name", "clock"), [(NANOGPT, "gpu"), (NANOGPT, "mark"), (NANOGPT, "span"), (BERT, None)])
def test_gains_are_those_of_apply(shared_traces: Path, name: str, clock: str | None) -> None:
    graph = whatif.read(str(shared_traces / name))
    found = sensitivity(Baseline.of(graph, clock), top=2)
    assert len(found.parts) >= 6
    for part in found.parts:
        for speedup, gain_ms in zip(SPEEDUPS_PCT, part.gain_ms, strict=True):
            alone = apply(found.baseline, faster(part, found, 1 - speedup / 100))
            assert found.step_ms - gain_ms == pytest.approx(alone.predicted_ms, abs=1e-9), part


def test_own_recording(own_traces: Path) -> None:
    """One CPU thread has nothing to hide behind: half the work of every phase shows, as far as steps are alike."""
    found = sensitivity(Baseline.of(whatif.read(str(own_traces / "transformer_cpu.json.gz"))))
    (thread,) = found.of_kind("thread")
    assert found.pct(thread.gain_ms[1]) == pytest.approx(50, abs=0.01)
    phases = found.of_kind("phase")
    assert {part.name for part in phases} == {"forward", "backward", "update", "data"}
    assert sum(found.pct(part.gain_ms[1]) for part in phases) == pytest.approx(50, abs=1)
    assert not [part for part in found.parts if found.note(part)]


def test_a_gpu_that_waits_for_its_host(shared_traces: Path) -> None:
    """V100, two ranks, as recorded: the host bounds the step until it is 43 % faster, and no kernel matters."""
    graph = whatif.read(shared_traces / "hta/v100_allreduce_rank1of2.json.gz")
    found = sensitivity(Baseline.of(graph, calibrated=False))
    parts = by_name(found)
    assert found.note(parts["side", GPU_SIDE]) == CHANGES_NOTHING
    half, all_of_it = (found.pct(gain) for gain in parts["side", CPU_SIDE].gain_ms[1:])
    assert half == pytest.approx(43, abs=1)
    assert all_of_it == pytest.approx(half, abs=0.1)
