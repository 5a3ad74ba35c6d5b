"""Answers of the chain of estimators: durations with their ranges, the answering source, and its basis."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from msgspec import Struct

from whatif.graph.types import Array, Float64, Int8, Int32, Int64
from whatif.opdb.model_answers import Estimates
from whatif.opdb.provenance import Basis


class AnswerSource(IntEnum):
    """The sources of the chain, the best first."""

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

    ``answered_by`` is the source, ``basis`` that of its measurements (an index into ``bases``, -1 without any),
    ``evidence`` the number of their rows, ``outside`` the operator's doublings beyond the measured sizes.
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
        """Store the estimates of the operators ``rows``."""
        self.t_s[rows], self.low_s[rows], self.high_s[rows], self.outside[rows] = estimates
        self.answered_by[rows], self.basis[rows], self.evidence[rows] = answered_by, basis, evidence

    def put(self, rows: Int64, other: Answers) -> None:
        """Copy the answers ``rows`` from another set of answers for the same operators."""
        for column, source in zip(self._columns(), other._columns(), strict=True):
            column[rows] = source[rows]

    def copy(self) -> Answers:
        """Return an independent copy."""
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
