"""Causes of a difference between two steps: by hand, on a recording with one slower layer, and on public pairs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.compared import AFTER, BEFORE, MS, run
from tests.helpers import replace
from whatif.cli.main import main
from whatif.questions.comparison.causes import Cause, cause_of
from whatif.questions.comparison.compare import compare
from whatif.questions.comparison.regression import Status, check_regression
from whatif.questions.comparison.two_recordings import TwoRecordings
from whatif.report.text_check import markdown
from whatif.report.text_compare import markdown as comparison_markdown
from whatif.simulation.simulator import simulate


def test_the_kernels_of_a_layer() -> None:
    found = compare(TwoRecordings.of(run(BEFORE), run(AFTER)), describe=False)
    assert str(found.cause) == "kernels, 6.00 → 6.50 ms of the critical path; largest change: layer g (+2.50 ms)"


def test_loading_comes_before_what_the_path_only_runs_through_now() -> None:
    """With 9 ms of loading the path leaves the GPU: the calls on it did not grow."""
    found = check_regression(TwoRecordings.of(run(BEFORE), run(BEFORE, loading_ns=9 * MS)), 3.0)
    assert found.status is Status.REGRESSED
    assert "; cause: data loading, 0.00 → 9.00 ms of the critical path" in found.verdict
    assert markdown(found).splitlines()[2].startswith("Cause: data loading, 0.00 → 9.00 ms")


def test_a_comparison_for_a_pull_request(capsys: pytest.CaptureFixture[str], own_traces: Path) -> None:
    """It holds the change, what describes it, the cause, both tables with ``--top`` rows each, and the warnings."""
    paths = [str(own_traces / f"resnet18_cifar_cpu_loader{n}.json.gz") for n in (2, 0)]
    assert main(["compare", *paths, "--markdown", "--top", "2"]) == 0
    shown = capsys.readouterr()
    sections = shown.out.strip().split("\n\n")
    assert sections[0].startswith("**")
    assert sections[1].startswith("data_loading undone describes the change")
    assert sections[2].startswith("Cause: data loading, ")
    assert [section.split(" ms a step |")[0] for section in sections[3:6]] == [
        "| critical path,",
        "| layers that changed most,",
        "| operators that changed most,",
    ]
    assert [len(section.splitlines()) for section in sections[4:6]] == [4, 4]
    assert sections[6].startswith("> ")
    assert shown.err == ""


def test_a_recording_puts_no_tag_into_markdown() -> None:
    """A layer called ``<b>g`` stays text, in the sentence of the cause as in the tables."""
    same, slower = (
        run([(name, ns, "<b>g" if layer == "g" else layer, family) for name, ns, layer, family in side])
        for side in (BEFORE, AFTER)
    )
    shown = comparison_markdown(compare(TwoRecordings.of(same, slower), describe=False))
    assert "largest change: layer &lt;b>g (+2.50 ms)." in shown
    assert "<b>" not in shown


def test_a_path_that_changed_its_way_is_no_cause() -> None:
    rerouted = Cause("Python and the framework", 0.0, 40.0, work_ms=1.0)
    loading = Cause("data loading", 0.0, 30.0, work_ms=30.0)
    assert cause_of([rerouted, loading], 28.0) is loading
    assert cause_of([rerouted], 28.0) is None


def test_a_layer_that_became_slower_is_named(own_traces: Path) -> None:
    """Every operator of one of the three largest layers takes 20 % longer."""
    graph = whatif.read(own_traces / "resnet18_cifar_cpu.json.gz")
    work = np.bincount(graph.layer, weights=graph.duration_ns * graph.on_cpu.mask, minlength=len(graph.layers))
    work[0] = 0
    for code in np.argsort(-work)[:3].tolist():
        slower = graph.scale((graph.layer == code) & graph.on_cpu.mask, 1.2)
        timeline = simulate(slower)
        measured = {clock: timeline.step_times_ns(clock) for clock in graph.info.measured_step_ns}
        slower = slower.replace(info=replace(slower.info, measured_step_ns=measured))
        found = check_regression(TwoRecordings.of(graph, slower, calibrated=False), 0.1)
        assert found.grown[0].name == graph.layers[code]
        assert f"largest change: layer {graph.layers[code]} " in str(found.causes[0])


def test_a_cpu_makes_no_calls_to_a_gpu(own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The calls that gloo is inserted with were called "CUDA / HIP calls" by all that name kinds of tasks."""
    recording, spread = str(own_traces / "lab_pipeline_cpu" / "mlp.trace.json.gz"), str(tmp_path / "spread.json.gz")
    assert main(["export", recording, "distributed:workers=4", "-o", spread, "--quiet"]) == 0
    for command in (["check", "--baseline", recording], ["explain"], ["info"]):
        capsys.readouterr()
        main([*command, spread])
        shown = capsys.readouterr().out
        assert "communication calls" in shown
        assert "CUDA" not in shown


@pytest.mark.parametrize(
    ("folder", "cause"), [("sleeping", "Python and the framework"), ("twice_the_batch", "operators")]
)
def test_a_rank_that_is_not_the_first_holds_all_up(folder: str, cause: str, own_traces: Path) -> None:
    """The first rank works as long as before: what grew is on the path through the other one."""
    graphs = [whatif.read_ranks([own_traces / "ranks_cpu" / name]).graph for name in ("even", folder)]
    for two, sign in ((TwoRecordings.of(*graphs), "+"), (TwoRecordings.of(*graphs[::-1]), "-")):
        found = compare(two, describe=False).cause
        assert found is not None
        assert found.name == cause
        assert f"({sign}" in found.where


@pytest.mark.parametrize("version", ["2020-12", "2021-06"])
def test_the_loader_pairs_of_others(version: str, shared_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both steps grew by 24 %: without loader workers the step waits for its batch."""
    files = [
        str(shared_traces / "kineto-resnet50-v100" / f"num_workers_{n}.{version}.pt.trace.json.gz") for n in (4, 0)
    ]
    assert main(["check", "--baseline", *files]) == 1
    assert "; cause: data loading, " in capsys.readouterr().out.splitlines()[0]
    assert main(["check", "--baseline", *files, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["causes"][0]["change_ms"] != 0
    assert main(["check", "--baseline", *files, "--markdown"]) == 1
    assert "| data loading |" in capsys.readouterr().out
    assert main(["compare", *files, "--markdown", "--top", "2"]) == 0
    shown = capsys.readouterr()
    assert "\nCause: data loading, " in shown.out
    assert "| critical path, ms a step | A | B | change | most in |" in shown.out
    assert "warning" not in shown.err


def test_noise_of_steps_that_wait_for_other_ranks(shared_traces: Path) -> None:
    """By the GPU's clock these steps spread by 100 %, by their marks by less than 4."""
    folder = shared_traces / "modded-nanogpt-8xh100"
    two = TwoRecordings.of(*(whatif.read(folder / f"{name}.rank0.json.gz") for name in ("current", "hook")))
    assert two.noise_pct is not None
    assert two.noise_pct <= 4
