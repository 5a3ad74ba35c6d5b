"""Shares of the peaks: never above 100 %, "–" where shapes are missing, and FLOPs as torch's own counter has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import launched, mark, need, op, write_trace
from whatif import Phase
from whatif.cli.main import main
from whatif.graph.kernels import KernelFamily
from whatif.models.durations.database import estimator_of
from whatif.opdb.rows import operators
from whatif.prediction.baseline import Baseline
from whatif.prediction.utilization import counted
from whatif.questions.efficiency import Efficiency, efficiency

RECORDINGS = (
    "triosim-vgg13-h100/vgg13_bs512_adam.json.gz",
    "tracelens-h100-mi300/h100.gaunernst_bert-small-uncased__1016001.json.gz",
    "tracelens-h100-mi300/h100.Falconsai_nsfw_image_detection__1016002.json.gz",
    "tracelens-h100-mi300/mi300.gaunernst_bert-small-uncased__1016001.json.gz",
    "tracelens-h100-mi300/mi300.Falconsai_nsfw_image_detection__1016002.json.gz",
    "tracelens-h100-mi300/mi300.resnet_act_checkpoint_ddp_train.json.gz",
    "modded-nanogpt-8xh100/current.rank0.json.gz",
    "hta/a100_dlrm_rank0of16.json.gz",
    "kineto-resnet50-v100/num_workers_4.2021-06.pt.trace.json.gz",
    "param-2080ti/linear_kineto.json.gz",
    "harryjmoss-a100-batch/bs64.run0.pt.trace.json.gz",
)


def used(path: Path, *, calibrated: bool = True) -> Efficiency:
    return efficiency(Baseline.of(whatif.read(path), calibrated=calibrated), top=10**6)


@pytest.mark.parametrize("name", RECORDINGS)
def test_no_row_is_above_its_peak(name: str, shared_traces: Path) -> None:
    found = used(shared_traces / name)
    for use in (*found.families, *found.layers, *found.phases):
        assert 0 <= (use.compute_pct or 0) <= 100
        assert 0 <= (use.memory_pct or 0) <= 100
        assert (use.bound == "") == (use.compute_pct is None and use.memory_pct is None)
    assert 0 <= (found.mfu_pct or 0) <= (found.hfu_pct or 0) <= 100


def a_product(folder: Path, shapes: dict[str, Any], us: float = 1000) -> Path:
    """One product of matrices on an A100, ``us`` a step of 2,000."""
    events = []
    for step in range(6):
        at = 2000 * step
        events.append(mark(f"ProfilerStep#{step}", at, 1999))
        events.append(op("aten::mm", at + 5, 40, **shapes))
        events += launched("ampere_bf16_s16816gemm_bf16_128x128", at + 10, 5, at + 30, us, step + 1)
    header = {"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000}]}
    return write_trace(folder / "mm.json", events, **header)


def test_by_hand(tmp_path: Path) -> None:
    """8,192 x 4,096 x 2,048 in bf16: 137.4 GFLOP in 1 ms is 137.4 TFLOP/s, 44.05 % of an A100's 312."""
    m, k, n = 8192, 4096, 2048
    shapes = {"Input Dims": [[m, k], [k, n]], "Input type": ["c10::BFloat16"] * 2}
    found = used(a_product(tmp_path, shapes), calibrated=False)
    (use,) = found.families
    flops, moved = 2 * m * k * n, 2 * (m * k + k * n + m * n)
    assert use.tflops == pytest.approx(flops / 1e9)
    assert use.compute_pct == pytest.approx(100 * flops / 1e9 / 312)
    assert use.intensity == pytest.approx(flops / moved)
    assert use.gbyte_s == pytest.approx(moved / 1e6)
    assert use.bound == "compute"
    assert found.mfu_pct == pytest.approx(100 * flops / 1e12 / 312 / (found.baseline.step_ns / 1e9))


def test_what_usual_kernels_save_is_what_the_database_says_of_the_shape(tmp_path: Path) -> None:
    """A product that takes 10 % longer than its range saves what is above its usual time; one inside it nothing."""
    sizes = {"batch": 1, "m": 8192, "n": 2048, "k": 4096}
    ops = operators("matmul", {name: [size] for name, size in sizes.items()}, name=["mm"], dtype=["bf16"])
    answer = estimator_of("A100-SXM-80").estimate(ops)
    usual_us, high_us = float(answer.t_s[0]) * 1e6, float(answer.high_s[0]) * 1e6
    shapes = {"Input Dims": [[8192, 4096], [4096, 2048]], "Input type": ["c10::BFloat16"] * 2}
    (slow,) = used(a_product(tmp_path, shapes, 1.1 * high_us), calibrated=False).families
    assert slow.usual_by == "shapes"
    assert slow.usual_saves_ms == pytest.approx((1.1 * high_us - usual_us) / 1e3, rel=1e-3)
    (fast,) = used(a_product(tmp_path, shapes, 0.99 * high_us), calibrated=False).families
    assert fast.usual_saves_ms == 0
    assert fast.usual_gain_ms is None


