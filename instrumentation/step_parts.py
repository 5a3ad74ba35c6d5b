"""CPU time of the parts of a step without the profiler, by whose shares a recording is corrected part by part."""

import statistics
import threading
import time
from typing import Any

import torch
from torch import nn

# A step goes through these, each ended by one of the moments that are noted.
PARTS = ("outside", "forward", "backward", "update")
# Fewer steps tell no part.
FEWEST_STEPS = 3


class StepParts:
    """Notes when the model and the optimizer are called and return, on this thread's CPU clock, until `remove`.

    What is neither a forward pass, an update nor between the two (`backward`, with the loss) is `outside`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._thread = threading.get_ident()
        self._moments: list[tuple[int, int]] = []  # the part that ends, ns
        self._hooks = [
            model.register_forward_pre_hook(self._at("outside"), prepend=True),
            model.register_forward_hook(self._at("forward")),
            optimizer.register_step_pre_hook(self._at("backward")),
            optimizer.register_step_post_hook(self._at("update")),
        ]

    def _at(self, ended: str) -> Any:
        part = PARTS.index(ended)

        def note(*_: Any) -> None:
            if threading.get_ident() == self._thread:
                self._moments.append((part, time.thread_time_ns()))

        return note

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def summary(self) -> dict[str, float] | None:
        """Return the median of each part, ms; None unless every step has one forward pass and one update."""
        parts = [part for part, _ in self._moments]
        begin = parts.index(0) if 0 in parts else len(parts)
        steps = (len(parts) - begin) // len(PARTS)
        if steps < FEWEST_STEPS or parts[begin:] != [at % len(PARTS) for at in range(len(parts) - begin)]:
            return None
        times: dict[str, list[float]] = {name: [] for name in PARTS}
        for (_, before_ns), (part, after_ns) in zip(self._moments[begin:], self._moments[begin + 1 :], strict=False):
            times[PARTS[part]].append((after_ns - before_ns) / 1e6)
        return {name: round(statistics.median(found), 6) for name, found in times.items()}
