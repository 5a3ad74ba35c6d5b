"""The recorder's measurements without the profiler: the target step of a calibrated graph."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.recorded import Recorded, StepTimes
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import ThreadKind
from whatif.simulation.steps import step_ns

# Our choice: a step without the profiler that is this many times longer or shorter than the recorded one belongs to
# another program.
IMPLAUSIBLE = 10.0


class Untraced(Struct, frozen=True):
    """The step without the profiler, ns: median and quartiles, by the ``wall`` or the ``cpu`` clock.

    ``running`` is the share of the recorded steps' wall time in which the CPU clock advanced; in the rest other
    programs had the core. 1 for the wall clock, and if the recording does not contain it.
    """

    median_ns: float
    q25_ns: float
    q75_ns: float
    clock: str
    running: float = 1.0


def untraced_step(graph: TaskGraph, clock: str) -> tuple[Untraced | None, str]:
    """Return the step without the profiler, or None and why the recorded one cannot be used.

    None and "" if the recording has none. It is by the wall clock, as users see it; if a single CPU thread does all the
    work, by the CPU clock, which other programs on the machine do not disturb. ``clock`` is the step clock of the
    recorded step to compare with.
    """
    recorded = graph.info.recorded
    if recorded.untraced_step is None:
        return None, ""
    wall = _quartiles(recorded.untraced_step, "wall")
    if wall is None:
        return None, "the recording's untraced_step_ms holds no usable time"
    cpu = _quartiles(recorded.untraced_cpu, "cpu") if _one_cpu_thread(graph) else None
    untraced = replace(cpu, running=_running(recorded)) if cpu else wall
    if clock not in ("gpu", "mark") or clock not in graph.info.measured_step_ns:
        return None, "the recording has no steps with which the one without the profiler could be compared"
    recorded_ns = step_ns(graph.info.measured_step_ns[clock], graph, clock)
    if not recorded_ns / IMPLAUSIBLE <= untraced.median_ns <= recorded_ns * IMPLAUSIBLE:
        return None, (
            f"a step of {untraced.median_ns / 1e6:.4g} ms without the profiler is implausible beside the recorded one "
            f"of {recorded_ns / 1e6:.4g} ms"
        )
    return untraced, ""


def event_cost_ns(recorded: Recorded) -> tuple[float | None, str]:
    """Return the recorder's measured cost of a profiler event, ns; None, and why, if it is unusable."""
    if recorded.profiler_cost is None:
        return None, ""
    if recorded.profiler_cost.per_event_ns is not None:
        return float(recorded.profiler_cost.per_event_ns), ""
    return None, "the recording's profiler_cost_ns holds no usable time"


def _one_cpu_thread(graph: TaskGraph) -> bool:
    """Whether one thread of one process does all the work, so that its CPU time is the step.

    One of several workers waits for the others, and gloo's threads are not in its trace.
    """
    return (
        [thread.kind for thread in graph.threads] == [ThreadKind.CPU]
        and graph.info.recorded.threads == 1
        and not graph.info.loads_in_processes
        and (graph.info.workers or 1) == 1
    )


def _running(recorded: Recorded) -> float:
    """The CPU time of the recorded steps over their wall time, at most 1; 1 if unknown."""
    cpu = _quartiles(recorded.traced_cpu, "cpu")
    wall = _quartiles(recorded.traced_step, "wall")
    return min(cpu.median_ns / wall.median_ns, 1.0) if cpu and wall else 1.0


def _quartiles(times: StepTimes | None, clock: str) -> Untraced | None:
    """A summary of the recorder's times; None if its median is invalid."""
    if times is None or times.median_ms is None:
        return None
    median_ms, q25_ms, q75_ms = times.median_ms, times.q25_ms, times.q75_ms
    if q25_ms is None or q75_ms is None or not q25_ms <= median_ms <= q75_ms <= 2 * median_ms:
        q25_ms = q75_ms = median_ms
    return Untraced(median_ms * 1e6, q25_ms * 1e6, q75_ms * 1e6, clock)
