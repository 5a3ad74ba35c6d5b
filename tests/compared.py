"""Recordings to compare: steps of kernels, and the facts recorded about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.helpers import CPU, STREAM, Build, replace
from whatif import DependencyKind, Phase, TaskGraph, TaskKind
from whatif.graph.kernels import KernelFamily
from whatif.questions.comparison.compare import Comparison
from whatif.simulation.simulator import simulate

US, MS = 1_000, 1_000_000
Kernel = tuple[str, int, str, KernelFamily]

BEFORE: tuple[Kernel, ...] = (
    ("conv", 4 * MS, "c", KernelFamily.CONVOLUTION),
    ("bn", 1 * MS, "b", KernelFamily.NORMALIZATION),
    ("relu", 1 * MS, "r", KernelFamily.ELEMENTWISE),
)
AFTER: tuple[Kernel, ...] = (
    ("conv", 3 * MS, "c", KernelFamily.CONVOLUTION),
    ("bn", 1 * MS, "b", KernelFamily.NORMALIZATION),
    ("gelu", 2 * MS + 500 * US, "g", KernelFamily.ELEMENTWISE),
)


def run(
    kernels: Sequence[Kernel],
    *,
    off_us: Sequence[int] = (0, 100, -100, 0, 0),
    loading_ns: int = 0,
    steps: int | None = None,
    **info: Any,
) -> TaskGraph:
    """Steps of kernels that the GPU is never without; ``off_us`` is what each was measured to take more, us.

    ::

        ms      0         4    5    6
        CPU     |||                 |||             (10 us a call)
        stream  |conv-----|bn--|relu|conv-----|...
    """
    steps = len(off_us) + 1 if steps is None else steps
    build = Build(CPU, STREAM)
    for step in range(steps):
        if loading_ns:
            build.task(0, loading_ns, "batch", TaskKind.DATA_LOADING, step=step, phase=Phase.DATA)
        for name, duration_ns, layer, family in kernels:
            of = {"step": step, "layer": layer, "phase": Phase.FORWARD}
            call = build.task(0, 10 * US, f"launch {name}", **of)
            kernel = build.task(1, duration_ns, name, family=family, **of)
            build.edge(call, kernel, kind=DependencyKind.LAUNCH)
        if loading_ns:
            build.sync()
    graph = build.graph()
    timeline = simulate(graph)
    gpu_ns = timeline.step_times_ns("gpu")
    measured = {
        "gpu": tuple(ns + off * US for ns, off in zip(gpu_ns, [*off_us, *[0] * steps], strict=False)),
        "span": timeline.step_times_ns("span"),
    }
    defaults = {"path": "hand.json", "gpu": "NVIDIA X", "n_steps": steps, "steady": (1, steps - 1)}
    return graph.replace(info=replace(graph.info, measured_step_ns=measured, **{**defaults, **info}))


def by_name(found: Comparison, kind: str) -> dict[str, tuple[str, float]]:
    return {part.name: (part.status, round(part.change(lambda p: p.gpu_ms), 6)) for part in getattr(found, kind)}
