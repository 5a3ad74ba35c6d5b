"""Steps that differ: by hand, from a public recording whose loader stutters, and through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import whatif
from tests.helpers import launched, mark, op, read_events, with_metadata, write_trace
from whatif.cli.main import main
from whatif.prediction.baseline import Baseline
from whatif.questions.uneven_steps import UnevenSteps, uneven_steps
from whatif.report.text_steps import reasons


def compared(graph: whatif.TaskGraph) -> UnevenSteps:
    return uneven_steps(graph, Baseline.of(graph, calibrated=False))


def steps_of_a_cpu(folder: Path, pauses_us: list[int], loads_us: list[int]) -> whatif.TaskGraph:
    """Steps of a batch, 1,000 us of an operator and a pause of the garbage collector, where it has one.

    ::

        ProfilerStep  |-load-|-aten::mm (1000)-|-gc-|
    """
    events, at = [], 0
    for number, (pause_us, load_us) in enumerate(zip(pauses_us, loads_us, strict=True)):
        length = load_us + 1000 + pause_us + 10
        events.append(mark(f"ProfilerStep#{number}", at, length))
        events.append(mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 1, load_us - 1))
        events.append(op("aten::mm", at + load_us + 1, 1000))
        if pause_us:
            events.append(mark("whatif::gc generation 2", at + load_us + 1005, pause_us))
        at += length
    return read_events(folder, events)


def test_pauses_and_loading_are_distinguished(tmp_path: Path) -> None:
    found = compared(steps_of_a_cpu(tmp_path, [0, 0, 500, *[0] * 7], [100, 100, 100, 100, 400, *[100] * 5]))
    slow = {step.step: step for step in found.steps if step.slow}
    assert {number: list(step.more_of) for number, step in slow.items()} == {
        2: ["garbage collection"],
        4: ["data loading"],
    }
    assert slow[2].more_of["garbage collection"] == pytest.approx(0.5)
    assert slow[4].more_of["data loading"] == pytest.approx(0.3)
    assert found.median_ms == pytest.approx(1.11)
    assert "2 slow, 0.80 ms above the median together" in found.headline


def test_waiting_for_a_slow_rank_is_told(tmp_path: Path) -> None:
    """Rank 1 computes for 500 us longer in step 2: the other one's slow step had more of nothing."""
    for rank in (0, 1):
        events, at = [], 0.0
        for step in range(5):
            length = 600 if step == 2 else 100
            own = length - 50 if rank else 50
            events += [
                mark(f"ProfilerStep#{step}", at, length),
                *launched("gemm", at + 1, 3, at + 5, own, 2 * step + 1),
                *launched("ncclDevKernel_AllReduce", at + 5, 3, at + 6 + own, length - 20 - own, 2 * step + 2),
            ]
            at += length
        info = {"rank": rank, "world_size": 2}
        write_trace(tmp_path / f"rank{rank}.json", events, distributedInfo=info)
    found = compared(whatif.read(tmp_path))
    slow = {step.step: step.more_of for step in found.steps if step.slow}
    assert slow.keys() == {2}
    assert slow[2]["waiting for other ranks"] == pytest.approx(0.5)


def test_retries_of_the_allocator_are_reported(tmp_path: Path) -> None:
    graph = steps_of_a_cpu(tmp_path, [0, 0, 0, 500, 0, 0], [100] * 6)
    found = compared(with_metadata(graph, allocator_retries=[0, 0, 1, 3, 0, 0]))
    assert [step.allocator_retries for step in found.steps] == [0, 1, 3, 0]
    assert "the allocator ran out of memory and tried again 3 times" in found.headline
    assert reasons(found.steps[2], str).endswith("3 retries of the allocator")
    assert found.to_dict()["steps"][2]["allocator_retries"] == 3


def test_even_steps_have_no_reasons(tmp_path: Path) -> None:
    found = compared(steps_of_a_cpu(tmp_path, [0] * 6, [100] * 6))
    assert not any(step.slow or step.more_of for step in found.steps)
    assert "none takes 5 % more than the median" in found.headline


def test_a_loader_that_stutters(shared_traces: Path) -> None:
    """28 steps of a ResNet on an RTX 2080 Ti: by the marks around the loader, half of them wait for a batch."""
    found = compared(whatif.read(shared_traces / "param-2080ti" / "resnet_kineto.json.gz"))
    slow = [step for step in found.steps if step.slow]
    assert len(found.steps) == 28
    assert len(slow) >= 10
    assert all(next(iter(step.more_of)) == "data loading" for step in slow)
    assert found.mean_ms > 1.5 * found.median_ms


def test_steps_that_do_not_spread(shared_traces: Path) -> None:
    found = compared(whatif.read(shared_traces / "modded-nanogpt-8xh100" / "current.rank0.json.gz"))
    assert max(step.ms for step in found.steps) / min(step.ms for step in found.steps) < 1.04


def test_the_command(own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, plot = str(own_traces / "transformer_cpu.json.gz"), tmp_path / "steps.svg"
    assert main(["explain", "--by", "step", trace, "--plot", str(plot)]) == 0
    assert "What each step holds" in capsys.readouterr().out
    assert plot.read_text(encoding="utf-8").count("<svg") == 1
    assert main(["explain", "--by", "step", trace, "--json"]) == 0
    (step, *_) = json.loads(capsys.readouterr().out)["steps"]
    assert {"step", "step_ms", "slow", "times_ms", "more_of", "allocator_retries"} == set(step)
    assert main(["explain", "--by", "step", "--sensitivity", trace]) == 2


def test_a_what_if_that_changes_some_steps_is_doubted(tmp_path: Path) -> None:
    graph = steps_of_a_cpu(tmp_path, [0] * 8, [100] * 8)

    def every_third(graph: whatif.TaskGraph) -> whatif.TaskGraph:
        return graph.scale(graph.select(name="mm") & (graph.step % 3 != 0), 0.1)

    def all_alike(graph: whatif.TaskGraph) -> whatif.TaskGraph:
        return graph.scale(graph.select(name="mm"), 0.1)

    (sentence,) = whatif.apply(graph, every_third).doubts  # of six steady steps four take 210 us, two 1,110 us
    assert sentence == (
        "some steps change more than others (the mean of the predicted ones is 2.43 times the median); "
        "the median step is predicted"
    )
    assert not whatif.apply(graph, all_alike).doubts
    uneven = steps_of_a_cpu(tmp_path, [0] * 8, [100, 100, 100, 400, 100, 100, 400, 100])  # 1.09 times the median
    assert not whatif.apply(uneven, lambda graph: graph.scale(graph.select(name="mm"), 0.8)).doubts  # 1.11 times
