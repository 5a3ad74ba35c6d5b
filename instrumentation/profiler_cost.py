"""Overhead of the profiler per recorded CPU operator, measured in the recorded process."""

import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

# About 0.06 s and some thousand events in all.
_ROUNDS = 25
_CALLS = 4
_SIZE = 16
_MARK = "whatif::profiler_cost"


class ProfilerCost:
    """Runs a tiny training step alternately with and without the profiler, timed by this thread's CPU clock.

    Both run in the recording's session, after the last step; they alternate, so that a slow moment affects both. The
    work is a training step, not one repeated operator, as backward operators have about twice the overhead.
    """

    def __init__(self) -> None:
        self._added_ns: list[int] = []  # by round

    def measure(self) -> None:
        """Measure while the profiler records; leaves it recording."""
        device = torch.device("cpu")
        # Independent of the program's modes.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            x, weight, state = (torch.ones(_SIZE, _SIZE, device=device, dtype=torch.float32) for _ in range(3))
            tensors = x, weight.requires_grad_(), state
            for recorded in (True, False):  # Warm-up: the profiler sees these operators for the first time.
                _round_ns(tensors, recorded)
            with record_function(_MARK):
                self._added_ns = [_round_ns(tensors, True) - _round_ns(tensors, False) for _ in range(_ROUNDS)]

    def summary(self, events: list[dict[str, Any]]) -> dict[str, float] | None:
        """Return `per_event`, the overhead of recording one operator in ns of CPU time; None if not measured.

        `events` are all of the trace, including those of `measure`, which are counted.
        """
        events_per_round = _operators(events) / _ROUNDS
        if not self._added_ns or not events_per_round:
            return None
        return {"per_event": round(max(0.0, statistics.median(self._added_ns)) / events_per_round, 1)}


def _operators(events: list[dict[str, Any]]) -> int:
    """Return the number of operators inside the mark of `measure`."""
    mark = next((event for event in events if event.get("name") == _MARK and event.get("ph") == "X"), None)
    if mark is None:
        return 0
    end_us = mark["ts"] + mark["dur"]
    return sum(
        event.get("cat") == "cpu_op" and event["tid"] == mark["tid"] and mark["ts"] <= event["ts"] <= end_us
        for event in events
    )


def _round_ns(tensors: tuple[Tensor, Tensor, Tensor], recorded: bool) -> int:
    """Return the time of some tiny steps; the profiler ignores this thread if they are not `recorded`."""
    torch._C._autograd._enable_record_function(recorded)
    try:
        begin_ns = time.thread_time_ns()
        for _ in range(_CALLS):
            _train(*tensors)
        return time.thread_time_ns() - begin_ns
    finally:
        torch._C._autograd._enable_record_function(True)


def _train(x: Tensor, weight: Tensor, state: Tensor) -> None:
    # Pointwise only: on tensors this small they never start a second thread, for which this one would wait.
    loss = x.mul(weight).relu().add(x).sigmoid().mul(weight).sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        for _ in range(4):
            state.lerp_(gradient, 0.1)
            weight.addcdiv_(gradient, state.sqrt().add_(1.0), value=0.0)
