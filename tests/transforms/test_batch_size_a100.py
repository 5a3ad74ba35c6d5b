"""The batch-size model against two public recordings: a transformer's forward pass on an A100, 8 and 64 samples.

Neither recording entered the model: its constants are the floor of all kernels, the share of the roofline that the
best kernels reach, and what the recording's own idle kernels take.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest

import whatif
from whatif import Prediction
from whatif.models.durations.estimator import device
from whatif.models.durations.occupancy import filled, latency_ns
from whatif.prediction.predict import Baseline

RUNS = (0, 1, 2)
# Milliseconds that the GPU is busy, all runs within 0.04 of it, and the span on the host.
BUSY_MS = {8: 6.27, 64: 16.07}
BOUND = 0.10


@pytest.fixture(scope="module")
def baselines(shared_traces: Path) -> dict[int, list[Baseline]]:
    """As recorded: neither size was measured without the profiler."""

    def of_run(size: int, run: int) -> Baseline:
        path = shared_traces / "harryjmoss-a100-batch" / f"bs{size}.run{run}.pt.trace.json.gz"
        return Baseline.of(whatif.read(path), calibrated=False)

    return {size: [of_run(size, run) for run in RUNS] for size in BUSY_MS}


def predict(baselines: dict[int, list[Baseline]], recorded: int, wanted: int) -> list[Prediction]:
    return [whatif.apply(baseline, f"batch_size:factor={wanted / recorded}") for baseline in baselines[recorded]]


def test_the_recordings_are_what_their_page_says(baselines: dict[int, list[Baseline]]) -> None:
    for size, busy_ms in BUSY_MS.items():
        for baseline in baselines[size]:
            assert baseline.breakdown.gpu_busy_ms == pytest.approx(busy_ms, abs=0.04)
            assert baseline.measured_ns == pytest.approx(31.5e6, rel=0.04)


@pytest.mark.parametrize(("recorded", "wanted"), [(8, 64), (64, 8)])
def test_busy_time_and_span_of_the_other_size(baselines: dict[int, list[Baseline]], recorded: int, wanted: int) -> None:
    for prediction in predict(baselines, recorded, wanted):
        for changed in baselines[wanted]:
            assert prediction.breakdown.gpu_busy_ms == pytest.approx(changed.breakdown.gpu_busy_ms, rel=BOUND)
            assert prediction.predicted_ms == pytest.approx(changed.measured_ns / 1e6, rel=BOUND)


@pytest.mark.parametrize(("recorded", "wanted"), [(8, 64), (64, 8)])
def test_the_range_of_the_busy_time_holds_it(baselines: dict[int, list[Baseline]], recorded: int, wanted: int) -> None:
    for prediction in predict(baselines, recorded, wanted):
        graph = prediction.graph
        low_ms, high_ms = (float(column[graph.on_gpu].sum()) / 1e6 for column in (graph.low_ns, graph.high_ns))
        assert low_ms <= BUSY_MS[wanted] <= high_ms
        # Wide enough to say something.
        assert high_ms - low_ms <= 0.6 * BUSY_MS[wanted]


def test_the_prediction_needs_occupancy(baselines: dict[int, list[Baseline]]) -> None:
    """Without occupancy all time but the shortest kernel's is proportional to the batch, with a large error."""
    baseline = baselines[8][0]
    graph = baseline.graph
    blind = graph.replace(warps=np.full(len(graph), -1, dtype=np.int64))
    busy_ms = whatif.apply(Baseline(blind, baseline.timeline, baseline.clock), "batch_size:factor=8")
    assert busy_ms.breakdown.gpu_busy_ms > 2 * BUSY_MS[64]


def test_the_a100_idles_between_its_kernels(baselines: dict[int, list[Baseline]]) -> None:
    for size in BUSY_MS:
        graph = baselines[size][0].graph
        share = filled(graph, device(graph), np.flatnonzero(graph.on_gpu))
        assert np.isfinite(share).sum() > 500
        # A kernel of a block or two takes 6 us here, three times the floor.
        assert 5_500 < latency_ns(graph, device(graph)) < 7_000


def test_every_kernel_by_itself_is_mostly_within_its_range(baselines: dict[int, list[Baseline]]) -> None:
    """Kernels of the same place in both recordings: seven in ten lie within their range, by time."""
    small, large = baselines[8][0].graph, baselines[64][0].graph
    predicted = whatif.apply(baselines[8][0], "batch_size:factor=8").graph
    names = [[g.names[code] for code in g.name[g.kind == whatif.TaskKind.KERNEL].tolist()] for g in (small, large)]
    blocks = SequenceMatcher(None, *names, autojunk=False).get_matching_blocks()
    first, second = (
        np.concatenate([np.arange(block[side], block[side] + block.size) for block in blocks]) for side in (0, 1)
    )
    a, b = (np.flatnonzero(g.kind == whatif.TaskKind.KERNEL) for g in (small, large))
    a, b = a[first], b[second]
    assert len(a) > 350
    measured = large.duration_ns[b]
    inside = (predicted.low_ns[a] * 0.95 <= measured) & (measured <= predicted.high_ns[a] * 1.05)
    assert measured[inside].sum() >= 0.7 * measured.sum()
