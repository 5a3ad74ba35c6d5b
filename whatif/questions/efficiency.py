"""How well a step uses its GPU: TFLOP/s, GB/s, arithmetic intensity and shares of the peaks; MFU and HFU.

FLOPs and bytes are those of ``whatif.ingest.op_cost``: products of matrices, a multiply-add counts two, causal
attention half; bytes are compulsory traffic. What shapes do not determine is None. Shares are of the data sheet's
dense peak in the kernel's own number format. MFU and HFU: ``whatif.prediction.utilization``.

Source: Williams et al., "Roofline", CACM 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.kernels import FAMILY_WORDS, MATRIX_FAMILIES, KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import PHASE_NAMES, Array, Bool, Float64, Phase, among
from whatif.hardware.gpu import MATRIX_DTYPES, Gpu
from whatif.hardware.roofline import MatrixWork, compute_share, kernel_floor_ns, memory_share
from whatif.models.durations.database import usual_calls_ns
from whatif.models.durations.estimator import device
from whatif.models.durations.occupancy import RATE_DTYPES
from whatif.prediction.baseline import Baseline
from whatif.prediction.utilization import CONVENTION, at_peak, counted, utilization
from whatif.simulation.simulator import simulate
from whatif.simulation.steps import CLOCK_NOUNS

# The work whose usual rates a family's kernels have, forward and backward.
_WORKS: dict[KernelFamily, tuple[MatrixWork, MatrixWork]] = {
    KernelFamily.GEMM: ("matmul", "matmul"),
    KernelFamily.CONVOLUTION: ("conv", "conv_backward"),
    KernelFamily.ATTENTION: ("attention", "attention_backward"),
    KernelFamily.RNN: ("rnn", "rnn"),
}
# A kernel that lasts at most this many times the shortest kernel is bound by its launch: our choice.
SHORT = 2.0
# A kernel below this share of both peaks is bound by neither, but by latency: our choice.
IDLE_SHARE = 0.1
# A row has no rates if less than this share of its time has known work: our choice.
LEAST_KNOWN = 0.5
# A saving below this share of the step is not reported: our choice.
WORTH_SHARE = 0.01


class Use(Struct, frozen=True):
    """GPU use of one family, layer or phase in a step; None if shapes are unknown."""

    name: str
    ms: float
    kernels: float
    known_pct: float  # share of that time in kernels with known work
    tflops: float | None  # per second, while these kernels run
    gbyte_s: float | None
    intensity: float | None  # FLOPs a byte
    compute_pct: float | None  # of the peak in their formats
    memory_pct: float | None  # of the data sheet's bandwidth
    bound: str  # compute, memory, launch, latency; "" if unknown
    usual_saves_ms: float | None  # kernel time saved at the usual speed on this GPU
    usual_by: str = ""  # source of most of that: shapes (the op database), rates (of large kernels)
    usual_gain_ms: float | None = None  # what the step gains by it; only for families in ``savings``

    def to_dict(self, key: str) -> dict[str, Any]:
        """Return the row as a JSON object."""
        rounded = {
            name: None if (value := getattr(self, name)) is None else round(value, 4)
            for name in (
                "ms", "kernels", "known_pct", "tflops", "gbyte_s", "intensity", "compute_pct", "memory_pct",
                "usual_saves_ms",
            )
        }  # fmt: skip
        gain = {} if self.usual_gain_ms is None else {"usual_gain_ms": round(self.usual_gain_ms, 6)}
        return {key: self.name, **rounded, "bound": self.bound or None, "usual_by": self.usual_by or None, **gain}


class Efficiency(Struct, frozen=True):
    """The use of a GPU by family, layer and phase, and of the whole step; percent of the data sheet's peaks."""

    baseline: Baseline
    gpu: Gpu | None
    step_tflop: float
    recomputed_tflop: float
    mfu_pct: float | None
    hfu_pct: float | None
    known_pct: float  # share of matrix kernel time with known FLOPs
    families: tuple[Use, ...]
    layers: tuple[Use, ...]
    phases: tuple[Use, ...]
    notes: tuple[str, ...]

    @property
    def has_rates(self) -> bool:
        """Whether the rate of any family is known from shapes."""
        return any(use.tflops is not None or use.gbyte_s is not None for use in self.families)

    @property
    def points(self) -> list[tuple[Use, float, float]]:
        """The families of a roofline plot, with their FLOPs a byte and TFLOP/s."""
        return [(use, use.intensity, use.tflops) for use in self.families if use.intensity and use.tflops]

    @property
    def memory_tbyte_s(self) -> float:
        """The peak rate of the device's memory, TB/s: the slope of the roofline; 0 if the device is unknown."""
        return self.gpu.memory_gbyte_s / 1e3 if self.gpu is not None else 0.0

    @property
    def roofs(self) -> list[tuple[str, float]]:
        """The formats with units on the device and their peaks, TFLOP/s, lowest first; equal peaks together."""
        if self.gpu is None:
            return []
        names: dict[float, list[str]] = {}
        for name in MATRIX_DTYPES:
            if self.gpu.matrix_dtype(name) == name:
                names.setdefault(self.gpu.matrix_tflops(name), []).append(name)
        return [(", ".join(names[peak]), peak) for peak in sorted(names)]

    @property
    def savings(self) -> tuple[Use, ...]:
        """Families whose usual times would save a hundredth of the step or more, the largest gain of the step first."""
        found = [use for use in self.families if use.usual_gain_ms is not None]
        return tuple(sorted(found, key=lambda use: (-(use.usual_gain_ms or 0.0), -(use.usual_saves_ms or 0.0))))

    @property
    def headline(self) -> str:
        """Give MFU and HFU in one sentence, or say why not."""
        noun, step_ms = CLOCK_NOUNS[self.baseline.clock], self.baseline.step_ms
        if self.step_tflop <= 0:
            return "MFU –: the recording holds no shapes of matrix products; record with shapes."
        done = f"{self.step_tflop:,.3g} TFLOP a {noun} of {step_ms:,.2f} ms"
        if self.gpu is None or self.mfu_pct is None:
            return f"MFU –: {done}, and the peak of this device is not known."
        again = f", HFU {self.hfu_pct:.1f} % with recomputation" if self.recomputed_tflop else ""
        known = (
            "" if self.known_pct > 99.5 else f"; {self.known_pct:.0f} % of the matrix kernels' time has known shapes"
        )
        return f"MFU {self.mfu_pct:.1f} % of {self.gpu.name}{again}: {done}{known}."

    def to_dict(self) -> dict[str, Any]:
        """Return the use as a JSON object."""
        return {
            "trace": self.baseline.graph.info.path,
            "gpu": self.gpu.name if self.gpu else None,
            "step_clock": self.baseline.clock,
            "baseline_ms": self.baseline.step_ms,
            "headline": self.headline,
            "convention": CONVENTION,
            "tflop_per_step": self.step_tflop,
            "recomputed_tflop_per_step": self.recomputed_tflop,
            "mfu_pct": self.mfu_pct,
            "hfu_pct": self.hfu_pct,
            "known_pct": self.known_pct,
            "families": [use.to_dict("family") for use in self.families],
            "layers": [use.to_dict("layer") for use in self.layers],
            "phases": [use.to_dict("phase") for use in self.phases],
            "notes": list(self.notes),
        }


