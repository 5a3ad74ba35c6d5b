"""``whatif advise`` on recordings: what it says first, and that every trial is what ``whatif apply`` predicts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import whatif
from tests.advice_by_hand import gains
from whatif.prediction.predict import Baseline, apply
from whatif.prediction.transform import built_in_names, load_transform
from whatif.questions.advice.advise import Advice, advise
from whatif.questions.advice.trial import Refusal, Trier
from whatif.questions.advice.warm_up import warm_up
from whatif.report.text import print_prediction
from whatif.report.text_advise import print_advice


def of_trace(path: Path, *, calibrated: bool = True) -> Advice:
    return advise(Baseline.of(whatif.read(path), calibrated=calibrated))


def test_a_trial_is_what_apply_predicts(own_traces: Path) -> None:
    """The same step and the same range, for what-ifs alone and together, whatever the kept graphs are."""
    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    found = advise(baseline, top=3)
    assert found.together
    for entry in (*found.gaining[:3], *found.together[:3]):
        prediction = apply(baseline, *entry.trial.spelled)
        assert entry.trial.predicted_ms == prediction.predicted_ms
        assert entry.range_ms == (prediction.low_ms, prediction.high_ms)
    assert all(entry.range_ms is None for entry in found.gaining[3:])


def test_kept_graphs_are_few(own_traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    amp, fused, batch = (load_transform(spec) for spec in ("amp", "fused_adam", "batch_size:factor=2"))
    monkeypatch.setattr("whatif.questions.advice.trial.KEPT_TASKS", 2 * len(baseline.graph))
    trier = Trier(baseline)
    for composition in ([amp], [amp, fused], [amp, fused, batch], [amp, batch], [batch]):
        trier.attempt(composition)
        assert len(trier._kept) <= 2


def test_a_step_that_waits_for_its_data_is_advised_to_load_it_elsewhere(shared_traces: Path) -> None:
    """As recorded, since the pair was measured with the profiler on both sides."""
    path = shared_traces / "kineto-resnet50-v100" / "num_workers_0.2021-06.pt.trace.json.gz"
    found = of_trace(path, calibrated=False)
    assert found.verdict[0].startswith("Loading-bound: the step waits for its data for 44.51 of 149.68 ms")
    assert found.verdict[1].startswith("Do first: data_loading:workers=4 (DataLoader(num_workers=4")
    assert gains(found.gaining)["data_loading:workers=4"] == pytest.approx(100 * (1 - 122.5 / 149.68), abs=3)
    page = " ".join((Path(__file__).parent.parent / "docs" / "advise.md").read_text(encoding="utf-8").split())
    assert all(sentence in page for sentence in found.verdict[:2])
    # Half precision alone adds launches to a step that waits for the CPU.
    assert gains(found.not_gaining)["amp:target=fp16"] < 0
    assert any({"amp", "data_loading"} <= entry.trial.names for entry in found.together)


def test_the_page_shows_what_apply_prints(shared_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = whatif.read(shared_traces / "kineto-resnet50-v100" / "num_workers_0.2021-06.pt.trace.json.gz")
    print_prediction(apply(graph, "amp", "fused_adam", "channels_last", calibrated=False))
    text = capsys.readouterr().out
    block = text[text.index("Gain of each, ms") :].split("\n\n")[0]
    page = (Path(__file__).parent.parent / "docs" / "advise.md").read_text(encoding="utf-8")
    assert block in page


def test_a_host_bound_run_is_advised_to_launch_less(shared_traces: Path) -> None:
    trace = shared_traces / "tracelens-h100-mi300" / "h100.gaunernst_bert-small-uncased__1016001.json.gz"
    found = of_trace(trace)
    assert found.verdict[0].startswith("Host-bound: the GPU is busy 0.31 of 2.48 ms (12 %)")
    same = [entry for entry in found.gaining if entry.trial.same_training]
    assert same[0].trial.work.cpu_ms < 0.5 * Trier(found.baseline).work.cpu_ms
    assert same[0].trial.names <= {"cuda_graph", "compile"}
    assert found.first is not None
    assert found.first.trial.names <= {"cuda_graph", "compile"}


@pytest.mark.parametrize(
    ("trace", "where"),
    [
        ("hta/mi250_minitoy_train.json.gz", "6.54 of 8.82 ms (74 %) is one stretch of CPU time in hipLaunchKernel"),
        ("hta/alexnet_fwd_a100.json.gz", "9,064.26 of 12,919.04 ms (70 %) are 2 stretches of CPU time, the longest in"),
        ("kineto-resnet50-v100/num_workers_4.2021-06.pt.trace.json.gz", ""),
        ("triosim-vgg13-h100/vgg13_bs512_adam.json.gz", ""),
        ("harryjmoss-a100-batch/bs8.run0.pt.trace.json.gz", ""),
    ],
)
def test_first_steps_are_distinguished_from_later_ones(shared_traces: Path, trace: str, where: str) -> None:
    found = warm_up(Baseline.of(whatif.read(shared_traces / trace)))
    assert found.startswith(where)
    assert bool(found) == bool(where)


def test_what_stands_still_gains_little_from_more_passes(shared_traces: Path) -> None:
    found = of_trace(shared_traces / "hta" / "a100_dlrm_rank0of16.json.gz")
    assert found.verdict[0].startswith("Waiting: the step is idle for 143.92 of 216.15 ms (67 %)")
    assert 0 <= gains(found.gaining).get("gradient_accumulation", 0) < 5


def test_a_run_in_fp8_is_not_advised_to_use_it(shared_traces: Path) -> None:
    found = of_trace(shared_traces / "modded-nanogpt-8xh100" / "current.rank0.json.gz")
    assert ("fp8",) in [refused.spelled for refused in found.refused if refused.why == Refusal.IN_PART]


def test_a_gpu_bound_run_is_advised_to_compute_in_half_precision(shared_traces: Path) -> None:
    found = of_trace(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    assert found.verdict[0].startswith("GPU-bound: ")
    assert found.first is not None
    assert found.first.trial.names <= {"amp", "channels_last"}
    assert found.gaining[0].trial.names <= {"amp", "channels_last"}
    # 3.55 of 347 ms of GPU work are the update's, and its launches are hidden.
    assert 0 <= gains(found.not_gaining)["fused_adam"] < 1
    assert "is not on the critical path" in next(
        entry.reason for entry in found.not_gaining if entry.trial.spelled == ("fused_adam",)
    )


@pytest.mark.parametrize(
    "trace", ["resnet18_cifar_cpu.json.gz", "resnet18_cifar_cpu_loader0.json.gz", "transformer_cpu_fused.json.gz"]
)
def test_advice_for_own_recordings(own_traces: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = of_trace(own_traces / trace)
    assert not [refused for refused in found.refused if refused.why == Refusal.FAILED]
    listed = [*found.gaining, *found.not_gaining, *found.too_large]
    shown = {entry.trial.names for entry in listed} | {frozenset(t.name for t in r.transforms) for r in found.refused}
    assert frozenset().union(*shown) | set(found.hypothetical) >= set(built_in_names())
    best = [entry.trial.gain_pct for entry in found.gaining]
    assert best == sorted(best, reverse=True)
    assert min(best) >= 1
    for entry in found.gaining:
        low, high = entry.gain_range_pct or (0.0, 0.0)
        assert low <= entry.trial.gain_pct <= high
    print_advice(found)
    text = capsys.readouterr().out
    assert text.startswith("CPU-bound: the recording has no GPU work")
    assert "Do first: " in text
    if "fused" in trace:
        assert "fused_adam" not in gains(found.gaining)


def test_all_of_it_takes_five_seconds_at_most(shared_traces: Path) -> None:
    baseline = Baseline.of(whatif.read(shared_traces / "hta" / "v100_allreduce_rank1of2.json.gz"))
    began = time.thread_time()
    assert advise(baseline).gaining
    assert time.thread_time() - began < 5
