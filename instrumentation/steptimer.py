"""Times steps without making the program wait for the GPU."""

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch


class StepTimer:
    """Times the steps between calls of `mark`: by CUDA events, or by the wall and the CPU clock of this thread."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._events: list[Any] = []
        self._wall_ns: list[int] = []
        self._cpu_ns: list[int] = []
        self.mark()

    def mark(self) -> None:
        """End one step and begin the next."""
        if self._cuda:
            cuda: Any = torch.cuda  # Partly untyped.
            event = cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._cpu_ns.append(time.thread_time_ns())
            self._wall_ns.append(time.perf_counter_ns())

    @property
    def steps(self) -> int:
        """The number of whole steps timed so far."""
        return len(self._events if self._cuda else self._wall_ns) - 1

    def summaries(self, which: str) -> dict[str, dict[str, float]]:
        """Return `{which}_step_ms` and, on a CPU, `{which}_cpu_ms` of two steps or more; waits for the GPU once."""
        if self._cuda:
            torch.cuda.synchronize()
            pairs = itertools.pairwise(self._events)
            return {f"{which}_step_ms": _summary([start.elapsed_time(end) for start, end in pairs])}
        return {
            f"{which}_step_ms": _summary(_differences_ms(self._wall_ns)),
            f"{which}_cpu_ms": _summary(_differences_ms(self._cpu_ns)),
        }


def _differences_ms(clock_ns: Sequence[int]) -> list[float]:
    return [(end - start) / 1e6 for start, end in itertools.pairwise(clock_ns)]


def _summary(times_ms: Sequence[float]) -> dict[str, float]:
    q25, median, q75 = statistics.quantiles(times_ms, n=4, method="inclusive")
    return {"median": round(median, 6), "q25": round(q25, 6), "q75": round(q75, 6), "steps": len(times_ms)}