def efficiency(baseline: Baseline, top: int = 10) -> Efficiency:
    """Return the use of the GPU in a baseline's steady steps, the ``top`` families and layers by time."""
    graph = baseline.graph
    gpu = device(graph)
    work = _Work(graph, gpu, *counted(graph, baseline.clock))
    used = utilization(graph, gpu, baseline.clock, baseline.step_ns)
    matrix = work.chosen & among(graph.family, MATRIX_FAMILIES)
    matrix_ns = float(graph.duration_ns[matrix].sum())
    known = matrix & (graph.flops > 0)
    family = np.where(work.chosen, graph.family, -1)
    notes, noun = [], CLOCK_NOUNS[baseline.clock]
    if work.faster.any():
        notes.append(
            f"{work.kernels_that(work.faster, 'do', 'does', noun)} fewer multiplications than the formula says "
            "(Winograd, FFT), or multiplications in another format than the name shows: such shares are not counted"
        )
    if graph.info.differentiates_gradients:
        notes.append("the backward pass computes gradients of gradients: none of its work counts as recomputation")
    if work.cached.any():
        notes.append(
            f"{work.kernels_that(work.cached, 'read', 'reads', noun)} from caches, faster than memory: such bytes are "
            "not counted"
        )
    families = work.rows(family, FAMILY_WORDS)
    families = _with_gains(baseline, work, family, families[:top])
    layers = work.rows(np.where(work.chosen & (graph.layer > 0), graph.layer, -1), graph.layers)
    phases = work.rows(np.where(work.chosen, graph.phase, -1), PHASE_NAMES)
    return Efficiency(
        baseline=baseline,
        gpu=gpu,
        step_tflop=used.tflop,
        recomputed_tflop=used.recomputed_tflop,
        mfu_pct=used.mfu_pct,
        hfu_pct=used.hfu_pct,
        known_pct=100.0 * float(graph.duration_ns[known].sum()) / matrix_ns if matrix_ns else 0.0,
        families=tuple(families),
        layers=tuple(layers[:top]),
        phases=tuple(phases),
        notes=tuple(notes),
    )


