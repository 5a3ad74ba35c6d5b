"""TF32, fp8, fused attention and the batch: by hand on drawn steps, on random graphs, and on recordings of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, extra_data, names, replace, step
from whatif import DependencyKind, Phase, TaskGraph, TaskKind, WhatifError, simulate
from whatif.graph.described import Described
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.models.durations.estimator import Source, described, sources
from whatif.models.kernels.attention import FUSED_NAME, unfused_attention
from whatif.models.kernels.fp8 import CAST_NAME, SCALE_NAME
from whatif.prediction.predict import Baseline
from whatif.prediction.transform import load_transform

F = KernelFamily
US = 1000
A100, H100, V100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB"
Row = tuple[str, KernelFamily, int]  # name, family, us

FORWARD: tuple[Row, ...] = (
    ("qkv", F.GEMM, 40), ("scores", F.GEMM, 30), ("scale", F.ELEMENTWISE, 20), ("softmax_warp_forward", F.SOFTMAX, 25),
    ("dropout", F.ELEMENTWISE, 20), ("context", F.GEMM, 30), ("out", F.GEMM, 40), ("softmax_loss", F.SOFTMAX, 10),
    ("nll_loss", F.REDUCTION, 5),
)  # fmt: skip
BACKWARD: tuple[Row, ...] = (
    ("nll_loss_bwd", F.ELEMENTWISE, 5), ("softmax_loss_backward", F.SOFTMAX, 10), ("out_dx", F.GEMM, 40),
    ("out_dw", F.GEMM, 40), ("context_dp", F.GEMM, 30), ("context_dv", F.GEMM, 30), ("dropout_bwd", F.ELEMENTWISE, 20),
    ("softmax_warp_backward", F.SOFTMAX, 25), ("scale_bwd", F.ELEMENTWISE, 20), ("scores_dq", F.GEMM, 30),
    ("scores_dk", F.GEMM, 30), ("qkv_dx", F.GEMM, 40), ("qkv_dw", F.GEMM, 40),
)  # fmt: skip
UPDATE: tuple[Row, ...] = (("adam", F.ELEMENTWISE, 50),)
CALL_NS, GAP_NS = 1000, 500


def attention_step(gpu: str = A100, dtype: str = "bf16", **columns: Any) -> TaskGraph:
    """A step of one attention layer, bound by the GPU; each call of 1 us is followed by a gap of 0.5 us, no lags.

    The kernels of FORWARD, BACKWARD and UPDATE follow one another on the stream from 1 us on::

        us      0    1                                                                  751
        CPU     |call|g|call|g| ... 23 calls
        stream       |qkv 40|scores 30|scale 20|softmax 25|dropout 20|context 30| ... |adam 50|
    """
    build = Build(CPU, STREAM, gpu=gpu, n_steps=1)
    for phase, rows in ((Phase.FORWARD, FORWARD), (Phase.BACKWARD, BACKWARD), (Phase.UPDATE, UPDATE)):
        for operator, (name, family, us) in enumerate(rows):
            call = build.task(0, CALL_NS, f"launch {name}", phase=phase)
            build.task(0, GAP_NS, f"gap {name}", TaskKind.GAP, phase=phase)
            more = columns if family == F.GEMM else {}
            kernel = build.task(
                1, us * US, name, family=family, phase=phase, dtype=DTYPES.index(dtype if family == F.GEMM else ""),
                operator=100 * phase + operator, **more,
            )  # fmt: skip
            build.edge(call, kernel, kind=DependencyKind.LAUNCH)
    return build.graph()


def changed(graph: TaskGraph, *what_ifs: str) -> TaskGraph:
    for what_if in what_ifs:
        graph = load_transform(what_if)(graph).check()
    return graph


def duration_of(graph: TaskGraph, name: str) -> int:
    (found,) = [i for i, n in enumerate(names(graph)) if n == name]
    return int(graph.duration_ns[found])


def makespan(graph: TaskGraph) -> int:
    return simulate(graph).makespan_ns


TOTAL_US = sum(us for _, _, us in (*FORWARD, *BACKWARD, *UPDATE))


def test_the_drawn_step() -> None:
    graph = attention_step()
    assert makespan(graph) == CALL_NS + TOTAL_US * US
    assert graph.on_gpu.sum() == 23


# -- fused attention -------------------------------------------------------------------------------------------------


def test_attention_is_found_forward_and_backward_and_the_loss_is_none() -> None:
    graph = attention_step()
    forward, backward = unfused_attention(graph)
    named = [[names(graph)[i] for i in attention.kernels] for attention in (forward, backward)]
    assert named[0] == ["scores", "scale", "softmax_warp_forward", "dropout", "context"]
    assert named[1] == ["context_dp", "context_dv", "dropout_bwd", "softmax_warp_backward", "scale_bwd", "scores_dq",
                        "scores_dk"]  # fmt: skip
    assert (forward.backward, backward.backward) == (False, True)


def test_flash_attention_without_known_work_keeps_the_products() -> None:
    """Forward 30 + 30 of 125 us; backward five fourths of 4 x 30, of 185 us."""
    graph = attention_step()
    fused = changed(graph, "flash_attention")
    assert fused.duration_ns[fused.select(name=FUSED_NAME)].tolist() == [60 * US, 150 * US]
    assert makespan(fused) == CALL_NS + (TOTAL_US - (125 - 60) - (185 - 150)) * US
    # The launches of the ten kernels that went are gone, with their gaps.
    assert len(fused) == len(graph) - 3 * 10
    assert sources(fused)[fused.select(name=FUSED_NAME)].tolist() == [Source.ASSUMED] * 2
    assert fused.low_ns[fused.select(name=FUSED_NAME)].tolist() == [37_500, 93_750]


def test_flash_attention_runs_at_the_share_of_the_peak_that_the_papers_report() -> None:
    """2.808 GFLOP a product: 5.616 at 0.6 x 312 TFLOP/s take 30 us, the recorded products 60: half-way is 42.426."""
    fused = changed(attention_step(flops=2_808_000_000), "flash_attention")
    forward, backward = fused.duration_ns[fused.select(name=FUSED_NAME)].tolist()
    assert forward == round(np.sqrt(30_000 * 60_000))
    # 4 x 2.808 x 5/4 = 14.04 GFLOP at half of the peak: 90 us, and 150 as recorded.
    assert backward == round(np.sqrt(90_000 * 150_000))
    assert described(fused) == {"paper": 2}
    # From 0.73 of the peak to the time of the products.
    assert fused.low_ns[fused.select(name=FUSED_NAME)][0] == pytest.approx(5.616e9 / (0.73 * 312e3), abs=1)
    assert fused.high_ns[fused.select(name=FUSED_NAME)][0] == 60_000


def test_a_causal_mask_halves_the_work() -> None:
    whole, half = (changed(attention_step(), what_if) for what_if in ("flash_attention", "flash_attention:causal=true"))
    for graph, expected in ((whole, [60, 150]), (half, [30, 75])):
        assert (graph.duration_ns[graph.select(name=FUSED_NAME)] / US).tolist() == expected


def test_small_attention_takes_what_recorded_flash_kernels_take_at_least() -> None:
    build = Build(CPU, STREAM, gpu=A100, n_steps=1)
    for name, family in (("scores", F.GEMM), ("softmax", F.SOFTMAX), ("context", F.GEMM)):
        call = build.task(0, 1000, "launch")
        kernel = build.task(1, 5000, name, family=family, dtype=DTYPES.index("fp16"), flops=10**6)
        build.edge(call, kernel, kind=DependencyKind.LAUNCH)
    fused = changed(build.graph(), "flash_attention")
    # 9 us is more than its products' 10 us allow half-way: sqrt(9 x 10).
    assert fused.duration_ns[fused.on_gpu].tolist() == [round(np.sqrt(9_000 * 10_000))]


def test_in_fp32_it_is_the_other_kernel_and_amp_first_gives_flash() -> None:
    graph = attention_step(dtype="fp32", flops=2_808_000_000)
    alone = changed(graph, "flash_attention")
    assert alone.duration_ns[alone.select(name=FUSED_NAME)].tolist() == [60 * US, 150 * US]
    assert any("amp flash_attention" in note for note in alone.notes)
    both = changed(graph, "amp:target=bf16", "flash_attention")
    assert not any("memory-efficient" in note for note in both.notes)
    assert (both.duration_ns[both.select(name=FUSED_NAME)] < alone.duration_ns[alone.select(name=FUSED_NAME)]).all()
    assert makespan(both) < makespan(alone)


def test_fused_attention_stays_and_none_is_refused() -> None:
    fused = changed(attention_step(), "flash_attention")
    again = changed(fused, "flash_attention")
    assert np.array_equal(again.duration_ns, fused.duration_ns)
    assert any("fused already" in note for note in again.notes)
    with pytest.raises(WhatifError, match="expected GPU kernels of an attention"):
        changed(step(), "flash_attention")


# -- TF32 ------------------------------------------------------------------------------------------------------------


def products_of(graph: TaskGraph, m: int, n: int, k: int) -> TaskGraph:
    """The step whose products were all recorded in these sizes."""
    what = Described("matmul", "mm", "fp32", (("batch", 1), ("m", m), ("n", n), ("k", k)))
    called = np.where(graph.family == F.GEMM, 0, -1).astype(np.int32)
    return graph.replace(called=called, info=replace(graph.info, operators=(what,)))


def test_tf32_speeds_up_products_alone() -> None:
    """Large products: the ratio of the data sheets' sustained rates, 156 to 19.5 TFLOP/s or less where TF32 starves."""
    graph = products_of(attention_step(dtype="fp32"), 4096, 4096, 4096)
    faster = changed(graph, "tf32")
    assert 40_000 / 9 < duration_of(faster, "qkv") < 40_000 / 4
    assert duration_of(faster, "softmax_warp_forward") == 25 * US
    assert duration_of(faster, "adam") == 50 * US
    assert len(faster) == len(graph)
    # A second time there is nothing left to do.
    assert changed(faster, "tf32").notes[-1].endswith("nothing changes")


