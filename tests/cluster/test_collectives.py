"""Links and collectives: by hand, against nccl-tests' bus factors, and as properties of every size and cluster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whatif import WhatifError
from whatif.cluster.collectives import (
    broadcast,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    send,
)
from whatif.cluster.links import TCP_SHARE, Link

ETHERNET = Link(1e9, 5_000)  # 1 GB/s is 1 byte/ns


def test_by_hand() -> None:
    """4 workers, 8,000 bytes: each sends 6 pieces of 2,000 bytes in 6 steps to all-reduce them."""
    reduced = ring_all_reduce(8_000, 4, ETHERNET)
    assert (reduced.latency_ns.tolist(), reduced.transfer_ns.tolist()) == ([30_000], [12_000])
    assert ring_reduce_scatter(8_000, 4, ETHERNET).total_ns.tolist() == [15_000 + 6_000]
    assert ring_all_gather([8_000, 0], 4, ETHERNET).total_ns.tolist() == [21_000, 15_000]
    assert broadcast(8_000, 4, ETHERNET).total_ns.tolist() == [15_000 + 8_000]
    assert send(8_000, ETHERNET).total_ns.tolist() == [5_000 + 8_000]


@pytest.mark.parametrize(
    ("collective", "factor"),
    [(ring_all_reduce, lambda n: 2 * (n - 1) / n), (ring_reduce_scatter, lambda n: (n - 1) / n),
     (ring_all_gather, lambda n: (n - 1) / n), (broadcast, lambda n: 1.0)],
)  # fmt: skip
@pytest.mark.parametrize("workers", [2, 3, 8, 1024])
def test_bus_factors_of_nccl_tests(collective, factor, workers: int) -> None:  # type: ignore[no-untyped-def]
    """Bus bandwidth = size / time × factor is the link's own rate, whatever the number of workers."""
    size = 1 << 30
    seconds = collective(size, workers, Link(12.5e9)).total_ns[0] * 1e-9
    assert size / seconds * factor(workers) == pytest.approx(12.5e9)


@pytest.mark.parametrize(
    ("mbit_s", "megabytes", "measured_ms"),
    [(100, 0.25, 20.1), (100, 1, 84.5), (100, 4, 336), (100, 16, 1_399), (1_000, 4, 34.0), (1_000, 16, 134.3),
     (1_000, 2.852304, 22.3), (200, 2.852304, 119.4)],
)  # fmt: skip
def test_gloo_between_two_hosts_over_tcp(mbit_s: float, megabytes: float, measured_ms: float) -> None:
    """Medians of all_reduce between two network namespaces whose links a token bucket limits (torch 2.13, gloo)."""
    link = Link(mbit_s * 1e6 / 8 * TCP_SHARE, 14_000)
    predicted_ms = ring_all_reduce(megabytes * 1e6, 2, link).total_ns[0] / 1e6
    assert predicted_ms == pytest.approx(measured_ms, rel=0.08)


@pytest.mark.parametrize("collective", [ring_all_reduce, ring_reduce_scatter, ring_all_gather, broadcast])
def test_one_worker_has_nobody_to_send_to(collective) -> None:  # type: ignore[no-untyped-def]
    assert collective([1_000, 10**9], 1, ETHERNET).total_ns.tolist() == [0, 0]


@given(
    size=st.integers(0, 10**12), workers=st.integers(2, 2_000), rate=st.floats(1e3, 1e12), faster=st.floats(1, 1e3),
    latency=st.floats(0, 1e7),
)  # fmt: skip
def test_more_bandwidth_is_never_slower_and_an_all_reduce_is_two_halves(
    size: int, workers: int, rate: float, faster: float, latency: float
) -> None:
    link, fast = Link(rate, latency), Link(rate * faster, latency)
    for collective in (ring_all_reduce, ring_reduce_scatter, ring_all_gather, broadcast):
        assert collective(size, workers, fast).total_ns <= collective(size, workers, link).total_ns
        assert collective(size, workers, link).latency_ns == collective(size, workers, fast).latency_ns
    halves = ring_reduce_scatter(size, workers, link).total_ns + ring_all_gather(size, workers, link).total_ns
    np.testing.assert_allclose(ring_all_reduce(size, workers, link).total_ns, halves, rtol=1e-12)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf")])
def test_a_link_without_a_rate_is_refused(rate: float) -> None:
    with pytest.raises(WhatifError, match="above 0 bytes a second"):
        Link(rate)


def test_a_latency_below_zero_and_no_workers_are_refused() -> None:
    with pytest.raises(WhatifError, match="latency of 0 ns or more"):
        Link(1e9, -1)
    with pytest.raises(WhatifError, match="expected from 1 to 1,000,000 workers, got 0"):
        ring_all_reduce(1, 0, ETHERNET)
