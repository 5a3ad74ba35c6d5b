"""The time of a batch by DTS's equations (1) to (5), as the paper means them: one unit, one row a processor.

Where they describe the very schedule that is simulated both give the same time; where the simulation is finer (a
server that begins with the first client's data) the equation is the larger one. ``whatif.models.dts.check`` compares
both.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pipeline_learning(
    fetch: npt.ArrayLike, forward: npt.ArrayLike, backward: npt.ArrayLike, write: npt.ArrayLike
) -> float:
    """Equation (1): every processor fetches, goes forward, goes backward and writes, one after the other.

    Deviations: the print sums the transfers over all layers and processors; a processor fetches and writes once. Its
    ``write`` is the gradient that goes back: written forward it would be the next processor's ``fetch``.
    """
    return float(sum(np.sum(np.asarray(part, dtype=np.float64)) for part in (fetch, forward, backward, write)))


def federated(forward: npt.ArrayLike, backward: npt.ArrayLike, transfer: npt.ArrayLike, average: float) -> float:
    """Equation (2): the slowest client's passes, the slowest way of the weights there and back, the averaging."""
    work = np.asarray(forward, dtype=np.float64) + np.asarray(backward, dtype=np.float64)
    return float(work.max() + 2 * np.asarray(transfer, dtype=np.float64).max() + average)


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
    once = sum(
        np.asarray(part, dtype=np.float64) for part in (fetch, forward, backward, server_forward, server_backward)
    )
    return float(np.sum(once + 2 * np.asarray(transfer, dtype=np.float64)) + np.sum(np.asarray(hand_over)))


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
    client = sum(np.asarray(part, dtype=np.float64) for part in (fetch, forward, backward))
    server = np.asarray(server_forward, dtype=np.float64) + np.asarray(server_backward, dtype=np.float64)
    return float(np.max(client + 2 * np.asarray(transfer, dtype=np.float64)) + server.sum())


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
    parts = (fetch, forward, backward, edge_forward, edge_backward)
    pair = sum(np.asarray(part, dtype=np.float64) for part in parts) + 2 * np.asarray(transfer, dtype=np.float64)
    there = np.max(pair + np.asarray(upload, dtype=np.float64))
    return float(there + average + np.max(np.asarray(back, dtype=np.float64), initial=0.0))