def test_tf32_gains_less_where_memory_binds() -> None:
    """32 rows times a matrix of a gigabyte, and a square product."""
    thin, square = (products_of(attention_step(dtype="fp32"), m, 16384, 16384) for m in (32, 16384))
    assert duration_of(changed(thin, "tf32"), "qkv") > 1.5 * duration_of(changed(square, "tf32"), "qkv")


def test_tf32_lengthens_no_kernel_and_comes_before_or_after_channels_last(shared_traces: Path) -> None:
    """The first convolution of a VGG, of three channels, used to take three times as long in TF32."""
    baseline = Baseline.of(whatif.read(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz"))
    after = whatif.apply(baseline, "tf32").graph
    assert (after.duration_ns <= baseline.graph.duration_ns).all()
    assert (after.high_ns <= baseline.graph.high_ns).all()
    orders = ("tf32", "channels_last"), ("channels_last", "tf32")
    assert len({whatif.apply(baseline, *order).predicted_ms for order in orders}) == 1


def test_a_convolution_that_does_not_say_fp32_runs_in_tf32_already() -> None:
    simt, unnamed = "ampere_scudnn_128x64_relu", "sm80_xmma_fprop_implicit_gemm_nhwc"

    def convolution(name: str) -> TaskGraph:
        build = Build(CPU, STREAM, gpu=A100, n_steps=1)
        call = build.task(0, 1000, "launch", phase=Phase.FORWARD)
        columns = {"family": F.CONVOLUTION, "dtype": DTYPES.index("fp32"), "phase": Phase.FORWARD}
        build.edge(call, build.task(1, 100_000, name, **columns), kind=DependencyKind.LAUNCH)
        return build.graph()

    assert duration_of(changed(convolution(simt), "tf32"), simt) < 60_000
    assert duration_of(changed(convolution(unnamed), "tf32"), unnamed) == 100_000
    # And half precision gains from TF32 what is left: the peaks' factor of two, and the layout's changes are half.
    assert duration_of(changed(convolution(simt), "amp:target=bf16"), simt) < 60_000
    assert duration_of(changed(convolution(unnamed), "amp:target=bf16"), unnamed) >= 45_000


def test_devices_without_the_units_say_so() -> None:
    for what_if, gpu in (("tf32", V100), ("fp8", A100), ("tf32", "A device of tomorrow"), ("fp8", V100)):
        with pytest.raises(WhatifError, match=rf"{what_if}: expected a GPU with .*, got {gpu}"):
            changed(attention_step(gpu), what_if)


def test_a_cpu_has_no_such_units(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "transformer_cpu.json.gz")
    for what_if in ("tf32", "fp8"):
        with pytest.raises(WhatifError, match=f"{what_if}: expected the recording of a GPU, got one of a CPU"):
            changed(graph, what_if)
    # torch's attention on a CPU is fused as well.
    assert changed(graph, "flash_attention").notes[-1].endswith("fused already; nothing changes")


# -- fp8 -------------------------------------------------------------------------------------------------------------


def test_fp8_takes_the_linear_layers_and_adds_their_casts() -> None:
    """Large products: 1979 to 989.4 TFLOP/s by the data sheet."""
    graph = products_of(attention_step(H100), 8192, 8192, 8192)
    fp8 = changed(graph, "fp8")
    assert duration_of(fp8, "qkv") == pytest.approx(40_000 / 2, rel=0.15)
    assert duration_of(fp8, "scores") == 30_000
    assert duration_of(fp8, "dropout") == 20_000
    # Two linear layers: two casts each forward, one for each pair of products backward; the scales once a pass.
    assert names(fp8).count(CAST_NAME) == 2 * 2 + 2
    assert names(fp8).count(SCALE_NAME) == 2
    casts = fp8.select(name=f"^{CAST_NAME[:11]}|^{SCALE_NAME}")
    assert (fp8.launch_of[casts] >= 0).all()
    assert (fp8.duration_ns[casts] == 2_000).all()
    assert (sources(fp8)[casts] == Source.ASSUMED).all()


def test_fp8_casts_move_a_third_of_the_product_and_two_copies_of_it() -> None:
    """3 x 24 MB of bf16: one operand of 24 MB is read and written as two of 12, 48 MB in all, at 0.91 x 3,350 GB/s."""
    fp8 = changed(attention_step(H100, size_bytes=72_000_000), "fp8")
    casts = fp8.select(name=f"^{CAST_NAME[:11]}")
    assert fp8.duration_ns[casts].tolist() == [round(48e6 / (0.91 * 3350))] * 6
    assert (sources(fp8)[casts] == Source.ROOFLINE).all()


def test_fp8_a_second_time_changes_nothing() -> None:
    fp8 = changed(attention_step(H100), "fp8")
    again = changed(fp8, "fp8")
    assert np.array_equal(again.duration_ns, fp8.duration_ns)
    assert again.notes[-1] == "fp8: the linear layers run in it already; nothing changes"


def test_fp8_slows_down_a_step_that_the_cpu_bounds(shared_traces: Path) -> None:
    folder = shared_traces / "tracelens-h100-mi300"
    baseline = Baseline.of(whatif.read(folder / "h100.Falconsai_nsfw_image_detection__1016002.json.gz"))
    prediction = whatif.apply(baseline, "fp8")
    assert prediction.predicted_ms > baseline.step_ns / 1e6
    assert "host-bound" in prediction.verdict


def test_products_of_unknown_shapes_do_not_get_slower_in_half_precision() -> None:
    """From an nsys recording, on another GPU: their upper end was 1.53 times that in fp32."""
    graph = whatif.read(extra_data("traces", "zx3xyy-a100-2.7b", "result_2_7B_clean.sqlite"))
    moved, half = (whatif.apply(graph, "device:to=A100-PCIE-40", *more).graph for more in ((), ("amp",)))
    products, halves = (each.high_ns[each.family == KernelFamily.GEMM].sum() for each in (moved, half))
    assert halves <= products


# -- recordings of others --------------------------------------------------------------------------------------------


def test_the_particle_transformers_attention_fuses(shared_traces: Path) -> None:
    """Ten attentions of four kernels (product, softmax, cast, product); fused they read and write tensors alone."""
    baseline = Baseline.of(whatif.read(shared_traces / "harryjmoss-a100-batch" / "bs64.run0.pt.trace.json.gz"))
    found = unfused_attention(baseline.graph)
    assert [len(attention.kernels) for attention in found] == [4] * 10
    prediction = whatif.apply(baseline, "flash_attention")
    saved_ms = baseline.breakdown.gpu_busy_ms - prediction.breakdown.gpu_busy_ms
    replaced_ms = sum(float(baseline.graph.duration_ns[attention.kernels].sum()) for attention in found) / 1e6
    assert 0.5 * replaced_ms < saved_ms < replaced_ms


def test_an_unfused_training_step_has_forward_and_backward_attention(shared_traces: Path) -> None:
    """A transformer on an RTX A4000 in fp32: products four fifths of whose time the fused kernel keeps."""
    graph = whatif.read(shared_traces / "edls-a4000" / "torch_profiler_trace.json.gz")
    found = unfused_attention(graph)
    assert sum(attention.backward for attention in found) >= 10
    assert sum(not attention.backward for attention in found) >= 10
    assert "memory-efficient" in " ".join(changed(graph, "flash_attention").notes)


@pytest.mark.parametrize(
    "file",
    [
        "tracelens-h100-mi300/h100.gaunernst_bert-small-uncased__1016001.json.gz",
        "tracelens-h100-mi300/mi300.gaunernst_bert-small-uncased__1016001.json.gz",
        "modded-nanogpt-8xh100/current.rank0.json.gz",
    ],
)
def test_fused_recordings_stay(shared_traces: Path, file: str) -> None:
    graph = whatif.read(shared_traces / file)
    assert changed(graph, "flash_attention").notes[-1] == (
        "flash_attention: the attention is fused already; nothing changes"
    )


# -- random graphs ---------------------------------------------------------------------------------------------------

KERNELS = st.lists(
    st.tuples(
        st.sampled_from([F.GEMM, F.GEMM, F.GEMM, F.SOFTMAX, F.ELEMENTWISE, F.CAST, F.REDUCTION, F.CONVOLUTION]),
        st.sampled_from(["fp32", "bf16", "fp16", ""]),
        st.integers(0, 200_000),
        st.integers(-1, 10**12),
        st.integers(-1, 10**9),
        st.sampled_from([Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]),
        st.booleans(),
        st.integers(-1, 10**6),
    ),
    min_size=1,
    max_size=25,
)


def random_graph(rows: list[Any], gpu: str) -> TaskGraph:
    build = Build(CPU, STREAM, gpu=gpu, n_steps=1)
    for number, (family, dtype, ns, flops, size, phase, backward, warps) in enumerate(rows):
        call = build.task(0, 1000, "launch", phase=phase)
        name = f"k{number}" + ("softmax_backward" if backward else "")
        kernel = build.task(
            1, ns, name, family=family, dtype=DTYPES.index(dtype), flops=flops, size_bytes=size, phase=phase,
            operator=number, warps=warps,
        )  # fmt: skip
        build.edge(call, kernel, kind=DependencyKind.LAUNCH)
    build.sync(1000)
    return build.graph()


@settings(max_examples=60, deadline=None)
@given(KERNELS, st.sampled_from([A100, H100]), st.sampled_from(["tf32", "fp8", "flash_attention"]))
def test_what_a_what_if_does_not_touch_stays(rows: list[Any], gpu: str, what_if: str) -> None:
    graph = random_graph(rows, gpu)
    try:
        result = changed(graph, what_if)
    except WhatifError:
        return  # no products, no attention
    by_name = dict(zip(names(result), result.duration_ns.tolist(), strict=True))
    inside = {int(i) for a in unfused_attention(graph) for i in a.kernels} if what_if == "flash_attention" else set()
    for task in np.flatnonzero(graph.on_gpu).tolist():
        name = names(graph)[task]
        before = int(graph.duration_ns[task])
        if what_if == "flash_attention":
            assert task in inside or by_name[name] == before
        elif graph.family[task] in (F.GEMM, F.CONVOLUTION):
            assert by_name[name] <= before
        else:
            assert by_name[name] == before
    assert (result.low_ns <= result.duration_ns).all()
    assert (result.duration_ns <= result.high_ns).all()
    # Every kernel that is left has its launch, and the wait at the end still waits for all of them.
    assert (result.launch_of[result.on_gpu] >= 0).all()
    timeline = simulate(result)
    assert timeline.makespan_ns >= int(timeline.end_ns[result.on_gpu].max())
    if what_if == "flash_attention":
        assert int(result.duration_ns[result.on_gpu].sum()) <= int(graph.duration_ns[graph.on_gpu].sum())


@settings(max_examples=60, deadline=None)
@given(KERNELS, st.sampled_from([A100, V100, "unknown"]), st.floats(0.05, 50), st.floats(1, 4))
def test_a_larger_batch_is_never_shorter_and_the_same_one_is_the_same(
    rows: list[Any], gpu: str, factor: float, more: float
) -> None:
    graph = random_graph(rows, gpu)
    try:
        same, some, larger = (changed(graph, f"batch_size:factor={by}") for by in (1, factor, factor * more))
    except WhatifError as error:  # forward passes alone, with a product of unknown size
        if "expected the shapes of the products of a forward pass" not in str(error):
            raise
        return
    assert np.array_equal(same.duration_ns, graph.duration_ns)
    assert (some.duration_ns <= larger.duration_ns).all()
    grows = larger.duration_ns > graph.duration_ns
    assert (larger.duration_ns <= np.ceil(graph.duration_ns * max(factor * more, 1))).all()
    assert not (grows & (graph.phase == Phase.UPDATE)).any()
