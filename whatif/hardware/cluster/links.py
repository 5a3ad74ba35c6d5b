"""A link between two workers: how many bytes a second it carries, and how long the first one takes."""

from __future__ import annotations

from dataclasses import dataclass

from whatif.errors import WhatifError

# NCCL's own constant for one step of a ring over a network, protocol Simple (tuning.cc of NCCL 2.30): what a message
# takes beside its bytes, on either side.
LATENCY_US = 14.0
# TCP over Ethernet: of 1,538 bytes on the wire 1,448 are the message's. Two hosts with gloo reached 0.95 of the rate
# that was set, at 100 Mbit/s and at 1 Gbit/s.
TCP_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link; where it is not full duplex, both directions share the rate.

    Raises WhatifError on a rate that is not above 0 or a latency below 0.
    """

    byte_s: float
    latency_ns: float = 0.0
    full_duplex: bool = True

    def __post_init__(self) -> None:
        """Check both numbers."""
        if not 0 < self.byte_s < float("inf"):
            raise WhatifError(f"link: expected a rate above 0 bytes a second, got {self.byte_s}.")
        if not 0 <= self.latency_ns < float("inf"):
            raise WhatifError(f"link: expected a latency of 0 ns or more, got {self.latency_ns}.")

    @property
    def exchange_byte_s(self) -> float:
        """Return the rate of one direction while both are in use."""
        return self.byte_s if self.full_duplex else self.byte_s / 2
