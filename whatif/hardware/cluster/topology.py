"""A cluster: levels of equal workers, or processors and the links between them (docs/cluster.md).

The same value serves the collectives of data parallel training, which want levels, and DTS's architectures, which want
processors and links.
"""

from __future__ import annotations

import math

from msgspec import Struct

from whatif.hardware.cluster.links import Link
from whatif.hardware.cluster.network import Level, Network
from whatif.runtime.errors import WhatifError


class Processor(Struct, frozen=True):
    """One processor of a cluster of unlike ones; None is what the file does not tell."""

    name: str
    gflop_s: float | None = None
    power_fluctuation_pct: float = 0.0
    memory_gbyte: float | None = None
    parallelization_factor: float = 1.0  # equal devices that work at once (DTS, table I)


class ClusterLink(Struct, frozen=True):
    """A link between two processors, by their names."""

    between: tuple[str, str]
    link: Link
    bandwidth_fluctuation_pct: float = 0.0
    shared: bool = False  # by all pairs of its table
    kind: str = "other"
    table: int = 0  # which [[link]] of the file it is of


class ClusterLevel(Struct, frozen=True):
    """A level of a cluster of equal workers; ``workers`` is None where there are as many as are asked for."""

    name: str
    workers: int | None
    link: Link
    shared: bool
    kind: str


class Cluster(Struct, frozen=True):
    """What a cluster file says: levels, innermost first, and the processors and links where it has any."""

    name: str
    levels: tuple[ClusterLevel, ...] = ()
    processors: tuple[Processor, ...] = ()
    links: tuple[ClusterLink, ...] = ()
    gpu: str | None = None
    path: str = ""

    def network(self, workers: int | None = None) -> Network:
        """Return the network of the first so many workers, whole members first; None is all of them, one
        member where a level leaves their number open.

        Raises WhatifError where there are not so many, or where they fill no equal members.
        """
        # Here: it loads networkx.
        from whatif.hardware.cluster.derive_levels import levels_of

        known = self.levels or levels_of(self)
        if not known:
            raise WhatifError(f"{self.path}: expected a [[level]], or two processors and a [[link]], got neither.")
        if workers is None:
            workers = math.prod(level.workers or 1 for level in known)
        if workers < 1:
            raise WhatifError(f"cluster {self.name!r}: expected 1 worker or more, got {workers}.")
        left, levels = workers, []
        for number, level in enumerate(known):
            last = number == len(known) - 1
            most = left if level.workers is None else level.workers
            taken = min(left, most)
            if left % taken or (last and left > taken):
                raise WhatifError(self._unequal(known, workers))
            levels.append(Level(taken, level.link, level.shared, level.kind))
            left //= taken
        return Network(tuple(levels), gpu=self.gpu)

    def _unequal(self, levels: tuple[ClusterLevel, ...], workers: int) -> str:
        sizes = " x ".join(str(level.workers or "any number") for level in levels)
        return (
            f"cluster {self.name!r}: expected a number of workers that fills equal members of {sizes}, got {workers}; "
            "take another number, or another cluster file."
        )
