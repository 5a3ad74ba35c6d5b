"""The current speed of this CPU: a fixed piece of arithmetic, timed before and after every operator.

A neighbour on the same physical core, or lower clocks, slow a thread down without taking CPU time from it: on the
machine of docs/profile.md up to two times, for seconds or minutes. The arithmetic slows down like the operator, so the
ratio of the two times is reproducible although neither time is. Times are scaled to the fastest pace of the machine.
Memory-bound operators slow down less: their time scales with the square root of the pace.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import torch

from whatif.graph.described import Described
from whatif.opdb.rows import operators
from whatif.opdb.work import work
from whatif.runtime.files import replacing

from ..operators.timing import Clock

FILE = "pace.json"
LARGEST_BYTES = 100_000
# Arithmetic inside the L1 cache, 48 KiB; it takes some 0.4 ms.
PRODUCT, PRODUCTS = 64, 50
# Next to a long operator several samples are taken, for about a tenth of the operator's time.
SHARE, MOST_SAMPLES = 0.1, 16
# An operator's time scales with the pace to this power: medians of 45 operators at 18 moments each on the machine of
# docs/profile.md, rounded; our estimate. Products and operators that fit in a core's L2 cache: 0.97; operators that
# read and write more and compute little: 0.55.
COMPUTES, STREAMS = 1.0, 0.5
STREAMS_FROM_BYTES = 512 << 10
_PRODUCTS = frozenset({"matmul", "conv", "attention"})


class Pace:
    """Times the arithmetic with a clock of one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._factors = torch.rand(PRODUCT, PRODUCT)
        self._product = torch.empty_like(self._factors)
        self._work()
        self._once_ns = max(1.0, self._clock(self._work))

    def sample(self, beside_ns: float = 0.0) -> float:
        """Return the time of the arithmetic in ns, next to work that takes ``beside_ns``."""
        count = min(MOST_SAMPLES, max(1, int(SHARE * beside_ns / self._once_ns)))
        return statistics.median(self._clock(self._work) for _ in range(count))

    def _work(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self._factors, self._factors, out=self._product)


def sensitivity(operator: Described) -> float:
    """Return the exponent of the pace in an operator's time."""
    if operator.family in _PRODUCTS:
        return COMPUTES
    sizes = {name: [value] for name, value in operator.integers}
    ops = operators(operator.family, sizes, name=[operator.name], dtype=operator.dtype)
    return STREAMS if work(ops)[1][0] > STREAMS_FROM_BYTES else COMPUTES


def fastest(folder: Path, machine: str, seen_ns: float) -> float:
    """Return the fastest pace of the machine, ns: ``seen_ns`` or that of an earlier run into this database.

    It is stored, so that the times of all runs are scaled to the same pace. A damaged file is replaced.
    """
    path = folder / FILE
    paces: dict[str, float] = {}
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(LARGEST_BYTES))
        paces = {str(k): float(v) for k, v in found.items() if math.isfinite(v) and v > 0}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass
    if seen_ns < paces.get(machine, math.inf):
        paces[machine] = seen_ns
        with replacing(path) as part:
            part.write_text(json.dumps(paces, indent=1) + "\n", encoding="utf-8")
    return paces[machine]
