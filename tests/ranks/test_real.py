"""Real ranks: eight GPUs of one host by others, and our own pairs over gloo."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import whatif
from whatif import TaskKind
from whatif.ingest.ranks.merge import COLLECTIVE, ranks_of
from whatif.ingest.ranks.read import Ranks, read_ranks
from whatif.prediction.predict import Baseline
from whatif.prediction.transform import load_transform
from whatif.questions.advice.trial import Trial
from whatif.questions.explain import explain
from whatif.questions.memory_summary import memory_summary
from whatif.questions.stragglers import report
from whatif.questions.sweep.scaling import scaling


@pytest.fixture(scope="module")
def dlrm(shared_traces: Path) -> Ranks:
    return read_ranks([shared_traces / "param-dlrm-8xv100"])


def pair(own_traces: Path, name: str) -> Ranks:
    return read_ranks([own_traces / "ranks_cpu" / name])


def test_eight_ranks_meet_in_every_collective(dlrm: Ranks) -> None:
    assert dlrm.numbers == tuple(range(8))
    assert dlrm.world_size == 8
    assert dlrm.matched.n_collectives == 8
    assert not any(dlrm.matched.unmatched)
    # One host: the clocks are one, and the ends of collectives say so within the trace's microsecond.
    assert max(map(abs, dlrm.clock_offsets_ns)) <= 3_000
    assert max(clock.spread_ns for clock in dlrm.clocks) <= 3_000
    operations = [dlrm.collectives[0].operation.count(name) for name in ("all_to_all", "all_reduce")]
    assert operations == [5, 3]


def test_eight_ranks_replay_and_most_of_their_communication_was_waiting(dlrm: Ranks) -> None:
    baseline = Baseline.of(dlrm.graph, calibrated=False)
    assert abs(baseline.replay_error_pct) < 0.5
    wait_ms, transfer_ms = dlrm.waits.wait_ns.sum() / 1e6, dlrm.waits.transfer_ns.sum() / 1e6
    assert wait_ms > 20 * transfer_ms
    # By one clock every rank's last task ends when it did.
    graph, timeline = dlrm.graph, baseline.timeline
    for rank in range(8):
        mine = (ranks_of(graph) == rank) & (graph.start_ns >= 0) & graph.on_gpu
        measured = (graph.start_ns + graph.duration_ns)[mine].max()
        assert timeline.end_ns[mine].max() == pytest.approx(measured, abs=200_000)


def test_faster_links_do_not_help_who_waits_for_peers(dlrm: Ranks) -> None:
    prediction = whatif.apply(dlrm.graph, "bandwidth:factor=10", calibrated=False)
    assert prediction.baseline_ms - prediction.predicted_ms < 0.3
    alone = whatif.apply(str_graph(dlrm), "bandwidth:factor=10", calibrated=False)
    assert alone.high_ms - alone.low_ms > 1  # one rank's recording does not show it
    assert prediction.high_ms - prediction.low_ms < (alone.high_ms - alone.low_ms) / 2


def str_graph(ranks: Ranks) -> whatif.TaskGraph:
    return whatif.read(ranks.paths[0])


def test_each_pass_meets_by_itself(dlrm: Ranks) -> None:
    """All-to-alls of the passes were once one meeting, so that the first pass waited for the last one."""
    passes = whatif.apply(dlrm.graph, "gradient_accumulation:passes=3", calibrated=False)
    number = np.abs(passes.graph.attached[COLLECTIVE])
    arrivals = np.unique(number[(number > 0) & (passes.graph.kind == TaskKind.WAIT)], return_counts=True)[1]
    assert arrivals.tolist() == [8] * (5 * 3 + 3)  # sums of gradients happen once
    assert 2 < passes.predicted_ms / passes.baseline_ms < 3.5


def test_what_a_what_if_says_of_some_ranks_names_them(dlrm: Ranks) -> None:
    """Lines that differed in a percentage once stood one below the other."""
    notes = whatif.apply(dlrm.graph, "distributed:workers=16", calibrated=False).notes
    assert [note for note in notes if "predicted on 16" in note] == [
        "distributed: recorded on 8 workers, predicted on 16, each with its recorded batch"
    ]
    stays = [note for note in notes if "stays as recorded" in note]
    assert len(stays) > 1
    assert all(note.startswith(("rank ", "ranks ")) for note in stays)


def test_without_one_rank_its_part_of_the_waiting_is_unknown(dlrm: Ranks) -> None:
    without = read_ranks([path for path in dlrm.paths if "rank7" not in path])
    assert without.numbers == tuple(range(7))
    assert any("1 of 8 ranks is missing (7)" in quirk for quirk in without.graph.info.quirks)
    assert without.waits.transfer_ns.sum() > dlrm.waits.transfer_ns[dlrm.matched.rank < 7].sum()


def test_the_order_of_the_files_changes_nothing(dlrm: Ranks) -> None:
    turned = read_ranks([*reversed(dlrm.paths)])
    assert turned.graph.info == dlrm.graph.info
    assert np.array_equal(turned.graph.duration_ns, dlrm.graph.duration_ns)
    assert np.array_equal(turned.waits.wait_ns, dlrm.waits.wait_ns)


@pytest.mark.parametrize("name", ["even", "twice_the_batch", "sleeping"])
def test_two_ranks_over_gloo_replay(own_traces: Path, name: str) -> None:
    ranks = pair(own_traces, name)
    assert ranks.matched.n_collectives == 25
    assert not any(ranks.matched.unmatched)
    graph = ranks.graph
    assert (graph.kind == TaskKind.COMMUNICATION).sum() == 50
    assert not graph.on_gpu.any()
    raw = Baseline.of(graph, calibrated=False)
    assert abs(raw.replay_error_pct) < 0.5
    calibrated = Baseline.of(graph)
    assert calibrated.calibration is not None
    assert calibrated.calibration.met


def test_the_straggler_is_found_with_what_it_does_longer(own_traces: Path) -> None:
    slow = pair(own_traces, "twice_the_batch")
    found = report(slow, Baseline.of(slow.graph))
    worst = found.stragglers[0]
    assert worst.rank == 1
    assert worst.late_ms > 0.2 * found.step_ms
    assert found.rows[0].waiting_ms > 5 * found.rows[1].waiting_ms
    named = {part.name for part in worst.excess}
    assert {"forward (CPU)", "backward (CPU)", "convolution (CPU)"} <= named
    asleep = pair(own_traces, "sleeping")
    worst = report(asleep, Baseline.of(asleep.graph, calibrated=False)).stragglers[0]
    assert worst.rank == 1
    assert worst.excess[0].of == "phase"
    assert worst.excess[0].ms == pytest.approx(40, rel=0.25)


def test_ranks_with_batches_of_their_own_train_the_samples_of_all(own_traces: Path) -> None:
    """Rank 0 has 16 samples a step, rank 1 has 32; they counted as twice those of rank 0."""
    graph = read_ranks([own_traces / "ranks_cpu" / "twice_the_batch"]).graph
    assert graph.info.samples == 48
    assert whatif.apply(graph, "batch_size:factor=0.5").graph.info.samples == 24
    assert whatif.apply(graph, "distributed:workers=4").graph.info.samples == 96


def test_one_worker_of_ranks_with_batches_of_their_own_trains_the_first_ones(own_traces: Path) -> None:
    """Rank 0's step of 16 samples counted as one of 24, and two workers as 1.03 times as fast as it."""
    graph = read_ranks([own_traces / "ranks_cpu" / "twice_the_batch"]).graph
    alone = whatif.apply(graph, "distributed:workers=1").graph.info
    assert alone.samples == 16
    assert alone.memory == graph.info.ranks[0].memory != graph.info.memory
    found = scaling(Baseline.of(graph), [load_transform("distributed")], [1, 2, 4])
    one, *more = found.rows
    assert found.throughput(one) == pytest.approx(1)
    for row in more:
        assert row.samples_per_s is not None
        assert one.samples_per_s is not None
        assert found.throughput(row) == pytest.approx(row.samples_per_s / one.samples_per_s)


