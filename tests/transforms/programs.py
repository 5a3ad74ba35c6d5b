"""Steps that are drawn program by program: what the tests of what-ifs on the host's side share."""

from __future__ import annotations

from typing import Any

import whatif
from tests.helpers import STREAM, Build, replace
from whatif import DependencyKind, Phase, TaskGraph, TaskKind
from whatif.graph.kernels import KernelFamily

FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE

LATE_STREAM = replace(STREAM, lag_ns=1_000)


def changed(spec: str, graph: TaskGraph) -> TaskGraph:
    return whatif.load_transform(spec)(graph).check()


def said(graph: TaskGraph) -> str:
    return " | ".join(graph.notes)


class Program(Build):
    """A build whose calls take 20 us and are followed by 10 us of Python, in one step."""

    def call(
        self, name: str, kernel_ns: int, phase: Phase = FORWARD, cpu: int = 0, stream: int = 1, **columns: Any
    ) -> int:
        call = self.task(cpu, 20_000, f"call {name}", phase=phase, layer=columns.get("layer", ""),
                         in_optimizer=columns.get("in_optimizer", False))  # fmt: skip
        kernel = self.task(stream, kernel_ns, name, phase=phase, **columns)
        self.edge(call, kernel, self.info.launch_lag_ns, DependencyKind.LAUNCH)
        return kernel

    def gap(self, name: str, duration_ns: int = 10_000, phase: Phase = FORWARD, cpu: int = 0, **columns: Any) -> int:
        return self.task(cpu, duration_ns, name, TaskKind.GAP, phase=phase, **columns)


def unbounded(graph: TaskGraph) -> TaskGraph:
    """Return the graph without a limit of the launch queue, which is a thousand launches where there is one."""
    return graph.replace(info=replace(graph.info, queue_depth=0))


GEMM, POINTWISE, NORM = KernelFamily.GEMM, KernelFamily.ELEMENTWISE, KernelFamily.LAYER_NORM
