"""One rank of several on a CPU, read alone: gloo's collectives are communication, not work of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import whatif
from whatif.graph.types import TaskKind, ThreadKind
from whatif.ingest.integrity import TRANSFERS
from whatif.prediction.baseline import Baseline
from whatif.questions.explain import explain
from whatif.simulation.simulator import simulate


def test_waits_for_the_other_rank_are_communication(own_traces: Path) -> None:
    """The other rank sleeps 40 ms ahead of each step: this one was "CPU-bound"."""
    graph = whatif.read(own_traces / "ranks_cpu" / "sleeping" / "rank0.json.gz")
    baseline = Baseline.of(graph)
    found = explain(baseline)
    assert found.verdict.startswith("communication-bound: the step waits for communication, or for other ranks in it,")
    assert found.critical_path_ms["communication"] > 40
    assert baseline.step_ms == pytest.approx(139.22, abs=0.05)
    assert whatif.apply(baseline, "distributed:workers=1").predicted_ms < baseline.step_ms - 40


def test_it_is_read_alone_as_the_one_chosen_of_its_run(own_traces: Path) -> None:
    folder = own_traces / "ranks_cpu" / "twice_the_batch"
    alone, chosen = whatif.read(folder / "rank0.json.gz"), whatif.read_ranks([folder], only=[0]).graph
    assert (alone.kind == TaskKind.COMMUNICATION).sum() == (chosen.kind == TaskKind.COMMUNICATION).sum() > 0
    spans = [simulate(graph).makespan_ns for graph in (alone, chosen)]
    assert spans[0] == spans[1]
    for graph in (alone, chosen):
        assert [finding.check for finding in graph.info.findings].count(TRANSFERS) == 1
    both = whatif.read(folder)
    assert TRANSFERS not in [finding.check for finding in both.info.findings]


def test_one_rank_chosen_of_several_waits_as_its_file_does(shared_traces: Path, own_traces: Path) -> None:
    """Its waits were "known" to be 0: transfers to other numbers of workers took longer, with a narrower range."""
    folder, even = shared_traces / "param-dlrm-8xv100", own_traces / "ranks_cpu" / "even"
    for file, chosen in (
        (folder / "rank6.json.gz", whatif.read_ranks(folder, only=[6])),
        (even / "rank0.json.gz", whatif.read_ranks(even, only=[0])),
    ):
        one, other = (whatif.apply(graph, "distributed:workers=16") for graph in (whatif.read(file), chosen.graph))
        assert one.to_dict() == other.to_dict()
        found = [explain(Baseline.of(graph)).collectives for graph in (whatif.read(file), chosen.graph)]
        assert found[0] == found[1]
        assert chosen.clock_offsets_ns == (0,)


@pytest.mark.parametrize("model", ["gpt2", "vgg"])
def test_other_numbers_of_workers_are_predicted_from_one_rank_as_from_all(model: str, own_traces: Path) -> None:
    folder = own_traces / "lab_ranks_cpu" / f"ranks-{model}-1000mbit-2"
    one, every = (
        whatif.apply(Baseline.of(whatif.read(path), calibrated=False), "distributed:workers=4").predicted_ms
        for path in (folder / "rank0.json.gz", folder)
    )
    assert one == pytest.approx(every, rel=0.01)


def test_threads_of_gloo_are_busy_while_they_transfer(own_traces: Path) -> None:
    timeline = simulate(whatif.read(own_traces / "ranks_cpu" / "even" / "rank0.json.gz"))
    gloo = [code for code, thread in enumerate(timeline.graph.threads) if thread.kind == ThreadKind.CHANNEL]
    transfers = timeline.graph.kind == TaskKind.COMMUNICATION
    assert gloo
    assert timeline.busy_ns[gloo].sum() == timeline.graph.duration_ns[transfers].sum() > 0
