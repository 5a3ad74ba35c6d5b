"""Steps of small networks, drawn layer by layer: each call of a layer is one launch and one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.helpers import CPU, STREAM, Build
from whatif import Phase, TaskGraph, TaskKind
from whatif.graph.kernels import KernelFamily

FAMILIES = {
    "Conv2d": KernelFamily.CONVOLUTION,
    "BatchNorm2d": KernelFamily.NORMALIZATION,
    "ReLU": KernelFamily.ELEMENTWISE,
    "MaxPool2d": KernelFamily.POOLING,
    "Linear": KernelFamily.GEMM,
    "Add": KernelFamily.ELEMENTWISE,
}
# What kernels of these classes are called, where a recording names no layers.
KERNELS = {"ReLU": ("clamp_min", "threshold_backward"), "Add": ("add", "add")}


class Call(NamedTuple):
    """A call of a layer: its class and number ("Conv2d_0"), times of its kernels, bytes that each of them moves."""

    layer: str
    forward_ns: int
    backward_ns: int = 0  # 0: no backward work
    size_bytes: int = -1


def network(calls: Sequence[Call], *, launch_ns: int = 1000, steps: int = 1, named: bool = True, on_cpu: bool = False,
            **info: Any) -> TaskGraph:  # fmt: skip
    """Forward through the calls, backward through them in reverse, an update of 5 us; on a CPU operators alone."""
    build = Build(*((CPU,) if on_cpu else (CPU, STREAM)), n_steps=steps, **info)
    operator = 0
    for step in range(steps):
        passes = [(call, Phase.FORWARD, call.forward_ns) for call in calls]
        passes += [(call, Phase.BACKWARD, call.backward_ns) for call in reversed(calls) if call.backward_ns]
        for call, phase, time_ns in [*passes, (Call("", 5000), Phase.UPDATE, 5000)]:
            kind = call.layer.rpartition("_")[0]
            backward = phase == Phase.BACKWARD
            name = KERNELS.get(kind, (call.layer, f"{call.layer} backward"))[backward] or "update"
            columns = {
                "layer": call.layer if named and kind != "Add" else "", "phase": phase, "step": step,
                "family": FAMILIES.get(kind, KernelFamily.OPTIMIZER), "size_bytes": call.size_bytes,
                "operator": operator,
            }  # fmt: skip
            operator += 1
            if on_cpu:
                build.task(0, time_ns, name, TaskKind.CPU_OP, **columns)
                continue
            start = build.task(0, launch_ns, "cudaLaunchKernel", **{**columns, "family": -1, "size_bytes": -1})
            kernel = build.task(1, time_ns, name, **columns)
            build.edge(start, kernel, kind=0)
    return build.graph()


def times_us(graph: TaskGraph, name: str) -> list[float]:
    """Durations of the tasks of a name, us, in order."""
    return [ns / 1e3 for ns in graph.duration_ns[graph.select(name=name)].tolist()]


def work_order(graph: TaskGraph, thread: int = 1) -> list[str]:
    """Names of the tasks of one thread, in order."""
    return [graph.names[code] for code in graph.name[graph.thread == thread].tolist()]