def test_the_memory_of_ranks_is_that_of_the_one_that_needs_most(own_traces: Path) -> None:
    """It was the first rank's, which has half the batch, and so was the batch that was said to fit."""
    folder = own_traces / "ranks_cpu" / "twice_the_batch"
    capacity = 64 * 2**20
    own = [memory_summary(Baseline.of(whatif.read(path)), capacity_bytes=capacity) for path in sorted(folder.iterdir())]
    found = memory_summary(Baseline.of(whatif.read(folder)), ["batch_size:factor=0.5"], capacity_bytes=capacity)
    assert own[0].peak.total < own[1].peak.total == found.peak.total
    assert "The ranks differ: this is rank 1, which needs most." in found.caveats
    halved = found.what_ifs[0]
    assert isinstance(halved, Trial)
    assert halved.peak_bytes == pytest.approx(own[0].peak.total, rel=0.001)
    assert found.largest is not None
    assert own[1].largest is not None
    assert found.largest.samples == own[1].largest.samples


def test_a_folder_is_read_like_a_recording(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "ranks_cpu" / "even")
    assert len(graph.info.ranks) == 2
    assert len(graph) == len(pair(own_traces, "even").graph)


def test_the_step_without_the_straggler_is_that_of_the_even_run(own_traces: Path) -> None:
    even = pair(own_traces, "even").graph.info.untraced_step_ns
    assert even is not None
    slow = pair(own_traces, "twice_the_batch")
    prediction = whatif.apply(slow.graph, "balance_ranks")
    assert prediction.predicted_ms == pytest.approx(even / 1e6, rel=0.12)
    assert prediction.baseline_ms > 1.3 * prediction.predicted_ms


