"""Derives the levels of a cluster from its processors and links, by rate."""

from __future__ import annotations

from typing import Any

from whatif.hardware.cluster.links import Link
from whatif.hardware.cluster.topology import Cluster, ClusterLevel
from whatif.runtime.errors import WhatifError


def check_connected(cluster: Cluster) -> None:
    """Raise WhatifError unless the links connect all processors."""
    if len(cluster.processors) < 2:
        return
    import networkx as nx  # 0.1 s, not needed by clusters without processors

    parts = sorted(nx.connected_components(_graph(cluster, 0.0)), key=lambda part: (len(part), min(part)))
    if len(parts) > 1:
        names = sorted(parts[0])
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        raise WhatifError(
            f"{cluster.path}: link: expected links that connect all {len(cluster.processors):,} processors, got none "
            f"from {', '.join(names[:3])}{more} to the others."
        )


def levels_of(cluster: Cluster) -> tuple[ClusterLevel, ...]:
    """Return the levels of a cluster of processors, innermost first.

    Processors connected by links of a rate or faster ones form a member of the next level. Raises WhatifError if the
    members of a level differ in size: the models of ring, tree and hierarchy need equal ones.
    """
    import networkx as nx

    members = {processor.name: processor.name for processor in cluster.processors}
    levels, below = [], 1
    for rate in sorted({link.link.byte_s for link in cluster.links}, reverse=True):
        parts = list(nx.connected_components(_graph(cluster, rate)))
        sizes = {len(part) for part in parts}
        if len(parts) == len(set(members.values())):
            continue
        if len(sizes) > 1:
            raise WhatifError(
                f"{cluster.path}: link: expected links of {rate * 8 / 1e9:g} Gbit/s and more to join groups of equally "
                f"many processors, got groups of {', '.join(map(str, sorted(sizes)))}; a collective needs equal ones."
            )
        joining = [
            link for link in cluster.links
            if link.link.byte_s == rate and members[link.between[0]] != members[link.between[1]]
        ]  # fmt: skip
        ends = {end for link in joining for end in link.between}
        slowest = max(link.link.latency_ns for link in joining)
        duplex = all(link.link.full_duplex for link in joining)
        shared = any(link.shared for link in joining) or len(ends) < len(cluster.processors)
        size = sizes.pop()
        levels.append(ClusterLevel("", size // below, Link(rate, slowest, duplex), shared, joining[0].kind))
        members = {name: min(part) for part in parts for name in part}
        below = size
    return tuple(levels)


def _graph(cluster: Cluster, least_byte_s: float) -> Any:
    import networkx as nx

    graph = nx.Graph()
    graph.add_nodes_from(processor.name for processor in cluster.processors)
    graph.add_edges_from(link.between for link in cluster.links if link.link.byte_s >= least_byte_s)
    return graph
