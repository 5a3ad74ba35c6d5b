"""Predict a step from its operators alone: kernels, their durations, CPU time, and a simulated graph."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from whatif.from_module.cpu_costs import cpu_costs
from whatif.from_module.durations import (
    Asked,
    Durations,
    ask,
    work_on_host,
)
from whatif.from_module.gpu_work import as_they_lie, kernels_of
from whatif.from_module.kernel import Kernel
from whatif.from_module.operations import Operation, OperatorGraph
from whatif.from_module.recording import trace_of, write_trace
from whatif.from_module.recurrent import CUDNN_OPERATORS, without_persistence
from whatif.from_module.schedule import schedule_steps
from whatif.from_module.tensor_cores import on_tensor_cores
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Phase
from whatif.hardware.gpu import Gpu
from whatif.ingest.gpu_side import DEFAULT_QUEUE_DEPTH
from whatif.ingest.read import read
from whatif.ingest.saved_graph import PREDICTED
from whatif.models.durations.estimator import device
from whatif.prediction.baseline import Baseline
from whatif.prediction.composition import spelled_together
from whatif.prediction.peak_fit import doubt_of, fits, peak_range_bytes
from whatif.prediction.predict import AnyTransform, Prediction, apply
from whatif.prediction.utilization import CONVENTION, Utilization, utilization

_STEADY = 4
# Steps that the GPU runs before the queue is full, in queues, at most: more are needed only if the host takes more than
# four fifths of the GPU's time, and then it hardly waits.
_MOST_BEFORE = 4.0
# Operator families whose fp32 products run in TF32, by what torch.backends allows.
TF32: dict[str, tuple[str, ...]] = {"none": (), "conv": ("conv",), "all": ("conv", "matmul")}


class PredictedStep(Struct, frozen=True, dict=True):
    """The result of ``whatif predict``: a prediction without a recorded baseline."""

    source: str
    device: str
    prediction: Prediction
    durations: Durations
    notes: tuple[str, ...]
    taken_bytes: int | None  # peak memory of the operators' tensors, without what-ifs

    @property
    def graph(self) -> TaskGraph:
        """The graph of the step with the what-ifs applied."""
        return self.prediction.graph

    @property
    def gpu(self) -> Gpu | None:
        """The GPU of the step with the what-ifs applied; None on a CPU."""
        return device(self.graph)

    @property
    def range_ms(self) -> tuple[float, float]:
        """A nominal 90 % range of the step, ms, from independent errors of the kernel families."""
        return self.prediction.low_ms, self.prediction.high_ms

    @property
    def peak_bytes(self) -> int | None:
        """The peak memory of a step, bytes; None if unknown."""
        if self.graph.info.memory is not None:
            return self.graph.info.peak_bytes
        # Only a forward pass: what-ifs change its memory by an unknown amount.
        return None if self.prediction.transforms else self.taken_bytes

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of training or inference; None if the batch is unknown."""
        return self.prediction.totals.samples_per_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, counted in the first input; None if that is not an integer tensor (batch, seq)."""
        recorded = self.graph.info.recorded
        shape = recorded.input_shape or ()
        if self.samples_per_s is None or len(shape) != 2 or recorded.input_dtype not in ("int64", "int32"):
            return None
        return self.samples_per_s * shape[1]

    @cached_property
    def used(self) -> Utilization:
        """FLOPs of the step's products with the what-ifs applied, and the utilization of its GPU."""
        predicted = self.prediction
        return utilization(self.graph, self.gpu, predicted.baseline.clock, predicted.predicted_ms * 1e6)

    @property
    def flops(self) -> int:
        """FLOPs of the products of one step as defined by ``CONVENTION``, without recomputed ones."""
        return round(self.used.tflop * 1e12)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Limitations of the prediction."""
        found = []
        unknown = self.durations.unknown
        if unknown:
            listed = ", ".join(f"{name} ({count})" for name, count in list(unknown.items())[:5])
            found.append(
                f"{sum(unknown.values())} kernels belong to operators without a rule; estimated from the bytes that "
                f"they move: {listed}"
            )
        if self.gpu is not None and self.gpu.note_on_dies:
            found.append(f"{self.gpu.note_on_dies}; use --device {self.gpu.name}-GCD")
        name, held = (self.gpu.name, self.gpu.memory_bytes) if self.gpu is not None else (self.device, None)
        if self.fits is False:
            found.append(f"the step does not fit the memory of {name}")
        found += filter(None, [doubt_of(name, self.peak_bytes, self.high_peak_bytes, held)])
        return (*found, *self.prediction.warnings)

    @property
    def fits(self) -> bool | None:
        """Whether the step fits the device's memory, as ``whatif.prediction.peak_fit.fits`` says."""
        return fits(self.peak_bytes, self.high_peak_bytes, self.gpu.memory_bytes if self.gpu is not None else None)

    @property
    def high_peak_bytes(self) -> int | None:
        """The upper end of the peak's range, bytes; None if unknown."""
        peak_bytes = self.peak_bytes
        return None if peak_bytes is None else peak_range_bytes(peak_bytes, self.prediction.transforms)[1]

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as a JSON object with the keys of ``whatif apply``; nothing was measured."""
        report = self.prediction.to_dict()
        low_ms, high_ms = self.range_ms
        kernels = len(self.durations.duration_ns)
        return {
            **report,
            "trace": self.source,
            "device": self.device,
            "low_ms": low_ms,
            "high_ms": high_ms,
            "kernels": kernels,
            "answered_by": self.durations.sources,
            "unknown_operators": self.durations.unknown,
            "peak_bytes": self.peak_bytes,
            "high_peak_bytes": self.high_peak_bytes,
            "fits": self.fits,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "flops": self.flops,
            "flops_count": CONVENTION,
            "mfu_pct": self.used.mfu_pct,
            "hfu_pct": self.used.hfu_pct,
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }  # fmt: skip


def predict_step(
    graph: OperatorGraph, estimator: Asked, gpu: Gpu | None, *, tf32: str = "conv",
    transforms: Sequence[AnyTransform] = (), save: Path | None = None,
) -> PredictedStep:  # fmt: skip
    """Predict the step of an operator graph on a device, under what-ifs; ``gpu`` is None for a CPU.

    ``tf32`` selects the fp32 products that may run in TF32 if the device supports it: a key of ``TF32``; PyTorch's
    default is "conv". With ``save`` the step without the what-ifs is written as a recording that every command reads.
    Raises WhatifError if the time of an operator is unknown.
    """
    kernels = work_on_host(estimator, graph) if gpu is None else _kernels(graph, gpu)
    if gpu is not None and gpu.fp16_tensor_tflops:
        matmuls_in_tf32 = gpu.tf32_tensor_tflops and tf32 == "all"  # on AMD's devices TF32 is no default
        families = TF32[tf32] if matmuls_in_tf32 or gpu.tf32_by_default else ()
        kernels = [
            on_tensor_cores(
                operation_kernels, gpu, _of_cudnn(operation, families), backward=operation.phase == Phase.BACKWARD
            )
            for operation_kernels, operation in zip(kernels, graph.operations, strict=True)
        ]
    durations = ask(estimator, [kernel for operation_kernels in kernels for kernel in operation_kernels])
    trace = _trace(graph, kernels, durations, gpu)
    if save is not None:
        write_trace(trace, save, user_named=True)
        recorded = read(save)
    else:
        with tempfile.TemporaryDirectory(prefix="whatif-") as folder:
            path = Path(folder) / "predicted.json"
            write_trace(trace, path, user_named=False)
            recorded = read(path)
    baseline = Baseline.of(recorded)
    prediction = apply(baseline, *transforms)
    notes = graph.notes
    if save is not None and transforms:
        label = spelled_together(prediction.transforms)
        notes = (*notes, f"{save} is the step without {label}: name what-ifs again where you use it")
    return PredictedStep(graph.source, estimator.device, prediction, durations, notes, graph.peak_bytes)


def _kernels(graph: OperatorGraph, gpu: Gpu) -> list[list[Kernel]]:
    """The kernels of each operation of a graph; an addmm right after a transpose has transposed weights."""
    found, before = [], ""
    old = float(gpu.compute_capability or 8.0) < 6.0  # other vendors have none
    for operation in graph.operations:
        kernels = kernels_of(without_persistence(operation) if old else operation)
        if operation.name == "aten::addmm" and before != "aten::t":
            kernels = [as_they_lie(kernel) for kernel in kernels]
        found.append(kernels)
        before = operation.name
    return found


def _of_cudnn(operation: Operation, families: tuple[str, ...]) -> tuple[str, ...]:
    """The families that may run in TF32: what allows cuDNN's convolutions allows its recurrent layers' products."""
    return TF32["all"] if families and operation.name in CUDNN_OPERATORS else families


def _trace(
    graph: OperatorGraph, kernels: Sequence[Sequence[Kernel]], durations: Durations, gpu: Gpu | None
) -> dict[str, Any]:
    costs = cpu_costs()
    whole_ns = np.rint(durations.duration_ns).astype(np.int64).tolist()
    predicted: dict[str, Any] = {"cpu_range_factor": costs.range_factor, "low_ns": [], "high_ns": []}
    at = 0
    timed: list[list[tuple[str, int]]] = []
    work_ns: list[int] = []
    for group in kernels:
        named_ns = [(kernel.name, int(ns)) for kernel, ns in zip(group, whole_ns[at : at + len(group)], strict=True)]
        at += len(group)
        timed.append(named_ns if gpu is not None else [])
        work_ns.append(0 if gpu is not None else sum(ns for _, ns in named_ns))
    if gpu is not None:
        predicted["low_ns"] = np.rint(durations.low_ns).astype(np.int64).tolist()
        predicted["high_ns"] = np.rint(durations.high_ns).astype(np.int64).tolist()
        predicted |= _under_autocast(graph, kernels)
    schedule = schedule_steps(graph, timed, work_ns, costs, steps=_steps(graph, timed, work_ns))
    return trace_of(graph, schedule, gpu, {PREDICTED: predicted})


def _under_autocast(graph: OperatorGraph, kernels: Sequence[Sequence[Kernel]]) -> dict[str, list[float] | list[int]]:
    """The effect of autocast on each kernel; casts come before the first kernel of their operation."""
    if not any(operation.autocast_share for operation in graph.operations):
        return {}
    share, casts = [], []
    for operation, operation_kernels in zip(graph.operations, kernels, strict=True):
        share += [round(operation.autocast_share, 3)] * len(operation_kernels)
        casts += ([operation.autocast_casts] + [0] * (len(operation_kernels) - 1)) if operation_kernels else []
    return {"autocast_share": share, "autocast_casts": casts}


def _steps(graph: OperatorGraph, kernels: Sequence[Sequence[tuple[str, int]]], work_ns: Sequence[int]) -> int:
    """The number of steps to schedule so that the readers see steady ones.

    Readers need four, without the first and the last. If the GPU is slower than the host, the host's steps are
    short until the launch queue is full, which the GPU empties meanwhile, and the GPU runs the last ones after the
    host is done: with more steps, neither is so in the middle.
    """
    once = schedule_steps(graph, kernels, work_ns, cpu_costs(), steps=1)
    count = sum(map(len, kernels))
    host_ns = once.steps[0].end_ns
    gpu_ns = once.kernels[-1].end_ns - once.kernels[0].start_ns if count else 0
    if gpu_ns <= host_ns:
        return _STEADY
    queued = DEFAULT_QUEUE_DEPTH / count
    before = min(host_ns / (gpu_ns - host_ns), _MOST_BEFORE)
    return max(math.ceil(queued) + _STEADY + 1, math.ceil(2 * queued * max(before, 1)) + _STEADY - 1)
