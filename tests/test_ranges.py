"""Ranges: what is shared adds up, what is independent adds as squares, and nothing is certain to the nanosecond."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.helpers import CHANNEL, CPU, STREAM, Build, benchmark, extra_data, replace
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import TaskKind
from whatif.models.durations.estimator import Source, mark
from whatif.prediction.predict import Baseline
from whatif.prediction.ranges import (
    GLOO_SLOWED,
    PREDICTED_SHARE,
    RUN_TO_RUN,
    RUN_TO_RUN_GPU,
    RUN_TO_RUN_WORKERS,
    SCALED_REST_GPU,
    combined_shares,
    error_sums,
    run_to_run,
    shares_beside,
    simulated_at,
    spread_of_steps,
)
from whatif.questions.validate.validate_records import StepTime
from whatif.questions.validate.validate_truth import paced, spread_pct, unpaced


def row(*bounds: tuple[int, int], source: tuple[Source, ...], kind: TaskKind = TaskKind.CPU_OP) -> TaskGraph:
    """Return tasks of 1,000 ns each on one thread, whose bounds lie so far below and above, by their sources."""
    build = Build(CPU)
    for place in range(len(bounds)):
        build.task(0, 1_000, f"op{place}", kind)
    graph = build.graph()
    below, above = np.array(bounds).T
    graph = graph.replace(low_ns=graph.duration_ns - below, high_ns=graph.duration_ns + above)
    return mark(graph, np.arange(len(bounds)), np.array(source))


def shares(graph: TaskGraph) -> tuple[float, float]:
    below, above = combined_shares(error_sums(graph))
    return float(below[0]), float(above[0])


def test_errors_of_one_source_add_up() -> None:
    assert shares(row((100, 300), (300, 100), source=(Source.ASSUMED,) * 2)) == pytest.approx((1.0, 1.0))


def test_errors_of_two_sources_add_as_squares() -> None:
    """300 and 400 ns make 500 of 700."""
    below, above = shares(row((300, 0), (400, 100), source=(Source.ASSUMED, Source.ROOFLINE)))
    assert (below, above) == pytest.approx((5 / 7, 1.0))


def test_families_of_a_predicted_step_are_wrong_independently() -> None:
    """Bounds of 300 and 400 ns of two families: a share of 500 is left below; above nothing is wide."""
    build = Build(CPU, STREAM, metadata={"predicted": {"cpu_range_factor": 2.0, "low_ns": [], "high_ns": []}})
    for name in ("a product", "a sum"):
        build.task(1, 1_000, name, TaskKind.KERNEL)
    graph = build.graph()
    graph = graph.replace(
        family=np.array([0, 1], dtype=np.int8),
        low_ns=graph.duration_ns - np.array([300, 400]),
        high_ns=graph.duration_ns,
    )
    below, above = combined_shares(error_sums(graph))
    assert below[0] == pytest.approx(PREDICTED_SHARE[0] * 500 / 700)
    assert above[0] == 1


def test_operators_measured_alone_share_the_caches_only() -> None:
    """50 ns of each 1,000 are the caches', for all of them; of 350 and 450 ns the rest is each operator's own."""
    below, _ = shares(row((350, 0), (450, 0), source=(Source.MEASURED,) * 2))
    assert below == pytest.approx(math.hypot(100, math.hypot(300, 400)) / 800)
    # Within that nothing is an operator's own.
    assert shares(row((40, 0), (30, 0), source=(Source.MEASURED,) * 2))[0] == pytest.approx(1.0)


def test_the_repetitions_of_an_operator_are_wrong_together() -> None:
    once = row((350, 0), (450, 0), source=(Source.MEASURED,) * 2)
    again = once.replace(name=np.zeros_like(once.name))
    assert shares(again)[0] == pytest.approx(math.hypot(100, 700) / 800)


def test_without_bounds_nothing_is_divided() -> None:
    assert shares(row((0, 0), source=(Source.RECORDED,))) == (1.0, 1.0)


def test_a_collective_beside_a_cpu_is_not_slowed_as_nccls_is() -> None:
    build = Build(CPU, CHANNEL)
    build.task(0, 1_000, "op", TaskKind.CPU_OP)
    build.task(1, 1_000, "all-reduce", TaskKind.COMMUNICATION)
    graph = build.graph()
    graph = mark(graph.replace(high_ns=graph.duration_ns + 400), np.array([1]), Source.PAPER)
    assert simulated_at(graph).high_ns.tolist() == [1_400, 1_000 + round(400 * GLOO_SLOWED)]
    build = Build(STREAM, CHANNEL)
    build.task(0, 1_000, "kernel", TaskKind.KERNEL)
    build.task(1, 1_000, "all-reduce", TaskKind.COMMUNICATION)
    on_gpu = build.graph()
    on_gpu = mark(on_gpu.replace(high_ns=on_gpu.duration_ns + 400), np.array([1]), Source.PAPER)
    assert simulated_at(on_gpu) is on_gpu


def test_two_runs_differ_by_who_computes_and_who_waits() -> None:
    alone, several, on_gpu = Build(CPU), Build(CPU, CHANNEL), Build(CPU, STREAM)
    for build in (alone, several, on_gpu):
        build.task(0, 1_000, "op", TaskKind.CPU_OP, step=0)
    on_gpu.task(1, 1_500, "kernel", TaskKind.KERNEL, step=0)
    steps_ns = np.array([2_000.0, 1_000.0])
    for build, expected in (
        (alone, [RUN_TO_RUN] * 2),
        (several, [RUN_TO_RUN_WORKERS] * 2),
        (on_gpu, [0.75 * RUN_TO_RUN_GPU + 0.25 * RUN_TO_RUN, RUN_TO_RUN_GPU]),
    ):
        graph = build.graph()
        assert run_to_run(graph, error_sums(graph), steps_ns, 1).tolist() == pytest.approx(expected)


def test_a_gpu_without_step_marks_varies_like_a_gpu() -> None:
    """Its kernels counted only if they were in a step: +-5 %, the range of a CPU, in place of 2."""
    unmarked = Build(CPU, STREAM)
    unmarked.task(0, 100, "op", TaskKind.CPU_OP)
    unmarked.task(1, 1_000, "kernel", TaskKind.KERNEL)
    graph = unmarked.graph()
    assert run_to_run(graph, error_sums(graph), np.array([1_000.0]), 1).tolist() == [RUN_TO_RUN_GPU]


@pytest.mark.parametrize(
    "parts",
    [
        ("triosim-vgg13-h100", "vgg13_bs512_adam.json.gz"),
        ("tracelens-h100-mi300", "mi300.resnet_act_checkpoint_ddp_train.json.gz"),
    ],
)
def test_the_gpu_is_busy_in_a_span_whatever_its_steps(parts: tuple[str, ...]) -> None:
    baseline = Baseline.of(whatif.read(extra_data("traces", *parts)), calibrated=False)
    assert baseline.clock == "span"
    answer = whatif.apply(baseline)
    assert answer.high_ms / answer.predicted_ms - 1 < 0.03


def test_few_steps_show_less_than_many() -> None:
    assert spread_of_steps(()) == spread_of_steps((7,)) == (0.0, 0.0)
    assert spread_of_steps((90, 100, 120) * 10) == pytest.approx((0.1, 0.2))
    assert spread_of_steps((80, 90, 100, 110, 120)) == pytest.approx((1 - 0.9**2, 2 * 0.1))


def test_no_range_begins_at_zero_however_busy_the_machine_was() -> None:
    """Twice a lower quartile distance of 80 % was 160 % of the step: its range began at 0.00 ms."""
    assert spread_of_steps((10, 20, 100, 300, 100))[0] == pytest.approx(1 - 0.2**2)


@pytest.mark.parametrize("what_if", ["scale:factor=1", "fused_adam:to=foreach", "scale:factor=0.5"])
def test_no_range_of_a_recording_has_zero_width(what_if: str, own_traces: Path) -> None:
    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    for prediction in (whatif.apply(baseline), whatif.apply(baseline, what_if)):
        assert prediction.low_ms <= prediction.predicted_ms * (1 - RUN_TO_RUN)
        assert prediction.high_ms >= prediction.predicted_ms * (1 + RUN_TO_RUN)


# -- what was measured -------------------------------------------------------------------------------------------------


def test_the_measured_step_is_paced_by_rounds_and_kept_raw() -> None:
    """The machine is twice as slow in the second of three rounds: each ratio is 0.5, the raw medians' is not."""
    baseline, changed = StepTime(10, 9, 11, (10, 20, 8)), StepTime(10, 9, 11, (5, 10, 4))
    truth = paced(replace(changed, median_ms=5), baseline)
    assert (truth.step.median_ms, truth.raw_ms, truth.spread_pct, truth.paced) == (5.0, 5, 0.0, True)
    assert paced(changed, StepTime(10, 9, 11)).spread_pct is None
    assert unpaced(changed, baseline).step is changed
    assert (unpaced(changed, baseline).spread_pct or 0) > 10


