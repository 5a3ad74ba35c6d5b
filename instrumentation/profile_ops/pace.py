"""How fast this CPU runs at the moment: a fixed piece of arithmetic, timed beside every operator.

A neighbour on the same physical core, or clocks that sink, slow a thread down without taking CPU time from it: on the
machine of docs/profile.md up to twice, for seconds or minutes. What slows an operator slows this as well, so the ratio
of both times repeats where neither of them does. Times are given at the fastest pace that was seen on the machine.
Operators that wait for memory are slowed less: their time goes with the square root of the pace.
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
# Arithmetic inside the first-level cache, 48 KiB; some 0.4 ms of it.
PRODUCT, PRODUCTS = 64, 50
# Beside a long operator the pace is taken several times: about a tenth of what the operator takes.
SHARE, MOST_SAMPLES = 0.1, 16
# By how much of a change of pace an operator's time changes, as an exponent: medians of 45 operators at 18 moments each
# on the machine of docs/profile.md, rounded; our estimate. Products and what fits a core's second-level cache: 0.97;
# what reads and writes more than that and computes little: 0.55.
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
        """Return the time of the arithmetic in ns, beside work that takes ``beside_ns``."""
        count = min(MOST_SAMPLES, max(1, int(SHARE * beside_ns / self._once_ns)))
        return statistics.median(self._clock(self._work) for _ in range(count))

    def _work(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self._factors, self._factors, out=self._product)


def sensitivity(what: Described) -> float:
    """Return the exponent with which an operator's time goes with the pace."""
    if what.family in _PRODUCTS:
        return COMPUTES
    sizes = {name: [value] for name, value in what.integers}
    ops = operators(what.family, sizes, name=[what.name], dtype=what.dtype)
    return STREAMS if work(ops)[1][0] > STREAMS_FROM_BYTES else COMPUTES


def fastest(folder: Path, machine: str, seen_ns: float) -> float:
    """Return the fastest pace of the machine, ns: ``seen_ns`` or what an earlier run into this database has seen.

    It is remembered, so that the times of all runs are given at one pace. A file that is damaged is written anew.
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
