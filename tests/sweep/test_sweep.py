"""Sweeps: what is simulated at once equals every prediction by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, need, replace
from whatif import TaskGraph, WhatifError, load_transform
from whatif.prediction.baseline import Baseline
from whatif.prediction.transform import Transform
from whatif.questions.sweep import Sweep, parse_vary, sweep
from whatif.questions.sweep.batch import pieces
from whatif.report.text_sweep import headline

# Lines are drawn through whole nanoseconds: each of up to some thousand transfers may be off by half of one.
WITHIN_MS = 1e-3


def swept(baseline: Baseline, names: list[str], *vary: str, jobs: str | int = 1) -> Sweep:
    transforms = [load_transform(name) for name in names]
    return sweep(baseline, transforms, [parse_vary(text, transforms) for text in vary], jobs=jobs)


@pytest.fixture(scope="module")
def resnet(own_traces: Path) -> Baseline:
    return Baseline.of(whatif.read(own_traces / "resnet18_cifar_cpu.json.gz"))


@pytest.fixture(scope="module")
def loader(shared_traces: Path) -> Baseline:
    return Baseline.of(whatif.read(shared_traces / "kineto-resnet50-v100" / "num_workers_0.2021-06.pt.trace.json.gz"))


def assert_equals_single_predictions(found: Sweep, names: list[str]) -> None:
    for point in found.points:
        options = dict(zip(found.options, point.values, strict=True))
        transforms = [load_transform(names[0], **options), *(load_transform(name) for name in names[1:])]
        single = whatif.apply(found.baseline, *transforms)
        assert point.step_ms == pytest.approx(single.predicted_ms, abs=WITHIN_MS)
        assert point.low_ms == pytest.approx(single.low_ms, rel=1e-6, abs=2 * WITHIN_MS)
        assert point.high_ms == pytest.approx(single.high_ms, rel=1e-6, abs=2 * WITHIN_MS)


@pytest.mark.parametrize("clock", ["mark", "span"])
def test_many_bandwidths_at_once_on_a_cpu(resnet: Baseline, clock: str) -> None:
    baseline = Baseline.of(resnet.graph, clock, calibrated=False)
    found = swept(baseline, ["distributed"], "bandwidth=50Mbps..40Gbps:12")
    assert_equals_single_predictions(found, ["distributed"])


def test_many_bandwidths_at_once_on_a_gpu(loader: Baseline) -> None:
    names = ["distributed:gradient_mb=102"]
    found = swept(loader, names, "bandwidth=1Gbps..400Gbps:9")
    assert_equals_single_predictions(found, names)


def test_two_options_give_every_combination(resnet: Baseline) -> None:
    found = swept(resnet, ["distributed", "amp"], "workers=2,16", "bandwidth=100Mbps..10Gbps:8")
    assert [point.values for point in found.points[:2]] == [("2", "100Mbps"), ("2", "193.07Mbps")]
    assert len(found.points) == 16
    assert_equals_single_predictions(found, ["distributed", "amp"])


def test_what_is_no_line_is_still_right(resnet: Baseline) -> None:
    # Buckets change with their size: another graph for every value.
    found = swept(resnet, ["distributed:bandwidth=1Gbps"], "bucket_mb=0.5,1,2,4,8,16,25")
    assert_equals_single_predictions(found, ["distributed:bandwidth=1Gbps"])
    assert len({round(point.step_ms or 0, 3) for point in found.points}) > 3


def test_a_schedule_of_its_own_is_asked_at_every_value(resnet: Baseline) -> None:
    found = swept(resnet, ["p3"], "bandwidth=1Gbps,2Gbps,4Gbps,8Gbps,10Gbps,16Gbps")
    assert_equals_single_predictions(found, ["p3"])


def test_a_value_where_it_does_not_apply_keeps_its_reason(resnet: Baseline) -> None:
    found = swept(resnet, ["p3"], "workers=1,2")
    assert found.points[0].step_ms is None
    assert "expected 2 workers or more" in found.points[0].reason
    assert found.best is found.points[1]


def test_a_count_that_fits_says_nothing_of_the_next(resnet: Baseline) -> None:
    """Without latencies the durations are a line over 1 / workers; 9 and 17 fill no equal nodes all the same."""
    found = swept(resnet, ["distributed:cluster=dgx-a100,latency_us=0"], "workers=8,9,16,17,24,25,32")
    assert [point.step_ms is None for point in found.points] == [False, True, False, True, False, True, False]


@pytest.mark.parametrize("values", ["10Gbps,1Gbps", "1Gbps"])
def test_a_note_says_of_which_value_it_is(resnet: Baseline, values: str) -> None:
    """A network that is said to be slow is that of one row of the table, whether rows are simulated at once or not."""
    (note,) = swept(resnet, ["distributed:workers=8"], f"bandwidth={values}").notes
    assert note.startswith("at bandwidth=10Gbps: distributed: " if "," in values else "distributed: ")
    assert ("8 at 9.5 Gbit/s" if "," in values else "8 at 0.95 Gbit/s") in note
    (note,) = swept(resnet, ["distributed"], "workers=1,2").notes
    assert note.startswith("at workers=1: distributed: one worker has no other")


def test_values_that_are_one_in_several_spellings(resnet: Baseline) -> None:
    found = swept(resnet, ["distributed"], "bandwidth=1Gbps,1000Mbps,0.001Tbps,1.0Gbps,1e9bps,1000000Kbps")
    assert len({point.step_ms for point in found.points}) == 1
    assert_equals_single_predictions(found, ["distributed"])


def test_samples_are_those_of_each_value(resnet: Baseline) -> None:
    found = swept(resnet, ["batch_size"], "factor=1,2,3,4,5,6,7,8")
    assert_equals_single_predictions(found, ["batch_size"])
    for factor, point in enumerate(found.points, 1):
        assert point.samples_per_s == pytest.approx(1e3 * 32 * factor / point.step_ms)  # type: ignore[operator]


def test_the_best_batch_is_that_of_the_most_samples_a_second(resnet: Baseline) -> None:
    """Half the batch has the shortest step and wastes time: what people want of a batch is throughput."""
    found = swept(resnet, ["batch_size"], "factor=0.5,1,2")
    assert found.by_throughput
    assert found.best is found.points[2]
    assert found.best.samples_per_s == max(point.samples_per_s or 0 for point in found.points)
    assert [found.times_as_fast(point) for point in found.points] == pytest.approx(
        [(point.samples_per_s or 0) / (1e3 * 32 / (resnet.step_ns / 1e6)) for point in found.points]
    )
    assert headline(found).startswith("batch_size: most samples a second with factor=2: ")
    as_dict = found.to_dict()
    assert as_dict["best_by"] == "samples_per_s"
    assert as_dict["best"]["factor"] == "2"
    # One batch on as many workers: the step compares them, as without a batch.
    same = swept(resnet, ["distributed:workers=4"], "bandwidth=1Gbps,100Gbps")
    assert not same.by_throughput
    assert same.best is same.points[1]
    assert headline(same).startswith("distributed:workers=4: shortest with bandwidth=100Gbps: ")
    assert swept(resnet, ["distributed"], "workers=1,2,4").by_throughput


def test_where_nothing_applies_the_reason_is_raised(resnet: Baseline) -> None:
    with pytest.raises(WhatifError, match="from 1 to 100,000 workers"):
        swept(resnet, ["distributed"], "workers=0,-1")


def test_text_values_are_predicted_one_by_one(resnet: Baseline) -> None:
    found = swept(resnet, ["scale:factor=0.5"], "kind=gpu,cpu")
    assert [point.values for point in found.points] == [("gpu",), ("cpu",)]


def graph_of(durations: list[int]) -> TaskGraph:
    """A CPU thread that launches kernels of those durations, one after the other, and does nothing else."""
    build = Build(CPU, STREAM)
    for duration_ns in durations:
        build.task(0, 10)
        build.task(1, duration_ns)
    return build.graph()


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=8),
    st.lists(st.floats(0.5, 2000), min_size=8, max_size=8),
    st.sampled_from(["value", "reciprocal", "corner", "square"]),
)
def test_pieces_are_those_of_every_graph_by_itself(base: list[int], slopes: list[float], law: str) -> None:
    """Lines are found over the value or its reciprocal, a corner is cut, and a square is left to be simulated."""
    x = np.linspace(1.0, 4.0, 24)
    laws = {"value": x, "reciprocal": 1 / x, "corner": np.maximum(x, 2.5), "square": x**2}

    def graph_at(place: int) -> TaskGraph:
        return graph_of([round(b + s * laws[law][place]) for b, s in zip(base, slopes, strict=False)])

    covered: set[int] = set()
    for piece in pieces(x, graph_at, "span"):
        for place, step_ns in zip(piece.places.tolist(), piece.steps.predicted_ns.tolist(), strict=True):
            alone = whatif.simulate(graph_at(place)).step_times_ns("span")
            assert step_ns == pytest.approx(alone[0], abs=2 * len(base) + 2)
            covered.add(place)
    if law in ("value", "reciprocal"):
        assert covered == set(range(24))


def test_other_processes_give_the_same(resnet: Baseline) -> None:
    values = "bucket_mb=1,4,25"
    assert swept(resnet, ["distributed"], values, jobs=2).points == swept(resnet, ["distributed"], values).points


def test_a_script_of_ones_own_is_loaded_again_in_each_process(resnet: Baseline, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        '"""Mine: everything takes so many times as long."""\n'
        "def transform(graph, *, factor: float = 1.0):\n"
        "    return graph.scale(graph.on_cpu, factor)\n"
    )
    found = swept(resnet, [str(script)], "factor=0.5,2,3", jobs=2)
    assert found.points[1].step_ms == pytest.approx(2 * resnet.step_ns / 1e6, rel=1e-3)


def test_a_dask_cluster_gives_the_same(resnet: Baseline) -> None:
    distributed = need("distributed")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as one:
        found = swept(resnet, ["distributed"], "bucket_mb=1,4", jobs=f"dask:{one.scheduler_address}")
    assert found.points == swept(resnet, ["distributed"], "bucket_mb=1,4").points


def test_a_function_cannot_be_sent_to_another_process(resnet: Baseline) -> None:
    def halve(graph: TaskGraph, *, factor: float = 0.5) -> TaskGraph:
        return graph.scale(graph.on_cpu, factor)

    mine = Transform("halve", "halve", "", halve)
    with pytest.raises(WhatifError, match="which other processes can load"):
        sweep(resnet, [mine], [parse_vary("factor=0.5,1", [mine])], jobs=2)
    for nothing in (0, "slurm", "dask:", "-1"):
        with pytest.raises(WhatifError, match="expected a number of processes, dask:ADDRESS or ray:ADDRESS"):
            swept(resnet, ["distributed"], "bucket_mb=1,2", jobs=nothing)


def test_steps_of_unknown_batches_are_compared_by_sample(resnet: Baseline) -> None:
    """One worker was best, as its step is the shortest; that of four trains four times as many samples."""
    unknown = Baseline.of(resnet.graph.replace(info=replace(resnet.graph.info, batch_size=None)))
    names = ["distributed:bandwidth=100Gbps", "gradient_accumulation"]
    for vary in ("distributed.workers=1,2,4", "gradient_accumulation.passes=1,2,4"):
        found, known = (swept(baseline, names, vary) for baseline in (unknown, resnet))
        assert [point.samples_per_s for point in found.points] == [None] * 3
        assert [point.share for point in found.points] == [point.share for point in known.points]
        assert found.best is not None
        assert known.best is not None
        assert found.best.values == known.best.values == ("4",)
        assert found.times_as_fast(found.best) == pytest.approx(known.times_as_fast(known.best))
        assert found.to_dict()["best_by"] == "samples_per_s"
        assert headline(found).split(" with ")[0].endswith("most samples a second")
