"""What all devices that train together do and take in a step: samples, energy, hours to pay for."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from whatif.graph.task_graph import TaskGraph
from whatif.models.durations.estimator import device


class Totals(Struct, frozen=True):
    """A step of ``devices`` devices that takes ``step_s``; ``samples`` are those of all, None where it is no step."""

    step_s: float
    devices: int
    samples: int | None
    watt: float | None  # the most that one device draws by its data sheet; None where it is not known

    @property
    def samples_per_s(self) -> float | None:
        """Samples a second; None where the batch is not known, or what took so long is no step."""
        return self.samples / self.step_s if self.samples and self.step_s > 0 else None

    @property
    def device_s(self) -> float:
        """Seconds that are paid for: the step's on every device."""
        return self.step_s * self.devices

    @property
    def energy_j(self) -> float | None:
        """The most energy that the devices take, joules: their power limit all the while, without hosts and cooling."""
        return None if self.watt is None else self.watt * self.device_s

    def to_dict(self) -> dict[str, Any]:
        """Return the totals as a JSON object."""
        return {"devices": self.devices, "samples_per_s": self.samples_per_s, "energy_j": self.energy_j}


def totals(graph: TaskGraph, step_ms: float, clock: str) -> Totals:
    """Return the totals of a step of ``graph``, which shows one of the workers, or one copy's stages."""
    gpu = device(graph)
    # A span holds an unknown part of a step, or several: it gives no rate.
    samples = None if clock == "span" else graph.info.samples
    return Totals(step_ms / 1e3, graph.info.devices, samples, None if gpu is None else gpu.power_watt)
