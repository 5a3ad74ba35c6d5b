"""Times steps without making the program wait for the GPU."""

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from .gpu import GPU
from .machine_load import LoadMeter


class StepTimer:
    """Times the steps between calls of `mark`: by events of a CUDA device, or by this thread's wall and CPU clock."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device  # None: the CPU
        self._ends: list[Any] = []  # CUDA events, or ns on the wall clock
        self._cpu_ns: list[int] = []
        self._load = LoadMeter()
        self.mark()

    def mark(self) -> None:
        """End one step and begin the next."""
        self._load.mark()
        self._cpu_ns.append(time.thread_time_ns())
        if self._device is None:
            self._ends.append(time.perf_counter_ns())
        else:
            self._ends.append(GPU.mark(self._device))

    def times_ms(self) -> tuple[list[float], list[float]]:
        """Return each step's time, and this thread's CPU time in it; synchronizes the GPU once."""
        cpu_ms = [(end - begin) / 1e6 for begin, end in itertools.pairwise(self._cpu_ns)]
        steps = itertools.pairwise(self._ends)
        if self._device is None:
            return [(end - begin) / 1e6 for begin, end in steps], cpu_ms
        GPU.synchronize(self._device)
        return [GPU.between_ms(begin, end) for begin, end in steps], cpu_ms

    def summaries(self, which: str) -> dict[str, dict[str, float]]:
        """Return `{which}_step_ms`, `{which}_load` and, on a CPU, `{which}_cpu_ms` of two steps or more.

        Synchronizes the GPU once.
        """
        wall_ms, cpu_ms = self.times_ms()
        # On a GPU, CPU time does not add up to the step and would mislead.
        on_cpu = {f"{which}_cpu_ms": _summary(cpu_ms)} if self._device is None else {}
        load = self.load()
        load_entry = {} if load is None else {f"{which}_load": load}
        return {f"{which}_step_ms": _summary(wall_ms), **on_cpu, **load_entry}

    def load(self) -> dict[str, float] | None:
        """Return the load of the machine over the steps, as `LoadMeter.summary`."""
        return self._load.summary(len(self._ends) - 1)


def _summary(times_ms: Sequence[float]) -> dict[str, float]:
    q25, median, q75 = statistics.quantiles(times_ms, n=4, method="inclusive")
    return {"median": round(median, 6), "q25": round(q25, 6), "q75": round(q75, 6), "steps": len(times_ms)}
