"""Separate waiting for peers from transfer: a rank arrives at a collective, and bytes move when all have arrived.

On rank r it lasts from arrival s_r to end e_r. If no rank leaves before the last one has arrived, at A = max s_r, the
wait is A - s_r and the transfer e_r - A. Clocks agree only nearly: a transfer shorter than the shortest time of any
rank in the collective (the last one to arrive does not wait) by no more than clocks differ is taken to be that time.
In a broadcast or a send a rank may be done before others arrive: those that left before A waited for no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whatif.graph.order import each_once
from whatif.graph.types import Bool, Int64
from whatif.ingest.ranks.clocks import Clock, meetings
from whatif.ingest.ranks.collectives import Collectives
from whatif.ingest.ranks.match import Match

# Ends scatter by a clock's spread; differences within three spreads do not count: our choice.
WITHIN = 3


@dataclass(frozen=True)
class Waits:
    """Arrival, wait and transfer of each rank in each collective: columns like those of ``Match``; common clock, ns."""

    arrival_ns: Int64
    wait_ns: Int64
    transfer_ns: Int64
    joins: Bool  # waits for the last one to arrive; the others left before


def find_waits(ranks: Sequence[Collectives], matched: Match, clocks: Sequence[Clock]) -> Waits:
    """Return the times that the members of each matched collective waited and transferred."""
    arrival_ns = matched.column([clock.common_ns(c.start_ns) for c, clock in zip(ranks, clocks, strict=True)])
    # Durations are on the rank's own clock: its drift within one collective is negligible.
    spent_ns = matched.column([c.end_ns - c.start_ns for c in ranks])
    meeting = matched.column(meetings(ranks))
    first = matched.first
    if not len(first):
        empty = np.empty(0, dtype=np.int64)
        return Waits(empty, empty, empty, empty.astype(np.bool_))
    collective = matched.collective
    all_here_ns = np.maximum.reduceat(arrival_ns, first)[collective]
    joins = meeting | (arrival_ns + spent_ns >= all_here_ns)
    shortest_ns = np.minimum.reduceat(np.where(joins, spent_ns, np.iinfo(np.int64).max), first)[collective]
    transfer_ns = arrival_ns + spent_ns - all_here_ns
    unsure_ns = WITHIN * np.array([clock.spread_ns for clock in clocks], dtype=np.int64)[matched.rank]
    transfer_ns = np.where(transfer_ns + unsure_ns >= shortest_ns, np.maximum(transfer_ns, shortest_ns), transfer_ns)
    transfer_ns = np.clip(transfer_ns, 0, spent_ns)
    transfer_ns = np.where(joins, transfer_ns, spent_ns)
    return Waits(
        arrival_ns=arrival_ns,
        wait_ns=spent_ns - transfer_ns,
        transfer_ns=transfer_ns,
        joins=joins,
    )


def latency_ns(size_bytes: Int64, transfer_ns: Int64, kind: Int64) -> Int64:
    """Return the part of each transfer that its bytes do not explain, ns: a line through the transfers of its kind.

    Least squares over size and time of a kind (operation and number of ranks), between 0 and the shortest of them; 0
    if sizes are unknown or all the same, as the two parts cannot be separated then. Columns of shape (n,).
    """
    result = np.zeros(len(kind), dtype=np.int64)
    for code in each_once(kind).tolist():
        members = np.flatnonzero((kind == code) & (size_bytes >= 0))
        size, time_ns = size_bytes[members].astype(np.float64), transfer_ns[members].astype(np.float64)
        if len(members) < 2 or size.min() == size.max():
            continue
        slope = np.cov(size, time_ns)[0, 1] / np.var(size, ddof=1)
        start_ns = time_ns.mean() - max(slope, 0.0) * size.mean()
        result[members] = int(np.clip(start_ns, 0, time_ns.min()))
    return result