def test_kernels_predicted_by_the_database_are_as_fast_as_it_calls_usual(own_traces: Path) -> None:
    found = used(own_traces / "predicted" / "resnet50_a100_predicted.json.gz")
    families = {use.name: use for use in found.families}
    assert families["convolution"].usual_saves_ms == pytest.approx(0, abs=0.01)
    # Batch normalization is no family of the database: the rates of large kernels say what is usual.
    assert [use.name for use in found.savings] == ["normalization", "elementwise"]
    for use in found.savings:  # the GPU bounds this step
        assert use.usual_by == "rates"
        assert use.usual_gain_ms == pytest.approx(use.usual_saves_ms, rel=0.02)


def test_faster_kernels_do_not_shorten_a_step_that_the_host_bounds(shared_traces: Path) -> None:
    found = used(shared_traces / "tracelens-h100-mi300" / "h100.Falconsai_nsfw_image_detection__1016002.json.gz")
    assert found.savings[0].name == "gemm"
    assert found.savings[0].usual_saves_ms > 0.2  # type: ignore[operator]
    assert found.savings[0].usual_gain_ms == pytest.approx(0, abs=0.01)


def a_checkpointed_step(folder: Path, *, built_again: int) -> Path:
    """A forward product of 500 us, and in its backward node four, of which ``built_again`` build the graph once more.

    ::

        us          0            1000         2000     2500     3000     3500     4000
        thread 1    |mm|
        thread 2                 |MmBackward0: mm, mm, mm, mm|
        stream      |mm-----|                 |mm-----|mm-----|mm-----|mm-----|
    """
    m, k, n = 8192, 4096, 2048
    shapes = {"Input Dims": [[m, k], [k, n]], "Input type": ["c10::BFloat16"] * 2}
    name, events = "ampere_bf16_s16816gemm_bf16_128x128", []
    for step in range(6):
        at, number = 5000 * step, 10 * step
        events.append(mark(f"ProfilerStep#{step}", at, 4999))
        events.append(op("aten::mm", at + 5, 40, **shapes, **{"Sequence number": number, "Fwd thread id": 0}))
        events += launched(name, at + 10, 5, at + 30, 500, number + 1)
        of_node = {"Sequence number": number, "Fwd thread id": 1}
        node = "autograd::engine::evaluate_function: MmBackward0"
        events.append(op(node, at + 1000, 500, 2, **of_node))
        for place in range(4):
            builds = {"Sequence number": number + 1 + place, "Fwd thread id": 0} if place < built_again else {}
            events.append(op("aten::mm", at + 1010 + 100 * place, 40, 2, **shapes, **builds))
            events += launched(
                name, at + 1015 + 100 * place, 5, at + 2000 + 500 * place, 500, number + 2 + place, tid=2
            )
    header = {"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000}]}
    return write_trace(folder / "checkpoint.json", events, **header)


def test_recomputation_counts_for_hfu_alone(tmp_path: Path) -> None:
    """Four products of the model and one again: HFU is 5 / 4 of MFU."""
    found = used(a_checkpointed_step(tmp_path, built_again=1), calibrated=False)
    product = 2 * 8192 * 4096 * 2048 / 1e12
    assert found.step_tflop == pytest.approx(4 * product)
    assert found.recomputed_tflop == pytest.approx(product)
    assert found.mfu_pct is not None
    assert found.hfu_pct == pytest.approx(5 / 4 * found.mfu_pct)
    assert f"HFU {found.hfu_pct:.1f} % with recomputation" in found.headline


def test_gradients_of_gradients_are_no_recomputation(tmp_path: Path) -> None:
    """Where the backward pass builds more than the forward pass did, it is not repeated."""
    found = used(a_checkpointed_step(tmp_path, built_again=4), calibrated=False)
    assert found.recomputed_tflop == 0
    assert found.hfu_pct == found.mfu_pct
    assert any("gradients of gradients" in note for note in found.notes)


@pytest.mark.parametrize("model", ["bert-base", "bert-large", "densenet121", "gpt2-small", "resnet50"])
def test_a_checkpointed_model_has_the_flops_of_the_plain_one(model: str, own_traces: Path) -> None:
    """Recorded with and without activation checkpointing: what is left without recomputation is the same."""
    plain, again = (
        used(own_traces / "campaign_cpu" / f"{model}--{name}.trace.json.gz", calibrated=False)
        for name in ("baseline", "checkpoint")
    )
    # The backward pass of a fused attention computes the scores again: one of the two products of its forward pass.
    graph = plain.baseline.graph
    attention = counted(graph, plain.baseline.clock)[0] & (graph.family == KernelFamily.ATTENTION)
    forward = graph.flops[attention & (graph.phase == Phase.FORWARD)].sum() / np.ptp(graph.info.steady) / 1e12
    assert plain.recomputed_tflop == pytest.approx(forward / 2)
    assert bool(forward) == (model not in ("densenet121", "resnet50"))
    assert again.step_tflop == pytest.approx(plain.step_tflop, rel=1e-6)
    # A forward pass is a third of the work; what is not checkpointed does not run again.
    assert 0.6 < (again.recomputed_tflop - forward / 2) / (plain.step_tflop / 3) <= 1.001


def test_a_recorded_checkpoint_on_a_gpu(shared_traces: Path) -> None:
    """Of 63 convolutions of the forward passes 57 run again."""
    found = used(shared_traces / "tracelens-h100-mi300/mi300.resnet_act_checkpoint_ddp_train.json.gz")
    assert found.mfu_pct is not None
    assert found.hfu_pct is not None
    assert found.mfu_pct < found.hfu_pct
    assert found.recomputed_tflop == pytest.approx(0.1017, rel=1e-3)


def test_without_shapes_nothing_is_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = a_product(tmp_path, {})
    (use,) = used(trace, calibrated=False).families
    assert (use.tflops, use.gbyte_s, use.compute_pct, use.bound) == (None, None, None, "")
    assert main(["explain", "--efficiency", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert "MFU –: the recording holds no shapes" in printed
    assert "Families" not in printed


def test_the_command(shared_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, plot = str(shared_traces / RECORDINGS[0]), tmp_path / "roof.svg"
    assert main(["explain", "--efficiency", trace, "--plot", str(plot), "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert as_json["mfu_pct"] == pytest.approx(21.6, abs=2)
    assert plot.is_file()
    assert main(["explain", "--efficiency", "--by", "step", trace]) == 2


# torch's counter knows no attention of CPUs, so that these compute it product by product.
def _model(name: str) -> tuple[Any, Any]:
    torch, transformers = need("torch"), need("transformers")
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    tokens, image = torch.randint(0, 100, (2, 64)), torch.randn(2, 3, 64, 64)
    if name == "resnet":
        return transformers.ResNetModel(transformers.ResNetConfig(depths=[1, 1, 1, 1])), image
    if name == "vgg":
        convolutions = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, stride=2)]
        return torch.nn.Sequential(*convolutions, torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten()), image
    if name == "vit":
        return transformers.ViTModel(transformers.ViTConfig(**small, image_size=64, attn_implementation="eager")), image
    if name == "electra":
        return transformers.ElectraModel(transformers.ElectraConfig(**small, vocab_size=100, embedding_size=32)), tokens
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(**small, vocab_size=100)), tokens
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8)), torch.randn(4, 64)


def test_numbers_of_the_whole_span_are_not_called_those_of_a_step(
    shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(shared_traces / "kineto-resnet50-v100/num_workers_4.2021-06.pt.trace.json.gz")
    assert main(["explain", "--efficiency", "--clock", "span", path]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Families of kernels, a span" in text
    assert "kernels a span read from caches" in text
    assert "ms of the span (" in text
    assert main(["explain", "--by", "line", "--clock", "span", path]) == 0
    assert "ms a span" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "vgg", "vit", "electra", "bert", "linear"])
def test_flops_are_those_of_torchs_counter(name: str, tmp_path: Path) -> None:
    torch = need("torch")
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = _model(name)

    def step() -> None:
        out = model(batch)
        out = out if isinstance(out, torch.Tensor) else out.last_hidden_state
        out.sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    with torch.profiler.profile(record_shapes=True) as profiler:
        step()
    trace = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    found = used(trace, calibrated=False)
    # Each piece of an operator has whole FLOPs.
    assert found.step_tflop * 1e12 == pytest.approx(counter.get_total_flops(), rel=1e-4)