def _with_gains(baseline: Baseline, work: _Work, family: Array, uses: Sequence[Use]) -> list[Use]:
    """The rows, with the step's gain if usual times save a hundredth of it or more."""
    graph, found = baseline.graph, []
    for use in uses:
        if (use.usual_saves_ms or 0.0) >= max(WORTH_SHARE * baseline.step_ns / 1e6, 1e-9):
            code = KernelFamily[use.name.upper().replace(" ", "_")]
            tasks = np.flatnonzero((family == code) & (work.saves_ns > 0))
            changed = graph.with_duration(tasks, graph.duration_ns[tasks] - work.saves_ns[tasks])
            gain_ns = baseline.step_ns - simulate(changed).step_ns_by(baseline.clock)
            use = replace(use, usual_gain_ms=max(gain_ns, 0.0) / 1e6)
        found.append(use)
    return found


class _Work:
    """FLOPs, bytes and their times at the device's peaks for each chosen task, shape (n_tasks,)."""

    def __init__(self, graph: TaskGraph, gpu: Gpu | None, chosen: Bool, n_steps: int) -> None:
        self.graph, self.gpu, self.chosen, self.n_steps = graph, gpu, chosen, n_steps
        self.ns = graph.duration_ns.astype(np.float64) * chosen
        self.flops = np.where(chosen & (graph.flops > 0), graph.flops, 0).astype(np.float64)
        self.bytes = np.where(chosen & (graph.size_bytes > 0), graph.size_bytes, 0).astype(np.float64)
        self.at_peak_ns, self.usual_ns, self.moving_ns = (np.zeros(len(graph)) for _ in range(3))
        self.faster = self.cached = self.by_shape = np.zeros(len(graph), dtype=np.bool_)
        self.saves_ns = np.zeros(len(graph))
        if gpu is None or not graph.has_gpu:
            return
        self.at_peak_ns, form = at_peak(graph, gpu, self.flops)
        backward = graph.phase == Phase.BACKWARD
        for family, works in _WORKS.items():
            for direction, matrix_work in enumerate(works):
                shares = np.array([compute_share(gpu, name, matrix_work).centre for name in RATE_DTYPES])
                selected = (graph.family == family) & (backward == bool(direction))
                self.usual_ns[selected] = (self.at_peak_ns / shares[form])[selected]
        self.moving_ns = self.bytes / gpu.memory_gbyte_s
        self.faster = self.at_peak_ns > self.ns
        self.cached = self.moving_ns > self.ns
        self.saves_ns, self.by_shape = self._saves()

    def kernels_that(self, mask: Bool, plural: str, singular: str, noun: str) -> str:
        """Return the number of kernels in a mask, per step or in the whole span, with its verb."""
        count = max(round(int(mask.sum()) / self.n_steps), 1)
        return f"1 kernel a {noun} {singular}" if count == 1 else f"{count:,} kernels a {noun} {plural}"

    def _saves(self) -> tuple[Float64, Bool]:
        """The time that each task would save at its usual speed, ns, and whether the op database gives that by shape.

        A call within the database's range saves nothing. Calls that the database lacks are compared with the rates of
        large kernels.
        """
        assert self.gpu is not None
        usual_ns = np.maximum(self.usual_ns, self.moving_ns / memory_share(self.gpu).centre)
        usual_ns = np.where(usual_ns > 0, np.maximum(usual_ns, kernel_floor_ns(self.gpu)), np.inf)
        of_shape_ns, high_ns = usual_calls_ns(self.graph, np.flatnonzero(self.chosen))
        by_shape = np.isfinite(of_shape_ns)
        usual_ns = np.where(by_shape, np.where(self.ns > high_ns, of_shape_ns, np.inf), usual_ns)
        return np.where(self.chosen, np.maximum(self.ns - usual_ns, 0.0), 0.0), by_shape

    def rows(self, codes: Array, names: Sequence[str]) -> list[Use]:
        """Return a row for each code that takes time, the longest first; negative codes are ignored."""
        graph, n = self.graph, len(names)
        known = codes >= 0

        def total(values: Float64, chosen: Bool) -> Float64:
            return np.bincount(codes[known & chosen], weights=values[known & chosen], minlength=n).astype(np.float64)

        everything, ones = np.ones(len(graph), dtype=np.bool_), np.ones(len(graph))
        computes, moves = (self.flops > 0) & ~self.faster, (self.bytes > 0) & ~self.cached
        ns, count = total(self.ns, everything), total(ones, self.chosen)
        compute_ns, at_peak_ns, flops = (
            total(self.ns, computes),
            total(self.at_peak_ns, computes),
            total(self.flops, computes),
        )
        memory_ns, moving_ns, moved = total(self.ns, moves), total(self.moving_ns, moves), total(self.bytes, moves)
        both = computes & moves
        flops_of_both, bytes_of_both = total(self.flops, both), total(self.bytes, both)
        saved, saved_by_shape = total(self.saves_ns, everything), total(self.saves_ns, self.by_shape)
        known_ns = total(self.ns, (self.flops > 0) | (self.bytes > 0))
        compared_ns = total(self.ns, (self.flops > 0) | (self.bytes > 0) | self.by_shape)
        found = []
        for code in np.argsort(-ns, kind="stable").tolist():
            if not ns[code] > 0:
                break
            has_flops = compute_ns[code] >= LEAST_KNOWN * ns[code]
            has_bytes = memory_ns[code] >= LEAST_KNOWN * ns[code]
            on_gpu = self.gpu is not None and graph.has_gpu
            compute = at_peak_ns[code] / compute_ns[code] if has_flops and on_gpu else None
            memory = moving_ns[code] / memory_ns[code] if has_bytes and on_gpu else None
            found.append(
                Use(
                    name=names[code],
                    ms=float(ns[code]) / self.n_steps / 1e6,
                    kernels=float(count[code]) / self.n_steps,
                    known_pct=100.0 * float(known_ns[code] / ns[code]),
                    tflops=float(flops[code] / compute_ns[code]) / 1e3 if has_flops else None,
                    gbyte_s=float(moved[code] / memory_ns[code]) if has_bytes else None,
                    intensity=float(flops_of_both[code] / bytes_of_both[code])
                    if bytes_of_both[code] and has_flops
                    else None,
                    compute_pct=None if compute is None else 100.0 * float(compute),
                    memory_pct=None if memory is None else 100.0 * float(memory),
                    bound=self._bound(compute, memory, float(ns[code] / max(count[code], 1))),
                    usual_saves_ms=float(saved[code]) / self.n_steps / 1e6
                    if on_gpu and compared_ns[code] >= LEAST_KNOWN * ns[code]
                    else None,
                    usual_by=("shapes" if 2 * saved_by_shape[code] >= saved[code] else "rates") if saved[code] else "",
                )
            )
        return found

    def _bound(self, compute: float | None, memory: float | None, mean_ns: float) -> str:
        """The bound of kernels with these shares of the peaks and this mean duration; "" if unknown."""
        if self.gpu is None or (compute is None and memory is None):
            return ""
        if mean_ns <= SHORT * kernel_floor_ns(self.gpu):
            return "launch"
        if max(compute or 0.0, memory or 0.0) < IDLE_SHARE:
            return "latency"
        return "compute" if (compute or 0.0) >= (memory or 0.0) else "memory"
