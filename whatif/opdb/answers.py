"""What the chain of estimators says: durations with their ranges, who answered, and from what."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from msgspec import Struct

from whatif.graph.types import Array, Float64, Int8, Int32, Int64
from whatif.opdb.model_answers import Estimates
from whatif.opdb.provenance import Basis


class AnswerSource(IntEnum):
    """Who answered, the best first."""

    EXACT = 0
    INTERPOLATED = 1
    LEARNED = 2
    SAME_CHIP = 3
    SAME_SHAPE = 4
    LEARNED_ACROSS = 5
    ANALYTIC = 6
    NONE = 7


ALL_SOURCES = tuple(source for source in AnswerSource if source != AnswerSource.NONE)


class Answers(Struct, frozen=True):
    """Durations of n operators, seconds, with a nominal 90 % range; all columns have shape (n,).

    ``answered_by`` is the source, ``basis`` how the measurements under it were taken (an index into ``bases``, -1 where
    there are none), ``evidence`` how many rows those are, ``outside`` how many doublings the operator lies
    beyond what was measured.
    """

    t_s: Float64
    low_s: Float64
    high_s: Float64
    answered_by: Int8
    basis: Int32
    evidence: Int64
    outside: Float64
    bases: tuple[Basis, ...]

    def __len__(self) -> int:
        return len(self.t_s)

    def fill(
        self, rows: Int64, estimates: Estimates, answered_by: AnswerSource, basis: Int64 | int, evidence: Int64 | int
    ) -> None:
        """Put the estimates of the operators ``rows`` in their places."""
        self.t_s[rows], self.low_s[rows], self.high_s[rows], self.outside[rows] = estimates
        self.answered_by[rows], self.basis[rows], self.evidence[rows] = answered_by, basis, evidence

    def put(self, rows: Int64, other: Answers) -> None:
        """Take the answers ``rows`` over from others of the same operators."""
        for mine, theirs in zip(self._columns(), other._columns(), strict=True):
            mine[rows] = theirs[rows]

    def copy(self) -> Answers:
        """Return the same answers, to be changed apart from these."""
        return self.take(np.arange(len(self)))

    def _columns(self) -> tuple[Array, ...]:
        return (self.t_s, self.low_s, self.high_s, self.answered_by, self.basis, self.evidence, self.outside)

    def take(self, rows: Int64) -> Answers:
        """The answers ``rows``."""
        return Answers(
            self.t_s[rows], self.low_s[rows], self.high_s[rows], self.answered_by[rows], self.basis[rows],
            self.evidence[rows], self.outside[rows], self.bases,
        )  # fmt: skip


def unanswered(size: int, bases: tuple[Basis, ...]) -> Answers:
    t, low, high = (np.full(size, np.nan) for _ in range(3))
    answered_by, basis = np.full(size, AnswerSource.NONE, dtype=np.int8), np.full(size, -1, dtype=np.int32)
    return Answers(t, low, high, answered_by, basis, np.zeros(size, dtype=np.int64), np.zeros(size), bases)