def test_a_folder_of_several_runs_is_refused(own_traces: Path, tmp_path: Path) -> None:
    for path in (own_traces / "ranks_cpu").glob("*/*.json.gz"):
        shutil.copy(path, tmp_path / f"{path.parent.name}.{path.name}")
    with pytest.raises(whatif.WhatifError, match="expected each rank once, got rank 0 in"):
        read_ranks([tmp_path])


@pytest.mark.parametrize("folder", ["ranks_cpu/twice_the_batch", "lab_ranks_cpu/ranks-gpt2-200mbit-4"])
def test_the_critical_time_of_collectives_is_that_of_all_ranks(own_traces: Path, folder: str) -> None:
    """The critical path goes through the transfers of the rank that is last: the table of the first showed 0."""
    found = explain(Baseline.of(whatif.read(own_traces / folder)))
    assert found.critical_path_ms["communication"] > 1
    critical_ms = sum(row.critical_ms for row in found.collectives)
    assert critical_ms == pytest.approx(found.critical_path_ms["communication"])


def test_ranks_that_were_not_read_take_part_in_collectives(own_traces: Path) -> None:
    """Those of three of four ranks were collectives among three, and other numbers of workers were refused."""
    folder = own_traces / "lab_ranks_cpu" / "ranks-vgg-1000mbit-4"
    every, some = (
        whatif.apply(Baseline.of(read_ranks(folder, only=only).graph, calibrated=False), "distributed:workers=8")
        for only in (None, [0, 2, 3])
    )
    assert every.speedup < 0.95
    assert some.predicted_ms == pytest.approx(every.predicted_ms, rel=0.01)


@pytest.mark.parametrize(("recorded", "factor", "measured"), [(200, 5, 1000), (1000, 0.2, 200)])
def test_a_shared_link_is_no_latency(own_traces: Path, recorded: int, factor: float, measured: int) -> None:
    """Small buckets wait on the link for large ones: most of the transfers seemed to be independent of the bandwidth.

    With five times the bandwidth 398 ms became 342, measured 156; with a fifth of it 156 became 181, measured 398.
    """
    folder = own_traces / "lab_ranks_cpu"
    found = whatif.apply(whatif.read(folder / f"ranks-gpt2-{recorded}mbit-2"), f"bandwidth:factor={factor}")
    step_ms = Baseline.of(whatif.read(folder / f"ranks-gpt2-{measured}mbit-2")).step_ms
    assert found.predicted_ms == pytest.approx(step_ms, rel=0.2)
