"""A cluster: levels of equal workers, or processors and the links between them (docs/cluster.md).

The same object serves the collectives of data parallel training, which use levels, and DTS's architectures, which use
processors and links.
"""

from __future__ import annotations

import math

from msgspec import Struct

from whatif.hardware.cluster.links import Link
from whatif.hardware.cluster.network import Level, Network
from whatif.runtime.errors import WhatifError


class Processor(Struct, frozen=True):
    """One processor of a heterogeneous cluster; None for values missing in the file."""

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
    table: int = 0  # index of its [[link]] in the file


class ClusterLevel(Struct, frozen=True):
    """A level of a cluster of equal workers; ``workers`` is None for any requested number."""

    name: str
    workers: int | None
    link: Link
    shared: bool
    kind: str


class Cluster(Struct, frozen=True):
    """The contents of a cluster file: levels, innermost first, and processors and links if it has any."""

    name: str
    levels: tuple[ClusterLevel, ...] = ()
    processors: tuple[Processor, ...] = ()
    links: tuple[ClusterLink, ...] = ()
    gpu: str | None = None
    path: str = ""

    def network(self, workers: int | None = None, inner: int = 1) -> Network:
        """Return the network of the first ``workers`` groups of ``inner`` neighbours, which fill members in order.

        ``workers`` None is all of the cluster, with one member in a level of open size.

        Raises WhatifError if there are not enough, or if they do not fill equal groups.
        """
        # Imported here: it loads networkx.
        from whatif.hardware.cluster.derive_levels import levels_of

        cluster_levels = self.levels or levels_of(self)
        if not cluster_levels:
            raise WhatifError(f"{self.path}: expected a [[level]], or two processors and a [[link]], got neither.")
        if workers is None:
            workers, inner = math.prod(level.workers or 1 for level in cluster_levels), 1
        if workers < 1:
            raise WhatifError(f"cluster {self.name!r}: expected 1 worker or more, got {workers}.")
        remaining, levels = workers * inner, []
        for number, level in enumerate(cluster_levels):
            last = number == len(cluster_levels) - 1
            most = remaining if level.workers is None else level.workers
            members = min(remaining, most)
            if remaining % members or (last and remaining > members):
                raise WhatifError(self._unequal(cluster_levels, workers, inner))
            levels.append(Level(members, level.link, level.shared, level.kind))
            remaining //= members
        return Network(tuple(levels), gpu=self.gpu)

    def _unequal(self, levels: tuple[ClusterLevel, ...], workers: int, inner: int) -> str:
        got = f"{workers * inner} ({workers} groups of {inner} neighbours)" if inner > 1 else str(workers)
        sizes = " x ".join(str(level.workers or "any number") for level in levels)
        return (
            f"cluster {self.name!r}: expected a number of workers that fills equal groups of {sizes}, got {got}; "
            "choose another number or cluster file, or bandwidth= without cluster= for equal links."
        )
