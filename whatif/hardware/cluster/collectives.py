"""What a collective costs on a network in levels: the alpha-beta model of each algorithm, one function each.

A cost is latencies plus bytes over a rate. Sizes are whole buffers as nccl-tests counts them (doc/PERFORMANCE.md): of
all-gather and reduce-scatter that of all parts together, of all-to-all what one worker sends, its own part included.
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
# What an algorithm takes: its latency, ns, and the time of one byte of the buffer, ns.
Terms = tuple[float, float]


class Cost(NamedTuple):
    """The two parts of n transfers, ns, shape (n,) each: only the second one shrinks with more bandwidth."""

    latency_ns: Float64
    transfer_ns: Float64

    @property
    def total_ns(self) -> Float64:
        """Both parts together, ns."""
        return np.asarray(self.latency_ns + self.transfer_ns, dtype=np.float64)


def fastest(costs: list[Cost]) -> Cost:
    """Return of each size the parts of the one whose total is least, the first of equal ones."""
    best = np.argmin([cost.total_ns for cost in costs], axis=0)[None]
    return Cost(*(np.take_along_axis(np.stack(part), best, 0)[0] for part in zip(*costs, strict=True)))


def check_operation(operation: str) -> None:
    """Raise WhatifError unless it is one of ``OPERATIONS``."""
    if operation not in OPERATIONS:
        raise WhatifError(f"network: expected an operation of {', '.join(OPERATIONS)}, got {operation!r}.")


def bus_factor(operation: str, workers: int) -> float:
    """Return nccl-tests' factor from size / time to bus bandwidth, the rate that the links see."""
    check_operation(operation)
    if operation in ("broadcast", "send"):
        return 1.0
    return (2.0 if operation == "all_reduce" else 1.0) * (workers - 1) / workers


def _ring(network: Network, rounds: int) -> Terms:
    """One ring through all workers, member by member: so much of it crosses each level, and the slowest link rules.

    A member with a link for each worker has as many rings as it has links.
    """
    return rounds * _hops(network), rounds * (network.workers - 1) / network.workers * 1e9 / network.ring_byte_s


def _chain(network: Network) -> Terms:
    """One buffer passes all workers, in pieces that follow one another."""
    return _hops(network), 1e9 / network.ring_byte_s


def _tree(network: Network, rounds: int) -> Terms:
    """A pair of binary trees, each for half of the buffer (Sanders, Speck, Träff, 2009; NCCL since 2.4).

    A worker is inside of one and a leaf of the other: as much goes up as comes down, the whole buffer each. Between
    two workers each tree is one message.
    """
    latency_ns = sum((level.workers - 1).bit_length() * level.link.latency_ns for _, level in network.used)
    buffers = 1 if network.workers == 2 else rounds
    return rounds * latency_ns, buffers * 1e9 / network.ring_byte_s


def _hierarchical(network: Network, rounds: int) -> Terms:
    """A ring in each level for what the levels inside have left of the buffer (Cho et al., BlueConnect, 2019).

    The workers of a member that share its link run as many rings on it as they are.
    """
    latency_ns = ns_per_byte = 0.0
    for below, level in network.used:
        latency_ns += (level.workers - 1) * level.link.latency_ns
        left = 1.0 if level.shared else 1 / below
        ns_per_byte += (level.workers - 1) / level.workers * left * 1e9 / level.link.exchange_byte_s
    return rounds * latency_ns, rounds * ns_per_byte


def _hierarchical_broadcast(network: Network) -> Terms:
    """The outermost level first: one worker of each member has the buffer before the next level begins."""
    latency_ns = sum((level.workers - 1) * level.link.latency_ns for _, level in network.used)
    return latency_ns, sum(1e9 / level.link.exchange_byte_s for _, level in network.used)


def _direct(network: Network, rounds: int) -> Terms:
    """Every worker sends every other one its part at once: what leaves a member passes the member's link."""
    ns_per_byte = 0.0
    for below, level in network.used:
        leaving = (network.workers - below) / network.workers * (below if level.shared else 1)
        ns_per_byte = max(ns_per_byte, leaving * 1e9 / level.link.exchange_byte_s)
    return rounds * _slowest_latency(network), rounds * ns_per_byte


def _direct_broadcast(network: Network) -> Terms:
    """One worker sends the whole buffer to every other one."""
    sent = [(network.workers - below) * 1e9 / level.link.byte_s for below, level in network.used]
    return _slowest_latency(network), max(sent)


def _hierarchical_all_to_all(network: Network) -> Terms:
    """First inside, sorted by member, then one message to each other member: fewer messages, more bytes.

    Every worker sends all but its own part in each level, of the whole buffer.
    """
    latency_ns = ns_per_byte = 0.0
    for below, level in network.used:
        latency_ns += level.link.latency_ns
        sent = (level.workers - 1) / level.workers * (below if level.shared else 1)
        ns_per_byte += sent * 1e9 / level.link.exchange_byte_s
    return latency_ns, ns_per_byte


def send_terms(network: Network) -> Terms:
    """One message between two workers of different members of the outermost level, and no other beside it."""
    _, level = network.used[-1]
    return level.link.latency_ns, 1e9 / level.link.byte_s


def _hops(network: Network) -> float:
    """The latencies on the way around the ring, ns: a hop into another member is one of the members' level."""
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
    """An all-reduce as two rounds, of which the operations ``once`` are one each."""
    return {"all_reduce": lambda network: terms(network, 2)} | dict.fromkeys(once, lambda network: terms(network, 1))


MODELS: dict[str, dict[str, Callable[[Network], Terms]]] = {
    "ring": _in_rounds(_ring, "reduce_scatter", "all_gather") | {"broadcast": _chain},
    "tree": _in_rounds(_tree, "broadcast"),
    "hierarchical": _in_rounds(_hierarchical, "reduce_scatter", "all_gather")
    | {"broadcast": _hierarchical_broadcast, "all_to_all": _hierarchical_all_to_all},
    "direct": _in_rounds(_direct, "reduce_scatter", "all_gather", "all_to_all") | {"broadcast": _direct_broadcast},
}
# What NCCL's tuner (tuning.cc) chooses from, in-network reduction aside.
NCCL_CHOICES = {
    "all_reduce": ("ring", "tree"),
    "reduce_scatter": ("ring",),
    "all_gather": ("ring",),
    "broadcast": ("ring",),
    "all_to_all": ("direct",),
}
