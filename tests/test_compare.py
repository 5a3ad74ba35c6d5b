"""Two recordings beside each other: by hand, as properties, and on real pairs whose change is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, facts_of, replace
from whatif import DependencyKind, GraphInfo, Phase, TaskGraph, TaskKind, WhatifError
from whatif.graph.kernels import KernelFamily
from whatif.graph.recorded import Recorded
from whatif.prediction.baseline import Baseline
from whatif.questions.comparison.change_candidates import accumulated_passes, batch_factor
from whatif.questions.comparison.compare import Comparison, compare
from whatif.questions.comparison.describe_change import describe_change
from whatif.questions.comparison.differences import without_wrappers
from whatif.questions.comparison.measured_step import MeasuredStep, noise_ms
from whatif.questions.comparison.part_changes import part_changes
from whatif.questions.comparison.regression import Status, check_regression
from whatif.questions.comparison.step_profile import profile
from whatif.questions.comparison.told_changes import told_changes
from whatif.questions.comparison.two_recordings import TwoRecordings, common_clock
from whatif.questions.explain import Part
from whatif.simulation.simulator import simulate

US, MS = 1_000, 1_000_000
Kernel = tuple[str, int, str, KernelFamily]

BEFORE: tuple[Kernel, ...] = (
    ("conv", 4 * MS, "c", KernelFamily.CONVOLUTION),
    ("bn", 1 * MS, "b", KernelFamily.NORMALIZATION),
    ("relu", 1 * MS, "r", KernelFamily.ELEMENTWISE),
)
AFTER: tuple[Kernel, ...] = (
    ("conv", 3 * MS, "c", KernelFamily.CONVOLUTION),
    ("bn", 1 * MS, "b", KernelFamily.NORMALIZATION),
    ("gelu", 2 * MS + 500 * US, "g", KernelFamily.ELEMENTWISE),
)


def run(
    kernels: Sequence[Kernel],
    *,
    off_us: Sequence[int] = (0, 100, -100, 0, 0),
    loading_ns: int = 0,
    steps: int | None = None,
    **info: Any,
) -> TaskGraph:
    """Steps of kernels that the GPU is never without; ``off_us`` is what each was measured to take more, us.

    ::

        ms      0         4    5    6
        CPU     |||                 |||             (10 us a call)
        stream  |conv-----|bn--|relu|conv-----|...
    """
    steps = len(off_us) + 1 if steps is None else steps
    build = Build(CPU, STREAM)
    for step in range(steps):
        if loading_ns:
            build.task(0, loading_ns, "batch", TaskKind.DATA_LOADING, step=step, phase=Phase.DATA)
        for name, duration_ns, layer, family in kernels:
            of = {"step": step, "layer": layer, "phase": Phase.FORWARD}
            call = build.task(0, 10 * US, f"launch {name}", **of)
            kernel = build.task(1, duration_ns, name, family=family, **of)
            build.edge(call, kernel, kind=DependencyKind.LAUNCH)
        if loading_ns:
            build.sync()
    graph = build.graph()
    timeline = simulate(graph)
    gpu_ns = timeline.step_times_ns("gpu")
    measured = {
        "gpu": tuple(ns + off * US for ns, off in zip(gpu_ns, [*off_us, *[0] * steps], strict=False)),
        "span": timeline.step_times_ns("span"),
    }
    told = {"path": "hand.json", "gpu": "NVIDIA X", "n_steps": steps, "steady": (1, steps - 1)}
    return graph.replace(info=replace(graph.info, measured_step_ns=measured, **{**told, **info}))


def by_name(found: Comparison, kind: str) -> dict[str, tuple[str, float]]:
    return {part.name: (part.status, round(part.change(lambda p: p.gpu_ms), 6)) for part in getattr(found, kind)}


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


def test_the_step_without_the_profiler_counts_where_both_tell_it() -> None:
    def untraced(median: float, spread: float = 0.2) -> dict[str, Any]:
        told = {"median": median, "q25": median - spread, "q75": median + spread}
        return {"recorded": facts_of({"untraced_step_ms": told}), "untraced_step_ns": round(median * 1e6)}

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
    def told(**info: Any) -> list[tuple[str, bool]]:
        two = TwoRecordings.of(run(BEFORE, batch_size=8), run(BEFORE, **{"batch_size": 8, **info}))
        return [(item.what, item.blocks) for item in two.differences]

    assert told() == []
    assert told(batch_size=16) == [("batch size", True)]
    assert told(batch_size=None) == []  # unknown is no difference
    assert told(gpu="AMD Y") == [("device", True)]
    assert told(optimizer="Adam") == []
    assert told(execution=("compiled",)) == [("execution", False)]
    other = [(name, ns, f"other.{layer}", family) for name, ns, layer, family in BEFORE]
    two = TwoRecordings.of(run(BEFORE), run(other))
    assert [(item.what, item.blocks) for item in two.differences] == [("model", True)]
    assert [str(item) for item in TwoRecordings.of(run(BEFORE), run(AFTER)).differences] == [
        "layers: 3 layers → 3 layers, 2 of them in both"
    ]


def test_metadata_may_be_anything() -> None:
    hostile = {"torch": ["2", {}], "precision": 7, "optimizer": [], "input_shape": "x", "cpu": "\x1b[31m" * 100}
    two = TwoRecordings.of(
        *(run(BEFORE, recorded=facts_of(told)) for told in (hostile, {**hostile, "torch": None, "cpu": "one"}))
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
def test_every_part_is_told_once_and_changes_add_up(before: list[Part], after: list[Part]) -> None:
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


# -- which what-if describes it -------------------------------------------------------------------------------------


def test_loading_that_moved_away_is_recognised_both_ways() -> None:
    """5 ms of loading and 6 ms of kernels in turns, against the kernels alone with the same waits."""
    before, after = run(BEFORE, loading_ns=5 * MS), run(BEFORE, loading_ns=1, loads_in_processes=True)
    there, back = describe_change(TwoRecordings.of(before, after)), describe_change(TwoRecordings.of(after, before))
    assert there.found is not None
    assert (there.found.spelled, there.found.undone) == ("data_loading", False)
    assert back.found is not None
    assert (back.found.spelled, back.found.undone) == ("data_loading", True)
    assert back.sentence.startswith("data_loading undone describes the change: A's step time is predicted within ")


def test_chance_is_not_a_description() -> None:
    """Half the time for all kernels alike: no what-if does that to these, nor to one kernel more."""
    faster = [(name, ns // 2, layer, family) for name, ns, layer, family in BEFORE]
    found = describe_change(TwoRecordings.of(run(BEFORE), run(faster)))
    assert found.found is None
    assert found.sentence == "the same program; the machine's pace changed: both make the same calls"
    other = describe_change(TwoRecordings.of(run(BEFORE), run([*faster, ("k", 1 * MS, "r", KernelFamily.SOFTMAX)])))
    assert other.found is None
    assert other.sentence.startswith("no what-if describes the change")


def test_nothing_is_tried_where_there_is_nothing_to_describe() -> None:
    assert describe_change(TwoRecordings.of(run(BEFORE), run(BEFORE))).sentence == (
        "the two are alike: there is no change to describe"
    )
    other = describe_change(TwoRecordings.of(run(BEFORE), run(AFTER, gpu="AMD Y")))
    assert other.sentence == "no what-if was tried: the recordings differ in device"
    adam = describe_change(TwoRecordings.of(run(BEFORE, optimizer="SGD"), run(AFTER, optimizer="Adam")))
    assert adam.sentence == "no what-if was tried: the recordings differ in optimizer"


def test_what_both_tell_is_accounted_for() -> None:
    def told(one: dict[str, Any], other: dict[str, Any]) -> tuple[set[str], list[set[str]]]:
        found = told_changes(GraphInfo(**one), GraphInfo(**other))
        return set(found.ruled_out), [set(group) for group in found.asked_for]

    def precision(autocast: str | None, matmul: str = "ieee") -> dict[str, Any]:
        table = {"autocast": autocast, "parameters": "float32", "matmul": matmul, "conv": "ieee"}
        return {"recorded": facts_of({"precision": table})}

    launched = {"compile", "cuda_graph"}
    assert told({}, {}) == (launched, [])  # every recording shows how it was launched
    assert told({"batch_size": 8}, {"batch_size": 8}) == (launched | {"batch_size"}, [])
    assert told({"batch_size": 8}, {"batch_size": 4}) == (launched, [{"batch_size"}])
    assert told({"batch_size": 8}, {}) == (launched, [])
    assert told({}, {"execution": ("compiled",)}) == (set(), [launched])
    assert told(precision(None), precision(None)) == (launched | {"amp", "tf32"}, [])
    assert told(precision(None), precision("bfloat16")) == (launched | {"tf32"}, [{"amp"}])
    assert told(precision(None), precision(None, "tf32")) == (launched | {"amp"}, [])
    assert told({"recorded": facts_of({"precision": 7})}, precision(None)) == (launched, [])
    optimizer = [{"recorded": facts_of({"optimizer": {"foreach": value, "fused": None}})} for value in (False, True)]
    assert told(optimizer[0], optimizer[0]) == (launched | {"fused_adam"}, [])
    assert told(optimizer[0], optimizer[1]) == (launched, [])
    both = told_changes(GraphInfo(batch_size=8), GraphInfo(batch_size=4, execution=("compiled",)))
    assert both.satisfied_by(frozenset(("batch_size", "cuda_graph")))
    assert not both.satisfied_by(frozenset(("batch_size", "amp")))


def test_a_change_that_is_told_is_not_described_by_another() -> None:
    """Loading went away, which data_loading describes; with another batch recorded beside it, it alone does not."""
    before, after = run(BEFORE, loading_ns=5 * MS), run(BEFORE, loading_ns=1, loads_in_processes=True)
    assert describe_change(TwoRecordings.of(before, after)).found is not None
    told = (graph.replace(info=replace(graph.info, batch_size=n)) for graph, n in ((before, 8), (after, 12)))
    assert describe_change(TwoRecordings.of(*told)).found is None


def test_facts_tell_the_options() -> None:
    def pair(before: TaskGraph, after: TaskGraph) -> tuple[float | None, int | None]:
        sides = Baseline.of(before), Baseline.of(after)
        return batch_factor(*sides), accumulated_passes(*sides)

    def with_flops(graph: TaskGraph, factor: float) -> TaskGraph:
        return graph.replace(flops=(graph.duration_ns * factor).astype("int64"))

    told = run(BEFORE, batch_size=8), run(BEFORE, batch_size=12)
    assert pair(*told) == (1.5, None)
    assert pair(*told[::-1]) == (pytest.approx(2 / 3), None)
    plain = run(BEFORE)
    assert pair(with_flops(plain, 1000), with_flops(plain, 8000)) == (8, None)
    assert pair(with_flops(plain, 8000), with_flops(plain, 1000)) == (0.125, None)
    assert pair(with_flops(plain, 1000), with_flops(plain, 1350)) == (None, None)  # no batch grows so
    assert pair(plain, run(BEFORE * 4)) == (None, 4)


@pytest.mark.parametrize(
    ("recording", "what_if"),
    [
        ("transformer_cpu.json.gz", "fused_adam"),
        ("transformer_cpu.json.gz", "batch_size:factor=2"),
        ("transformer_cpu.json.gz", "activation_checkpoint"),
        ("resnet18_cifar_cpu.json.gz", "amp:target=bf16"),
    ],
)
def test_a_run_that_is_exactly_what_a_what_if_says_is_recognised(
    own_traces: Path, recording: str, what_if: str
) -> None:
    graph = whatif.read(str(own_traces / recording))
    prediction = whatif.apply(graph, what_if, calibrated=False)
    clock = prediction.baseline.clock
    times_ns = {clock: prediction.timeline.step_times_ns(clock)}
    # What the recorder wrote is of the unchanged run.
    info = replace(prediction.graph.info, measured_step_ns=times_ns, recorded=Recorded())
    changed = prediction.graph.replace(info=info)
    found = describe_change(TwoRecordings.of(graph, changed, calibrated=False))
    assert found.fits[0].transforms[0].name == what_if.partition(":")[0]
    assert found.fits[0].left == pytest.approx(0, abs=1e-6)
    assert found.found is not None


@pytest.mark.parametrize(
    ("before", "after", "what_if", "undone"),
    [
        ("resnet18_cifar_cpu", "resnet18_cifar_cpu_bf16", "amp:target=bf16", False),
        ("resnet18_cifar_cpu_bf16", "resnet18_cifar_cpu", "amp:target=bf16", True),
        ("resnet18_cifar_cpu", "resnet18_cifar_cpu_batch64", "batch_size:factor=2", False),
        ("resnet18_cifar_cpu", "resnet18_cifar_cpu_batch16", "batch_size:factor=0.5", False),
        ("resnet18_cifar_cpu_loader0", "resnet18_cifar_cpu_loader2", "data_loading", False),
        ("transformer_cpu", "transformer_cpu_fused", "fused_adam", False),
        ("transformer_cpu_fused", "transformer_cpu", "fused_adam", True),
        ("transformer_cpu", "transformer_cpu_foreach", None, False),  # 6 % slower; the model of foreach says faster
        ("campaign_cpu/gpt2-small--baseline.trace", "campaign_cpu/gpt2-small--batch_x0.5.trace",
         "batch_size:factor=0.5", False),
        ("campaign_cpu/resnet50--baseline.trace", "campaign_cpu/resnet50--channels_last.trace",
         "channels_last", False),
        ("campaign_cpu/gnmt--baseline.trace", "campaign_cpu/gnmt--accumulate_x4.trace",
         "gradient_accumulation:passes=4", False),
        # The machine ran at another pace: 0.83, 0.79, 0.85, 1.90 and 0.85 times as long for the same work.
        ("campaign_cpu/resnet50--baseline.trace", "campaign_cpu/resnet50--accumulate_x4.trace",
         "gradient_accumulation:passes=4", False),
        ("campaign_cpu/resnet50--baseline.trace", "campaign_cpu/resnet50--bn_eval.trace", "batch_norm_eval", False),
        ("campaign_cpu/bert-base--baseline.trace", "campaign_cpu/bert-base--checkpoint.trace",
         "activation_checkpoint", False),
        ("campaign_cpu/gnmt--adam_foreach.trace", "campaign_cpu/gnmt--adam_fused.trace", "fused_adam", False),
        ("campaign_cpu/vgg19--baseline.trace", "campaign_cpu/vgg19--accumulate_x4.trace",
         "gradient_accumulation:passes=4", False),
        # Nothing was changed between two lots, and between these two something that no what-if stands for.
        ("campaign_cpu/gnmt--baseline.trace", "campaign_cpu_2/gnmt--baseline.trace", None, False),
        ("campaign_cpu/vgg19--baseline.trace", "campaign_cpu/vgg19--offload.trace", None, False),
        ("campaign_cpu/densenet121--baseline.trace", "campaign_cpu/densenet121--adam_foreach.trace", None, False),
        # Two changes at once.
        ("resnet18_cifar_cpu_loader0", "resnet18_cifar_cpu_bf16", "data_loading + amp:target=bf16", False),
        ("resnet18_cifar_cpu_bf16", "resnet18_cifar_cpu_loader0", "data_loading + amp:target=bf16", True),
        ("resnet18_cifar_cpu_batch64", "resnet18_cifar_cpu_bf16", "amp:target=bf16 + batch_size:factor=0.5", False),
        ("resnet18_cifar_cpu_loader0", "resnet18_cifar_cpu_batch64", "batch_size:factor=2 + data_loading", False),
        ("campaign_cpu/resnet50--loader_0.trace", "campaign_cpu/resnet50--accumulate_x4.trace",
         "gradient_accumulation:passes=4 + data_loading", False),
    ],
)  # fmt: skip
def test_own_pairs(own_traces: Path, before: str, after: str, what_if: str | None, undone: bool) -> None:
    two = TwoRecordings.of(*(whatif.read(str(own_traces / f"{name}.json.gz")) for name in (before, after)))
    found = describe_change(two).found
    assert (found.spelled if found else None) == what_if
    assert found is None or found.undone == undone


def test_another_pace_alone_is_said(own_traces: Path) -> None:
    files = [own_traces / folder / "resnet50--baseline.trace.json.gz" for folder in ("campaign_cpu_3", "campaign_cpu")]
    two = TwoRecordings.of(*(whatif.read(str(file)) for file in files))
    assert abs(two.change_pct) > 30
    assert two.pace is not None
    assert describe_change(two).sentence == (
        f"the same program; the machine's pace changed: both make the same calls, and a call takes {two.pace:.2f} "
        "times as long in B (median)"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "recording", ["campaign_cpu/resnet50--bn_eval.trace", "transformer_cpu", "resnet18_cifar_cpu_loader0",
                  "campaign_cpu/gnmt--baseline.trace", "campaign_cpu_4/resnet50--compile.trace"],
)  # fmt: skip
def test_ten_runs_of_one_program_are_the_same_program(own_traces: Path, recording: str) -> None:
    """Each run takes its steps from the recorded ones, by chance, at a pace of its own."""
    graph = whatif.read(str(own_traces / f"{recording}.json.gz"))
    random = np.random.default_rng(7)
    said = []
    for _ in range(10):
        pair = [resampled(graph, random) for _ in range(2)]
        found = describe_change(TwoRecordings.of(*pair))
        said.append(found.sentence.partition(":")[0])
        assert found.found is None
        assert found.fits == ()
    assert "the same program; the machine's pace changed" in said


def resampled(graph: TaskGraph, random: np.random.Generator) -> TaskGraph:
    """The recording with the durations of each step's calls from another step, at another pace."""
    pace = random.lognormal(0, 0.15)
    by_step = [np.flatnonzero(graph.step == step) for step in range(graph.info.n_steps)]
    duration_ns = graph.duration_ns.copy()
    for tasks in by_step:
        source = by_step[random.integers(len(by_step))]
        if len(source) == len(tasks):
            duration_ns[tasks] = graph.duration_ns[source]
    duration_ns = np.rint(duration_ns * random.lognormal(np.log(pace), 0.1, len(graph))).astype(np.int64)
    changed = graph.replace(duration_ns=duration_ns, low_ns=duration_ns, high_ns=duration_ns)
    times_ns = simulate(changed).step_times_ns("mark")
    told = replace(graph.info, measured_step_ns={"mark": times_ns}, untraced_step_ns=None)
    return changed.replace(info=replace(told, recorded=told.recorded.without_untraced_step()))


