"""Two recordings beside each other: by hand, and as properties."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compared import AFTER, BEFORE, MS, US, Kernel, by_name, run
from tests.helpers import facts_of, replace
from whatif import TaskKind, WhatifError
from whatif.graph.kernels import KernelFamily
from whatif.prediction.baseline import Baseline
from whatif.questions.comparison.compare import compare
from whatif.questions.comparison.differences import without_wrappers
from whatif.questions.comparison.measured_step import MeasuredStep, noise_ms
from whatif.questions.comparison.part_changes import part_changes
from whatif.questions.comparison.regression import Status, check_regression
from whatif.questions.comparison.step_profile import profile
from whatif.questions.comparison.two_recordings import TwoRecordings, common_clock
from whatif.questions.explain import Part

# -- by hand --------------------------------------------------------------------------------------------------------


def test_the_drawn_change() -> None:
    found = compare(TwoRecordings.of(run(BEFORE), run(AFTER)), describe=False)
    assert found.two.clock == "gpu"
    assert (found.two.measured[0].ms, found.two.measured[1].ms) == (6.0, 6.5)
    assert found.two.change_pct == pytest.approx(100 / 12)
    assert by_name(found, "operations") == {
        "gelu": ("new", 2.5), "conv": ("both", -1), "relu": ("gone", -1), "bn": ("both", 0),
    }  # fmt: skip
    assert by_name(found, "layers") == {
        "g": ("new", 2.5), "c": ("both", -1), "r": ("gone", -1), "b": ("both", 0),
    }  # fmt: skip
    assert by_name(found, "kernels") == {
        "elementwise": ("both", 1.5), "convolution": ("both", -1), "normalization": ("both", 0),
    }  # fmt: skip
    assert by_name(found, "phases") == {"forward": ("both", 0.5)}
    assert found.headline == "6.0000 → 6.5000 ms a step, +8.3 %, beyond the noise (3.3 %)"


def test_layers_that_a_wrapper_renamed_are_the_same() -> None:
    wrapped = [(name, ns, f"module.{layer}", family) for name, ns, layer, family in BEFORE]
    found = compare(TwoRecordings.of(run(BEFORE), run(wrapped)), describe=False)
    assert {(part.name, part.renamed, part.status) for part in found.layers} == {
        (layer, f"module.{layer}", "renamed") for _, _, layer, _ in BEFORE
    }
    assert not found.two.differences
    assert without_wrappers("module._orig_mod.blocks.0") == "blocks.0"
    assert without_wrappers("module") == "module"


def test_a_name_that_two_layers_would_have_is_not_guessed() -> None:
    before = [Part("a", 1, 1.0, 0.0, 0.0)]
    after = [Part("module.a", 1, 1.0, 0.0, 0.0), Part("_orig_mod.a", 1, 1.0, 0.0, 0.0)]
    found = part_changes(before, after, without_wrappers)
    assert sorted((part.name, part.status) for part in found) == [
        ("_orig_mod.a", "new"), ("a", "gone"), ("module.a", "new"),
    ]  # fmt: skip


def test_noise_is_where_the_spreads_overlap() -> None:
    """Steady A: 6.0, 6.1, 5.9, 6.0; B: 6.5 with the same offsets. The longer one's low end, the shorter one's high."""
    two = TwoRecordings.of(run(BEFORE), run(AFTER))
    assert (two.measured[0].low_ms, two.measured[0].high_ms) == (5.9, 6.1)
    assert two.noise_ms == pytest.approx(0.1 + 0.1)
    assert not two.within_noise
    shaky = TwoRecordings.of(run(BEFORE), run(AFTER, off_us=(0, 900, -600, 0, 0)))
    assert shaky.noise_ms == pytest.approx(0.1 + 0.6)
    assert shaky.within_noise


def test_many_steps_have_quartiles() -> None:
    off = (0, *range(-500, 501, 100), 0)
    step = TwoRecordings.of(run(BEFORE, off_us=off), run(BEFORE)).measured[0]
    assert step.low_ms is not None
    assert step.high_ms is not None
    assert 5.5 < step.low_ms < 6.0 < step.high_ms < 6.5


def test_one_step_has_no_noise() -> None:
    two = TwoRecordings.of(run(BEFORE, steps=1, off_us=()), run(AFTER, steps=1, off_us=()))
    assert two.clock == "span"
    assert (two.noise_ms, two.noise_pct, two.within_noise) == (None, None, False)
    assert "noise not known" in compare(two, describe=False).headline


def test_the_step_without_the_profiler_counts_where_both_have_it() -> None:
    def untraced(median: float, spread: float = 0.2) -> dict[str, Any]:
        times = {"median": median, "q25": median - spread, "q75": median + spread}
        return {"recorded": facts_of({"untraced_step_ms": times}), "untraced_step_ns": round(median * 1e6)}

    two = TwoRecordings.of(run(BEFORE, **untraced(5.8)), run(AFTER, **untraced(6.4)))
    assert [(step.ms, step.clock) for step in two.measured] == [(5.8, "wall"), (6.4, "wall")]
    assert two.noise_ms == pytest.approx(0.4)
    one = TwoRecordings.of(run(BEFORE, **untraced(5.8)), run(AFTER))
    assert [(step.ms, step.clock) for step in one.measured] == [(6.0, "gpu"), (6.5, "gpu")]
    assert one.remarks == ("only A has a step time without the profiler: both are compared as recorded",)
    as_recorded = TwoRecordings.of(run(BEFORE, **untraced(5.8)), run(AFTER, **untraced(6.4)), calibrated=False)
    assert [step.ms for step in as_recorded.measured] == [6.0, 6.5]
    unknown = TwoRecordings.of(run(BEFORE, **untraced(5.8, 0.0)), run(AFTER, **untraced(6.4)))
    assert unknown.noise_ms is None


def test_what_blocks_a_comparison() -> None:
    def differences(**info: Any) -> list[tuple[str, bool]]:
        two = TwoRecordings.of(run(BEFORE, batch_size=8), run(BEFORE, **{"batch_size": 8, **info}))
        return [(item.what, item.blocks) for item in two.differences]

    assert differences() == []
    assert differences(batch_size=16) == [("batch size", True)]
    assert differences(batch_size=None) == []  # unknown is no difference
    assert differences(gpu="AMD Y") == [("device", True)]
    assert differences(optimizer="Adam") == []
    assert differences(execution=("compiled",)) == [("execution", False)]
    other = [(name, ns, f"other.{layer}", family) for name, ns, layer, family in BEFORE]
    two = TwoRecordings.of(run(BEFORE), run(other))
    assert [(item.what, item.blocks) for item in two.differences] == [("model", True)]
    assert [str(item) for item in TwoRecordings.of(run(BEFORE), run(AFTER)).differences] == [
        "layers: 3 layers → 3 layers, 2 of them in both"
    ]


def test_metadata_may_be_anything() -> None:
    hostile = {"torch": ["2", {}], "precision": 7, "optimizer": [], "input_shape": "x", "cpu": "\x1b[31m" * 100}
    two = TwoRecordings.of(
        *(run(BEFORE, recorded=facts_of(metadata)) for metadata in (hostile, {**hostile, "torch": None, "cpu": "one"}))
    )
    assert [item.what for item in two.differences] == ["CPU"]
    assert len(two.differences[0].before) <= 60


def test_spans_of_other_numbers_of_steps_do_not_compare() -> None:
    two = TwoRecordings.of(run(BEFORE), run(BEFORE, steps=2), "span")
    assert [(item.what, item.blocks) for item in two.differences] == [("number of steps", True)]
    assert check_regression(two, 3.0).status is Status.NOT_COMPARABLE


def test_the_clock_is_one_that_both_have() -> None:
    assert common_clock(run(BEFORE), run(AFTER)) == "gpu"
    assert common_clock(run(BEFORE), run(AFTER, steps=3)) == "gpu"
    assert common_clock(run(BEFORE, steps=1), run(AFTER)) == "span"
    with pytest.raises(WhatifError, match="no steps by the clock 'mark'"):
        TwoRecordings.of(run(BEFORE), run(AFTER), "mark")


def test_a_recording_without_time_is_refused() -> None:
    empty = run(BEFORE)
    info = replace(empty.info, measured_step_ns={"gpu": (0,) * 5})
    with pytest.raises(WhatifError, match="expected steps that take time"):
        TwoRecordings.of(run(BEFORE), empty.replace(info=info))


# -- the gate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed_pct", "off_us", "status"),
    [
        (3.0, (0, 100, -100, 0, 0), Status.REGRESSED),
        (8.3, (0, 100, -100, 0, 0), Status.REGRESSED),
        (8.4, (0, 100, -100, 0, 0), Status.OK),
        (3.0, (0, 900, -600, 0, 0), Status.OK),  # within the noise
    ],
)
def test_the_gate(allowed_pct: float, off_us: tuple[int, ...], status: Status) -> None:
    found = check_regression(TwoRecordings.of(run(BEFORE), run(AFTER, off_us=off_us)), allowed_pct)
    assert found.status is status
    assert [(part.name, part.status) for part in found.grown] == [("g", "new")]
    assert found.verdict.startswith(f"{status.value}: a step takes 6.0000 → 6.5000 ms, +8.3 % (allowed +")
    assert found.verdict.endswith("within the noise") == (status is Status.OK and allowed_pct == 3)


def test_faster_passes_and_other_work_does_not() -> None:
    assert check_regression(TwoRecordings.of(run(AFTER), run(BEFORE)), 0.0).status is Status.OK
    blocked = check_regression(TwoRecordings.of(run(BEFORE, batch_size=8), run(BEFORE, batch_size=4)), 1000.0)
    assert blocked.status is Status.NOT_COMPARABLE
    assert blocked.verdict == ("not comparable: batch size: 8 → 4; record a new baseline of what is to be compared")
    assert blocked.grown == ()


def test_the_gate_says_what_it_cannot_see() -> None:
    shaky = check_regression(TwoRecordings.of(run(BEFORE), run(AFTER, off_us=(0, 900, -600, 0, 0))), 3.0)
    assert [warning.split(" (")[0] for warning in shaky.warnings] == ["the noise of the two recordings"]
    single = TwoRecordings.of(run(BEFORE, steps=1, off_us=()), run(AFTER, steps=1, off_us=()))
    found = check_regression(single, 3.0)
    assert found.status is Status.REGRESSED
    assert found.warnings[0].startswith("the noise is not known")


def test_what_is_slower_alike_may_be_the_machine() -> None:
    many = [(f"k{i}", (i + 1) * 100 * US, "x", KernelFamily.GEMM) for i in range(12)]
    slow = [(name, ns * 3 // 2, layer, family) for name, ns, layer, family in many]
    one = [*many[:-1], ("k11", 12 * MS, "x", KernelFamily.GEMM)]
    assert compare(TwoRecordings.of(run(many), run(slow)), describe=False).pace == pytest.approx(1.5)
    assert compare(TwoRecordings.of(run(many), run(one)), describe=False).pace == pytest.approx(1.0)
    assert compare(TwoRecordings.of(run(BEFORE), run(AFTER)), describe=False).pace is None  # too few to say
    found = check_regression(TwoRecordings.of(run(many), run(slow)), 3.0)
    assert found.status is Status.REGRESSED
    assert found.warnings[0].startswith("the same calls take 1.50 times as long as in the baseline (median)")
    assert not any("machine may" in w for w in check_regression(TwoRecordings.of(run(many), run(one)), 3.0).warnings)


def test_the_pace_is_that_of_the_same_work() -> None:
    """Ten kinds of kernels take 1.2 times as long, two others twice, and one is another kind of work in B."""
    calls = [(f"k{i}", (i + 1) * 100 * US, "x", KernelFamily.GEMM) for i in range(13)]
    slow = [
        (name, ns * (2 if i in (10, 11) else 1.2), layer, family) for i, (name, ns, layer, family) in enumerate(calls)
    ]
    other = [(name, int(ns), "module.x", family) for name, ns, _, family in slow]
    two = TwoRecordings.of(run(calls), run(other))
    assert two.pace == pytest.approx(1.2)
    same = two.same_work
    assert same.reversed().pace() == pytest.approx(1 / 1.2)
    graph = two.before.graph
    loud = (graph.kind == TaskKind.KERNEL) & (graph.duration_ns <= 800 * US)
    assert same.pace(graph.scale(loud, 0.5)) is None  # five kinds are left as they were
    assert same.pace(graph.scale(graph.name == graph.names.index("k3"), 0.5)) == pytest.approx(1.2)
    # What is done four times as often in B takes four times as long by what-ifs that keep the tasks.
    often = TwoRecordings.of(run(calls), run(other * 4))
    assert often.same_work.pace(graph.scale(graph.kind == TaskKind.KERNEL, 4.0)) == pytest.approx(1.2)
    # Of another batch only the update is the same work, and there is none here.
    assert TwoRecordings.of(run(calls, batch_size=8), run(other, batch_size=4)).pace is None


def test_layers_first_then_kernels() -> None:
    bare = [[(name, ns, "", family) for name, ns, _, family in kernels] for kernels in (BEFORE, AFTER)]
    found = check_regression(TwoRecordings.of(run(bare[0]), run(bare[1])), 3.0)
    assert found.parts_are == "kernels"
    assert [part.name for part in found.grown] == ["gelu"]


# -- properties -----------------------------------------------------------------------------------------------------

parts = st.lists(
    st.builds(
        Part,
        st.sampled_from(["a", "b", "c", "module.a", "_orig_mod.b", "d"]),
        *[st.floats(0, 1e6, allow_nan=False) for _ in range(4)],
    ),
    unique_by=lambda part: part.name,
)


@given(parts, parts)
def test_every_part_is_reported_once_and_changes_add_up(before: list[Part], after: list[Part]) -> None:
    found = part_changes(before, after, without_wrappers)
    assert sorted(c.before.name for c in found if c.before) == sorted(part.name for part in before)
    assert sorted(c.after.name for c in found if c.after) == sorted(part.name for part in after)
    total = sum(p.gpu_ms + p.cpu_ms for p in after) - sum(p.gpu_ms + p.cpu_ms for p in before)
    assert sum(c.work_change_ms for c in found) == pytest.approx(total, abs=1e-3)
    back = part_changes(after, before, without_wrappers)
    assert sorted(c.work_change_ms for c in back) == pytest.approx(sorted(-c.work_change_ms for c in found))
    assert all(c.work_change_ms == 0 and c.status == "both" for c in part_changes(before, before, without_wrappers))


steps_ms = st.tuples(st.floats(1, 100), st.floats(0, 0.5), st.floats(0, 0.5)).map(
    lambda t: MeasuredStep(t[0], t[0] * (1 - t[1]), t[0] * (1 + t[2]), "wall")
)


@given(steps_ms, steps_ms)
def test_a_change_is_noise_where_the_spreads_overlap(before: MeasuredStep, after: MeasuredStep) -> None:
    found = noise_ms(before, after)
    assert found is not None
    assert before.low_ms is not None
    assert before.high_ms is not None
    assert after.low_ms is not None
    assert after.high_ms is not None
    overlap = before.high_ms - after.low_ms if after.ms >= before.ms else after.high_ms - before.low_ms
    assert found - abs(after.ms - before.ms) == pytest.approx(overlap, abs=1e-9)


kernels_of_runs = st.lists(
    st.tuples(
        st.sampled_from(["k", "l", "m"]), st.integers(US, MS), st.sampled_from(["x", "y"]),
        st.sampled_from(list(KernelFamily)),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@given(kernels_of_runs, kernels_of_runs)
def test_a_profile_is_nowhere_but_at_itself(one: list[Kernel], other: list[Kernel]) -> None:
    a, b = (profile(Baseline.of(run(kernels))) for kernels in (one, other))
    assert a.distance(a) == 0
    assert b.distance(b) == 0
    same = a.step_ms == b.step_ms and (a.work_ms == b.work_ms).all() and (a.tasks == b.tasks).all()
    assert (a.distance(b) == 0) == same
    found = compare(TwoRecordings.of(run(one), run(one)), describe=False)
    assert all(part.work_change_ms == 0 for part in (*found.layers, *found.kernels, *found.operations, *found.phases))


@given(st.floats(0, 100), st.floats(0, 100))
def test_a_gate_that_allows_more_lets_more_pass(one: float, other: float) -> None:
    two = TwoRecordings.of(run(BEFORE), run(AFTER))
    strict, lenient = (check_regression(two, allowed).status for allowed in sorted((one, other)))
    assert not (strict is Status.OK and lenient is Status.REGRESSED)
