"""What the recorder measured without the profiler: the step that a calibrated graph has to meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from whatif.graph import TaskGraph
from whatif.steps import step_ns
from whatif.types import ThreadKind

# Our choice: a step without the profiler that is this many times longer or shorter than the recorded one is of another
# program.
IMPLAUSIBLE = 10.0
# Ten times what the costliest of torch's observers takes an event (ExecutionTraceObserver: 10 to 12 us).
LARGEST_EVENT_COST_NS = 100_000.0
# In the name of the annotation with which torch's loader marks a batch that other processes prepare.
WORKER_LOADER = "_MultiProcessingDataLoaderIter"


@dataclass(frozen=True, slots=True)
class Untraced:
    """The step without the profiler, ns: median and quartiles, by the ``wall`` or the ``cpu`` clock.

    ``running`` is the share of the recorded steps in which the CPU clock ran on: in the rest other programs had the
    core. 1 for the wall clock, and where the recording does not tell.
    """

    median_ns: float
    q25_ns: float
    q75_ns: float
    clock: str
    running: float = 1.0


def untraced_step(graph: TaskGraph, clock: str) -> tuple[Untraced | None, str]:
    """Give the step without the profiler, or None and why what the recording says of it cannot be used.

    None and "" where the recording says nothing. It is the wall clock's, as users see it; where a single CPU thread
    does all the work it is the CPU clock's, which other programs on the machine do not disturb. ``clock`` is the step
    clock of the recorded step with which it is compared.
    """
    metadata = graph.info.metadata
    told = metadata.get("untraced_step_ms")
    if told is None:
        return None, ""
    wall = _quartiles(told, "wall")
    if wall is None:
        return None, "the recording's untraced_step_ms holds no usable time"
    cpu = _quartiles(metadata.get("untraced_cpu_ms"), "cpu") if _one_cpu_thread(graph) else None
    untraced = replace(cpu, running=_running(metadata)) if cpu else wall
    if clock not in ("gpu", "mark") or clock not in graph.info.measured_step_ns:
        return None, "the recording has no steps with which the one without the profiler could be compared"
    recorded_ns = step_ns(graph.info.measured_step_ns[clock], graph, clock)
    if not recorded_ns / IMPLAUSIBLE <= untraced.median_ns <= recorded_ns * IMPLAUSIBLE:
        return None, (
            f"a step of {untraced.median_ns / 1e6:.4g} ms without the profiler is implausible beside the recorded one "
            f"of {recorded_ns / 1e6:.4g} ms"
        )
    return untraced, ""


def event_cost_ns(metadata: dict[str, Any]) -> tuple[float | None, str]:
    """Give what the recorder measured an event of the profiler to cost, ns; None, and why, where it is unusable."""
    told = metadata.get("profiler_cost_ns")
    cost_ns = told.get("per_event") if isinstance(told, dict) else told
    if told is None:
        return None, ""
    if _time(cost_ns) and cost_ns <= LARGEST_EVENT_COST_NS:
        return float(cost_ns), ""
    return None, "the recording's profiler_cost_ns holds no usable time"


def _one_cpu_thread(graph: TaskGraph) -> bool:
    """Whether one thread of one process does all the work, so that its CPU time is the step."""
    return (
        [thread.kind for thread in graph.threads] == [ThreadKind.CPU]
        and graph.info.metadata.get("threads") == 1
        and not any(WORKER_LOADER in name for name in graph.names)
    )


def _running(metadata: dict[str, Any]) -> float:
    """The CPU time of the recorded steps over their wall time, at most 1; 1 where it is not told."""
    cpu = _quartiles(metadata.get("traced_cpu_ms"), "cpu")
    wall = _quartiles(metadata.get("traced_step_ms"), "wall")
    return min(cpu.median_ns / wall.median_ns, 1.0) if cpu and wall else 1.0


def _quartiles(told: Any, clock: str) -> Untraced | None:
    """A summary of the recorder, {"median", "q25", "q75"} in ms; None where its median is no time."""
    median_ms = told.get("median") if isinstance(told, dict) else None
    if not _time(median_ms):
        return None
    q25_ms, q75_ms = told.get("q25"), told.get("q75")
    if not (_time(q25_ms) and _time(q75_ms) and q25_ms <= median_ms <= q75_ms <= 2 * median_ms):
        q25_ms = q75_ms = median_ms
    return Untraced(median_ms * 1e6, q25_ms * 1e6, q75_ms * 1e6, clock)


def _time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12
