"""Match the collectives of the ranks: by step, process group, operation, size, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from whatif.graph.columns import one_table
from whatif.graph.types import Array, Bool, Int64
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
    kinds = _by_kind(ranks, rank, row)
    sound, reasons = _sound(ranks, kinds)
    kept = sound[kinds.of_kind]
    order, of_kind, occurrence = kinds.order[kept], kinds.of_kind[kept], kinds.occurrence[kept]
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


class _ByKind(Struct, frozen=True):
    """All collectives, sorted by kind (step, group, operation, size), then by rank and row."""

    order: Int64  # their places among those of all ranks, shape (n,)
    of_kind: Int64  # the kind of each, shape (n,)
    occurrence: Int64  # which of its kind on its rank, shape (n,)
    first: Int64  # the first place in ``order`` of each kind
    ranks: Int64  # the number of ranks that have the kind
    fewest: Int64  # on one of them
    most: Int64


def _by_kind(ranks: Sequence[Collectives], rank: Int64, row: Int64) -> _ByKind:
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
    # One rank's share of a kind is a run.
    begins_run = begins | np.append(True, np.diff(rank[order]) != 0)
    run, run_starts = np.cumsum(begins_run) - 1, np.flatnonzero(begins_run)
    run_length = np.diff(np.append(run_starts, len(order)))
    first_run = np.flatnonzero(begins[run_starts])
    return _ByKind(
        order,
        of_kind,
        np.arange(len(order)) - run_starts[run],
        np.flatnonzero(begins),
        np.diff(np.append(first_run, len(run_starts))),
        np.minimum.reduceat(run_length, first_run),
        np.maximum.reduceat(run_length, first_run),
    )


def _sound(ranks: Sequence[Collectives], kinds: _ByKind) -> tuple[Bool, Counter[str]]:
    """Return a mask of the kinds that can be matched, and the number of collectives of the others by the reason."""
    first = kinds.order[kinds.first]
    group_size = np.concatenate([c.group_size for c in ranks])[first]
    nameless = np.array([not name for c in ranks for name in c.group], dtype=np.bool_)[first]
    alone = kinds.ranks < 2
    uneven = ~alone & (kinds.fewest != kinds.most)
    # Groups of some of the ranks, and it is unknown which ranks belong together.
    split = ~alone & ~uneven & nameless & (group_size > 0) & (group_size < kinds.ranks)
    count = np.bincount(kinds.of_kind)
    reasons = {
        "on one rank only": int(count[alone].sum()),
        "of a kind whose count differs between ranks": int(count[uneven].sum()),
        "of groups that the recordings do not name": int(count[split].sum()),
    }
    return ~(alone | uneven | split), Counter({reason: n for reason, n in reasons.items() if n})
