"""The GPU steps that ship are predicted: every command shows their kernels and says that they were not recorded."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import need
from whatif.cli.main import main
from whatif.graph.kernels import KernelFamily
from whatif.graph.types import Phase, TaskKind
from whatif.models.durations.estimator import Source
from whatif.models.kernels.batch import at_batch
from whatif.prediction.predict import Baseline, apply
from whatif.questions.advice.advise import advise
from whatif.report.text_advise import print_decision

FOLDER = Path(__file__).resolve().parent.parent / "traces" / "predicted"
STEPS = sorted(FOLDER.glob("*.json.gz"))
SAYS = "predicted, not recorded"


@pytest.fixture(params=STEPS, ids=lambda path: path.name.partition(".")[0])
def step(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_two_steps_ship() -> None:
    assert [path.name for path in STEPS] == ["gpt2_h100_predicted.json.gz", "resnet50_a100_predicted.json.gz"]


def test_a_step_is_small_and_holds_a_gpus_work(step: Path) -> None:
    assert step.stat().st_size <= 400_000
    graph = whatif.read(step)
    assert graph.info.is_predicted
    assert graph.info.n_steps == 4
    kinds = set(np.unique(graph.kind).tolist())
    assert {TaskKind.KERNEL, TaskKind.RUNTIME} <= kinds
    assert not graph.info.findings


VARIED = ["sweep", "device", "--vary", "to=V100-SXM-32,H100-SXM-80"]


@pytest.mark.parametrize(
    "command", [["info"], ["explain"], ["apply", "amp"], ["advise"], ["memory"], VARIED], ids=lambda words: words[0]
)
def test_commands_say_that_it_is_predicted(step: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = command
    words = [name, *rest, str(step)] if name == "apply" else [name, *rest[:1], str(step), *rest[1:]]
    assert main(words) == 0
    shown = capsys.readouterr()
    text = " ".join((shown.out + shown.err).split())
    assert SAYS in text
    if name in ("info", "explain", "advise"):
        assert "kernels" in text
    assert main([*words, "--json", "--quiet"]) == 0
    as_json: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert as_json.get("replay_error_pct") is None
    assert as_json.get("measured_ms") is None


@pytest.mark.parametrize(
    "what_if",
    [
        "tensor_parallel:workers=4", "batch_size:factor=2", "pipeline:stages=2,micro_batches=4",
        "pipeline:stages=4,micro_batches=8", "pipeline:stages=4,micro_batches=1",
    ],
)  # fmt: skip
def test_other_shapes_and_stages_of_a_predicted_step_are_as_certain(what_if: str) -> None:
    """Their operators are estimated anew, or summed: no error is added to that of the step itself."""
    baseline = Baseline.of(whatif.read(FOLDER / "gpt2_h100_predicted.json.gz"))
    itself, changed = apply(baseline), apply(baseline, what_if)
    assert changed.low_ms < changed.predicted_ms < changed.high_ms
    assert changed.high_ms / changed.low_ms < 1.1 * itself.high_ms / itself.low_ms


def test_a_larger_batch_moves_memory_at_the_rate_of_larger_tensors() -> None:
    """Batch norm with 8 times the samples: 9.3 times the time, because its tensors no longer fit the L2 cache.

    It was 7.8 times, as if more samples filled the machine better.
    """
    graph = whatif.read(FOLDER / "resnet50_a100_predicted.json.gz")
    norms = graph.on_gpu.mask & (graph.family == KernelFamily.NORMALIZATION)
    found = at_batch(graph, norms, 8.0)
    assert found.duration_ns.sum() > 8.5 * graph.duration_ns[norms].sum()
    assert np.all(found.source == Source.OTHER_DEVICES)


def test_report_and_export_say_it_too(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, timeline = tmp_path / "page.html", tmp_path / "timeline.json.gz"
    assert main(["report", str(step), "-o", str(page)]) == 0
    assert SAYS in page.read_text()
    assert "replayed against recorded" not in page.read_text()
    assert "predicted_elementwise" in page.read_text()
    assert page.read_text().count('class="made made-measured"') == 1  # the legend
    assert main(["export", str(step), "-o", str(timeline)]) == 0
    written = gzip.decompress(timeline.read_bytes()).decode()
    assert f"baseline ({SAYS})" in written
    shown = [event for event in json.loads(written)["traceEvents"] if event.get("name", "").startswith("predicted_")]
    kernels = whatif.read(step)
    assert len(shown) == np.count_nonzero(kernels.kind == TaskKind.KERNEL)
    capsys.readouterr()


@pytest.mark.slow
def test_the_script_makes_the_same_steps(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many tasks of each name; durations move with the models, and a file may lag behind by a tenth."""
    need("torch")
    from benchmarks.predicted_steps import make

    made = whatif.read(make(step.name.partition(".")[0], tmp_path))
    shipped = whatif.read(step)
    capsys.readouterr()
    again = "run `python -m benchmarks.predicted_steps`"
    for graph in (made, shipped):
        assert graph.info.is_predicted
    names = [sorted(np.array(graph.names)[graph.name[graph.on_gpu]].tolist()) for graph in (made, shipped)]
    assert names[0] == names[1], again
    times_ns = [np.median(graph.info.measured_step_ns["gpu"]) for graph in (made, shipped)]
    assert times_ns[0] == pytest.approx(times_ns[1], rel=0.1), again


