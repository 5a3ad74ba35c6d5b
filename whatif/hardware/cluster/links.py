"""A link between two workers: its rate and its latency."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from whatif.runtime.errors import WhatifError

# NCCL's constant for one step of a ring over a network, protocol Simple (tuning.cc of NCCL 2.30): the time of a message
# besides its bytes, on either side.
LATENCY_US = 14.0
# An all-reduce of 4 to 64 KB among two takes 0.42 to 0.67 ms, nearly all of it CPU time: handing over to gloo's threads
# and back, and two messages each way. This is the time per message; a broadcast is one.
GLOO_MESSAGE_NS = 225_000
# TCP over Ethernet: of 1,538 bytes on the wire 1,448 are payload. Two hosts with gloo reached 0.95 of the rate
# that was set, at 100 Mbit/s and at 1 Gbit/s.
TCP_SHARE = 0.95


class Link(Struct, frozen=True):
    """One direction of a link; if it is not full duplex, both directions share the rate.

    A message of x MB takes ``latency_ns`` x^(1 - ``growth``) besides its bytes: with a growth of 1 the same for all.
    Raises WhatifError for a rate or a growth not above 0, or a latency below 0.
    """

    byte_s: float
    latency_ns: float = 0.0
    full_duplex: bool = True
    growth: float = 1.0

    @classmethod
    def sigmoid(cls, k: float, a: float, w: float, *, full_duplex: bool = True) -> Link:
        """Return a link that carries messages of x MB at k / (a + x^-w) GB/s.

        Source: Pei et al., IEEE Access 2019, section III D, equation 21, whose x is the logarithm of the size.
        """
        return cls(k / a * 1e9, 1e6 / k, full_duplex, w)

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 < self.byte_s < float("inf"):
            raise WhatifError(f"link: expected a rate above 0 bytes a second, got {self.byte_s}.")
        if not 0 <= self.latency_ns < float("inf"):
            raise WhatifError(f"link: expected a latency of 0 ns or more, got {self.latency_ns}.")
        if not 0 < self.growth < float("inf"):
            raise WhatifError(f"link: expected a growth above 0, got {self.growth}.")

    def for_messages(self, size_bytes: float) -> Link:
        """Return the link for messages of this size: with their latency, and no dependence on size."""
        return replace(self, latency_ns=self.latency_ns * (max(size_bytes, 1.0) / 1e6) ** (1 - self.growth), growth=1.0)

    @property
    def described(self) -> str:
        """The rate and the latency in words."""
        of_size = "" if self.growth == 1 else f" for a message of 1 MB (x^{1 - self.growth:.3g} for x MB)"
        return f"{self.byte_s * 8e-9:,.6g} Gbit/s and {self.latency_ns / 1e3:.6g} us{of_size}"

    @property
    def exchange_byte_s(self) -> float:
        """Return the rate of one direction while both are in use."""
        return self.byte_s if self.full_duplex else self.byte_s / 2
