"""Kernel names from real recordings, and the share of each recording that stays unclassified."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whatif.graph.kernels import (
    DTYPES,
    KernelFamily,
    classify_kernel,
    collective_of,
)

AT = "at::native::"
NAMES = [
    ("volta_sgemm_64x64_nt", KernelFamily.GEMM, "fp32"),
    ("ampere_sgemm_128x64_tn", KernelFamily.GEMM, "fp32"),
    ("ampere_fp16_s16816gemm_fp16_64x64_ldg8_f2f_nn", KernelFamily.GEMM, "fp16"),
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", KernelFamily.GEMM, "bf16"),
    ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", KernelFamily.GEMM, "fp16"),
    ("volta_h884gemm_128x64_ldg8_nn", KernelFamily.GEMM, "fp16"),
    (
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align1>"
        "(cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align1::Params)",
        KernelFamily.GEMM,
        "tf32",
    ),
    (
        "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_64x64_nn_align1>"
        "(cutlass_75_tensorop_bf16_s1688gemm_bf16_64x64_nn_align1::Params)",
        KernelFamily.GEMM,
        "bf16",
    ),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_execute_kernel__5x_cublas", KernelFamily.GEMM, "fp32"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_kernel__5x_cublas", KernelFamily.GEMM, "bf16"),
    ("nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NNN", KernelFamily.GEMM, "bf16"),
    ("nvjet_qqtst_192x192_128x4_2x1_v_bz_coopB_TNN", KernelFamily.GEMM, "fp8"),
    ("nvjet_rqsss_144x128_128x6_1x2_h_bz_coopA_algo2_TNN", KernelFamily.GEMM, "fp8"),
    ("nvjet_hsh_128x128_64x6_2x4_v_bz_NTT", KernelFamily.GEMM, "fp16"),
    ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN", KernelFamily.GEMM, "fp32"),
    ("Cijk_Ailk_Bljk_BBS_BH_MT64x64x64_MI16x16x16x1_SN", KernelFamily.GEMM, "bf16"),
    ("Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT64x32x128_MI16x16x1_SN", KernelFamily.GEMM, "bf16"),
    ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN", KernelFamily.GEMM, "fp16"),
    ("XXT_kernel", KernelFamily.GEMM, ""),
    ("cudnn_volta_scudnn_128x64_stridedB_splitK_xregs_large_nn_v1", KernelFamily.CONVOLUTION, "fp32"),
    ("volta_fp16_s884cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1", KernelFamily.CONVOLUTION, "fp16"),
    ("turing_fp16_s1688cudnn_fp16_256x64_ldg8_relu_f2f_exp_nhwc_tn_v1", KernelFamily.CONVOLUTION, "fp16"),
    (
        "sm90_xmma_wgrad_indexed_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x32_cudnn_train",
        KernelFamily.CONVOLUTION,
        "tf32",
    ),
    (
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>"
        "(cudnn::winograd_nonfused::WinogradDataParams<float, float>)",
        KernelFamily.CONVOLUTION,
        "fp32",
    ),
    ("void implicit_convolve_sgemm<float, float, 1024, 6, 7>(int, int)", KernelFamily.CONVOLUTION, "fp32"),
    ("void fft2d_r2c_32x32<float, false, 5u, true>(float2*, float const*)", KernelFamily.CONVOLUTION, "fp32"),
    ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8", KernelFamily.CONVOLUTION, "bf16"),
    ("miopenSp3AsmConv_v30_3_1_gfx94x_fp32_f2x3_stride1", KernelFamily.CONVOLUTION, "fp32"),
    (
        "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47GridwiseGemm_bk0mk1"
        "_bk0nk1_mn_xdlops_bwd_weightILi64EttftLNS_25InMemoryDataOperationEnumE1E",
        KernelFamily.CONVOLUTION,
        "bf16",
    ),
    (
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnBwdSm90<cutlass::bfloat16_t> > >",
        KernelFamily.ATTENTION,
        "bf16",
    ),
    (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::half_t> >",
        KernelFamily.ATTENTION,
        "fp16",
    ),
    ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", KernelFamily.ATTENTION, "fp32"),
    ("attn_fwd", KernelFamily.ATTENTION, ""),
    (
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float)",
        KernelFamily.NORMALIZATION,
        "fp32",
    ),
    (
        f"void {AT}batch_norm_backward_kernel<c10::BFloat16, c10::BFloat16, float, int>",
        KernelFamily.NORMALIZATION,
        "bf16",
    ),
    (f"void {AT}vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)", KernelFamily.LAYER_NORM, "bf16"),
    (f"void {AT}GammaBetaBackwardCUDAKernel<float, float>(long, long)", KernelFamily.LAYER_NORM, "fp32"),
    ("void softmax_warp_forward<c10::Half, float, float, 7, false, false>(float*)", KernelFamily.SOFTMAX, "fp16"),
    (f"void {AT}vectorized_elementwise_kernel<4, {AT}CUDAFunctor_add<float>, ...>", KernelFamily.ELEMENTWISE, "fp32"),
    (
        f"void {AT}elementwise_kernel<128, 4, {AT}BinaryFunctor<c10::Half, c10::Half, c10::Half, MulFunctor<float> > >",
        KernelFamily.ELEMENTWISE,
        "fp16",
    ),
    (f"void {AT}vectorized_elementwise_kernel<4, {AT}FillFunctor<long>, ...>(int)", KernelFamily.ELEMENTWISE, "int"),
    (f"void {AT}vectorized_elementwise_kernel<4, {AT}AbsFunctor<double> >", KernelFamily.ELEMENTWISE, "fp64"),
    (f"void {AT}CatArrayBatchedCopy<{AT}OpaqueType<4u>, unsigned int, 3, 64, 64>", KernelFamily.ELEMENTWISE, ""),
    (f"void {AT}reduce_kernel<512, 1, {AT}ReduceOp<float, {AT}WelfordOps<float> > >", KernelFamily.REDUCTION, "fp32"),
    ("void cunn_ClassNLLCriterion_updateOutput_kernel<float, float>(float*)", KernelFamily.REDUCTION, "fp32"),
    (f"void {AT}max_pool_backward_nchw<float, float>(float const*)", KernelFamily.POOLING, "fp32"),
    (f"void {AT}atomic_adaptive_average_gradinput<float>(float*)", KernelFamily.POOLING, "fp32"),
    ("void permute_pooled_embs_kernel<float>(float const*)", KernelFamily.INDEXING, "fp32"),
    ("void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int)", KernelFamily.INDEXING, "int"),
    (f"void {AT}indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2>", KernelFamily.INDEXING, "bf16"),
    (
        "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int> >",
        KernelFamily.INDEXING,
        "int",
    ),
    (
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float>",
        KernelFamily.OPTIMIZER,
        "fp32",
    ),
    ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>", KernelFamily.LAYOUT, "fp32"),
    ("batched_transpose_16x32_half", KernelFamily.LAYOUT, "fp16"),
    (f"void {AT}bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)", KernelFamily.CAST, "bf16"),
    ("void LSTM_elementWise_fp<float, float, float>(int, int)", KernelFamily.RNN, "fp32"),
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", KernelFamily.COMMUNICATION, "fp32"),
    (
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        KernelFamily.COMMUNICATION,
        "bf16",
    ),
    ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", KernelFamily.COMMUNICATION, ""),
    ("triton_poi_fused__scaled_mm__to_copy_clone_div_lift_fresh_permute_0", KernelFamily.FUSED, ""),
    ("triton_red_fused__log_softmax_div_mul_sigmoid_view_31", KernelFamily.FUSED, ""),
    ("triton_tem_fused_mm_12", KernelFamily.GEMM, ""),
    ("fused__autocast_to__16747471071299466860", KernelFamily.FUSED, ""),
    ("Memcpy HtoD (Pageable -> Device)", KernelFamily.COPY, ""),
    ("CopyHostToDevice", KernelFamily.COPY, ""),
    ("Memset (Device)", KernelFamily.MEMSET, ""),
    ("at::cuda::spin_kernel(long)", KernelFamily.OTHER, ""),
]


@pytest.mark.parametrize(("name", "family", "dtype"), NAMES, ids=[name[:60] for name, _, _ in NAMES])
def test_real_names(name: str, family: KernelFamily, dtype: str) -> None:
    assert classify_kernel(name) == (family, dtype)


@given(st.text(max_size=200))
def test_any_text_has_a_family_and_a_format(name: str) -> None:
    family, dtype = classify_kernel(name)
    assert family in KernelFamily
    assert dtype in DTYPES


@pytest.mark.parametrize(
    ("name", "detail", "collective"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "", "all_gather"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "", "send_recv"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "all_to_allv", "all_to_all"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "", "broadcast"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "allreduce", "all_reduce"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base", "all_gather"),
        (
            "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
            "reduce_scatter_tensor_coalesced",
            "reduce_scatter",
        ),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "", ""),
        ("volta_sgemm_64x64_nt", "", ""),
    ],
)
def test_collectives(name: str, detail: str, collective: str) -> None:
    assert collective_of(name, detail) == collective


@cache
def _gpu_time_us(path: Path) -> Counter[str]:
    loaded = json.loads(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))
    events = loaded["traceEvents"] if isinstance(loaded, dict) else loaded
    time_us: Counter[str] = Counter()
    for event in events:
        if str(event.get("cat")).lower() in ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"):
            time_us[event["name"]] += event["dur"]
    return time_us


@pytest.fixture(scope="module")
def recordings(shared_traces: Path) -> list[Path]:
    paths = sorted(shared_traces.glob("*/*.json.gz"))
    assert paths, f"expected recordings in {shared_traces}"
    return paths


def test_recordings_hold_almost_nothing_unknown(recordings: list[Path]) -> None:
    shares = {}
    for path in recordings:
        time_us = _gpu_time_us(path)
        # A busy-wait that tests of streams launch (torch.cuda._sleep): it computes nothing, so it has no family.
        unknown = sum(
            time
            for name, time in time_us.items()
            if classify_kernel(name)[0] == KernelFamily.OTHER and "spin_kernel" not in name
        )
        shares[path.name] = unknown / max(sum(time_us.values()), 1e-9)
    assert max(shares.values()) <= 0.001, shares


def test_matrix_kernels_of_recordings_say_their_format(recordings: list[Path]) -> None:
    for path in recordings:
        named: Counter[bool] = Counter()
        for name, time in _gpu_time_us(path).items():
            family, dtype = classify_kernel(name)
            if family in (KernelFamily.GEMM, KernelFamily.CONVOLUTION):
                named[dtype != ""] += time
        # Muon's Triton products and cuDNN's offset kernels do not.
        assert named[False] <= 0.06 * named.total(), path


def test_families_of_a_recording_add_up(recordings: list[Path]) -> None:
    """ResNet-50 in fp32 on a V100: mostly convolutions, then batch norms and elementwise kernels."""
    path = next(path for path in recordings if path.name == "num_workers_0.2021-06.pt.trace.json.gz")
    share: Counter[KernelFamily] = Counter()
    for name, time in _gpu_time_us(path).items():
        share[classify_kernel(name)[0]] += time
    matrix = share[KernelFamily.CONVOLUTION] + share[KernelFamily.GEMM]
    assert 0.5 < matrix / share.total() < 0.75
    assert 0.1 < share[KernelFamily.NORMALIZATION] / share.total() < 0.2
    assert 0.1 < share[KernelFamily.ELEMENTWISE] / share.total() < 0.25
