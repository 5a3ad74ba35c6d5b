"""The time of a batch by DTS's equations (1) to (5), as the paper means them: one unit, one row a processor.

Where they describe the very schedule that is simulated both give the same time; where the simulation is finer (a
server that begins with the first client's data) the equation is the larger one. ``whatif.models.dts.check`` compares
both.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Float64


def pipeline_learning(
    fetch: npt.ArrayLike, forward: npt.ArrayLike, backward: npt.ArrayLike, write: npt.ArrayLike
) -> float:
    """Equation (1): every processor fetches, goes forward, goes backward and writes, one after the other.

    Deviations: the print sums the transfers over all layers and processors; a processor fetches and writes once. Its
    ``write`` is the gradient that goes back: written forward it would be the next processor's ``fetch``.
    """
    return float(sum(np.sum(part) for part in (fetch, forward, backward, write)))


def federated(forward: npt.ArrayLike, backward: npt.ArrayLike, transfer: npt.ArrayLike, average: float) -> float:
    """Equation (2): the slowest client's passes, the slowest way of the weights there and back, the averaging."""
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
    """Equation (3): client after client with the server; ``hand_over`` (n - 1,) are the weights on their way on."""
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

    The print names both passes of client and server alike; the text says that those of the sum are the server's.
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
    """Equation (5): the slowest client and its edge server with the weights' way to the server, the averaging.

    Deviations: the print counts the edge server's backward pass twice, which the text describes once, and has no way
    ``back`` of the averaged weights, without which no next epoch could begin; equation (2) has one.
    """
    there = _summed(fetch, forward, backward, edge_forward, edge_backward, transfer, transfer, upload)
    return float(np.max(there) + average + np.max(np.asarray(back, dtype=np.float64), initial=0.0))


def _summed(*terms: npt.ArrayLike) -> Float64:
    """The sum of several terms for each client, shape (n_clients,)."""
    return np.asarray(np.sum(np.asarray(terms, dtype=np.float64), axis=0))
