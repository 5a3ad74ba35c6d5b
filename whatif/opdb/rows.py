"""Rows of the op database: one family's measurements as columns, checked, sorted, and hashed by content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.columns import one_table
from whatif.graph.described import FAMILIES, LARGEST_ATTRIBUTE, LONGEST_TEXT
from whatif.graph.types import (
    Array,
    Bool,
    Float64,
    Int32,
    Int64,
)
from whatif.opdb.keys import UInt64, mixed, op_keys, text_code
from whatif.opdb.schema import LONGEST_S, SHORTEST_S, TEXTS, TIMES


class Texts(Struct, frozen=True):
    """A column of texts: ``codes``, shape (n,), into ``table``."""

    codes: Int32
    table: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.codes)

    @staticmethod
    def of(values: Sequence[str]) -> Texts:
        """Encode texts with a sorted table."""
        table, (_, codes) = one_table([sorted(set(values)), values])
        return Texts(codes, table)

    @staticmethod
    def same(text: str, size: int) -> Texts:
        """Return a column of one text, repeated ``size`` times."""
        return Texts(np.zeros(size, dtype=np.int32), (text,))

    def take(self, rows: Array) -> Texts:
        """The texts of ``rows``: ids or a mask."""
        return Texts(self.codes[rows], self.table)

    def among(self, *wanted: str) -> Bool:
        """Mask of the rows whose text is one of ``wanted``, shape (n,)."""
        return np.array([text in wanted for text in self.table] or [False])[self.codes]

    def hashes(self) -> UInt64:
        """A 64-bit hash of each text, shape (n,)."""
        return np.array([text_code(text) for text in self.table] or [0], dtype=np.uint64)[self.codes]

    def decoded(self) -> list[str]:
        """The texts as a list."""
        return [self.table[code] for code in self.codes.tolist()]

    def sorted_table(self) -> Texts:
        """The same column with a sorted table of just the texts that occur: equal columns become equal arrays."""
        used = np.unique(self.codes)
        order = sorted(used.tolist(), key=lambda code: self.table[code])
        place = np.zeros(max(len(self.table), 1), dtype=np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        return Texts(place[self.codes], tuple(self.table[code] for code in order))


class Operators(Struct, frozen=True, dict=True):
    """n operators of one family: ``texts`` name, phase, dtype, layout, and the family's ``integers``, shape (n,)."""

    family: str
    texts: Mapping[str, Texts]
    integers: Mapping[str, Int64]

    def __len__(self) -> int:
        return len(self.texts["name"])

    @cached_property
    def keys(self) -> UInt64:
        """The key of each operator, shape (n,)."""
        return op_keys(self.family, {name: column.hashes() for name, column in self.texts.items()}, self.integers)

    @cached_property
    def group_keys(self) -> UInt64:
        """The key of each operator's interpolation group: everything but the sizes, shape (n,)."""
        modes = {name: self.integers[name] for name in FAMILIES[self.family].modes}
        hashes = {name: column.hashes() for name, column in self.texts.items()}
        return mixed(op_keys(self.family, hashes, modes) ^ np.uint64(text_code("group")))

    @property
    def floats(self) -> dict[str, Float64]:
        """The integers as floats, in which products of sizes do not overflow."""
        return {name: column.astype(np.float64) for name, column in self.integers.items()}

    @property
    def dtypes(self) -> list[str]:
        """The number format of each operator."""
        return self.texts["dtype"].decoded()

    def take(self, rows: Array) -> Operators:
        """The operators ``rows``: ids or a mask."""
        texts = {name: column.take(rows) for name, column in self.texts.items()}
        return Operators(self.family, texts, {name: column[rows] for name, column in self.integers.items()})

    def possible(self) -> Bool:
        """Mask of the operators whose integers are valid sizes, shape (n,)."""
        valid = np.ones(len(self), dtype=np.bool_)
        for name in FAMILIES[self.family].attributes:
            smallest = 0 if name.startswith("padding") or name == "causal" else 1
            valid &= (self.integers[name] >= smallest) & (self.integers[name] <= LARGEST_ATTRIBUTE)
        return valid

    def described(self, row: int) -> dict[str, str | int]:
        """One operator as a readable dictionary."""
        fields: dict[str, str | int] = {"family": self.family}
        fields |= {name: column.table[column.codes[row]] for name, column in self.texts.items()}
        return fields | {name: int(column[row]) for name, column in self.integers.items()}


def operators(
    family: str,
    integers: Mapping[str, npt.ArrayLike],
    *,
    name: str | Sequence[str],
    dtype: str | Sequence[str],
    phase: str | Sequence[str] = "fwd",
    layout: str | Sequence[str] = "",
) -> Operators:
    """Build operators from arrays and texts that broadcast; a single text applies to all rows."""
    names = FAMILIES[family].attributes
    named = {"name": name, "phase": phase, "dtype": dtype, "layout": layout}
    size = max(
        len(np.atleast_1d(c)) for c in (*integers.values(), *([t] if isinstance(t, str) else t for t in named.values()))
    )
    columns = [np.broadcast_to(np.asarray(integers[a], dtype=np.int64), size) for a in names]
    texts = {k: Texts.same(v, size) if isinstance(v, str) else Texts.of(v) for k, v in named.items()}
    return Operators(family, texts, dict(zip(names, map(np.ascontiguousarray, columns), strict=True)))


