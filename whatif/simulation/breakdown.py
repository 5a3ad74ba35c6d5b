"""The breakdown of a step: CPU only, GPU only, both, exposed communication, neither (Daydream §6.2, figure 6)."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from whatif.graph.types import Bool, Int64, TaskKind
from whatif.simulation.intervals import union
from whatif.simulation.timeline import Timeline


class Breakdown(Struct, frozen=True):
    """Parts of one step, ms; they add up to the step.

    Communication counts if no other GPU work hides it, in a step without a GPU if no CPU work does.
    """

    cpu_only_ms: float
    gpu_only_ms: float
    cpu_gpu_ms: float
    communication_ms: float
    idle_ms: float
    gpu_busy_ms: float  # union of kernels, copies and communication
    cpu_busy_ms: float  # union of the work of CPU threads, also during communication

    def to_dict(self) -> dict[str, float]:
        """Return the five parts as a JSON object."""
        return {
            name: round(getattr(self, name), 6)
            for name in ("cpu_only_ms", "gpu_only_ms", "cpu_gpu_ms", "communication_ms", "idle_ms")
        }


def breakdown(timeline: Timeline, clock: str, tasks: Int64 | None = None) -> Breakdown:
    """Return the breakdown of the steady step that is closest to the median, scaled to the reported step.

    For several ranks only the work of the reported one counts, or the given ``tasks`` (ids, ascending).
    """
    graph = timeline.graph
    low_ns, high_ns = timeline.window_ns(clock)
    tasks = graph.of_clock.ids if tasks is None else tasks
    tasks = tasks[(timeline.start_ns[tasks] < high_ns) & (timeline.end_ns[tasks] > low_ns)]
    communication = graph.kind[tasks] == TaskKind.COMMUNICATION
    sets = [
        _busy(timeline, tasks[chosen], low_ns, high_ns)
        for chosen in (graph.on_cpu[tasks], graph.on_gpu[tasks] & ~communication, communication)
    ]
    times, states = _states(sets, low_ns, high_ns)
    spans = np.diff(times)
    cpu, gpu, transfer = states
    if not graph.has_gpu:
        transfer &= ~cpu
    total_ns = max(high_ns - low_ns, 1)
    step_ms = timeline.step_ns_by(clock) / 1e6

    def part(mask: Bool) -> float:
        return float(spans[mask].sum()) / total_ns * step_ms

    return Breakdown(
        cpu_only_ms=part(cpu & ~gpu & ~transfer),
        gpu_only_ms=part(gpu & ~cpu),
        cpu_gpu_ms=part(gpu & cpu),
        communication_ms=part(transfer & ~gpu),
        idle_ms=part(~cpu & ~gpu & ~transfer),
        gpu_busy_ms=part(gpu | transfer) if graph.has_gpu else 0.0,
        cpu_busy_ms=part(cpu),
    )


def _busy(timeline: Timeline, tasks: Int64, low_ns: int, high_ns: int) -> tuple[Int64, Int64]:
    """Disjoint, sorted intervals in which any of ``tasks`` (ids) runs, cut to the window."""
    start_ns = np.maximum(timeline.start_ns[tasks], low_ns)
    end_ns = np.minimum(timeline.end_ns[tasks], high_ns)
    order = np.argsort(start_ns, kind="stable")
    return union(start_ns[order], end_ns[order])


def _states(sets: list[tuple[Int64, Int64]], low_ns: int, high_ns: int) -> tuple[Int64, list[Bool]]:
    """Times at which any set changes, and between them whether each set is busy."""
    # A stable sort merges sorted runs; numpy.unique would hash all values first.
    times = np.sort(np.concatenate([[low_ns], *[t for pair in sets for t in pair], [high_ns]]), kind="stable")
    times = times[np.append(True, times[1:] != times[:-1])]
    states = []
    for starts, ends in sets:
        opened = np.searchsorted(starts, times[:-1], side="right")
        closed = np.searchsorted(ends, times[:-1], side="right")
        states.append(opened > closed)
    return times, states
