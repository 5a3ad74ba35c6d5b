"""Measure the peak memory of a training step, and its resident parts."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from whatif.instrumentation.gpu import GPU

from .training import Training


def measure_memory(training: Training, device: str) -> dict[str, Any]:
    """Return bytes: parameters, gradients, buffers, optimizer state, inputs, and the peak of one eager step.

    On a GPU the peak is the caching allocator's; it is null if a CUDA graph replays, whose memory was allocated at
    capture. On a CPU it is the resident parts plus torch's allocations during a step under the
    profiler: call this last in a process, because steps after the profiler are slower.
    """
    model, state = training.model, training.optimizer_state
    inputs, target = training.batch
    resident = {
        "parameter_bytes": _size(model.parameters()),
        "buffer_bytes": _size(model.buffers()),
        "optimizer_state_bytes": _size(value for slots in state.values() for value in slots.values()),
        "input_bytes": _size([*inputs, target]),
    }
    gradients = {"gradient_bytes": _size(parameter.grad for parameter in model.parameters())}
    if device == "cuda":
        return {**resident, **gradients, **_cuda_peak(training)}
    peak_bytes = sum(resident.values()) + _allocated_in_a_step(training)
    return {**resident, **gradients, "peak_allocated_bytes": peak_bytes}


def _size(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if torch.is_tensor(tensor))


def _cuda_peak(training: Training) -> dict[str, int | None]:
    process_peak_bytes = GPU.peak_bytes()[0]
    GPU.synchronize()
    GPU.reset_peak()
    training.step()
    GPU.synchronize()
    allocated_bytes, reserved_bytes = (None, None) if training.captured else GPU.peak_bytes()
    return {
        "peak_allocated_bytes": allocated_bytes,
        "peak_reserved_bytes": reserved_bytes,
        "process_peak_allocated_bytes": process_peak_bytes,
    }


def _allocated_in_a_step(training: Training) -> int:
    """The peak of one step's own allocations, bytes, gradients included."""
    training.optimizer.zero_grad(set_to_none=True)  # The profiler only sees its own allocations.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)["traceEvents"]
    return max((event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]"), default=0)
