"""Doubts from the recorder's counters: other programs on the machine, and time spent in page faults."""

from __future__ import annotations

from whatif.graph.recorded import MachineLoad, Recorded

BUSY = "other programs and page faults while recording"

# A program with cores to itself is preempted a few times per second of CPU time, one that shares a core about 300
# times (measured with one to four programs on a core: a scheduler's slice is about 3 ms).
BUSY_SWITCHES_PER_S = 50.0
# Less CPU time or fewer switches prove nothing: in this time a program with a core to itself (1 to 4 switches a
# second) has 3 in one of a thousand recordings, one that shares it about 6.
LEAST_CPU_S, LEAST_SWITCHES = 0.02, 3
# A recorded step is not representative if it takes this many times the step without the profiler,
STORM = 1.5
# and page faults explain at least this share of the difference, at the least cost of one (0.5 to 2 us on a virtual
# machine).
STORM_SHARE, FAULT_US = 0.2, 0.5


def machine_doubts(recorded: Recorded) -> list[str]:
    """Return a sentence for each sign that the machine was busy while recording."""
    loads = (("without the profiler", recorded.untraced_load), ("with it", recorded.traced_load))
    found = []
    busy = [f"{per_s:.0f} times {which}" for which, load in loads if (per_s := _switches_per_s(load)) is not None]
    if busy:
        average = max((load.load for _, load in loads if load and load.load is not None), default=None)
        cores = "" if recorded.cpu_cores is None else f" on {recorded.cpu_cores} cores"
        suffix = "" if average is None else f"; load average {average:.1f}{cores}"
        found.append(
            f"busy machine, record again: per second of CPU time the program was preempted {' and '.join(busy)}{suffix}"
        )
    storm = _page_faults(recorded)
    return [*found, storm] if storm else found


def _switches_per_s(load: MachineLoad | None) -> float | None:
    """Preemptions of the program per second of CPU time; None unless they are frequent."""
    if load is None or load.involuntary_switches is None or load.cpu_s is None or load.cpu_s < LEAST_CPU_S:
        return None
    per_s = load.involuntary_switches / load.cpu_s
    return per_s if load.involuntary_switches >= LEAST_SWITCHES and per_s > BUSY_SWITCHES_PER_S else None


def _page_faults(recorded: Recorded) -> str:
    steps = [table.median_ms if table else None for table in (recorded.untraced_step, recorded.traced_step)]
    faults = [
        load.minor_faults / load.steps if load and load.steps and load.minor_faults is not None else None
        for load in (recorded.untraced_load, recorded.traced_load)
    ]
    if steps[0] is None or steps[1] is None or faults[0] is None or faults[1] is None:
        return ""
    longer_ms, more = steps[1] - steps[0], faults[1] - faults[0]
    if steps[1] < STORM * steps[0] or more * FAULT_US / 1e3 < STORM_SHARE * longer_ms:
        return ""
    return (
        f"page faults: the recorded step is {steps[1] / steps[0]:.1f} times as long as without the profiler, with "
        f"{faults[1]:,.0f} page faults instead of {faults[0]:,.0f}; record again with the environment variables "
        "MALLOC_TRIM_THRESHOLD_=2000000000 and MALLOC_TOP_PAD_=67108864, so that freed memory is kept"
    )
