"""What a collective costs on equal links: the latency of its steps, and the time in which its bytes pass.

The bus factors are those of nccl-tests, doc/PERFORMANCE.md: a ring of n workers sends 2 (n - 1) / n of a buffer to
all-reduce it, and half of that to reduce-scatter or to all-gather it. Sizes are of the whole buffer, in bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.cluster.links import Link
from whatif.errors import WhatifError

Float64 = npt.NDArray[np.float64]
# More are no cluster that anybody has.
MOST_WORKERS = 1_000_000


class Cost(NamedTuple):
    """The two parts of n transfers, ns, shape (n,) each: only the second one shrinks with more bandwidth."""

    latency_ns: Float64
    transfer_ns: Float64

    @property
    def total_ns(self) -> Float64:
        """Both parts together, ns."""
        return np.asarray(self.latency_ns + self.transfer_ns, dtype=np.float64)


def ring_all_reduce(size_bytes: npt.ArrayLike, workers: int, link: Link) -> Cost:
    """Every worker ends up with the sum: a reduce-scatter and an all-gather around the ring."""
    return _ring(size_bytes, workers, link, rounds=2)


def ring_reduce_scatter(size_bytes: npt.ArrayLike, workers: int, link: Link) -> Cost:
    """Every worker ends up with its part of the sum."""
    return _ring(size_bytes, workers, link, rounds=1)


def ring_all_gather(size_bytes: npt.ArrayLike, workers: int, link: Link) -> Cost:
    """Every worker ends up with the parts of all; the size is that of all parts together."""
    return _ring(size_bytes, workers, link, rounds=1)


def broadcast(size_bytes: npt.ArrayLike, workers: int, link: Link) -> Cost:
    """One worker's buffer passes all the others, in pieces that follow one another."""
    _check(workers)
    if workers == 1:
        return _cost(size_bytes, 0.0, 0.0)
    return _cost(size_bytes, (workers - 1) * link.latency_ns, 1e9 / link.byte_s)


def send(size_bytes: npt.ArrayLike, link: Link) -> Cost:
    """One message from one worker to another."""
    return _cost(size_bytes, link.latency_ns, 1e9 / link.byte_s)


def _ring(size_bytes: npt.ArrayLike, workers: int, link: Link, *, rounds: int) -> Cost:
    _check(workers)
    steps = rounds * (workers - 1)
    return _cost(size_bytes, steps * link.latency_ns, steps / workers * 1e9 / link.byte_s)


def _cost(size_bytes: npt.ArrayLike, latency_ns: float, ns_per_byte: float) -> Cost:
    size = np.atleast_1d(np.asarray(size_bytes, dtype=np.float64))
    return Cost(np.full(size.shape, float(latency_ns)), size * ns_per_byte)


def _check(workers: int) -> None:
    if not 1 <= workers <= MOST_WORKERS:
        raise WhatifError(f"expected from 1 to {MOST_WORKERS:,} workers, got {workers}.")
