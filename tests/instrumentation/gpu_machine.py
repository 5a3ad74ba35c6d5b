"""A machine with GPUs for `instrumentation.gpu` and the two tracers: everything beneath them is a fake.

The program trains on the CPU. `FakeGpu` answers what the recorder asks a GPU; `FakeKineto` adds to torch.profiler's own
trace what a GPU's half of it would be, and `cupti_machine` does the same to CUPTI. Faults are fields.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from whatif.instrumentation import gpu, gpu_rates, kineto_tracer, recorder, tracer
from whatif.instrumentation.gpu import GPU, Gpu

from tests.instrumentation.cupti_machine import KERNEL_NS, LAG_NS, STREAM

NAME = "NVIDIA H100 80GB HBM3"
# What nvidia-smi answers for each field that is asked for.
SMI_VALUES = {
    "clocks.sm": "1980", "clocks.mem": "2619", "power.draw": "412.53", "temperature.gpu": "47",
    "driver_version": "580.65.06", "power.limit": "700.00", "clocks_event_reasons.active": "0x0000000000000000",
}  # fmt: skip


@dataclass
class FakeGpu(Gpu):
    """Answers for GPUs that are not there; `device` is the one that every model is said to be on."""

    name: str = NAME
    visible: int = 1
    device: int = 0
    smi_values: dict[str, str] = field(default_factory=lambda: dict(SMI_VALUES))
    sees_cuda: bool = True  # torch.profiler
    waits: int = 0
    retried: int = 0  # allocations, so far
    retries_a_step: int = 0
    asked: list[int | None] = field(default_factory=list)  # devices that were made the current one

    def available(self) -> bool:
        return True

    def is_nvidia(self) -> bool:
        return True

    def traced_by_torch(self) -> bool:
        return self.sees_cuda

    def count(self) -> int:
        return self.visible

    def current(self) -> int:
        return self.device

    def in_use(self) -> bool:
        return True

    def of_model(self, model: torch.nn.Module) -> torch.device | None:
        return torch.device("cuda", self.device)

    def properties(self, index: int | None = None) -> Any:
        return SimpleNamespace(name=self.name, total_memory=80 << 30, major=9, minor=0, multi_processor_count=132)

    def on(self, device: torch.device | None) -> AbstractContextManager[Any]:
        self.asked.append(None if device is None else device.index)
        return nullcontext()

    def free_bytes(self) -> int:
        return 60 << 30

    def reset_peak(self, device: torch.device | None = None) -> None:
        pass

    def peak_bytes(self) -> tuple[int, int]:
        return 3 << 30, 4 << 30

    def retries(self) -> int:
        self.retried += self.retries_a_step
        return self.retried

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: torch.device | None = None) -> None:
        self.waits += 1

    def mark(self, device: torch.device | None = None) -> Any:
        return time.perf_counter_ns()

    def between_ms(self, begin: Any, end: Any) -> float:
        return (end - begin) / 1e6

    def hold(self, cycles: int) -> None:
        pass

    def stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return self.stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        work()
        return lambda: (work(), None)[1]

    def smi(self, *fields: str) -> str:
        return ", ".join(self.smi_values.get(name, "[N/A]") for name in fields) + "\n" if self.smi_values else ""


@dataclass
class FakeKineto:
    """Adds to a CPU's trace a launch and a kernel for each innermost operator, as Kineto writes them."""

    kernels: bool = True  # False: CUPTI was refused, and only the calls are there
    calls: bool = True
    loses: int = 0  # of so many kernels one is dropped
    stream: int = STREAM

    def added(self, trace: dict[str, Any], machine: FakeGpu) -> dict[str, Any]:
        events = trace["traceEvents"]
        found: list[dict[str, Any]] = []
        launches, free_us = [], 0.0
        for number, event in enumerate(_innermost(events), start=1):
            end_us = event["ts"] + event["dur"]
            common = {"correlation": number, "External id": event["args"]["External id"]}
            launches.append({
                "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": event["pid"], "tid": event["tid"],
                "ts": event["ts"], "dur": event["dur"], "args": {**common, "cbid": 211},
            })  # fmt: skip
            free_us = max(end_us + LAG_NS / 1e3, free_us) + KERNEL_NS / 1e3
            found.append({
                "ph": "X", "cat": "kernel", "name": f"{event['name']}_kernel", "pid": machine.device,
                "tid": self.stream, "ts": free_us - KERNEL_NS / 1e3, "dur": KERNEL_NS / 1e3,
                "args": {**common, "device": machine.device, "context": 1, "stream": self.stream,
                         "grid": [1, 1, 1], "block": [128, 1, 1]},
            })  # fmt: skip
        found = [kernel for place, kernel in enumerate(found) if not self.loses or place % self.loses]
        devices = [
            {"id": index, "name": machine.name, "totalGlobalMem": 80 << 30, "computeMajor": 9, "computeMinor": 0}
            for index in range(machine.visible)
        ]
        more = [*(launches if self.calls else ()), *(found if self.kernels else ())]
        return {**trace, "deviceProperties": devices, "traceEvents": [*events, *more]}


def _innermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operators that hold no other, in the order of time: one that does is followed by it."""
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    operators.sort(key=lambda event: (event["tid"], event["ts"], -event["dur"]))
    found = [
        event for event, following in zip(operators, [*operators[1:], None], strict=True)
        if following is None or following["tid"] != event["tid"] or following["ts"] >= event["ts"] + event["dur"]
    ]  # fmt: skip
    return sorted(found, key=lambda event: event["ts"])


def install(patch: pytest.MonkeyPatch, machine: FakeGpu, kineto: FakeKineto | None = None) -> None:
    """Put the machine beneath the process's GPU, and its half of a trace into what torch.profiler writes."""
    for name in vars(Gpu):
        if not name.startswith("_") and name in vars(FakeGpu):
            patch.setattr(GPU, name, getattr(machine, name), raising=False)
    # Products and copies on the device itself, which tests of gpu_rates cover.
    patch.setattr(recorder, "measure_rates", lambda cuda: {"copy_gbyte_s": 2700.0} if cuda else None)
    patch.setattr(tracer, "_gpu_recorded", False)
    if kineto is not None:
        original = kineto_tracer.KinetoTracer.trace
        patch.setattr(kineto_tracer.KinetoTracer, "trace", lambda self: kineto.added(original(self), machine))
    assert gpu.GPU is GPU
    assert gpu_rates.GPU is GPU
