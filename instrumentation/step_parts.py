"""CPU time of the parts of a step without the profiler, by whose shares a recording is corrected part by part."""

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

# A step goes through these, each ended by one of the moments that are noted.
PARTS = ("outside", "forward", "backward", "update")
# What of `outside` a DataLoader takes, where there is one.
LOADING = "loading"
# Fewer steps tell no part.
FEWEST_STEPS = 3


class StepParts:
    """Notes when the model and the optimizer are called and return, on this thread's CPU clock, until `remove`.

    What is neither a forward pass, an update nor between the two (`backward`, with the loss) is `outside`; `loading` is
    what of it the watched loaders take.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loaders: LoaderWatch) -> None:
        self._thread, self._loaders = threading.get_ident(), loaders
        self._moments: list[tuple[int, int, int]] = []  # the part that ends, ns, ns of fetches until then
        self._hooks = [
            model.register_forward_pre_hook(HookHere(self._at("outside")), prepend=True),
            model.register_forward_hook(HookHere(self._at("forward"))),
            optimizer.register_step_pre_hook(self._at("backward")),
            optimizer.register_step_post_hook(self._at("update")),
        ]

    def _at(self, ended: str) -> Any:
        part = PARTS.index(ended)

        def note(*_: Any) -> None:
            if threading.get_ident() == self._thread:
                self._moments.append((part, time.thread_time_ns(), self._loaders.fetch_ns))

        return note

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def summary(self) -> dict[str, float] | None:
        """Return the median of each part, ms; None unless every step has one forward pass and one update."""
        parts = [part for part, *_ in self._moments]
        begin = parts.index(0) if 0 in parts else len(parts)
        steps = (len(parts) - begin) // len(PARTS)
        if steps < FEWEST_STEPS or parts[begin:] != [at % len(PARTS) for at in range(len(parts) - begin)]:
            return None
        times: dict[str, list[float]] = {name: [] for name in (*PARTS, LOADING)}
        for (_, *before), (part, *after) in itertools.pairwise(self._moments[begin:]):
            part_ns, fetch_ns = np.subtract(after, before).tolist()
            times[PARTS[part]].append(part_ns / 1e6)
            if PARTS[part] == "outside":
                times[LOADING].append(fetch_ns / 1e6)
        medians = {name: round(statistics.median(found), 6) for name, found in times.items()}
        return medians if medians[LOADING] else {name: medians[name] for name in PARTS}
