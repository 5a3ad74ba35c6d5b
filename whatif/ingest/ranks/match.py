"""Match the collectives of the ranks: by step, process group, operation, size, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from whatif.graph.columns import one_table
from whatif.graph.types import Array, Int64
from whatif.ingest.ranks.collectives import Collectives


class Match(Struct, frozen=True):
    """The members of each collective: a row for each rank in each, ordered by collective, then by rank.

    Columns of shape (n_members,): ``collective`` counts from 0, ``rank`` is the place among the ranks that were read,
    ``row`` the place in that rank's ``Collectives``.
    """

    collective: Int64
    rank: Int64
    row: Int64
    n_collectives: int
    unmatched: tuple[int, ...]  # of each rank
    reasons: Counter[str]  # why collectives are unmatched -> how many, all ranks together

    @property
    def first(self) -> Int64:
        """The first row of each collective, shape (n_collectives,)."""
        return np.searchsorted(self.collective, np.arange(self.n_collectives))

    def column(self, per_rank: Sequence[Array]) -> Array:
        """Return a value for each row, (n_members,), from one column for each rank."""
        offsets = np.cumsum([0, *(len(column) for column in per_rank)])
        return np.concatenate(per_rank)[offsets[self.rank] + self.row]


def match(ranks: Sequence[Collectives]) -> Match:
    """Return the collectives that ranks have in common; it takes O(n log n) for n collectives of all ranks together.

    Within a step the k-th one of a kind (group, operation, size) on one rank is the k-th on every other. If ranks have
    different numbers of a kind, it is unknown which are missing: all of the kind stay unmatched.
    """
    lengths = [len(c) for c in ranks]
    rank = np.repeat(np.arange(len(ranks)), lengths)
    row = np.concatenate([np.arange(n) for n in lengths]) if ranks else np.empty(0, dtype=np.int64)
    if not len(rank):
        none = np.empty(0, dtype=np.int64)
        return Match(none, none, none, 0, tuple(lengths), Counter())
    kind = np.stack(
        [
            np.concatenate([c.step for c in ranks]),
            np.concatenate(one_table(c.group for c in ranks)[1]),
            np.concatenate(one_table(c.operation for c in ranks)[1]),
            np.concatenate([c.size_bytes for c in ranks]),
        ]
    )
    order = np.lexsort((row, rank, *kind))
    begins = np.append(True, np.any(kind[:, order[1:]] != kind[:, order[:-1]], axis=0))
    of_kind = np.cumsum(begins) - 1
    sorted_rank = rank[order]
    begins_rank = begins | np.append(True, sorted_rank[1:] != sorted_rank[:-1])
    run = np.cumsum(begins_rank) - 1  # one rank's share of a kind
    run_starts = np.flatnonzero(begins_rank)
    run_length = np.diff(np.append(run_starts, len(order)))
    kind_of_run = of_kind[run_starts]
    n_kinds = int(of_kind[-1]) + 1
    members = np.bincount(kind_of_run, minlength=n_kinds)
    fewest, most = np.full(n_kinds, len(order)), np.zeros(n_kinds, dtype=np.int64)
    np.minimum.at(fewest, kind_of_run, run_length)
    np.maximum.at(most, kind_of_run, run_length)
    group_size = np.concatenate([c.group_size for c in ranks])[order][begins]
    alone = members < 2
    uneven = ~alone & (fewest != most)
    # Groups of some of the ranks, and it is unknown which ranks belong together.
    nameless = np.array([not name for c in ranks for name in c.group], dtype=np.bool_)[order][begins]
    split = ~alone & ~uneven & nameless & (group_size > 0) & (group_size < members)
    sound = ~(alone | uneven | split)
    reasons = Counter(
        {
            reason: int(np.bincount(of_kind, minlength=n_kinds)[mask].sum())
            for reason, mask in (
                ("on one rank only", alone),
                ("of a kind whose count differs between ranks", uneven),
                ("of groups that the recordings do not name", split),
            )
            if mask.any()
        }
    )
    kept = sound[of_kind]
    occurrence = np.arange(len(order)) - run_starts[run]
    order, of_kind, occurrence = order[kept], of_kind[kept], occurrence[kept]
    by_collective = np.lexsort((rank[order], occurrence, of_kind))
    order, of_kind, occurrence = order[by_collective], of_kind[by_collective], occurrence[by_collective]
    new = np.append(True, (of_kind[1:] != of_kind[:-1]) | (occurrence[1:] != occurrence[:-1]))[: len(order)]
    collective = np.cumsum(new) - 1
    unmatched = np.array(lengths) - np.bincount(rank[order], minlength=len(ranks))
    return Match(
        np.asarray(collective, dtype=np.int64),
        rank[order],
        row[order],
        int(collective[-1]) + 1 if len(order) else 0,
        tuple(unmatched.tolist()),
        reasons,
    )
