"""Another GPU: by hand, as properties of any device, and with other what-ifs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, equal, facts_of, id_of, replace
from whatif import Phase, TaskGraph, TaskKind, WhatifError
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.hardware.gpu import Gpu, load_gpu
from whatif.hardware.roofline import kernel_floor_ns
from whatif.ingest.operator_calls import describe
from whatif.models.durations import database
from whatif.models.durations.device_convolutions import convolution_ns
from whatif.models.durations.device_scaling import Ratio, roofline_ratio
from whatif.models.durations.estimator import Source, device, sources
from whatif.models.durations.other_device import on_device
from whatif.opdb.importers.described import operators_of
from whatif.prediction.baseline import Baseline
from whatif.prediction.predict import apply
from whatif.prediction.transform import load_transform

F, US = KernelFamily, 1000
DEVICE = "device:to=A100-SXM-80"
V100, A100, H100, MI300X = (
    "Tesla V100-SXM2-32GB",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3",
    "AMD Instinct MI300X",
)
FP32, TF32, BF16 = (DTYPES.index(name) for name in ("fp32", "tf32", "bf16"))
pytestmark = pytest.mark.usefixtures("no_database")


def kernels(gpu: str | None, *rows: dict[str, Any], **info: Any) -> TaskGraph:
    """A step of kernels one after the other, each with a call of 1 us; a row is ``name``, ``us`` and columns."""
    build = Build(CPU, STREAM, gpu=gpu, n_steps=1, **info)
    for number, row in enumerate(rows):
        columns = {
            "family": F.ELEMENTWISE,
            "dtype": FP32,
            "phase": Phase.FORWARD,
            "operator": number,
            "called": -1,
            **row,
        }
        name, us = columns.pop("name"), columns.pop("us")
        call = build.task(0, 1 * US, f"launch {name}")
        kernel = build.task(1, round(us * US), name, **columns)
        build.edge(call, kernel)
    return build.graph()


def moved(graph: TaskGraph, name: str) -> int:
    return int(graph.duration_ns[id_of(graph, name)])


def to(graph: TaskGraph, spec: str) -> TaskGraph:
    return load_transform(f"device:to={spec}")(graph).check()


def test_memory_bound_kernels_follow_the_bandwidth_above_the_floor() -> None:
    """100 us of which 2 are a kernel's start and end: 2 + 98 x 900 / 2039, by the shares that both reach."""
    graph = kernels(
        V100, {"name": "add", "us": 100, "size_bytes": 80_000_000}, {"name": "tiny", "us": 1.5, "size_bytes": 64}
    )
    changed = to(graph, "A100-SXM-80")
    assert moved(changed, "add") == pytest.approx(2_000 + 98_000 * (900 * 0.88) / (2039 * 0.84), abs=2)
    assert moved(changed, "tiny") == 1_500  # all floor: no device of the vendor shortens it
    assert moved(to(graph, "MI300X"), "tiny") == pytest.approx(1_500 * 3.2 / 2, abs=2)
    at = [id_of(changed, "add"), id_of(changed, "tiny")]
    assert (changed.low_ns[at] < changed.duration_ns[at]).all()
    assert (changed.high_ns[at] > changed.duration_ns[at]).all()
    assert sources(changed)[at].tolist() == [Source.ROOFLINE] * 2
    summary = "device: V100-SXM2-32 to A100-SXM-80, GPU tasks: 2 (100% of their time) by data sheets"
    assert summary in changed.notes


def test_products_follow_the_peak_of_their_format() -> None:
    rows = [
        {"name": "sgemm", "us": 1002, "family": F.GEMM, "flops": 12 * 10**9, "size_bytes": 1_000_000},
        {"name": "hgemm", "us": 102, "family": F.GEMM, "dtype": DTYPES.index("fp16"), "flops": 8 * 10**9},
    ]
    changed = to(kernels(V100, *rows), "T4")
    assert moved(changed, "sgemm") == pytest.approx(
        2_000 + 1_000_000 * 15.7 * 0.8 / 4.1, rel=1e-3
    )  # T4's sustained rate
    assert moved(changed, "hgemm") == pytest.approx(2_000 + 100_000 * 125 / 65, rel=1e-3)


