"""The time per batch by DTS's equations (1) to (5), as the paper means them: one unit, one row per processor.

If an equation describes the simulated schedule, both give the same time. If the simulation is finer (the server begins
with the first client's data), the equation's time is longer. ``whatif.models.dts.check`` compares them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Float64


def pipeline_learning(
    fetch: npt.ArrayLike, forward: npt.ArrayLike, backward: npt.ArrayLike, write: npt.ArrayLike
) -> float:
    """Equation (1): every processor fetches, runs its forward and backward pass and writes, one after the other.

    Deviations: the print sums the transfers over all layers and processors; a processor fetches and writes once. Its
    ``write`` sends the gradient back; the output that it passes on is the next processor's ``fetch``.
    """
    return float(sum(np.sum(term) for term in (fetch, forward, backward, write)))


def federated(forward: npt.ArrayLike, backward: npt.ArrayLike, transfer: npt.ArrayLike, average: float) -> float:
    """Equation (2): the slowest client's passes, the slowest transfer of the weights both ways, the averaging."""
    return float(np.max(_summed(forward, backward)) + 2 * np.max(transfer) + average)


def split(
    fetch: npt.ArrayLike,
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    transfer: npt.ArrayLike,
    server_forward: npt.ArrayLike,
    server_backward: npt.ArrayLike,
    hand_over: npt.ArrayLike,
) -> float:
    """Equation (3): one client after the other with the server; ``hand_over`` (n - 1,): weights to the next client."""
    rounds = _summed(fetch, forward, backward, server_forward, server_backward, transfer, transfer)
    return float(np.sum(rounds) + np.sum(hand_over))


def parallel_split(
    fetch: npt.ArrayLike,
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    transfer: npt.ArrayLike,
    server_forward: npt.ArrayLike,
    server_backward: npt.ArrayLike,
) -> float:
    """Equation (4): the slowest client with both its transfers, then the server with one client after the other.

    The print uses the same symbols for client and server; by the text those of the sum are the server's.
    """
    client = _summed(fetch, forward, backward, transfer, transfer)
    return float(np.max(client) + np.sum(_summed(server_forward, server_backward)))


def federated_split(
    fetch: npt.ArrayLike,
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    transfer: npt.ArrayLike,
    edge_forward: npt.ArrayLike,
    edge_backward: npt.ArrayLike,
    upload: npt.ArrayLike,
    average: float,
    back: npt.ArrayLike = (),
) -> float:
    """Equation (5): the slowest client with its edge server and their upload of the weights, then the averaging.

    Deviations: the print counts the edge server's backward pass twice, which the text describes once, and lacks the
    transfer ``back`` of the averaged weights, which the next epoch needs; equation (2) has one.
    """
    until_server = _summed(fetch, forward, backward, edge_forward, edge_backward, transfer, transfer, upload)
    return float(np.max(until_server) + average + np.max(np.asarray(back, dtype=np.float64), initial=0.0))


def _summed(*terms: npt.ArrayLike) -> Float64:
    """The sum of the terms per client, shape (n_clients,)."""
    return np.asarray(np.sum(np.asarray(terms, dtype=np.float64), axis=0))
