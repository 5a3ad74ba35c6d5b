"""Why a step takes as long as it does: its breakdown, its critical path, and the layers and kernels that matter.

All times are ms per step: what falls into the steady steps, scaled to the step time that the clock reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.kernels import FAMILY_NAMES
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    GPU_KINDS,
    PHASE_NAMES,
    Array,
    Bool,
    Float64,
    Int64,
    TaskKind,
    among,
)
from whatif.models.exchange.stragglers import waiting_for_peers
from whatif.prediction.baseline import Baseline
from whatif.prediction.doubts import warnings_of
from whatif.questions.collectives import Collective, collectives
from whatif.questions.stragglers import held_up_by
from whatif.questions.verdict import verdict
from whatif.simulation.breakdown import Breakdown
from whatif.simulation.steps import CLOCK_NOUNS
from whatif.simulation.timeline import Timeline

# Time on the critical path in which nothing runs: launch latency, and gaps between the kernels of a stream.
LAG = "lag"


class Part(Struct, frozen=True):
    """The part of a step that one layer, phase, thread, kernel family or operation takes."""

    name: str
    tasks: float  # in one step
    gpu_ms: float
    cpu_ms: float
    critical_ms: float  # on the critical path: the most that making it free could save at once

    def to_dict(self, key: str) -> dict[str, Any]:
        """Return the part as a JSON object, its name under ``key``."""
        return {
            key: self.name,
            "tasks_per_step": round(self.tasks, 3),
            "gpu_ms": round(self.gpu_ms, 6),
            "cpu_ms": round(self.cpu_ms, 6),
            "critical_ms": round(self.critical_ms, 6),
        }


class Explanation(Struct, frozen=True, dict=True):
    """Where the time of a step goes. Parts are sorted by their time on the critical path, then by their work."""

    baseline: Baseline
    verdict: str
    breakdown: Breakdown
    critical_path_ms: dict[str, float]  # by task kind, and LAG; adds up to the step
    collectives: tuple[Collective, ...]
    peers_ms: float  # of it spent waiting for other ranks in collectives, with one rank's recording
    phases: tuple[Part, ...]
    threads: tuple[Part, ...]
    layers: tuple[Part, ...]
    without_layer: Part
    n_layers: int
    kernels: tuple[Part, ...]  # by family: kernels, or operators if there is no GPU
    operations: tuple[Part, ...]  # by name: likewise
    warnings: tuple[str, ...]

    @cached_property
    def as_recorded(self) -> str | None:
        """The verdict on the step including the profiler's overhead, if that was estimated and removed."""
        recorded = self.baseline.as_recorded
        return _verdict(recorded, _Shares.of(recorded)) if recorded else None

    @property
    def baseline_ms(self) -> float:
        """The simulated step, ms."""
        return self.baseline.step_ms

    @property
    def slack(self) -> str | None:
        """How far the GPU and the main CPU thread are from bounding the step, in one sentence; None without a GPU."""
        graph, step_ms = self.baseline.graph, self.baseline_ms
        if not graph.has_gpu or step_ms <= 0:
            return None
        idle_ms = max(step_ms - self.breakdown.gpu_busy_ms, 0.0)
        main = next((part.cpu_ms for part in self.threads if part.name == graph.threads[0].name), 0.0)
        return (
            f"slack: the GPU is idle for {idle_ms:,.2f} of {step_ms:,.2f} ms, so without faster GPU work the "
            f"{CLOCK_NOUNS[self.baseline.clock]} can become at most {100 * idle_ms / step_ms:.0f} % shorter; "
            "the main CPU thread is idle for "
            f"{max(step_ms - main, 0.0):,.2f} ms"
        )

    @property
    def all_layers(self) -> tuple[Part, ...]:
        """The layers, and the work outside all of them, such as the update; empty if no layers are known."""
        rest = self.without_layer
        known = self.layers and rest.gpu_ms + rest.cpu_ms > 0
        return (*self.layers, *([replace(rest, name="(no layer)")] if known else []))

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as a JSON object with the keys that scripts rely on."""
        return {
            **step_facts(self.baseline),
            **self.baseline.profiler_facts,
            "gpu_busy_ms": self.breakdown.gpu_busy_ms,
            "breakdown": self.breakdown.to_dict(),
            "critical_path_ms": {kind: round(ms, 6) for kind, ms in self.critical_path_ms.items()},
            "collectives": [row.to_dict() for row in self.collectives],
            "waits_for_peers_ms": round(self.peers_ms, 6),
            "phases": [part.to_dict("phase") for part in self.phases],
            "threads": [part.to_dict("thread") for part in self.threads],
            "layers": [part.to_dict("layer") for part in self.layers],
            "without_layer": self.without_layer.to_dict("layer"),
            "kernels": [part.to_dict("family") for part in self.kernels],
            "operations": [part.to_dict("name") for part in self.operations],
            "verdict": self.verdict,
            **({"slack": self.slack} if self.slack else {}),
            **({"verdict_as_recorded": self.as_recorded} if self.as_recorded else {}),
            "warnings": list(self.warnings),
        }


def step_facts(baseline: Baseline) -> dict[str, Any]:
    """Return the JSON fields with which every answer about a recorded step begins."""
    return {
        "trace": baseline.graph.info.path,
        "step_clock": baseline.clock,
        "steps": baseline.graph.info.n_steps,
        "measured_ms": baseline.measured_ms,
        "baseline_ms": baseline.step_ms,
        "replay_error_pct": baseline.known_error_pct,
    }


def explain(baseline: Baseline, top: int = 10) -> Explanation:
    """Return the explanation of a baseline's step, with the ``top`` layers, families and operations."""
    graph, shares = baseline.graph, _Shares.of(baseline)
    begins, work_ms, critical_ms, parts = shares.begins, shares.work_ms, shares.critical_ms, shares.parts
    # A thread belongs to one rank and shows its own work; those of other ranks appear if the path goes through them.
    on_path = np.bincount(graph.thread, weights=critical_ms, minlength=len(graph.threads)) > 0
    threads = np.where(graph.of_clock | on_path.take(graph.thread), graph.thread, -1)
    of_threads = _Parts(graph, begins, work_ms, critical_ms).by(threads, [t.name for t in graph.threads])

    layers = parts.by(graph.layer, graph.layers)
    named = [part for part in layers if part.name]
    return Explanation(
        baseline=baseline,
        verdict=_verdict(baseline, shares),
        collectives=collectives(baseline, critical_ms),
        peers_ms=shares.peers_ms,
        breakdown=baseline.breakdown,
        critical_path_ms=dict(sorted(shares.critical_path_ms.items(), key=lambda item: -item[1])),
        phases=tuple(shares.phases),
        threads=tuple(of_threads),
        layers=tuple(named[:top]),
        without_layer=next((part for part in layers if not part.name), Part("", 0.0, 0.0, 0.0, 0.0)),
        n_layers=len(named),
        kernels=tuple(shares.families[:top]),
        operations=tuple(parts.by(np.where(in_families(graph), graph.name, -1), graph.names)[:top]),
        warnings=warnings_of(baseline),
    )


