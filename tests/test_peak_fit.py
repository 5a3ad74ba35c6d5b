"""Whether a step fits: its predicted peak decides, and only the end of the range of that is a doubt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

import whatif
from whatif.cli.main import main
from whatif.graph.info import GraphInfo
from whatif.prediction.baseline import Baseline
from whatif.prediction.peak_fit import doubt_of, fits, high_peak_bytes, peak_range_bytes
from whatif.prediction.transform import load_transform
from whatif.questions.advice.trial import Trial, Trier
from whatif.questions.memory_summary import memory_summary
from whatif.questions.plan.search import asked_of, plan, simulated
from whatif.report.text_plan import reasons

PREDICTED = Path(__file__).parents[1] / "traces" / "predicted" / "gpt2_h100_predicted.json.gz"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((100, 106, 106), True), ((100, 106, 105), None), ((100, 106, 100), None), ((100, 106, 99), False),
        ((100, None, 100), True), ((None, None, 100), None), ((100, 106, None), None),
    ],
)  # fmt: skip
def test_the_predicted_peak_decides(sizes: tuple[int | None, int | None, int | None], expected: bool | None) -> None:
    assert fits(*sizes) is expected
    assert bool(doubt_of("amp", *sizes)) == (expected is None and None not in sizes)


def test_what_leaves_recorded_allocations_as_they_are_has_no_range(own_traces: Path) -> None:
    info: GraphInfo = whatif.read(own_traces / "memory_cpu" / "gpt2-small.trace.json.gz").info
    most = info.peak_bytes
    assert most is not None
    assert high_peak_bytes(info, most) == most
    assert high_peak_bytes(info, most - 1) == peak_range_bytes(most - 1)[1] > most


def test_the_recorded_batch_is_the_largest_one_without_a_doubt(
    own_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It "may need up to" 6 % more than was recorded, while the same page said that the step fits."""
    trace = str(own_traces / "memory_cpu" / "gpt2-small.trace.json.gz")
    most = whatif.read(trace).info.peak_bytes
    assert most is not None
    words = ["memory", trace, "--capacity", str(most / 2**20) + "MiB", "--solve", "batch"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["largest_batch"]["high_bytes"]) == (True, most)
    assert main(words) == 0
    assert "The peak is that of the recording. A GPU's context" in capsys.readouterr().out


def test_advise_memory_and_plan_judge_alike() -> None:
    """A device with as much memory as the predicted peak: each lists the step, and says that it may not fit."""
    graph = whatif.read(PREDICTED)
    amp = load_transform("amp")
    tried = Trier(Baseline.of(graph)).attempt([amp])
    assert isinstance(tried, Trial)
    assert tried.peak_bytes is not None
    for capacity, expected in ((tried.peak_bytes - 1, False), (tried.peak_bytes, None), (2 * tried.peak_bytes, True)):
        baseline = Baseline.of(graph.replace(info=replace(graph.info, gpu_memory_bytes=capacity)))
        trier = Trier(baseline)
        assert trier.fits(tried) == (expected is not False)
        assert bool(trier.doubt(tried)) == (expected is None)
        assert memory_summary(baseline, ["amp"]).fits_each == (expected,)


def test_a_plan_that_fits_by_its_predicted_peak_alone_says_so() -> None:
    baseline = Baseline.of(whatif.read(PREDICTED))
    asked = asked_of(baseline, 1)
    best = plan(baseline, [asked]).best
    assert best.fits is True
    assert best.peak_bytes is not None
    tight = structs.replace(asked, memory_bytes=best.peak_bytes)
    row = simulated(baseline, structs.replace(best, asked=tight))
    assert row.fits is None
    assert row.to_dict()["fits"] is None
    found = plan(baseline, [tight])
    assert found.best.peak_bytes == best.peak_bytes
    said = [
        text for text in reasons(found) if text.startswith("the best plan: the predicted peak fits; a run may need")
    ]
    assert len(said) == 1
