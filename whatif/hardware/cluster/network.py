"""A network of equal workers in levels (GPUs of a node, nodes of a cluster), and the cost of exchanges among them.

The formulas are in `collectives.py`, NCCL's tuner is in `nccl.py`, measured times are in `calibration.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from whatif.hardware.cluster.collectives import (
    MODELS,
    NCCL_CHOICES,
    Cost,
    Terms,
    check_operation,
    fastest,
    send_terms,
)
from whatif.hardware.cluster.links import Link
from whatif.hardware.cluster.nccl import COLLECTIVES, nccl_cost
from whatif.runtime.errors import WhatifError
from whatif.units import counted

if TYPE_CHECKING:
    from whatif.hardware.cluster.calibration import Table

# More than any real cluster.
MOST_WORKERS = 1_000_000
ALGORITHMS = ("auto", "ring", "tree", "hierarchical", "direct", "nccl")


@dataclass(frozen=True, slots=True)
class Level:
    """``workers`` members that reach one another over ``link``: GPUs in a node, or nodes in a cluster.

    ``shared``: all workers of a member share one such link (the only network card of a node); otherwise each worker has
    its own. On the innermost level a member is one worker, so it makes no difference. ``kind`` is the common name of
    the link (NVLink, PCIe, Ethernet, ...), on which only NCCL's tuner depends.
    """

    workers: int
    link: Link
    shared: bool = True
    kind: str = field(default="other", compare=False)


class Network(Struct, frozen=True):
    """Levels, innermost first; a table of measured times, if there is one, replaces the formulas.

    ``algorithm`` is the default of ``cost``, ``gpu`` the workers' device if known, ``spread_pct`` the standard
    deviation of a worker's step if given, percent. ``usual_for`` is the device for which this network was assumed,
    ``unused`` what was given for links that these workers do not use, in words.

    Raises WhatifError on no levels or no workers.
    """

    levels: tuple[Level, ...]
    algorithm: str = "auto"
    table: Table | None = None
    gpu: str | None = None
    spread_pct: float | None = None
    usual_for: str = ""
    unused: str = ""

    def __post_init__(self) -> None:
        """Check the number of workers and the algorithm."""
        if not self.levels or any(level.workers < 1 for level in self.levels) or self.workers > MOST_WORKERS:
            counts = " x ".join(str(level.workers) for level in self.levels) or "none"
            raise WhatifError(f"network: expected from 1 to {MOST_WORKERS:,} workers, got {counts}.")
        if self.algorithm not in ALGORITHMS:
            raise WhatifError(f"network: expected an algorithm of {', '.join(ALGORITHMS)}, got {self.algorithm!r}.")

    @classmethod
    def of(cls, workers: int, link: Link, algorithm: str = "auto") -> Network:
        """Return the network of ``workers`` workers on equal links."""
        return cls((Level(workers, link),), algorithm)

    @property
    def workers(self) -> int:
        """Number of workers in all levels together."""
        return math.prod(level.workers for level in self.levels)

    def cost(self, operation: str, size_bytes: npt.ArrayLike, algorithm: str | None = None) -> Cost:
        """Return the cost of n separate exchanges of ``size_bytes``, shape (n,) each part.

        ``auto`` is the fastest of those that NCCL chooses from: ring and tree for an all-reduce, the ring for
        reduce-scatter, all-gather and broadcast, direct messages for all-to-all and send. The network's algorithm
        applies to the operations that it supports, ``auto`` to the others. ``nccl`` is NCCL's tuner
        (`whatif.hardware.cluster.nccl`). A table takes precedence over all of them, unless ``algorithm`` is given here.
        Raises WhatifError for an unknown operation, or for one that the given ``algorithm`` does not support; a send is
        the same with all of them.
        """
        name = algorithm or (self.algorithm if self.algorithm in _supporting(operation) else "auto")
        check_operation(operation)
        size = np.atleast_1d(np.asarray(size_bytes, dtype=np.float64))
        if self.workers == 1:
            return Cost(np.zeros(size.shape), np.zeros(size.shape))
        if self.table is not None and algorithm is None:
            return self.table.cost(operation, size, self)
        if any(level.link.growth != 1 for level in self.levels):
            return self._by_size(operation, size, name)
        if operation == "send":
            return _cost(size, send_terms(self))
        if name == "auto":
            return fastest([_cost(size, MODELS[model][operation](self)) for model in NCCL_CHOICES[operation]])
        if name not in _supporting(operation):
            able = ", ".join(_supporting(operation))
            raise WhatifError(f"network: expected an algorithm for {operation} of auto, {able}, got {name!r}.")
        if name == "nccl":
            return nccl_cost(self, operation, size)
        return _cost(size, MODELS[name][operation](self))

    def _by_size(self, operation: str, size_bytes: npt.NDArray[np.float64], name: str) -> Cost:
        """Return the cost if latency depends on message size: a part for each worker (Pei et al., equation 28), or all.

        Other algorithms than the ring send other parts; they are counted like the ring's.
        """
        parts = 1 if operation in ("send", "broadcast") else self.workers
        sizes, which = np.unique(size_bytes, return_inverse=True)
        costs = []
        for size in sizes.tolist():
            levels = tuple(replace(level, link=level.link.for_messages(size / parts)) for level in self.levels)
            costs.append(structs.replace(self, levels=levels).cost(operation, size, name))
        latency_ns, transfer_ns = (np.concatenate(part)[which] for part in zip(*costs, strict=True))
        return Cost(latency_ns, transfer_ns)

    def around(self, inner: int) -> Network:
        """Return the network of one of ``inner`` groups, each with one worker of every ``inner`` neighbours.

        The groups exchange at the same time and so divide the shared links. Raises WhatifError if ``inner`` does not
        divide the levels evenly.
        """
        levels: list[Level] = []
        remaining = inner
        for level in self.levels:
            divisor = math.gcd(remaining, level.workers)
            groups_on_link = inner // remaining if level.shared else 1
            link = structs.replace(level.link, byte_s=level.link.byte_s / groups_on_link)
            levels.append(replace(level, workers=level.workers // divisor, link=link))
            remaining //= divisor
        if remaining > 1:
            counts = " x ".join(str(level.workers) for level in self.levels)
            raise WhatifError(f"network: expected groups of {inner} that fill {counts} workers.")
        return structs.replace(self, levels=tuple(levels))

    @property
    def described(self) -> str:
        """The assumed network in words: a measured table, or the links of each level with several workers."""
        if self.table is not None:
            return f"{counted(self.workers, 'worker')}, times from {self.table.path}"
        links = " x ".join(f"{level.workers:,} at {level.link.described}" for _, level in self.used)
        if not self.usual_for:
            return f"{links} ({self.unused})" if self.unused else links
        return f"{links} (usual for {self.usual_for}), as neither bandwidth= nor cluster= is given"

    @property
    def ring_byte_s(self) -> float:
        """The rate of a ring's slowest link; the separate links of a member's workers add up."""
        return min(level.link.exchange_byte_s * (1 if level.shared else below) for below, level in self.used)

    @property
    def used(self) -> list[tuple[int, Level]]:
        """Each level with several members, with the number of workers in one of its members."""
        found, below = [], 1
        for level in self.levels:
            if level.workers > 1:
                found.append((below, level))
            below *= level.workers
        return found


def _supporting(operation: str) -> tuple[str, ...]:
    """Return the algorithms that support an operation."""
    nccl = ("nccl",) if operation in COLLECTIVES else ()
    return (*(name for name, operations in MODELS.items() if operation in operations), *nccl)


def _cost(size_bytes: npt.NDArray[np.float64], terms: Terms) -> Cost:
    latency_ns, ns_per_byte = terms
    return Cost(np.full(size_bytes.shape, float(latency_ns)), size_bytes * ns_per_byte)
