"""Daydream's figures 6 and 7 in what they say of the CPU: steps drawn from the numbers that the paper states.

§6.3: the weight update of BERT runs 2,633 element-wise kernels (base) and 5,164 (large), takes around 30 and 45 % of
the iteration, is bound by the calls that launch them, and FusedAdam almost eliminates these. §6.2 and figure 6: under
AMP the GPU gets faster, part of the time in which both work becomes time of the CPU alone, and the CPU's own time
barely changes. The paper prints no times of a call or a kernel: a call and its gap take 6 us here and an element-wise
kernel 3 ("could be much shorter than their corresponding CUDA launch calls"); the tests vary them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

import whatif
from tests.helpers import CPU, STREAM, Build, replace
from whatif import DependencyKind, Phase, Prediction, TaskGraph, TaskKind
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.prediction.predict import Baseline

UPDATE_KERNELS = {"base": 2633, "large": 5164}
# Share of the iteration that the update takes.
UPDATE_SHARE = {"base": 0.30, "large": 0.45}
CALL_NS, GAP_NS = 4_000, 2_000
ELEMENT_WISE_NS = 3_000
# Forward and backward kernels of a layer are some tens of microseconds long; the share of the update shows their sum.
PASSES = 600
STEPS = 2


@lru_cache(maxsize=2)
def bert(size: str, *, kernel_ns: int = ELEMENT_WISE_NS, call_ns: int = CALL_NS) -> TaskGraph:
    """Steps whose passes are bound by the GPU, half of their kernels products, and whose update is bound by launches.

    ::

        CPU     |call|gap|call|gap| ... 600 ...|sync|call|gap|call|gap| ... 2633 or 5164 ...|sync|
        stream       |forward and backward kernels ...    |    |k|     |k|     |k| ...
    """
    update_ns = UPDATE_KERNELS[size] * (call_ns + GAP_NS)
    passes_ns = update_ns * (1 / UPDATE_SHARE[size] - 1)
    each_ns = round(passes_ns / PASSES)
    build = Build(CPU, STREAM, gpu="GeForce RTX 2080 Ti", n_steps=STEPS, optimizer="Adam")
    fp32 = DTYPES.index("fp32")

    def kernel(step: int, number: int, ns: int, name: str, phase: Phase, family: KernelFamily) -> None:
        columns = {"step": step, "phase": phase, "in_optimizer": phase == Phase.UPDATE}
        call = build.task(0, call_ns, "cudaLaunchKernel", **columns)
        build.task(0, GAP_NS, "gap", TaskKind.GAP, **columns)
        found = build.task(1, ns, name, family=family, dtype=fp32, operator=number, **columns)
        build.edge(call, found, kind=DependencyKind.LAUNCH)

    for step in range(STEPS):
        for number in range(PASSES):
            phase = Phase.FORWARD if number < PASSES // 3 else Phase.BACKWARD
            family = KernelFamily.GEMM if number % 2 else KernelFamily.ELEMENTWISE
            kernel(step, step * PASSES + number, each_ns, "sgemm" if number % 2 else "gelu", phase, family)
        build.sync(1_000)
        for _ in range(UPDATE_KERNELS[size]):
            kernel(step, -1, kernel_ns, "elementwise_kernel<adam>", Phase.UPDATE, KernelFamily.ELEMENTWISE)
        build.sync(1_000)
    graph = build.graph()
    span_ns = (sum(whatif.simulate(graph).step_times_ns("span")),)
    return graph.replace(info=replace(graph.info, measured_step_ns={"span": span_ns}))


def predicted(graph: TaskGraph, what_if: str) -> tuple[Baseline, Prediction]:
    baseline = Baseline.of(graph, "span", calibrated=False)
    return baseline, whatif.apply(baseline, what_if)


def update_ns(graph: TaskGraph) -> tuple[int, int]:
    """Time of the GPU's and of the CPU's work in the updates, ns."""
    update = graph.phase == Phase.UPDATE
    return tuple(int(graph.duration_ns[update & mask].sum()) for mask in (graph.on_gpu, graph.on_cpu))  # type: ignore[return-value]


@pytest.mark.parametrize("size", ["base", "large"])
def test_thousands_of_element_wise_kernels_are_bound_by_their_launches(size: str) -> None:
    graph = bert(size)
    on_gpu, on_cpu = update_ns(graph)
    assert (graph.on_gpu & (graph.phase == Phase.UPDATE)).sum() == STEPS * UPDATE_KERNELS[size]
    assert on_cpu > 1.5 * on_gpu
    # Kernels of no length at all would change nothing: only their calls bound the update.
    baseline = Baseline.of(graph, "span", calibrated=False)
    update = graph.on_gpu & (graph.phase == Phase.UPDATE)
    free = whatif.simulate(graph.with_duration(update, 0)).makespan_ns
    assert free > 0.99 * baseline.timeline.makespan_ns
    assert on_cpu / baseline.timeline.makespan_ns == pytest.approx(UPDATE_SHARE[size], abs=0.03)


@pytest.mark.parametrize("size", ["base", "large"])
@pytest.mark.parametrize(("kernel_ns", "call_ns"), [(2_500, 3_000), (3_000, 4_000), (5_000, 9_000)])
def test_fused_adam_gains_the_launches(size: str, kernel_ns: int, call_ns: int) -> None:
    graph = bert(size, kernel_ns=kernel_ns, call_ns=call_ns)
    baseline, prediction = predicted(graph, "fused_adam")
    gained_ns = baseline.timeline.makespan_ns - prediction.timeline.makespan_ns
    kernels_alone = graph.scale(graph.on_gpu & (graph.phase == Phase.UPDATE), 7 / 18)
    from_kernels_ns = baseline.timeline.makespan_ns - whatif.simulate(kernels_alone).makespan_ns
    # Faster kernels, launched one by one as before, gain next to nothing of it.
    assert from_kernels_ns < 0.05 * gained_ns
    # "almost eliminates all CPU kernel launch overhead in the weight update phase"
    left_on_gpu, left_on_cpu = update_ns(prediction.graph)
    assert left_on_cpu < 0.01 * update_ns(graph)[1]
    assert (prediction.graph.on_gpu & (prediction.graph.phase == Phase.UPDATE)).sum() == STEPS
    # The whole gain is the update's launches, less the one kernel that stays and its call.
    assert gained_ns == pytest.approx(update_ns(graph)[1] - left_on_gpu - left_on_cpu, rel=0.01)


def test_the_larger_model_gains_more() -> None:
    """Figure 7: BERT large gains more than base, because its update is a larger share."""
    gains = [predicted(bert(size), "fused_adam")[1].speedup for size in ("base", "large")]
    assert 1.2 < gains[0] < gains[1]
    # The share that the paper states bounds the gain: 1 / (1 - 0.30) and 1 / (1 - 0.45).
    assert gains[0] < 1 / (1 - UPDATE_SHARE["base"]) + 0.05
    assert gains[1] < 1 / (1 - UPDATE_SHARE["large"]) + 0.05


@pytest.mark.parametrize("size", ["base", "large"])
def test_amp_moves_the_bottleneck_to_the_cpu(size: str) -> None:
    """Figure 6: what the GPU loses is its own time, and time of both becomes time of the CPU alone."""
    baseline, prediction = predicted(bert(size), "amp")
    before, after = baseline.breakdown, prediction.breakdown
    assert after.gpu_busy_ms < 0.75 * before.gpu_busy_ms
    assert after.gpu_only_ms < before.gpu_only_ms
    share = [before.cpu_only_ms / prediction.baseline_ms, after.cpu_only_ms / prediction.predicted_ms]
    assert share[1] > share[0]
    cpu_ms = [float(graph.duration_ns[graph.on_cpu].sum()) / 1e6 for graph in (baseline.graph, prediction.graph)]
    # "while CPU runtime barely changes": the casts' launches are what it gains.
    assert cpu_ms[0] <= cpu_ms[1] < 1.35 * cpu_ms[0]
    # The step gains less than its kernels do, and the update, which stays fp32 and launch-bound, not at all.
    assert prediction.speedup < before.gpu_busy_ms / after.gpu_busy_ms
    update = prediction.graph.phase == Phase.UPDATE
    recorded = prediction.graph.start_ns >= 0
    assert np.array_equal(
        prediction.graph.duration_ns[update & recorded],
        baseline.graph.duration_ns[baseline.graph.phase == Phase.UPDATE],
    )


def test_together_they_gain_more_than_amp_alone() -> None:
    """§6.3 again: once the GPU is faster the launches of the update are the larger part of the step."""
    graph = bert("large")
    baseline = Baseline.of(graph, "span", calibrated=False)
    alone, both = whatif.apply(baseline, "amp"), whatif.apply(baseline, "amp", "fused_adam")
    assert both.speedup > 1.4 * alone.speedup
