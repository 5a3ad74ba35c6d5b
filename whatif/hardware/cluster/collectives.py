"""Costs of collectives on a network with levels: the alpha-beta model of each algorithm, one function each.

A cost is latencies plus bytes over a rate. Sizes are full buffers as nccl-tests counts them (doc/PERFORMANCE.md): for
all-gather and reduce-scatter all parts together, for all-to-all the buffer of one worker including its own part.
docs/cluster.md has the formulas with their sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from whatif.graph.types import Float64
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from whatif.hardware.cluster.network import Network

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")
# Cost of an algorithm: its latency, ns, and the time of one byte of the buffer, ns.
Terms = tuple[float, float]


class Cost(NamedTuple):
    """The two parts of the cost of n transfers, ns, shape (n,) each: only the second depends on the bandwidth."""

    latency_ns: Float64
    transfer_ns: Float64

    @property
    def total_ns(self) -> Float64:
        """Both parts together, ns."""
        return np.asarray(self.latency_ns + self.transfer_ns, dtype=np.float64)


def fastest(costs: list[Cost]) -> Cost:
    """Return, for each size, the cost with the least total; the first of equal ones."""
    best = np.argmin([cost.total_ns for cost in costs], axis=0)[None]
    return Cost(*(np.take_along_axis(np.stack(part), best, 0)[0] for part in zip(*costs, strict=True)))


def check_operation(operation: str) -> None:
    """Raise WhatifError unless it is one of ``OPERATIONS``."""
    if operation not in OPERATIONS:
        raise WhatifError(f"network: expected one of {', '.join(OPERATIONS)}, got {operation!r}.")


def bus_factor(operation: str, workers: int) -> float:
    """Return nccl-tests' factor from size / time to bus bandwidth, the rate on the links."""
    check_operation(operation)
    if operation in ("broadcast", "send"):
        return 1.0
    return (2.0 if operation == "all_reduce" else 1.0) * (workers - 1) / workers


def _ring(network: Network, rounds: int) -> Terms:
    """Cost of one ring through all workers, member by member: its slowest link determines the rate.

    A member with a link for each worker runs as many rings as it has links.
    """
    return rounds * _hops(network), rounds * (network.workers - 1) / network.workers * 1e9 / network.ring_byte_s


def _chain(network: Network) -> Terms:
    """Cost of a buffer that passes all workers in pipelined pieces."""
    return _hops(network), 1e9 / network.ring_byte_s


def _tree(network: Network, rounds: int) -> Terms:
    """Cost of a pair of binary trees, each for half of the buffer (Sanders, Speck, Träff, 2009; NCCL since 2.4).

    A worker is an inner node of one and a leaf of the other: the full buffer goes up and the full buffer comes down.
    Between two workers each tree is one message.
    """
    latency_ns = sum((level.workers - 1).bit_length() * level.link.latency_ns for _, level in network.used)
    buffers = 1 if network.workers == 2 else rounds
    return rounds * latency_ns, buffers * 1e9 / network.ring_byte_s


def _hierarchical(network: Network, rounds: int) -> Terms:
    """Cost of a ring in each level for the part of the buffer left by inner levels (Cho et al., BlueConnect, 2019).

    Workers of a member that share its link run one ring each on it.
    """
    latency_ns = ns_per_byte = 0.0
    for below, level in network.used:
        latency_ns += (level.workers - 1) * level.link.latency_ns
        left = 1.0 if level.shared else 1 / below
        ns_per_byte += (level.workers - 1) / level.workers * left * 1e9 / level.link.exchange_byte_s
    return rounds * latency_ns, rounds * ns_per_byte


def _hierarchical_broadcast(network: Network) -> Terms:
    """Cost with the outermost level first: one worker of each member has the buffer before the next level starts."""
    latency_ns = sum((level.workers - 1) * level.link.latency_ns for _, level in network.used)
    return latency_ns, sum(1e9 / level.link.exchange_byte_s for _, level in network.used)


def _direct(network: Network, rounds: int) -> Terms:
    """Cost if every worker sends each other one its part at once: all that leaves a member passes its link."""
    ns_per_byte = 0.0
    for below, level in network.used:
        leaving = (network.workers - below) / network.workers * (below if level.shared else 1)
        ns_per_byte = max(ns_per_byte, leaving * 1e9 / level.link.exchange_byte_s)
    return rounds * _slowest_latency(network), rounds * ns_per_byte


def _direct_broadcast(network: Network) -> Terms:
    """Cost if one worker sends the full buffer to every other one."""
    sent = [(network.workers - below) * 1e9 / level.link.byte_s for below, level in network.used]
    return _slowest_latency(network), max(sent)


def _hierarchical_all_to_all(network: Network) -> Terms:
    """Cost of exchanging inside members first, then one message to each other member: fewer messages, more bytes.

    In each level every worker sends the full buffer except its own part.
    """
    latency_ns = ns_per_byte = 0.0
    for below, level in network.used:
        latency_ns += level.link.latency_ns
        sent = (level.workers - 1) / level.workers * (below if level.shared else 1)
        ns_per_byte += sent * 1e9 / level.link.exchange_byte_s
    return latency_ns, ns_per_byte


def send_terms(network: Network) -> Terms:
    """Cost of a single message between two workers in different members of the outermost level."""
    _, level = network.used[-1]
    return level.link.latency_ns, 1e9 / level.link.byte_s


def _hops(network: Network) -> float:
    """Return the sum of latencies around the ring, ns: a hop to another member has the latency of its level."""
    crossings = network.workers
    total = 0.0
    for below, level in network.used:
        outside = network.workers // (below * level.workers)
        total += (crossings - outside) * level.link.latency_ns
        crossings = outside
    return total


def _slowest_latency(network: Network) -> float:
    return max(level.link.latency_ns for _, level in network.used)


def _in_rounds(terms: Callable[[Network, int], Terms], *once: str) -> dict[str, Callable[[Network], Terms]]:
    """Return the models of all-reduce, two rounds, and of the operations ``once``, one round each."""
    return {"all_reduce": lambda network: terms(network, 2)} | dict.fromkeys(once, lambda network: terms(network, 1))


MODELS: dict[str, dict[str, Callable[[Network], Terms]]] = {
    "ring": _in_rounds(_ring, "reduce_scatter", "all_gather") | {"broadcast": _chain},
    "tree": _in_rounds(_tree, "broadcast"),
    "hierarchical": _in_rounds(_hierarchical, "reduce_scatter", "all_gather")
    | {"broadcast": _hierarchical_broadcast, "all_to_all": _hierarchical_all_to_all},
    "direct": _in_rounds(_direct, "reduce_scatter", "all_gather", "all_to_all") | {"broadcast": _direct_broadcast},
}
# The choices of NCCL's tuner (tuning.cc), without in-network reduction.
NCCL_CHOICES = {
    "all_reduce": ("ring", "tree"),
    "reduce_scatter": ("ring",),
    "all_gather": ("ring",),
    "broadcast": ("ring",),
    "all_to_all": ("direct",),
}