@pytest.mark.parametrize(
    ("name", "held", "expected"),
    [
        # Some make it fit on one GPU; two passes of half the batch hold more gradients than half the batch alone.
        ("gpt2_h100", 4.0, ["batch_size:size=2 gradient_accumulation:passes=4", "activation_checkpoint",
                            "batch_size:size=4"]),
        # The parameters and what Adam keeps of them do not fit, whatever the batch.
        ("gpt2_h100", 1.2, []),
    ],
)  # fmt: skip
def test_advice_on_a_step_that_does_not_fit_begins_with_what_makes_it_fit(
    name: str, held: float, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    graph = whatif.read(FOLDER / f"{name}_predicted.json.gz")
    capacity = int(held * 2**30)
    baseline = Baseline.of(graph.replace(info=replace(graph.info, gpu_memory_bytes=capacity)))
    found = advise(baseline, top=1)
    assert [" ".join(entry.trial.spelled) for entry in found.making_fit] == expected
    assert all((entry.trial.peak_bytes or 0) <= capacity for entry in (*found.making_fit, *found.together))
    assert bool(found.together) == bool(expected)
    print_decision(found)
    text = " ".join(capsys.readouterr().out.split())
    assert ("What makes it fit" in text) == ("with which it fits" in text) == bool(expected)
    assert ("Nothing that was tried makes it fit" in text) == (not expected)


def test_more_gpus_are_advised_where_nothing_fits_on_one() -> None:
    """With 20 GiB of optimizer state in 12 GiB: shared by workers, and with half precision beside that."""
    graph = whatif.read(FOLDER / "gpt2_h100_predicted.json.gz")
    info = graph.info
    assert info.memory is not None
    info = replace(info, gpu_memory_bytes=12 * 2**30, memory=replace(info.memory, optimizer_state=20 * 2**30))
    found = advise(Baseline.of(graph.replace(info=info)))
    assert {entry.trial.transforms[0].name for entry in found.making_fit} == {"fsdp", "zero"}
    assert found.first is not None
    assert found.first.trial.workers > 1
    assert "times as many devices" in found.verdict[2]
    assert found.together
    assert all(entry.alone_pct[0] is not None for entry in found.together)


def test_passes_of_a_part_train_the_samples_of_a_step_of_unknown_batch() -> None:
    """Three passes of a third were 0.999999999999 of the samples: another batch, after all that keep it."""
    graph = whatif.read(FOLDER / "gpt2_h100_predicted.json.gz")
    baseline = Baseline.of(graph.replace(info=replace(graph.info, batch_size=None)))
    for passes in (3, 49):
        part = f"batch_size:factor={1 / passes!r}"
        assert apply(baseline, part, f"gradient_accumulation:passes={passes}").samples_factor == 1


def test_gradients_of_convolutions_on_another_gpu_are_estimated_apart() -> None:
    """A model of the V100 knows each gradient, none knows both, so the data sheet answered (2.11 for 2.02)."""
    graph = whatif.load_transform("device:to=V100-SXM2-32")(whatif.read(FOLDER / "resnet50_a100_predicted.json.gz"))
    convolutions = graph.on_gpu.mask & (graph.family == KernelFamily.CONVOLUTION)
    backward_ns, forward_ns = (
        graph.duration_ns[convolutions & (graph.phase == phase)].sum() for phase in (Phase.BACKWARD, Phase.FORWARD)
    )
    assert backward_ns == pytest.approx(2.02 * forward_ns, rel=0.02)
