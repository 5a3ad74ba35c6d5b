"""CPU time of the parts of a step without the profiler; a recording is corrected by their shares."""

import itertools
import statistics
import threading
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from .layers import HookHere
from .loaders import LoaderWatch

# The parts of a step in order; a timestamp is taken at the end of each.
PARTS = ("outside", "forward", "backward", "update")
# The share of a DataLoader in `outside`, if there is one.
LOADING = "loading"
# Too few steps give no medians.
FEWEST_STEPS = 3


class StepParts:
    """Takes timestamps when model and optimizer are called and return, by this thread's CPU clock, until `remove`.

    `backward` lies between the forward pass and the update and includes the loss. The rest of the step is `outside`,
    and `loading` the time of the watched loaders in it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loaders: LoaderWatch) -> None:
        self._thread, self._loaders = threading.get_ident(), loaders
        self._timestamps: list[tuple[int, int, int]] = []  # the part that ends, ns, ns of fetches so far
        self._hooks = [
            model.register_forward_pre_hook(HookHere(self._at_end("outside")), prepend=True),
            model.register_forward_hook(HookHere(self._at_end("forward"))),
            optimizer.register_step_pre_hook(self._at_end("backward")),
            optimizer.register_step_post_hook(self._at_end("update")),
        ]

    def _at_end(self, ended: str) -> Any:
        part = PARTS.index(ended)

        def take_time(*_: Any) -> None:
            if threading.get_ident() == self._thread:
                self._timestamps.append((part, time.thread_time_ns(), self._loaders.fetch_ns))

        return take_time

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def summary(self) -> dict[str, float] | None:
        """Return the median of each part, ms; None unless every step has one forward pass and one update."""
        parts = [part for part, *_ in self._timestamps]
        begin = parts.index(0) if 0 in parts else len(parts)
        steps = (len(parts) - begin) // len(PARTS)
        if steps < FEWEST_STEPS or parts[begin:] != [at % len(PARTS) for at in range(len(parts) - begin)]:
            return None
        times: dict[str, list[float]] = {name: [] for name in (*PARTS, LOADING)}
        for (_, *before), (part, *after) in itertools.pairwise(self._timestamps[begin:]):
            part_ns, fetch_ns = np.subtract(after, before).tolist()
            times[PARTS[part]].append(part_ns / 1e6)
            if PARTS[part] == "outside":
                times[LOADING].append(fetch_ns / 1e6)
        medians = {name: round(statistics.median(found), 6) for name, found in times.items()}
        return medians if medians[LOADING] else {name: medians[name] for name in PARTS}
