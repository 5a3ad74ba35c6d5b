"""Links: rates and latencies, and gloo between two hosts."""

from __future__ import annotations

import pytest

from whatif import WhatifError
from whatif.hardware.cluster.links import TCP_SHARE, Link
from whatif.hardware.cluster.network import Network


@pytest.mark.parametrize(
    ("mbit_s", "megabytes", "measured_ms"),
    [(100, 0.25, 20.1), (100, 1, 84.5), (100, 4, 336), (100, 16, 1_399), (1_000, 4, 34.0), (1_000, 16, 134.3),
     (1_000, 2.852304, 22.3), (200, 2.852304, 119.4)],
)  # fmt: skip
def test_gloo_between_two_hosts_over_tcp(mbit_s: float, megabytes: float, measured_ms: float) -> None:
    """Medians of all_reduce between two network namespaces whose links a token bucket limits (torch 2.13, gloo)."""
    link = Link(mbit_s * 1e6 / 8 * TCP_SHARE, 14_000)
    predicted_ms = Network.of(2, link).cost("all_reduce", megabytes * 1e6, "ring").total_ns[0] / 1e6
    assert predicted_ms == pytest.approx(measured_ms, rel=0.08)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf")])
def test_a_link_without_a_rate_is_refused(rate: float) -> None:
    with pytest.raises(WhatifError, match="above 0 bytes a second"):
        Link(rate)


def test_a_latency_below_zero_is_refused() -> None:
    with pytest.raises(WhatifError, match="latency of 0 ns or more"):
        Link(1e9, -1)


def test_a_link_that_is_not_full_duplex_shares_its_rate() -> None:
    assert (Link(8.0).exchange_byte_s, Link(8.0, full_duplex=False).exchange_byte_s) == (8.0, 4.0)
