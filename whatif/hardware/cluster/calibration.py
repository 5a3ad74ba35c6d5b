"""Measured times of collectives instead of formulas: a table of sizes and times, a CSV or nccl-tests' output.

Within the table times are interpolated in the logarithms of sizes and times; above it the bus bandwidth of the largest
size applies; below it the time of the smallest size is latency. With nccl-tests' bus factors (doc/PERFORMANCE.md) a
table of one operation among n workers also covers other operations and other numbers of workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from whatif.hardware.cluster.collectives import Cost, bus_factor
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from whatif.hardware.cluster.network import Network

# NCCL 2.30, tuning.cc: 6.6 us to start a ring, and 0.6 us for each of its steps over NVLink (protocol LL).
_STARTING_STEPS = 6.6 / 0.6


class Curve(Struct, frozen=True):
    """Times of one operation, ascending by size; ``workers`` is None if the file does not contain it."""

    operation: str
    workers: int | None
    size_bytes: tuple[float, ...]
    time_ns: tuple[float, ...]

    def time_of(self, size_bytes: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the time of each size, ns, shape (n,)."""
        size = np.atleast_1d(np.asarray(size_bytes, dtype=np.float64))
        sizes, time = np.asarray(self.size_bytes), np.asarray(self.time_ns)
        inside = np.exp(np.interp(np.log(np.maximum(size, sizes[0])), np.log(sizes), np.log(time)))
        return np.asarray(np.where(size > sizes[-1], time[-1] / sizes[-1] * size, inside), dtype=np.float64)


class Table(Struct, frozen=True):
    """The curves of a file. Raises WhatifError if there is none."""

    curves: tuple[Curve, ...]
    path: str = ""

    def __post_init__(self) -> None:
        """Check that there is a curve."""
        if not self.curves:
            raise WhatifError(f"{self.path}: expected rows of sizes and times, got none.")

    @property
    def workers(self) -> int | None:
        """The number of workers of the measurements; None for several numbers, or if the file does not contain it."""
        measured = {curve.workers for curve in self.curves}
        return measured.pop() if len(measured) == 1 else None

    def cost(self, operation: str, size_bytes: npt.NDArray[np.float64], network: Network) -> Cost:
        """Return the cost of n exchanges among the workers of ``network``, shape (n,) each part.

        Uses the curve of the same operation and the closest number of workers, else one of another operation. The
        latency is the time of the smallest size.
        """
        workers = network.workers

        def distance(curve: Curve) -> tuple[bool, bool, float]:
            ratio = abs(np.log((curve.workers or workers) / workers))
            return curve.operation != operation, curve.operation != "all_reduce", float(ratio)

        curve = min(self.curves, key=distance)
        measured = curve.workers or workers
        factor = bus_factor(operation, workers) / bus_factor(curve.operation, measured)
        steps = _steps(operation, workers) / _steps(curve.operation, measured)
        total = curve.time_of(size_bytes)
        latency = np.minimum(curve.time_ns[0], total)
        return Cost(latency * steps, (total - latency) * factor)


def _steps(operation: str, workers: int) -> float:
    """Return the latency of an operation in steps: sequential messages, and its start."""
    messages = 1 if operation in ("all_to_all", "send") else workers - 1
    return _STARTING_STEPS + (2 if operation == "all_reduce" else 1) * messages
