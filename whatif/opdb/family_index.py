"""The rows of one family in an index: sorted by operator, grouped by what is comparable, strays set aside."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from whatif.graph.types import (
    Array,
    Float64,
    Int8,
    Int32,
    Int64,
)
from whatif.opdb import devices
from whatif.opdb.keys import UInt64
from whatif.opdb.provenance import Basis, Provenance
from whatif.opdb.quarantine import Aside, log_sizes, set_aside
from whatif.opdb.rows import Operators, Rows, Texts, joined
from whatif.opdb.schema import TIMES
from whatif.opdb.work import work


class GroupInfo(Struct, frozen=True):
    """The properties that the operators of a group share."""

    number: int
    family: str
    key: int
    device: str
    basis: Basis
    rows: int
    name: str
    dtype: str


class FamilyIndex(Struct, frozen=True):
    """The rows of a family, sorted by key: all columns have shape (n,), ``log_sizes`` (n, p).

    ``by_group`` lists the rows by group: those of group g from ``starts[g]`` to ``starts[g + 1]``.
    """

    keys: UInt64
    t_s: Float64
    t_low_s: Float64
    t_high_s: Float64
    contribution: Int32
    aside: Int8
    group: Int32
    log_sizes: Float64
    flops: Float64
    moved_bytes: Float64
    by_group: Int64
    starts: Int64

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: UInt64) -> tuple[Int64, Int64]:
        """Return the first row of each key and the one after its last, shape (q,) both; equal if there is none."""
        order = np.argsort(keys)  # sorted queries access memory sequentially
        wanted = keys[order]
        first, last = np.empty(len(keys), dtype=np.int64), np.empty(len(keys), dtype=np.int64)
        first[order] = np.searchsorted(self.keys, wanted, side="left")
        last[order] = np.searchsorted(self.keys, wanted, side="right")
        return first, last

    def rows_of(self, group: int) -> Int64:
        """The rows of a group, sorted by key."""
        return np.asarray(self.by_group[self.starts[group] : self.starts[group + 1]], dtype=np.int64)

    def sound_rows_of(self, group: int) -> Int64:
        """The rows of a group that are not set aside, sorted by key."""
        rows = self.rows_of(group)
        return np.asarray(rows[self.aside[rows] == Aside.SOUND], dtype=np.int64)


def family_index(
    family: str, parts: list[tuple[int, Rows]], contributions: list[Provenance], losses: list[str]
) -> tuple[FamilyIndex, list[GroupInfo]]:
    """Index the rows of a family, each part with the number of its contribution; returns the index and its groups.

    Appends a message to ``losses`` for rows that are left out.
    """
    rows = _all_rows([rows for _, rows in parts])
    contribution = np.repeat(np.array([n for n, _ in parts], dtype=np.int32), [len(r) for _, r in parts])
    order = np.lexsort((rows.t_s, contribution, rows.ops.keys))
    rows, contribution = rows.take(order), contribution[order]
    clash = _clashes(rows.ops)
    if clash.any():  # two operators with one key: with 10^7 operators one chance in 10^5
        losses.append(f"{int(clash.sum()):,} rows of the family {family!r} left out: another operator has their key.")
        rows, contribution = rows.take(~clash), contribution[~clash]
    group, groups = _groups(family, rows.ops, contribution, contributions)
    aside = set_aside(
        rows.ops, rows.t_s, group, [devices.facts(g.device) for g in groups], [g.basis.cache == "cold" for g in groups]
    )
    flops, moved = work(rows.ops)
    by_group = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[by_group], np.arange(len(groups) + 1))
    return FamilyIndex(
        rows.ops.keys, rows.t_s, rows.t_low_s, rows.t_high_s, contribution, aside, group.astype(np.int32),
        log_sizes(rows.ops), flops, moved, by_group, starts,
    ), groups  # fmt: skip


def _groups(
    family: str, ops: Operators, contribution: Int32, contributions: list[Provenance]
) -> tuple[Int64, list[GroupInfo]]:
    """Number the groups of comparable operators: equal but for their sizes, on one device, with one basis."""
    kinds = [(c.origin.device.name, c.origin.basis) for c in contributions]
    table = sorted(set(kinds))
    kind = np.array([table.index(k) for k in kinds], dtype=np.int64)[contribution]
    pairs = np.stack([ops.group_keys.view(np.int64), kind], axis=1)
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    new = np.append(True, (np.diff(pairs[order], axis=0) != 0).any(axis=1)) if len(order) else np.zeros(0, np.bool_)
    group = np.empty(len(ops), dtype=np.int64)
    group[order] = np.cumsum(new) - 1
    infos, sizes = [], np.bincount(group)
    for number, row in enumerate(order[new].tolist()):
        device, basis = table[kind[row]]
        fields = ops.described(row)
        key, name, dtype = int(ops.group_keys[row]), str(fields["name"]), str(fields["dtype"])
        infos.append(GroupInfo(number, family, key, device, basis, int(sizes[number]), name, dtype))
    return group, infos


def _all_rows(parts: list[Rows]) -> Rows:
    """The rows of all parts without kernel names, which no estimate needs."""
    ops = joined([part.ops for part in parts])
    t, low, high, repeats = (np.concatenate([getattr(part, name) for part in parts]) for name in (*TIMES, "repeats"))
    return Rows(ops, t, low, high, repeats, Texts.same("", len(ops)))


def _clashes(ops: Operators) -> npt.NDArray[np.bool_]:
    """Mask of the rows whose key equals that of a different operator above them; rows are sorted by key."""
    same = np.append(False, ops.keys[1:] == ops.keys[:-1])
    differs = np.zeros(len(ops), dtype=np.bool_)
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(ops))))
    columns: list[Array] = [*ops.integers.values(), *(texts.codes for texts in ops.texts.values())]
    for column in columns:
        differs |= column != column[first]
    return np.asarray(same & differs, dtype=np.bool_)
