"""Totals of all devices that train together in a step: samples, energy, paid hours."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from whatif.graph.task_graph import TaskGraph
from whatif.models.durations.estimator import device


class Totals(Struct, frozen=True):
    """A step of ``devices`` devices that takes ``step_s``; ``samples`` are those of all, None if it is no step."""

    step_s: float
    devices: int
    samples: int | None
    watt: float | None  # the power limit of one device by its data sheet; None if unknown

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second; None if the batch is unknown, or ``step_s`` is not one step."""
        return self.samples / self.step_s if self.samples and self.step_s > 0 else None

    @property
    def device_s(self) -> float:
        """Paid device seconds: the step's time on every device."""
        return self.step_s * self.devices

    @property
    def energy_j(self) -> float | None:
        """The maximum energy of the devices, joules: their power limit throughout, without hosts and cooling."""
        return None if self.watt is None else self.watt * self.device_s

    def to_dict(self) -> dict[str, Any]:
        """Return the totals as a JSON object."""
        return {"devices": self.devices, "samples_per_s": self.samples_per_s, "energy_j": self.energy_j}


def totals(graph: TaskGraph, step_ms: float, clock: str) -> Totals:
    """Return the totals of a step of ``graph``, which contains one worker, or one replica's stages."""
    gpu = device(graph)
    # A span covers an unknown part of a step, or several steps: it gives no rate.
    samples = None if clock == "span" else graph.info.samples
    return Totals(step_ms / 1e3, graph.info.devices, samples, None if gpu is None else gpu.power_watt)


def samples_factor(before: TaskGraph, after: TaskGraph) -> float:
    """Return the samples of a step of all workers over those of one before the change, also if neither is known."""
    old, new = before.info, after.info
    if old.samples and new.samples:
        return new.samples / old.samples
    factor = workers_factor(before, after) * (new.batch_factor * new.passes) / (old.batch_factor * old.passes)
    return round(factor, 12)  # three passes of a third are the samples of one step


def workers_factor(before: TaskGraph, after: TaskGraph) -> float:
    """Return the number of workers that train together over that before the change."""
    one, other = (info.workers or len(info.ranks) or 1 for info in (before.info, after.info))
    return other / one
