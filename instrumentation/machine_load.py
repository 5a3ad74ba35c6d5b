"""Load of the machine while steps run: interference by other processes shows in this process's counters."""

import importlib
import importlib.util
import os
import time


class LoadMeter:
    """Counts the process's CPU time, involuntary context switches and minor page faults, from now on."""

    def __init__(self) -> None:
        self._began = self._ended = _counters()

    def mark(self) -> None:
        """End the counted interval now."""
        self._ended = _counters()

    def summary(self, steps: int) -> dict[str, float] | None:
        """Return the counts over `steps` steps and the one-minute load average; None without counters."""
        if self._began is None or self._ended is None:
            return None
        wall_s, cpu_s, switches, faults = (end - begin for end, begin in zip(self._ended, self._began, strict=True))
        return {
            "steps": steps, "wall_s": round(wall_s, 6), "cpu_s": round(cpu_s, 6), "load": round(os.getloadavg()[0], 2),
            "involuntary_switches": int(switches), "minor_faults": int(faults),
        }  # fmt: skip


def _counters() -> tuple[float, float, int, int] | None:
    if importlib.util.find_spec("resource") is None:  # not a Unix: nothing is counted
        return None
    resource = importlib.import_module("resource")
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), used.ru_utime + used.ru_stime, used.ru_nivcsw, used.ru_minflt
