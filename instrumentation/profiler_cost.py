"""What the profiler itself adds to each recorded CPU operator, measured in the process that is recorded."""

import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

# Under 0.1 s and some thousand events in all.
_ROUNDS = 15
_CALLS = 6
_SIZE = 16
_MARK = "whatif::profiler_cost"


class ProfilerCost:
    """Runs the same tiny training step without and with the profiler, on this thread's CPU clock.

    Both runs belong to one recording: the one with the profiler is inside its only session, behind the last step. A
    training step and no loop over one operator, because backward operators cost the profiler about twice as much.
    """

    def __init__(self) -> None:
        self._without_ns: float | None = None
        self._with_ns: float | None = None

    def measure_without(self) -> None:
        """Measure while no profiler runs."""
        self._without_ns = _round_ns()

    def measure_with(self) -> None:
        """Measure while the profiler records."""
        _round_ns()  # The profiler meets these operators for the first time.
        with record_function(_MARK):
            self._with_ns = _round_ns()

    def summary(self, events: list[dict[str, Any]]) -> dict[str, float] | None:
        """Return `per_event`, the CPU time in ns that begin and end of one operator cost; None if not measured.

        `events` are all of the trace, also those of `measure_with`: they are counted.
        """
        count = _operators(events) / _ROUNDS
        if self._without_ns is None or self._with_ns is None or not count:
            return None
        return {"per_event": round(max(0.0, self._with_ns - self._without_ns) / count, 1)}


def _operators(events: list[dict[str, Any]]) -> int:
    """Return the number of operators inside the mark of `measure_with`."""
    mark = next((event for event in events if event.get("name") == _MARK and event.get("ph") == "X"), None)
    if mark is None:
        return 0
    end_us = mark["ts"] + mark["dur"]
    return sum(
        event.get("cat") == "cpu_op" and event["tid"] == mark["tid"] and mark["ts"] <= event["ts"] <= end_us
        for event in events
    )


def _round_ns() -> float:
    """Return the median time of a round of `_CALLS` tiny steps, whatever modes the program is in."""
    device = torch.device("cpu")
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        x, weight, state = (torch.ones(_SIZE, _SIZE, device=device, dtype=torch.float32) for _ in range(3))
        weight.requires_grad_()
        _train(x, weight, state)
        rounds = []
        for _ in range(_ROUNDS):
            begin = time.thread_time_ns()
            for _ in range(_CALLS):
                _train(x, weight, state)
            rounds.append(time.thread_time_ns() - begin)
    return statistics.median(rounds)


def _train(x: Tensor, weight: Tensor, state: Tensor) -> None:
    # Pointwise only: on so small tensors these never start a second thread, for which this one would wait.
    loss = x.mul(weight).relu().add(x).sigmoid().mul(weight).sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        for _ in range(4):
            state.lerp_(gradient, 0.1)
            weight.addcdiv_(gradient, state.sqrt().add_(1.0), value=0.0)