def test_a_kernel_that_does_not_fill_the_device_gains_nothing_from_more_multiprocessors() -> None:
    """132 blocks of 8 warps at 128 registers: half of an H100; on 304 smaller ones each runs as slow as one of them."""
    row = {"name": "flash_fwd", "us": 50, "family": F.ATTENTION, "dtype": BF16, "flops": 10**9, "registers": 128}
    full, half = (kernels(H100, {**row, "warps": warps}) for warps in (132 * 16, 132 * 8))
    h100, mi300x = load_gpu("H100-SXM-80"), load_gpu("MI300X")
    rate = 794.5 / 668.4  # the best bf16 products measured on each
    expected = [3_200 + 48_000 * rate / (132 * 16 / (304 * 16)), 3_200 + 48_000 * rate * 0.5 / (132 * 8 / (304 * 16))]
    assert (h100.sm_count, mi300x.sm_count, h100.bf16_sustained_tflops, mi300x.bf16_sustained_tflops) == (
        132,
        304,
        794.5,
        668.4,
    )
    assert [moved(to(g, "MI300X"), "flash_fwd") for g in (full, half)] == pytest.approx(expected, rel=1e-3)


def test_a_kernel_that_keeps_no_memory_busy_waits_for_its_latency() -> None:
    """64 blocks of 4 warps ask for 98 GB/s on any device; a million threads for all that each one has."""
    row = {"name": "norm", "us": 50, "family": F.LAYER_NORM, "size_bytes": 10**7}
    small, large = (to(kernels(H100, {**row, "warps": warps}), "MI300X") for warps in (64 * 4, 10**6 // 32))
    assert moved(small, "norm") == pytest.approx(3_200 + 48_000, rel=1e-3)
    assert moved(large, "norm") == pytest.approx(3_200 + 48_000 * 3352 * 0.91 / (5300 * 0.74), rel=1e-3)


def test_a_product_of_unknown_size_gains_less_than_the_ratio_of_rates() -> None:
    """By the power 0.67, in a range 1.4 times as wide; a format without units on the new device does not follow it."""
    row = {"name": "gemm", "us": 102, "family": F.GEMM, "dtype": BF16}
    bare, known = kernels(H100, row), kernels(H100, {**row, "flops": 7 * 10**10})
    changed = to(bare, "MI300X")
    assert moved(changed, "gemm") == pytest.approx(3_200 + 100_000 * (794.5 / 668.4) ** 0.67, rel=1e-3)
    wide, narrow = (g.high_ns[id_of(g, "gemm")] / moved(g, "gemm") for g in (changed, to(known, "MI300X")))
    assert wide > 1.3 * narrow
    assert moved(to(bare, "V100-SXM2-32"), "gemm") == pytest.approx(2_000 + 100_000 * 794.5 / (15.7 * 0.8), rel=1e-3)


CONV = describe(
    "aten::conv2d",
    [[32, 256, 28, 28], [256, 256, 3, 3]],
    ["float", "float"],
    ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]"],
)


def convolution(**columns: Any) -> TaskGraph:
    """One call of a 3x3 convolution of 256 channels as two kernels: the product, and a filter's transform."""
    assert CONV is not None
    rows = (
        {"name": "volta_scudnn", "us": 900, "family": F.CONVOLUTION, "operator": 3, "called": 0, **columns},
        {"name": "transform", "us": 100, "family": F.LAYOUT, "operator": 3, "called": 0},
    )
    return kernels(V100, *rows, operators=(CONV,))


def test_convolutions_use_tf32_where_the_device_has_it() -> None:
    """29.6 GFLOP on a new device's tensor cores: the model's time of the whole call, whatever the old algorithm."""
    graph = convolution()
    fast, plain = to(graph, "A100-SXM-80"), to(graph, "A100-SXM-80,tf32=no")
    ((_, ops),) = operators_of(graph.info.operators)
    model_us = float(convolution_ns(ops, load_gpu("A100-SXM-80"), "tf32")[0]) / US
    flops = 2 * 32 * 28 * 28 * 256 * 256 * 9
    assert flops / 156e6 < model_us < 4 * flops / 156e6  # MFLOP over TFLOP/s is us
    assert sum(moved(fast, n) for n in ("volta_scudnn", "transform")) == pytest.approx(model_us * US, rel=0.02)
    assert moved(fast, "volta_scudnn") / moved(fast, "transform") == pytest.approx(9, rel=0.2)
    slower = sum(
        moved(convolved, n)
        for convolved in (to(convolution(us=1800), "A100-SXM-80"),)
        for n in ("volta_scudnn", "transform")
    )
    assert slower == pytest.approx(model_us * US, rel=0.02)  # how slow the old algorithm was says nothing
    assert moved(plain, "volta_scudnn") > 2 * moved(fast, "volta_scudnn")
    assert moved(plain, "volta_scudnn") / moved(graph, "volta_scudnn") == pytest.approx(15.7 / 19.5, rel=0.35)
    assert fast.dtype[id_of(fast, "volta_scudnn")] == TF32
    assert plain.dtype[id_of(plain, "volta_scudnn")] == FP32


def test_a_convolution_in_half_precision_moves_half_the_bytes() -> None:
    """Whatever it was recorded in: a what-if before may have changed it. With few channels the layout is most of it."""
    narrow = describe("aten::conv2d", [[32, 8, 224, 224], [8, 8, 3, 3]], ["float"] * 2, ["", "", "", *["[1, 1]"] * 3])
    assert narrow is not None
    ((_, single),) = operators_of([narrow])
    ((_, half),) = operators_of([replace(narrow, dtype="fp16")])
    gpu = load_gpu("A100-SXM-80")
    assert convolution_ns(single, gpu, "fp16") == pytest.approx(convolution_ns(half, gpu, "fp16"))
    layout = [
        (convolution_ns(single, gpu, d) - convolution_ns(single, gpu, d, channels_last=True))[0]
        for d in ("tf32", "fp16")
    ]
    assert layout[0] == pytest.approx(2 * layout[1])


def test_naming_another_what_if_first_adds_a_note() -> None:
    graph = kernels(V100, {"name": "gemm", "us": 500, "family": F.GEMM, "dtype": FP32})
    for specs, said in ((("amp", "device:to=A100-SXM-80"), True), (("device:to=A100-SXM-80", "amp"), False)):
        changed = graph
        for spec in specs:
            changed = load_transform(spec)(changed)
        assert any("name device first" in note for note in changed.notes) == said


def test_a_step_moves_to_another_device_once() -> None:
    """There and back used to give the recorded step the ranges of both ways, squared."""
    graph = kernels(V100, {"name": "gemm", "us": 500, "family": F.GEMM, "dtype": FP32})
    there = to(graph, "A100-SXM-80")
    with pytest.raises(WhatifError, match="got one on A100-SXM-80 already; name one device"):
        to(there, "V100-SXM2-32")
    again = to(there, "A100-SXM-80")
    assert again.low_ns.tolist() == there.low_ns.tolist()


def test_the_products_of_a_convolution_are_in_its_format() -> None:
    """A product within a convolution's call is in TF32 too, so that half precision behind it gains twice at most."""
    rows = (
        {"name": "volta_sgemm", "us": 900, "family": F.GEMM, "operator": 3, "called": 0},
        {"name": "transform", "us": 100, "family": F.LAYOUT, "operator": 3, "called": 0},
        {"name": "sgemm_of_a_linear", "us": 900, "family": F.GEMM, "operator": 4},
    )
    assert CONV is not None
    graph = to(kernels(V100, *rows, operators=(CONV,)), "A100-SXM-80")
    assert graph.dtype[id_of(graph, "volta_sgemm")] == TF32
    assert graph.dtype[id_of(graph, "sgemm_of_a_linear")] == FP32
    assert moved(graph, "volta_sgemm") == pytest.approx(moved(to(convolution(), "A100-SXM-80"), "volta_scudnn"))
    half = load_transform("amp")(graph)
    assert moved(half, "volta_sgemm") > moved(graph, "volta_sgemm") / 2.1


def test_amd_has_no_tf32_unless_a_program_asks_for_it() -> None:
    """PyTorch computes fp32 in fp32 there: pytorch/pytorch pull request 190711."""
    there = to(convolution(), "MI300X")
    assert there.dtype[id_of(there, "volta_scudnn")] == FP32
    in_tf32 = to(convolution(), "A100-SXM-80")
    in_tf32 = in_tf32.replace(info=replace(in_tf32.info, changes=()))  # as if recorded
    back = to(in_tf32, "MI300X")
    assert back.dtype[id_of(back, "volta_scudnn")] == FP32
    assert moved(back, "volta_scudnn") > moved(in_tf32, "volta_scudnn")  # 163 TFLOP/s, of which half are reached
    recorded = replace(there.info, gpu=MI300X, gpu_memory_bytes=None, changes=())
    again = to(there.replace(info=recorded), "H100-SXM-80")
    assert again.dtype[id_of(again, "volta_scudnn")] == TF32


@pytest.mark.parametrize(("new", "models"), [("MI300X", False), ("MI250X-GCD", False), ("A100-PCIE-80", True)])
def test_models_of_nvidias_devices_say_nothing_of_amds(new: str, models: bool) -> None:
    """The shipped models across devices have seen no other vendor's."""
    product = describe("aten::mm", [[4096, 1024], [1024, 1024]], ["c10::BFloat16"] * 2, ["", ""])
    assert product is not None
    row = {"name": "gemm", "us": 50, "family": F.GEMM, "dtype": BF16, "called": 0}
    graph = kernels(H100, row, operators=(product,))
    source = on_device(graph, np.flatnonzero(graph.on_gpu), load_gpu(new), tf32=True).source
    assert set(source.tolist()) <= ({Source.OTHER_DEVICES, Source.LEARNED} if models else {Source.ROOFLINE})


@pytest.mark.parametrize(
    ("form", "new", "taken"),
    [
        ("bf16", "T4", "fp32"), ("bf16", "A100-SXM-80", None), ("fp8", "A100-SXM-80", "fp16"), ("fp8", "P40", "fp32"),
        ("tf32", "MI300X", "fp32"), ("tf32", "V100-SXM2-32", "fp32"), ("fp16", "P100-PCIE-16", None),
    ],
)  # fmt: skip
def test_formats_the_new_device_lacks_are_noted(form: str, new: str, taken: str | None) -> None:
    graph = kernels(H100, {"name": "k", "us": 50, "family": F.GEMM, "dtype": DTYPES.index(form)})
    notes = [note for note in to(graph, new).notes if "count as" in note]
    assert notes == ([] if taken is None else [f"device: products in {form} count as {taken} on {new}"])


def test_a_board_of_two_dies_says_what_a_rank_has() -> None:
    for name, said in (("MI250X", True), ("MI250", True), ("MI250X-GCD", False), ("MI300X", False)):
        assert any(f"to={name}-GCD" in note for note in to(convolution(), name).notes) == said


def test_the_database_is_asked_about_the_very_device_that_was_named() -> None:
    """Recordings call a die MI250X; who names the board has the board's products as well, and not a die's."""
    for name in ("MI250X", "MI250X-GCD"):
        gpu = database.estimator_of(name).gpu
        assert gpu is not None
        assert gpu.name == name


def test_a_convolution_of_an_unknown_call_speeds_up_by_the_root_of_the_peaks() -> None:
    graph = kernels(V100, {"name": "volta_scudnn", "us": 1002, "family": F.CONVOLUTION})
    assert moved(to(graph, "A100-SXM-80"), "volta_scudnn") == pytest.approx(
        2_000 + 1_000_000 * (156 / 15.7) ** -0.5, rel=1e-3
    )


def test_copies_cross_their_link_and_collectives_stay() -> None:
    rows = [
        {"name": "Memcpy HtoD (Pinned -> Device)", "us": 102, "kind": TaskKind.MEMCPY, "family": F.COPY},
        {"name": "Memcpy HtoD (Pageable -> Device)", "us": 102, "kind": TaskKind.MEMCPY, "family": F.COPY},
        {"name": "Memcpy DtoD (Device -> Device)", "us": 102, "kind": TaskKind.MEMCPY, "family": F.COPY},
        {"name": "ncclAllReduce", "us": 500, "kind": TaskKind.COMMUNICATION, "family": F.COMMUNICATION},
    ]  # fmt: skip
    changed = to(kernels(V100, *rows), "A100-SXM-80")
    on_gpu = changed.duration_ns[changed.on_gpu].tolist()
    assert on_gpu == pytest.approx(
        [2_000 + 50_000, 102_000, 2_000 + 100_000 * (900 * 0.88) / (2039 * 0.84), 500_000], abs=2
    )
    assert any("collectives keep their time" in note for note in changed.notes)


def test_the_cpu_stays_or_takes_its_option() -> None:
    graph = kernels(V100, {"name": "add", "us": 10, "size_bytes": 10**6})
    assert to(graph, "T4").duration_ns[graph.on_cpu].tolist() == [1000]
    assert to(graph, "T4,cpu=2").duration_ns[graph.on_cpu].tolist() == [500]
    with pytest.raises(WhatifError, match="speedup of the CPU above 0"):
        to(graph, "T4,cpu=0")


def test_the_same_device_changes_nothing() -> None:
    graph = kernels(V100, {"name": "add", "us": 10, "size_bytes": 10**6})
    same = to(graph, "V100-SXM2-32")
    assert equal(graph, same)
    assert same.notes == ("device: the recording is of a V100-SXM2-32 already; no kernel changes",)
    assert same.info == graph.info
    assert same.declined == same.notes
    assert not to(graph, "V100-SXM2-32,cpu=2").declined


@pytest.mark.parametrize("what_if", ["distributed:workers=8", "tensor_parallel", "parameter_server"])
def test_the_recorded_device_leaves_what_follows_as_it_is(what_if: str, own_traces: Path) -> None:
    """The network too: another device brings its usual one."""
    predicted = Baseline.of(whatif.read(own_traces / "predicted" / "gpt2_h100_predicted.json.gz"))
    alone = apply(predicted, what_if)
    behind = apply(predicted, "device:to=H100-SXM-80", what_if)
    assert (behind.predicted_ms, behind.low_ms, behind.high_ms) == (alone.predicted_ms, alone.low_ms, alone.high_ms)
    assert behind.graph.notes[1:] == alone.graph.notes


def test_a_predicted_step_has_the_usual_network_of_its_device(own_traces: Path) -> None:
    """`scaling` counted on 25 Gbit/s between the H100s of one node, where `plan` took NVLink."""
    predicted = Baseline.of(whatif.read(own_traces / "predicted" / "gpt2_h100_predicted.json.gz"))
    notes = [apply(predicted, f"distributed:workers=8{more}").graph.notes[0] for more in ("", ",bandwidth=25Gbps")]
    assert ["usual for H100-SXM-80" in note for note in notes] == [True, False]
    assert "are cut in 2" in apply(predicted, "tensor_parallel").graph.notes[0]


def test_what_it_cannot_do_is_one_sentence(own_traces: Path) -> None:
    graph = kernels(V100, {"name": "add", "us": 10})
    for spec, message in (("A100-SXM-8", "closest are A100-SXM-80"), ("nonsense", "expected the name of a known GPU")):
        with pytest.raises(WhatifError, match=message):
            to(graph, spec)
    with pytest.raises(WhatifError, match=r"expected device:to=NAME, as in "):
        load_transform("device")(graph)
    with pytest.raises(WhatifError, match="expected the recording of a GPU, got one of a CPU"):
        to(whatif.read(own_traces / "resnet18_cifar_cpu.json.gz"), "T4")


@pytest.mark.parametrize("gpu", ["Voodoo 3", None])
def test_an_unknown_recorded_device_widens_the_range(gpu: str | None) -> None:
    graph = kernels(gpu, {"name": "add", "us": 100, "size_bytes": 10**6})
    changed = to(graph, "T4")
    task = id_of(changed, "add")
    assert (changed.low_ns[task], changed.duration_ns[task], changed.high_ns[task]) == (25_000, 100_000, 400_000)
    assert sources(changed)[task] == Source.ASSUMED
    why = f"{gpu} is not in whatif/hardware/gpus" if gpu else "the recording does not name its GPU"
    assert f"device: {why}, so each kernel may take a quarter to four times as long" in changed.notes


def test_what_ifs_that_follow_see_the_new_device() -> None:
    rows = [
        {"name": "sgemm", "us": 1000, "family": F.GEMM, "flops": 12 * 10**9, "size_bytes": 1_000_000},
        {"name": "volta_scudnn", "us": 1000, "family": F.CONVOLUTION, "flops": 12 * 10**9, "size_bytes": 1_000_000},
    ]
    graph = kernels(
        V100, *rows, gpu_memory_bytes=32 * 2**30, metadata={"rates": {"h2d_pinned_gbyte_s": 12}, "torch": "2"}
    )
    changed = to(graph, "H100-SXM-80")
    assert device(changed) == load_gpu("H100-SXM-80")
    assert changed.info.gpu_memory_bytes == load_gpu("H100-SXM-80").memory_bytes
    assert changed.info.recorded == facts_of({"torch": "2"})  # what was measured on the old machine is of no other
    # No bf16 on Volta; TF32 for products on Hopper; fp8 from the formats that the new device has.
    for what_if in ("amp:target=bf16", "tf32", "fp8"):
        assert load_transform(what_if)(changed).duration_ns.sum() < changed.duration_ns.sum()
        with pytest.raises(WhatifError) if what_if != "amp:target=bf16" else nullcontext():
            load_transform(what_if)(graph)
    # In half precision before the move, products take the tensor cores' ratio of the two devices.
    half = load_transform("amp")(graph)
    both = to(half, "H100-SXM-80")
    # The other order gives the like: one is the product of two ratios, the other one ratio, of unknown shapes.
    assert 1 / 2.5 < both.duration_ns.sum() / load_transform("amp")(changed).duration_ns.sum() < 2.5
    assert both.dtype[id_of(both, "sgemm")] == DTYPES.index("fp16")


def test_a_step_that_does_not_fit_says_so(shared_traces: Path) -> None:
    graph = whatif.read(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    assert graph.info.memory is not None
    small, large = to(graph, "T4"), to(graph, "A100-SXM-80")
    assert any("does not fit" in note and "T4 has 16" in note for note in small.notes)
    assert not any("does not fit" in note for note in large.notes)


ANY = st.floats(0.3, 30)


def faster(gpu: Gpu, *, memory: float = 1.0, compute: float = 1.0) -> Gpu:
    """A made-up device with multiples of the bandwidth and of every rate."""
    rates = {
        name: getattr(gpu, name) and getattr(gpu, name) * compute
        for name in (
            "fp32_tflops",
            "tf32_tensor_tflops",
            "bf16_tensor_tflops",
            "fp16_tensor_tflops",
            "bf16_sustained_tflops",
        )
    }
    return replace(gpu, name="made up", memory_gbyte_s=gpu.memory_gbyte_s * memory, **rates)


@given(us=st.floats(0.5, 1e5), flops=st.floats(0, 1e13), size=st.floats(0, 1e10), memory=ANY, compute=ANY,
       family=st.sampled_from([F.GEMM, F.ELEMENTWISE, F.ATTENTION, F.NORMALIZATION, F.OTHER]),
       warps=st.integers(-1, 10**6), registers=st.integers(-1, 255))  # fmt: skip
def test_better_hardware_is_never_slower(
    us: float,
    flops: float,
    size: float,
    memory: float,
    compute: float,
    family: KernelFamily,
    warps: int,
    registers: int,
) -> None:
    graph = kernels(A100, {"name": "k", "us": us, "family": family, "dtype": BF16, "flops": int(flops),
                           "size_bytes": int(size), "warps": warps, "registers": registers})  # fmt: skip
    old, tasks = load_gpu("A100-SXM-80"), np.array([id_of(graph, "k")])
    dtype = graph.dtype[tasks]

    def ratio(new: Gpu) -> Ratio:
        return roofline_ratio(graph, tasks, old, new, dtype, dtype)

    one, more = ratio(old), ratio(faster(old, memory=memory, compute=compute))
    assert one.centre[0] == pytest.approx(1)
    assert more.low[0] <= more.centre[0] <= more.high[0]
    if min(memory, compute) >= 1:
        assert more.centre[0] <= 1 + 1e-9
    if max(memory, compute) <= 1:
        assert more.centre[0] >= 1 - 1e-9
    # No faster than the faster of the two makes it.
    assert more.centre[0] >= min(1, 1 / max(memory, compute)) * (1 - 1e-9)


SOME = st.sampled_from(["V100-SXM2-32", "T4", "A100-SXM-40", "H100-SXM-80", "MI300X", "B200-SXM"])


@given(us=st.floats(0.5, 1e5), flops=st.floats(0, 1e13), size=st.floats(1, 1e10), names=st.tuples(SOME, SOME))
def test_there_and_back_is_where_it_began(us: float, flops: float, size: float, names: tuple[str, str]) -> None:
    graph = kernels(V100, {"name": "k", "us": us, "family": F.GEMM, "flops": int(flops), "size_bytes": int(size)})
    old, new = map(load_gpu, names)
    tasks = np.array([id_of(graph, "k")])
    dtype = graph.dtype[tasks]
    there = roofline_ratio(graph, tasks, old, new, dtype, dtype).centre[0]
    after = graph.duration_ns[tasks].astype(np.float64) * there
    moved_graph = graph.replace(
        duration_ns=np.array([1000, round(after[0])]), high_ns=np.array([1000, round(after[0])])
    )
    back = roofline_ratio(moved_graph, tasks, new, old, dtype, dtype).centre[0]
    if graph.duration_ns[tasks[0]] >= kernel_floor_ns(old):
        assert there * back == pytest.approx(1, rel=5e-3)


@settings(max_examples=40)
@given(st.data())
def test_every_estimate_holds_its_own_duration(data: st.DataObject) -> None:
    family = st.sampled_from([*KernelFamily])
    row = st.fixed_dictionaries({
        "us": st.floats(0, 1e6), "family": family, "dtype": st.integers(0, len(DTYPES) - 1),
        "flops": st.integers(-1, 10**14), "size_bytes": st.integers(-1, 10**11), "warps": st.integers(-1, 10**7),
        "registers": st.integers(-1, 255), "called": st.integers(-1, 0),
    })  # fmt: skip
    rows = data.draw(st.lists(row, min_size=1, max_size=4))
    assert CONV is not None
    gpus = ["V100-SXM2-32", "T4", "A100-PCIE-40", "H100-SXM-80", "MI300X", "P100-PCIE-16", "K80-die"]
    graph = kernels(
        data.draw(st.sampled_from(gpus)), *({"name": f"k{i}", **r} for i, r in enumerate(rows)), operators=(CONV,)
    )
    new = load_gpu(data.draw(st.sampled_from(gpus)))
    tasks = np.flatnonzero(graph.on_gpu)
    found = on_device(graph, tasks, new, tf32=data.draw(st.booleans()))
    assert np.isfinite(found.duration_ns).all()
    assert (found.duration_ns >= 0).all()
    assert (found.low_ns <= found.duration_ns).all()
    assert (found.duration_ns <= found.high_ns).all()
    assert ((found.duration_ns > 0) | (graph.duration_ns[tasks] == 0)).all()