def test_what_leads_to_other_tasks_is_no_description(own_traces: Path) -> None:
    """Channels-last takes time from the forward pass as checkpointing undone would, but no task."""
    names = ("baseline", "channels_last")
    files = [own_traces / "campaign_cpu" / f"vgg19--{name}.trace.json.gz" for name in names]
    found = describe_change(TwoRecordings.of(*(whatif.read(str(file)) for file in files)))
    assert found.found is not None
    assert found.found.spelled == "channels_last"
    assert not any("activation_checkpoint" in fit.names for fit in found.fits)


def test_the_loader_pair_of_others(shared_traces: Path) -> None:
    folder = shared_traces / "kineto-resnet50-v100"
    files = [folder / f"num_workers_{workers}.2021-06.pt.trace.json.gz" for workers in (0, 4)]
    found = compare(TwoRecordings.of(*(whatif.read(str(file)) for file in files)))
    assert found.description is not None
    assert found.description.found is not None
    assert found.description.found.spelled == "data_loading"
    assert abs(found.description.found.error_pct) < 3
    assert found.two.change_ms == pytest.approx(-28.5, abs=1)
    (loading,) = (part for part in found.phases if part.name == "data")
    assert loading.change(lambda part: part.cpu_ms) == pytest.approx(-43, abs=2)
    # By hand, of the trace's own events: each step launches 1,462 and 1,478 kernels, 106 of them of batch norm.
    counts = {part.name: (part.before.tasks, part.after.tasks) for part in found.kernels if part.before and part.after}
    assert counts["normalization"] == (106, 106)
    launched = [count for name, count in counts.items() if name not in ("copy", "memset")]
    assert (sum(a for a, _ in launched), sum(b for _, b in launched)) == (1462, 1478)


def test_other_pairs_of_others(shared_traces: Path) -> None:
    def described(folder: str, *names: str) -> tuple[TwoRecordings, str]:
        two = TwoRecordings.of(*(whatif.read(str(shared_traces / folder / f"{name}.json.gz")) for name in names))
        return two, describe_change(two).sentence

    two, sentence = described("harryjmoss-a100-batch", "bs8.run1.pt.trace", "bs64.run1.pt.trace")
    assert two.noise_ms is None
    assert sentence.startswith("batch_size:factor=8 describes the change")
    two, sentence = described("harryjmoss-a100-batch", "bs8.run1.pt.trace", "bs8.run2.pt.trace")
    assert sentence == "the two are alike: there is no change to describe"
    bert = "gaunernst_bert-small-uncased__1016001"
    two, sentence = described("tracelens-h100-mi300", f"h100.{bert}", f"mi300.{bert}")
    assert [(item.what, item.blocks) for item in two.differences] == [("device", True)]
    assert sentence == "no what-if was tried: the recordings differ in device"
    two, sentence = described("modded-nanogpt-8xh100", "current.rank0", "hook.rank0")
    assert not sentence.startswith("no what-if was tried")
    assert "describes the change" not in sentence or sentence.startswith("no what-if")
