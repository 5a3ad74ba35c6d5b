"""Half precision: what stays, what moves half of its bytes, and which operators the op database answers for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import CPU, STREAM, Build, replace
from whatif import DependencyKind, Phase, TaskGraph, TaskKind
from whatif.graph.described import Described
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.hardware import roofline
from whatif.models.durations import database
from whatif.models.durations.format_flow import flow_of
from whatif.models.durations.precision import Precision, in_precision
from whatif.models.kernels.mixed_precision import UNKNOWN_CASTS
from whatif.prediction.transform import load_transform

F = KernelFamily
MS = 1_000_000
V100, A100, P100 = "Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-80GB", "Tesla P100-SXM2-16GB"


def kernel(family: KernelFamily, dtype: str = "fp32", ns: int = MS, **columns: Any) -> dict[str, Any]:
    return {"family": family, "dtype": DTYPES.index(dtype), "ns": ns, **columns}


def recorded(*kernels: dict[str, Any], gpu: str = V100, operators: tuple[Described, ...] = ()) -> TaskGraph:
    """The kernels one behind the other in a forward pass, and a long product in fp32: a step that is not half."""
    build = Build(CPU, STREAM, gpu=gpu, n_steps=1)
    for place, columns in enumerate((*kernels, kernel(F.GEMM, ns=100 * MS))):
        rest = dict(columns)
        build.task(1, rest.pop("ns"), f"kernel {place}", phase=Phase.FORWARD, **rest)
    graph = build.graph()
    return graph.replace(info=replace(graph.info, operators=operators))


def ratio(*kernels: dict[str, Any], target: Precision = "fp16", **options: Any) -> list[float]:
    graph = recorded(*kernels, **options)
    estimates = in_precision(graph, np.arange(len(kernels)), target)
    return (estimates.duration_ns / graph.duration_ns[: len(kernels)]).tolist()  # type: ignore[no-any-return]


def product(m: int, n: int, k: int) -> Described:
    return Described("matmul", "mm", "fp32", (("batch", 1), ("m", m), ("n", n), ("k", k)))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8", "fp64", "int"])
def test_other_formats_stay(dtype: str) -> None:
    assert ratio(*(kernel(family, dtype) for family in F)) == [1.0] * len(F)


def test_master_weights_and_transfers_stay() -> None:
    assert ratio(*map(kernel, (F.COPY, F.MEMSET, F.COMMUNICATION, F.OPTIMIZER))) == [1.0] * 4


def test_memory_bound_kernels_halve_above_the_floor() -> None:
    # 2 us stay, the other 8 of 10 us halve.
    found = ratio(kernel(F.ELEMENTWISE, ns=10_000), kernel(F.ELEMENTWISE), kernel(F.ELEMENTWISE, ns=1_500))
    assert found == pytest.approx([0.6, 0.5, 1.0], abs=0.002)


def test_kernels_of_known_bytes_take_the_chains_ratio() -> None:
    large, small = ratio(*(kernel(F.ELEMENTWISE, size_bytes=size) for size in (10**9, 10**4)))
    assert large == pytest.approx(0.5, abs=0.05)
    assert small > 0.9


def test_autocast_keeps_layer_norm_and_indexing_in_fp32() -> None:
    norm, index, batch_norm, softmax = ratio(*map(kernel, (F.LAYER_NORM, F.INDEXING, F.NORMALIZATION, F.SOFTMAX)))
    assert norm == index == 1.0
    assert batch_norm < 0.51 < 0.75 < softmax


def test_a_product_takes_the_ratio_of_the_chains_answers() -> None:
    """4096^3 on a V100: 125 to 15.7 TFLOP/s; and of one row less, which its weights bind."""
    operators = (product(4096, 4096, 4096), product(1, 8192, 8192))
    large, thin = ratio(kernel(F.GEMM, called=0), kernel(F.GEMM, called=1), operators=operators)
    assert large == pytest.approx(15.7 / 125, rel=0.15)
    assert 1.5 * large < thin < 0.6


def test_products_of_unknown_shapes_gain_by_their_time() -> None:
    short, long = ratio(kernel(F.GEMM, ns=4_000), kernel(F.GEMM, ns=10 * MS))
    assert long < 0.2 < short <= 1.0


@pytest.mark.parametrize(("gpu", "width"), [(V100, 3.0), (A100, 1.5)])
def test_the_range_of_unknown_shapes_is_that_of_products_that_take_as_long(gpu: str, width: float) -> None:
    """Its upper end was that of the smallest usual products, which gain nothing: 8 times the estimate."""
    graph = recorded(kernel(F.GEMM, ns=10 * MS), gpu=gpu)
    estimates = in_precision(graph, np.arange(1), "fp16")
    below, above = (estimates.duration_ns / end for end in (estimates.low_ns, estimates.high_ns))
    assert 1.02 < below[0] < width
    assert 1.02 < 1 / above[0] < width


def test_gradients_in_tf32_of_unknown_shapes_gain_more_too() -> None:
    graph = recorded(kernel(F.GEMM, "tf32", ns=MS), kernel(F.GEMM, "tf32", ns=MS), gpu=A100)
    phase = graph.phase.copy()
    phase[1] = Phase.BACKWARD
    forward, backward = in_precision(graph.replace(phase=phase), np.arange(2), "fp16").duration_ns
    assert backward < 0.8 * forward


def test_casts_of_unknown_weights_have_the_range_of_those_in_models(shared_traces: Path) -> None:
    """A forward pass by Nsight Systems, 149.0 ms under bf16 autocast: the upper end was 410 ms, of 138 predicted."""
    prediction = whatif.apply(shared_traces / "zx3xyy-a100-2.7b" / "result_2_7B_clean.sqlite", "amp:target=bf16")
    graph = prediction.graph
    casts = graph.select(name="autocast").ids
    assert (graph.high_ns[casts] <= UNKNOWN_CASTS * (graph.duration_ns[casts] + 1)).all()
    assert (graph.low_ns[casts] < graph.duration_ns[casts]).any()
    assert prediction.low_ms < 149.0 < prediction.high_ms < 1.3 * prediction.predicted_ms


def test_devices_without_the_units_gain_little() -> None:
    assert ratio(kernel(F.GEMM), target="bf16") == [pytest.approx(1.0, abs=0.05)]
    (pascal,) = ratio(kernel(F.GEMM), gpu=P100)
    assert 0.4 < pascal < 1.0


def test_an_unknown_device_takes_daydreams_speedup() -> None:
    graph = recorded(kernel(F.GEMM), gpu="A device of tomorrow")
    estimates = in_precision(graph, np.arange(1), "fp16")
    assert estimates.duration_ns[0] == pytest.approx(MS / 3)
    assert (estimates.low_ns[0], estimates.high_ns[0]) == pytest.approx((MS / 8, MS))


def test_a_step_that_is_half_already_keeps_its_unnamed_and_fp32_kernels() -> None:
    graph = recorded(kernel(F.GEMM, "bf16", 500 * MS), kernel(F.FUSED, ""), kernel(F.ELEMENTWISE), gpu=A100)
    estimates = in_precision(graph, np.arange(4), "bf16")
    assert estimates.duration_ns[:3].tolist() == graph.duration_ns[:3].tolist()
    assert estimates.duration_ns[3] < 50 * MS


def test_a_stream_that_begins_with_rows_of_a_table_stays_fp32() -> None:
    """index, norm, product, gelu, product, addition to the stream, norm: what lies between products alone is half."""
    add = "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, (unsigned long)3>>"
    kinds = {
        "index": F.INDEXING, "sgemm": F.GEMM, "pow_tensor_scalar_kernel": F.ELEMENTWISE, "gelu": F.ELEMENTWISE,
        "exp_kernel_cuda": F.ELEMENTWISE, add: F.ELEMENTWISE,
    }  # fmt: skip
    names = ["index", "pow_tensor_scalar_kernel", "sgemm", "gelu", "exp_kernel_cuda", "sgemm", "gelu", add]
    names += ["sgemm", "sgemm"]
    build = Build(CPU, STREAM, gpu=V100, n_steps=1)
    for name in names:
        build.task(1, MS, name, phase=Phase.FORWARD, family=kinds[name], dtype=DTYPES.index("fp32"))
    graph = build.graph()
    flow = flow_of(graph)
    assert flow is not None
    assert flow.stays.tolist() == [False, True, False, False, True, False, False, True, False, False]
    # Products of the stream, twice of one that the next product reads as well; and an exponential of half.
    assert flow.casts.tolist() == [False, False, True, False, True, True, False, False, True, True]
    found = in_precision(graph, np.arange(len(graph)), "fp16").duration_ns / MS
    assert found[[1, 4]].tolist() == [1.0] * 2
    # The addition reads a half and an fp32 tensor, and writes fp32.
    assert found[7] == pytest.approx(0.8, abs=0.01)
    assert found[[3, 6]] == pytest.approx([0.5, 0.5], abs=0.01)


def named(*kinds: tuple[str, KernelFamily, int], phase: Phase = Phase.FORWARD) -> TaskGraph:
    """Kernels of a name, a family and a duration, each called by an operator of the same name."""
    build = Build(CPU, STREAM, gpu=V100, n_steps=1)
    for place, (name, family, ns) in enumerate(kinds):
        call = build.task(0, 1_000, name, TaskKind.CPU_OP, phase=phase, operator=place)
        columns = {"family": family, "operator": place, "dtype": DTYPES.index("fp32")}
        build.edge(call, build.task(1, ns, name, phase=phase, **columns), kind=DependencyKind.LAUNCH)
    return build.graph()


def test_attention_reads_what_products_write() -> None:
    """Queries, keys and values are products of one norm; attention and the product after it read half."""
    attention = ("flash", F.ATTENTION, MS)
    for middle in (
        (attention,),
        (("aten::bmm", F.GEMM, MS), ("aten::_softmax", F.SOFTMAX, MS), ("aten::bmm", F.GEMM, MS)),
    ):
        norm, mm = ("aten::layer_norm", F.LAYER_NORM, MS), ("aten::mm", F.GEMM, MS)
        graph = named(("aten::embedding", F.INDEXING, MS), norm, mm, mm, *middle, mm)
        flow = flow_of(graph)
        assert flow is not None
        casts = flow.casts[graph.on_gpu.mask].tolist()
        assert casts[2:4] == [True, True]
        assert casts[4:] == ([False, False] if len(middle) == 1 else [False, False, True, False])


def test_the_cast_of_attentions_weights_is_that_of_the_softmax() -> None:
    """Its time was that of the copy of the values, the last kernel before the product."""
    copy = ("direct_copy_kernel_cuda", F.ELEMENTWISE, MS // 10)
    table, softmax, batch = (
        ("aten::embedding", F.INDEXING, MS),
        ("aten::_softmax", F.SOFTMAX, MS),
        ("aten::bmm", F.GEMM, MS),
    )
    graph = named(table, batch, softmax, copy, batch)
    changed = load_transform("amp")(graph)
    casts = changed.duration_ns[changed.on_gpu.mask & (changed.family == F.CAST)]
    assert casts[-1] == pytest.approx(0.75 * 0.8 * MS, rel=0.05)


def test_a_softmax_that_reads_an_addition_to_a_mask_stays_fp32() -> None:
    kinds = [("aten::embedding", F.INDEXING, MS), ("aten::bmm", F.GEMM, MS)]
    add, softmax = ("aten::add", F.ELEMENTWISE, MS), ("aten::_softmax", F.SOFTMAX, MS)
    for middle, share in (((add,), 1.0), ((), 0.8)):
        graph = named(*kinds, *middle, softmax)
        last = np.flatnonzero(graph.on_gpu.mask)[-1:]
        assert in_precision(graph, last, "fp16").duration_ns[0] == pytest.approx(share * MS, rel=0.01)


def test_the_loss_of_a_language_model_reads_half() -> None:
    graph = named(("aten::embedding", F.INDEXING, MS), ("aten::mm", F.GEMM, MS), ("aten::_log_softmax", F.SOFTMAX, MS))
    flow = flow_of(graph)
    assert flow is not None
    assert not flow.casts[-1]


def test_batches_of_products_gain_less_than_one_that_takes_as_long() -> None:
    graph = named(*((name, F.GEMM, MS // 5) for name in ("aten::mm", "aten::bmm", "aten::baddbmm")))
    one, *batches = in_precision(graph, np.flatnonzero(graph.on_gpu.mask), "fp16").duration_ns.tolist()
    assert batches[0] == batches[1] > 1.3 * one


@pytest.mark.parametrize(
    ("gpu", "ns", "gain"),
    [
        # 1,024 sequences of 512 tokens, heads of 64: xFormers' times in fp32, and over those in fp16 on a V100.
        (V100, 6_698_000, 6698 / 2514),
        # In fp16 at FlashAttention-2's share of 312 TFLOP/s, over 24.7 TFLOP/s.
        (A100, 2_777_000, 0.6 * 312 / 24.7),
    ],
)
def test_attention_gains_as_much_without_its_shapes(gpu: str, ns: int, gain: float) -> None:
    sizes = (("batch", 1024), ("query_length", 512), ("key_length", 512), ("heads", 1), ("kv_heads", 1))
    operators = (Described("attention", "attention", "fp32", (*sizes, ("head_size", 64), ("causal", 0))),)
    graph = recorded(*(kernel(F.ATTENTION, ns=ns, called=called) for called in (0, -1)), gpu=gpu, operators=operators)
    estimates = in_precision(graph, np.arange(2), "fp16")
    known, unknown = ns / estimates.duration_ns
    assert known == pytest.approx(gain, rel=0.15)
    assert unknown == pytest.approx(known, rel=0.15)
    assert estimates.low_ns[1] < ns / gain < estimates.high_ns[1] < ns


def test_a_net_without_look_ups_and_layer_norms_has_no_fp32_stream() -> None:
    assert flow_of(recorded(kernel(F.CONVOLUTION), kernel(F.NORMALIZATION), kernel(F.ELEMENTWISE))) is None


def test_gradients_in_tf32_gain_more_than_products_of_the_forward_pass() -> None:
    """TF32's operands are not transposed on their way to the units; those of 16 bits are."""
    operators = (product(4096, 4096, 4096),)
    graph = recorded(kernel(F.GEMM, "tf32", called=0), gpu=A100, operators=operators)
    found = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        of_phase = np.where(np.arange(2) == 0, phase, graph.phase).astype(np.int8)
        found.append(in_precision(graph.replace(phase=of_phase), np.arange(1), "fp16").duration_ns[0])
    forward, backward = found
    assert forward == pytest.approx(0.5 * MS, rel=0.15)
    assert backward < 0.8 * forward