class _Shares(Struct, frozen=True):
    """What a verdict is made of: each task's starts, work and critical time in a step, and their sums."""

    begins: Float64
    work_ms: Float64
    critical_ms: Float64
    critical_path_ms: dict[str, float]  # by task kind, and LAG
    peers_ms: float  # of it spent waiting for other ranks in collectives
    parts: _Parts
    phases: list[Part]
    families: list[Part]

    @staticmethod
    def of(baseline: Baseline) -> _Shares:
        """Return the shares of a baseline's step."""
        graph = baseline.graph
        begins, work_ms, critical_ms, lag_ms = _step_columns(baseline)
        parts = _Parts(graph, begins * graph.of_clock, work_ms * graph.of_clock, critical_ms)
        by_kind = np.bincount(graph.kind, weights=critical_ms, minlength=len(TaskKind))
        critical_path_ms = {kind.name.lower(): float(by_kind[kind]) for kind in TaskKind if by_kind[kind] > 0}
        if lag_ms:
            critical_path_ms[LAG] = lag_ms
        waits_ns = np.minimum(waiting_for_peers(graph), graph.duration_ns)
        peers_ms = float((critical_ms * waits_ns / np.maximum(graph.duration_ns, 1)).sum())
        return _Shares(
            begins, work_ms, critical_ms, critical_path_ms, peers_ms, parts,
            parts.by(graph.phase, PHASE_NAMES), parts.by(family_codes(graph), FAMILY_NAMES),
        )  # fmt: skip


def _verdict(baseline: Baseline, shares: _Shares) -> str:
    """The sentence on what limits a baseline's step."""
    return verdict(
        baseline,
        shares.critical_path_ms,
        {part.name: part.cpu_ms for part in shares.phases},
        {part.name: part.gpu_ms for part in shares.families},
        shares.peers_ms,
        held_up_by(baseline),
    )


def parts_by(baseline: Baseline, codes: Array, names: Sequence[str]) -> list[Part]:
    """Return a part for each code, shape (n_tasks,), that occurs in the step; negative codes are ignored."""
    graph = baseline.graph
    begins, work_ms, critical_ms, _ = _step_columns(baseline)
    return _Parts(graph, begins * graph.of_clock, work_ms * graph.of_clock, critical_ms).by(codes, names)


