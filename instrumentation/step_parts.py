"""CPU time of the parts of a step without the profiler; a recording is corrected by their shares."""

import threading
import time
from collections.abc import Sequence
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
# The timestamps take about 10 us of a step. In shorter steps that would be more than 0.5 %.
SHORT_STEP_MS = 2.0
# The timestamps around one step, by the part that ends: one forward pass, one backward pass, one update.
_ONE_STEP = [PARTS.index("update"), *range(len(PARTS))]


class StepParts:
    """Takes timestamps when model and optimizer are called and return, by this thread's CPU clock, until `remove`.

    `backward` lies between the forward pass and the update and includes the loss; ``others`` are the step's other
    optimizers, which belong to the update. The rest of the step is `outside`,
    and `loading` the time of the watched loaders in it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loaders: LoaderWatch,
        others: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self._thread, self._loaders = threading.get_ident(), loaders
        self._timestamps: list[tuple[int, int, int]] = []  # the part that ends, ns, ns of fetches so far
        self._hooks = [
            model.register_forward_pre_hook(HookHere(self._at_end("outside")), prepend=True),
            model.register_forward_hook(HookHere(self._at_end("forward"))),
        ]
        for each in (optimizer, *(other for other in others if other is not optimizer)):
            self._hooks.append(each.register_step_pre_hook(self._at_end("backward")))
            self._hooks.append(each.register_step_post_hook(self._at_end("update")))

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

    @property
    def are_cheap(self) -> bool:
        """Whether the timestamps so far show steps that take much longer than the timestamps."""
        found = self.summary()
        return found is not None and sum(found[name] for name in PARTS) >= SHORT_STEP_MS

    def begin_anew(self) -> None:
        """Forget the steps so far."""
        self._timestamps.clear()

    def summary(self) -> dict[str, float] | None:
        """Return the median of each part, ms; None unless most steps have one forward pass and one update."""
        # One update after another, by a step's other optimizers, continues it.
        update = (PARTS.index("update"), PARTS.index("backward"))
        ended = [part for part, *_ in self._timestamps]
        between = {at for at in range(len(ended)) if tuple(ended[at : at + 2]) == update}
        timestamps = [row for at, row in enumerate(self._timestamps) if at not in between and at - 1 not in between]
        parts = [part for part, *_ in timestamps]
        begins = [at for at in range(len(parts)) if parts[at : at + len(_ONE_STEP)] == _ONE_STEP]
        if len(begins) < FEWEST_STEPS or 2 * len(begins) < parts.count(PARTS.index("update")):
            return None
        steps = np.array([timestamps[at : at + len(_ONE_STEP)] for at in begins])
        parts_ms, fetched_ms = (np.median(np.diff(steps[:, :, column]), axis=0) / 1e6 for column in (1, 2))
        found = {**dict(zip(PARTS, parts_ms.tolist(), strict=True)), LOADING: float(fetched_ms[0])}
        return {name: round(ms, 6) for name, ms in found.items() if ms or name != LOADING}
