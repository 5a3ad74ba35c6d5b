"""Training steps on a GPU, written as Kineto writes them, for what otherwise only recordings made by others show.

A small machine runs three linear layers: the CPU calls, the stream works, the CPU waits for it at the end of a step.
A step written with other kernels or another loader is what the same machine would have recorded after the change.

::

    CPU 1     |loader |f0|f1|f2|                  |update| sync ........|
    CPU 2                       |b2|b1|b0|
    stream 7             |f0---|f1---|f2---|b2---|b1---|b0---|update-|
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.helpers import Event, call, kernel, mark, module, op

V100 = {"id": 0, "name": "Tesla V100-SXM2-32GB", "totalGlobalMem": 34089730048, "numSms": 80, "warpSize": 32}
LAYERS, STEPS, BATCH, WIDTH = 3, 4, 64, 1024
LAG_US, GAP_US = 6.0, 4.0
GEMM = "volta_sgemm_128x64_nn"
UPDATE = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, AddFunctor<float>>"


@dataclass(frozen=True)
class Machine:
    """What the steps are made of, times in us; ``spelled`` is how the trace names things."""

    call_us: float = 10.0
    kernel_us: float = 400.0
    loader_us: float = 0.0
    spelled: str = "new"  # "old": categories of 2020 and a bare array; "amd": HIP; "bare": no operators


KINDS = {
    "gpu-bound": Machine(),
    "host-bound": Machine(call_us=30.0, kernel_us=5.0),
    "loader": Machine(loader_us=3_000.0),
    "old": Machine(spelled="old"),
    "amd": Machine(spelled="amd"),
    "bare": Machine(spelled="bare"),
}


@dataclass
class _Writer:
    machine: Machine
    events: list[Event] = field(default_factory=list)
    now_us: float = 1_000.0
    stream_us: float = 0.0
    correlation: int = 0

    def launch(self, name: str, kernel_name: str, tid: int, duration_us: float, **args: Any) -> None:
        """An operator that launches one kernel; then a gap of Python."""
        machine = self.machine
        self.correlation += 1
        begin, call_us = self.now_us, machine.call_us
        launched_at = begin + 2
        cuda = "hipLaunchKernel" if machine.spelled == "amd" else "cudaLaunchKernel"
        self.events.append(op(name, begin, call_us + 4, tid, **args))
        self.events.append(call(cuda, launched_at, call_us, self.correlation, tid))
        start_us = max(launched_at + call_us + LAG_US, self.stream_us)
        self.events.append(kernel(kernel_name, start_us, duration_us, self.correlation))
        self.stream_us = start_us + duration_us
        self.now_us = begin + call_us + 4 + GAP_US

    def step(self, number: int) -> None:
        begin = self.now_us
        self.now_us += 5
        if self.machine.loader_us:
            name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            self.events.append(mark(name, self.now_us, self.machine.loader_us))
            self.now_us += self.machine.loader_us + GAP_US
        shapes = {
            "Input Dims": [[WIDTH], [BATCH, WIDTH], [WIDTH, WIDTH], [], []],
            "Input type": ["float", "float", "float", "Scalar", "Scalar"],
            "Concrete Inputs": ["", "", "", "1", "1"],
        }
        for layer in range(LAYERS):
            entered = self.now_us
            numbered = {"Sequence number": 10 * number + layer, "Fwd thread id": 0}
            self.launch("aten::addmm", GEMM, 1, self.machine.kernel_us, **shapes, **numbered)
            self.events.append(module(f"Linear_{layer}", entered - 1, self.now_us - entered))
        self._backward(number)
        entered = self.now_us
        self.launch("aten::_foreach_add_", UPDATE, 1, self.machine.kernel_us / 4)
        self.events.append(mark("Optimizer.step#SGD.step", entered - 1, self.now_us - entered))
        self.correlation += 1
        until = max(self.stream_us, self.now_us) + 3
        self.events.append(call("cudaDeviceSynchronize", self.now_us, until - self.now_us, self.correlation))
        self.now_us = until + GAP_US
        self.events.append(mark(f"ProfilerStep#{number}", begin, self.now_us - begin))
        self.now_us += 1

    def _backward(self, number: int) -> None:
        for layer in reversed(range(LAYERS)):
            entered = self.now_us
            self.now_us += 1
            mm = {"Input Dims": [[BATCH, WIDTH], [WIDTH, WIDTH]], "Input type": ["float", "float"]}
            self.launch("aten::mm", GEMM, 2, self.machine.kernel_us, **mm)
            numbered = {"Sequence number": 10 * number + layer, "Fwd thread id": 1}
            name = "autograd::engine::evaluate_function: AddmmBackward0"
            self.events.append(op(name, entered, self.now_us - GAP_US - entered + 1, 2, **numbered))
            self.now_us += 1


OLD_CATEGORIES = {
    "cpu_op": "Operator", "user_annotation": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel",
}  # fmt: skip


def written(machine: Machine) -> dict[str, Any] | list[Event]:
    """Return the content of a trace of four steps."""
    writer = _Writer(machine)
    for number in range(1, STEPS + 1):
        writer.step(number)
    events = writer.events
    if machine.spelled == "bare":
        events = [event for event in events if event["cat"] in ("cuda_runtime", "kernel")]
    if machine.spelled == "old":
        known = [event for event in events if event["cat"] in OLD_CATEGORIES]
        return [{**event, "cat": OLD_CATEGORIES[event["cat"]]} for event in known]
    device = {**V100, "name": "AMD Instinct MI250X"} if machine.spelled == "amd" else V100
    return {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": events}