def _step_columns(baseline: Baseline) -> tuple[Float64, Float64, Float64, float]:
    """Each task's starts per step, its work and its time on the critical path, ms; and the time of lags, ms."""
    timeline = baseline.timeline
    low_ns, high_ns = timeline.window_ns(baseline.clock)
    # With several ranks the work of one is shown; the critical path runs through all of them.
    work_ms, (critical_ms, lag_ms) = step_work_ms(baseline), step_critical_ms(baseline)
    begins = (timeline.start_ns >= low_ns) & (timeline.start_ns < high_ns)
    # Whole steps: the reported step may be longer or shorter than the median, but runs the tasks of a step.
    n_steps = max(round((high_ns - low_ns) / baseline.step_ns), 1) if baseline.step_ns else 1
    return begins / n_steps, work_ms, critical_ms, lag_ms


def step_work_ms(baseline: Baseline) -> Float64:
    """Return the time of each task within the reported step, ms, shape (n_tasks,)."""
    timeline = baseline.timeline
    low_ns, high_ns = timeline.window_ns(baseline.clock)
    work_ns = timeline.within_ns(low_ns, high_ns)
    return np.asarray(work_ns * (baseline.step_ms / max(high_ns - low_ns, 1)))


def step_critical_ms(baseline: Baseline) -> tuple[Float64, float]:
    """Return the time that each task holds the critical path of the reported step, ms, and that of lags."""
    timeline = baseline.timeline
    low_ns, high_ns = timeline.window_ns(baseline.clock)
    ms_per_ns = baseline.step_ms / max(high_ns - low_ns, 1)
    held_ns, lag_ns = critical_path_times(timeline, low_ns, high_ns)
    return np.asarray(held_ns * ms_per_ns), lag_ns * ms_per_ns


def in_families(graph: TaskGraph) -> Bool:
    """Return the mask of the tasks that are grouped by family: the GPU's work, operators if there is no GPU."""
    return graph.on_gpu.mask if graph.has_gpu else graph.kind == TaskKind.CPU_OP


def family_codes(graph: TaskGraph) -> Array:
    """Return the ``KernelFamily`` of each task, shape (n_tasks,); -1 for those not grouped by family."""
    return np.where(in_families(graph), graph.family, -1)


def critical_path_times(timeline: Timeline, low_ns: int, high_ns: int) -> tuple[Int64, int]:
    """Return the time that each task holds the critical path within a window, ns, shape (n_tasks,), and that of lags.

    A task holds the path from its start until the next one on the path starts, or until its own end if that comes
    first; the rest is lag. Together they add up to the part of the window that the path covers.
    """
    path = timeline.critical_path
    held_ns = np.zeros(len(timeline.graph), dtype=np.int64)
    if not len(path):
        return held_ns, 0
    start_ns, end_ns = timeline.start_ns[path], timeline.end_ns[path]
    until_ns = np.append(start_ns[1:], end_ns[-1])
    released_ns = np.minimum(end_ns, until_ns)
    start_ns, released_ns, until_ns = (np.clip(t, low_ns, high_ns) for t in (start_ns, released_ns, until_ns))
    held_ns[path] = released_ns - start_ns
    return held_ns, int((until_ns - released_ns).sum())


class _Parts:
    """Sums of tasks by a column of codes."""

    def __init__(self, graph: TaskGraph, tasks: Float64, work_ms: Float64, critical_ms: Array) -> None:
        on_gpu = among(graph.kind, GPU_KINDS)
        columns = (tasks, work_ms * on_gpu, work_ms * graph.on_cpu, critical_ms)
        # Most tasks are outside the reported step and add nothing.
        self._rows = np.flatnonzero((tasks != 0) | (work_ms != 0) | (critical_ms != 0))
        self._columns = [column[self._rows] for column in columns]

    def by(self, codes: npt.NDArray[Any], table: Sequence[str]) -> list[Part]:
        """Return one part for each code that occurs in the step; negative codes are ignored."""
        codes = codes[self._rows]
        known = codes >= 0
        codes = codes[known]
        sums = [np.bincount(codes, weights=column[known], minlength=len(table)) for column in self._columns]
        tasks, gpu_ms, cpu_ms, critical_ms = sums
        present = np.flatnonzero((gpu_ms > 0) | (cpu_ms > 0) | (critical_ms > 0))
        order = present[np.lexsort((present, -(gpu_ms + cpu_ms)[present], -critical_ms[present]))]
        return [
            Part(table[code], float(tasks[code]), float(gpu_ms[code]), float(cpu_ms[code]), float(critical_ms[code]))
            for code in order.tolist()
        ]