def test_one_sustained_share_moves_amp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain asks ``hardware/``: what products sustain there is what they take here."""
    options = {"operators": (product(4096, 4096, 4096),)}
    (before,) = ratio(kernel(F.GEMM, called=0), **options)
    tables = roofline._architectures()
    monkeypatch.setattr(roofline, "_architectures", lambda: {**tables, "nvidia": {**tables["nvidia"], "matmul": 0.4}})
    database._opened.cache_clear()
    (after,) = ratio(kernel(F.GEMM, called=0), **options)
    assert after > 1.5 * before


@pytest.mark.parametrize(
    ("file", "what_ifs", "slowest", "fastest"),
    [
        # ResNet-50 on V100: NVIDIA publishes 3.24 times with images in NHWC (DeepLearningExamples).
        ("kineto-resnet50-v100/num_workers_0.2021-06.pt.trace.json.gz", ("amp",), 2.0, 2.8),
        ("kineto-resnet50-v100/num_workers_0.2021-06.pt.trace.json.gz", ("amp", "channels_last"), 2.9, 3.5),
        # A Transformer without shapes on V100, not measured in half precision. By Daydream's rule (section 5.1:
        # products 3 times, others 2) its GPU part would speed up 2.55 times.
        ("hta/v100_allreduce_rank1of2.json.gz", ("amp", "channels_last"), 2.5, 3.5),
        # TF32 VGG-13 on H100: half of the operations gain at most 2.
        ("triosim-vgg13-h100/vgg13_bs512_adam.json.gz", ("amp",), 1.3, 2.2),
        # Daydream, figure 5: CNNs on RTX 2080 Ti, GPU part only.
        ("param-2080ti/resnet_kineto.json.gz", ("amp",), 1.4, 3.0),
        # Half already.
        ("modded-nanogpt-8xh100/current.rank0.json.gz", ("amp",), 1.0, 1.0),
        ("harryjmoss-a100-batch/bs64.run0.pt.trace.json.gz", ("amp",), 1.0, 1.02),
    ],
)
def test_recorded_steps_speed_up_plausibly(
    shared_traces: Path, file: str, what_ifs: tuple[str, ...], slowest: float, fastest: float
) -> None:
    graph = whatif.read(shared_traces / file)
    changed = graph
    for name in what_ifs:
        changed = load_transform(name)(changed)
    before, after = (
        int(g.duration_ns[g.on_gpu.mask & (g.kind != TaskKind.COMMUNICATION)].sum()) for g in (graph, changed)
    )
    assert slowest <= before / after <= fastest
