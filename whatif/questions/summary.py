"""Summary of a recording: its contents, what was odd in it, and how well its replay matches it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct

from whatif.graph.kernels import DTYPES, FAMILY_NAMES
from whatif.graph.order import each_once
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    PHASE_NAMES,
    Array,
    Bool,
    Phase,
    TaskKind,
)
from whatif.models.durations.estimator import device
from whatif.prediction.baseline import Baseline
from whatif.prediction.doubts import warnings_of
from whatif.prediction.trust import Trust, trust_of
from whatif.simulation.steps import steady


class ThreadSummary(Struct, frozen=True):
    """One execution thread: its name, its number of tasks and its busy time in the whole recording."""

    name: str
    kind: str
    tasks: int
    busy_ms: float


class Summary(Struct, frozen=True, dict=True):
    """What a recording holds. Shares are percent of the GPU's time, without a GPU of the CPU's."""

    baseline: Baseline
    gpu_known_as: str | None  # the device's name in whatif's own tables
    tasks: dict[str, int]
    threads: tuple[ThreadSummary, ...]
    time_share_of: str  # gpu or cpu
    time_ms: float  # the time that shares refer to, in the whole recording
    time_with_layer_pct: float | None
    time_with_phase_pct: float | None
    families_pct: dict[str, float]  # of the time of tasks whose family is known
    dtypes_pct: dict[str, float]
    phases_pct: dict[str, float]
    n_layers: int
    warnings: tuple[str, ...]

    @property
    def graph(self) -> TaskGraph:
        """The recording's graph."""
        return self.baseline.graph

    @property
    def steady_steps(self) -> int:
        """The number of steady steps of which the step time is the median."""
        measured = self.graph.info.measured_step_ns[self.baseline.clock]
        return len(steady(measured, self.graph, self.baseline.clock))

    @cached_property
    def trust(self) -> Trust:
        """How far answers from this recording can be trusted."""
        return trust_of(self.baseline)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as a JSON object with the keys that scripts rely on."""
        info = self.graph.info
        return {
            "trace": info.path,
            "gpu": info.gpu,
            "gpu_known_as": self.gpu_known_as,
            "gpu_memory_bytes": info.gpu_memory_bytes,
            "batch_size": info.batch_size,
            "steps": info.n_steps,
            "step_source": info.step_source,
            "execution": list(info.execution),
            "step_clock": self.baseline.clock,
            "steady_steps": self.steady_steps,
            "measured_ms": self.baseline.measured_ms,
            "untraced_ms": info.untraced_step_ns / 1e6 if info.untraced_step_ns else None,
            "baseline_ms": self.baseline.step_ms,
            "replay_error_pct": self.baseline.known_error_pct,
            "unexplained_wait_pct": self.baseline.unexplained_wait_pct,
            "tasks": self.tasks,
            "threads": [
                {"thread": t.name, "kind": t.kind, "tasks": t.tasks, "busy_ms": round(t.busy_ms, 6)}
                for t in self.threads
            ],
            "time_share_of": self.time_share_of,
            "gpu_time_with_layer_pct": self.time_with_layer_pct,
            "gpu_time_with_phase_pct": self.time_with_phase_pct,
            "layers": self.n_layers,
            "phases_pct": self.phases_pct,
            "kernel_families_pct": self.families_pct,
            "dtypes_pct": self.dtypes_pct,
            "launch_lag_us": info.launch_lag_ns / 1e3 if (self.graph.launch_of >= 0).any() else None,
            "queue_depth": info.queue_depth,
            **self.baseline.profiler_facts,
            "trust": self.trust.to_dict(),
            "warnings": list(self.warnings),
        }


def summarize(baseline: Baseline) -> Summary:
    """Return the summary of a baseline's recording."""
    graph = baseline.graph
    counted = graph.on_device.mask
    gpu = device(graph)
    time_ns = int(graph.duration_ns[counted].sum())
    kinds = np.bincount(graph.kind, minlength=len(TaskKind))
    return Summary(
        baseline=baseline,
        gpu_known_as=gpu.name if gpu else None,
        tasks={kind.name.lower(): int(kinds[kind]) for kind in TaskKind if kinds[kind]},
        threads=_threads(baseline),
        time_share_of="gpu" if graph.has_gpu else "cpu",
        time_ms=time_ns / 1e6,
        time_with_layer_pct=_share_pct(graph, counted, graph.layer > 0),
        time_with_phase_pct=_share_pct(graph, counted, graph.phase != Phase.UNKNOWN),
        families_pct=_shares_pct(graph, counted, graph.family, FAMILY_NAMES),
        dtypes_pct=_shares_pct(graph, counted & (graph.family >= 0), graph.dtype, ["unknown", *DTYPES[1:]]),
        phases_pct=_shares_pct(graph, counted, graph.phase, PHASE_NAMES),
        n_layers=len(each_once(graph.layer[graph.layer > 0])),
        warnings=warnings_of(baseline),
    )


def _threads(baseline: Baseline) -> tuple[ThreadSummary, ...]:
    graph = baseline.graph
    tasks = np.bincount(graph.thread, minlength=len(graph.threads))
    busy_ns = baseline.timeline.busy_ns
    return tuple(
        ThreadSummary(thread.name, thread.kind.name.lower(), int(tasks[code]), float(busy_ns[code]) / 1e6)
        for code, thread in enumerate(graph.threads)
    )


def _share_pct(graph: TaskGraph, counted: Bool, chosen: Bool) -> float | None:
    """The share of the counted time that chosen tasks take, percent; None if there is no time."""
    total_ns = int(graph.duration_ns[counted].sum())
    return 100.0 * int(graph.duration_ns[counted & chosen].sum()) / total_ns if total_ns else None


def _shares_pct(graph: TaskGraph, counted: Bool, codes: Array, table: Sequence[str]) -> dict[str, float]:
    """The share of the counted time by code, percent, largest first."""
    counted = counted & (codes >= 0)
    time_ns = np.bincount(codes[counted], weights=graph.duration_ns[counted], minlength=len(table))
    total_ns = float(time_ns.sum())
    order = [code for code in np.argsort(-time_ns, kind="stable").tolist() if time_ns[code] > 0]
    return {table[code]: round(100.0 * float(time_ns[code]) / total_ns, 3) for code in order}