def test_the_spread_of_a_median_shrinks_with_rounds() -> None:
    few, many = (spread_pct([90.0, 100.0, 110.0] * count) for count in (1, 20))
    assert few > 2 * many > 0
    assert spread_pct([100.0] * 5) == 0.0


# -- leaving pairs out -------------------------------------------------------------------------------------------------


def test_the_floor_is_fitted_without_the_pair_that_it_is_scored_on() -> None:
    """Nine pairs miss by 2 %, one by 11: with it the floor holds all ten, without it only the nine."""
    ranges = benchmark("ranges")
    missed = np.array([0.02] * 9 + [0.11])
    below = np.broadcast_to(ranges.FLOORS[:, None], (len(ranges.FLOORS), 10))
    outside = np.maximum(missed - below, 0)
    pairs = ranges.Scored(
        (None,) * 10, 2 * below, 2 * below + ranges.MISS * outside, outside == 0, np.zeros(10, dtype=bool)
    )
    everything = np.ones(10, dtype=bool)
    assert ranges.FLOORS[ranges.fitted(pairs, everything)[0]] <= ranges.WIDEST / 2
    inside, width = ranges.left_out(pairs)
    assert inside.tolist() == [True] * 9 + [False]
    assert width[-1] == pytest.approx(0.04)


def test_an_error_that_two_steps_share_leaves_their_ratio_alone() -> None:
    """Kernels 30 % off in both steps: 5 % of the ratio is left; an exact reference leaves the step's own range."""
    many, one = (200.0, 140.0, 260.0), (100.0, 70.0, 130.0)
    assert shares_beside(many, one, on_gpu=True) == pytest.approx((SCALED_REST_GPU, SCALED_REST_GPU))
    assert shares_beside(many, (100.0, 100.0, 100.0), on_gpu=True) == pytest.approx((0.3, 0.3))
    wider = (200.0, 100.0, 300.0)
    assert shares_beside(wider, one, on_gpu=True)[0] == pytest.approx(math.sqrt(0.5**2 - 0.3**2 + SCALED_REST_GPU**2))
    assert shares_beside((100.0, 99.0, 101.0), one, on_gpu=True) == pytest.approx((0.01, 0.01))
    # Without computation: 1 % of its own, and the reference from 0.7 to 1.3 times.
    below, above = shares_beside((100.0, 99.0, 101.0), one, on_gpu=True, share=0.0)
    assert (1 - below, 1 + above) == pytest.approx((1 / 1.3, 1 / 0.7), abs=1e-3)