class Rows(Struct, frozen=True):
    """Measurements of ``ops``; all columns have shape (n,).

    ``t_low_s`` to ``t_high_s`` holds 10 to 90 % of the repeats (NaN: unknown), ``repeats`` is 0 if unknown, and
    ``kernels`` are those that ran, joined by ``;`` ("": unknown).
    """

    ops: Operators
    t_s: Float64
    t_low_s: Float64
    t_high_s: Float64
    repeats: Int32
    kernels: Texts

    def __len__(self) -> int:
        return len(self.t_s)

    @property
    def family(self) -> str:
        """The family of all of these operators."""
        return self.ops.family

    def take(self, rows: Array) -> Rows:
        """The measurements ``rows``: ids or a mask."""
        return Rows(
            self.ops.take(rows), self.t_s[rows], self.t_low_s[rows], self.t_high_s[rows], self.repeats[rows],
            self.kernels.take(rows),
        )  # fmt: skip

    def sound(self) -> Bool:
        """Mask of the plausible rows, shape (n,): possible times and sizes, short texts."""
        plausible = np.isfinite(self.t_s) & (self.t_s >= SHORTEST_S) & (self.t_s <= LONGEST_S)
        # A range that excludes its own time is damaged; a missing range is not.
        plausible &= ~(self.t_low_s > self.t_s) & ~(self.t_high_s < self.t_s) & ~(self.t_low_s < 0)
        plausible &= ~np.isinf(self.t_high_s) & ~np.isinf(self.t_low_s) & (self.repeats >= 0)
        plausible &= self.ops.possible()
        for texts in (*self.ops.texts.values(), self.kernels):
            plausible &= np.array([len(text) <= LONGEST_TEXT for text in texts.table] or [True])[texts.codes]
        return np.asarray(plausible, dtype=np.bool_)

    def canonical(self) -> Rows:
        """Return the rows in canonical order without duplicates: equal for every copy of them."""
        kernels = self.kernels.sorted_table()
        last_first: list[Array] = [kernels.codes, self.repeats, self.t_high_s, self.t_low_s, self.t_s]
        order = np.lexsort([*last_first, *self._identity(), self.ops.keys])
        rows = self.take(order)
        same = np.ones(max(len(rows) - 1, 0), dtype=np.bool_)
        times: list[Array] = [rows.t_s, rows.t_low_s, rows.t_high_s, rows.repeats, kernels.codes[order]]
        for column in (*rows._identity(), *times):
            same &= (column[1:] == column[:-1]) | ((column[1:] != column[1:]) & (column[:-1] != column[:-1]))  # NaN
        rows = rows.take(~np.append(False, same)) if len(rows) else rows
        texts = {name: column.sorted_table() for name, column in rows.ops.texts.items()}
        return replace(rows, ops=replace(rows.ops, texts=texts), kernels=rows.kernels.sorted_table())

    def _identity(self) -> list[Array]:
        """The columns that identify an operator, in case two keys collide."""
        texts = [texts.sorted_table().codes for texts in self.ops.texts.values()]
        return [*texts, *self.ops.integers.values()]

    def times_sha256(self) -> str:
        """Hash of the operators and their times alone, of rows in canonical order.

        The device is not hashed: the same times under two device names have the same hash.
        """
        digest = hashlib.sha256(self.family.encode())
        digest.update(self.ops.keys.astype("<u8").tobytes())
        digest.update(self.t_s.astype("<f8").tobytes())
        return digest.hexdigest()

    def sha256(self) -> str:
        """Hash of all content of rows in canonical order, independent of the file's compression."""
        digest = hashlib.sha256(self.times_sha256().encode())
        for name in TIMES:
            # Normalize NaN, which has many bit patterns.
            column = getattr(self, name)
            digest.update(np.where(np.isnan(column), np.nan, column).astype("<f8").tobytes())
        digest.update(self.repeats.astype("<i4").tobytes())
        for name in sorted(self.ops.integers):
            digest.update(self.ops.integers[name].astype("<i8").tobytes())
        for name in (*TEXTS, "kernels"):
            texts = self.kernels if name == "kernels" else self.ops.texts[name]
            digest.update(msgspec.json.encode(texts.table))
            digest.update(texts.codes.astype("<i4").tobytes())
        return digest.hexdigest()


def joined(parts: Sequence[Operators]) -> Operators:
    """Concatenate operators of one family; ``parts`` must not be empty."""
    texts = {}
    for name in TEXTS:
        columns = [part.texts[name] for part in parts]
        table, where = one_table(column.table for column in columns)
        texts[name] = Texts(np.concatenate([to[c.codes] for to, c in zip(where, columns, strict=True)]), table)
    family = parts[0].family
    integers = {name: np.concatenate([p.integers[name] for p in parts]) for name in FAMILIES[family].attributes}
    return Operators(family, texts, integers)


def measurements(
    ops: Operators,
    t_s: npt.ArrayLike,
    *,
    t_low_s: npt.ArrayLike = np.nan,
    t_high_s: npt.ArrayLike = np.nan,
    repeats: npt.ArrayLike = 0,
    kernels: Sequence[str] | None = None,
) -> Rows:
    """Build measurements from arrays or numbers that fit the operators."""
    size = len(ops)
    t, low, high = (np.broadcast_to(np.asarray(c, dtype=np.float64), size).copy() for c in (t_s, t_low_s, t_high_s))
    count = np.broadcast_to(np.asarray(repeats, dtype=np.int32), size).copy()
    return Rows(ops, t, low, high, count, Texts.of(kernels) if kernels is not None else Texts.same("", size))


def sound_part(rows: Rows) -> tuple[Rows, int]:
    """Return the plausible rows, and the number of the others."""
    plausible = rows.sound()
    return rows.take(plausible), int((~plausible).sum())
