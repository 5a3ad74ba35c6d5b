"""The chain of estimators: the first one that can answer does, with a range, and its name stands beside the answer.

1. exact: the operator itself was measured on the device.
2. interpolated: operators of other sizes were; see ``whatif.opdb.interpolate``.
3. same_shape: the operator itself was measured on two other devices or more; see ``whatif.opdb.same_shape``.
4. analytic: the device's data sheet; see ``whatif.opdb.roofline``.

Nothing falls back in silence: what nobody can answer is NaN, with the rung NONE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from whatif.hardware import Gpu
from whatif.opdb import devices
from whatif.opdb.index import FamilyIndex, GroupInfo, Index
from whatif.opdb.interpolate import Group, Measured, fit_group
from whatif.opdb.keys import UInt64
from whatif.opdb.provenance import Basis
from whatif.opdb.quarantine import Aside, log_sizes
from whatif.opdb.roofline import analytic_s, answers_analytically, bound_s, compute_s, memory_s
from whatif.opdb.rows import Operators
from whatif.opdb.same_shape import Transfer, fit_transfer
from whatif.opdb.work import work
from whatif.types import Bool, Int8, Int32, Int64

Float64 = npt.NDArray[np.float64]


class Rung(IntEnum):
    """Who answered, the best first."""

    EXACT = 0
    INTERPOLATED = 1
    SAME_SHAPE = 2
    ANALYTIC = 3
    NONE = 4


ALL_RUNGS = (Rung.EXACT, Rung.INTERPOLATED, Rung.SAME_SHAPE, Rung.ANALYTIC)
# Which times are answered with where an operator was measured in several ways: those of the kernels alone come first,
# which is what a task of a trace is.
METHOD_ORDER = ("graph_replay", "kernel", "chain_difference", "trace", "event_pair", "wall", "unknown")
# A measurement that tells no spread: what library versions move the same shape by (1 to 5 % at the median).
UNKNOWN_SIGMA = 0.05
# An operator that moves as often the bytes of the second-level cache runs from memory.
_CLEARLY_OUTSIDE = 4.0
# However often it was repeated, another day and another process move it by more than this (NCCL sweeps: 1.5 %).
LEAST_SIGMA = 0.01
# The repeats' range holds 10 to 90 %: so many sigma of a normal distribution, and a nominal 90 % range is wider.
_SIGMAS_IN_RANGE, _SIGMAS_OF_90 = 2.563, 1.645


@dataclass(frozen=True)
class Answers:
    """Durations of n operators, seconds, with a nominal 90 % range; all columns have shape (n,).

    ``rung`` is who answered, ``basis`` how the measurements that it rests on were taken (an index into ``bases``, -1
    where there are none), ``evidence`` how many rows those are, ``outside`` how many doublings the operator lies
    beyond what was measured.
    """

    t_s: Float64
    low_s: Float64
    high_s: Float64
    rung: Int8
    basis: Int32
    evidence: Int64
    outside: Float64
    bases: tuple[Basis, ...]

    def __len__(self) -> int:
        return len(self.t_s)

    def take(self, rows: Int64) -> Answers:
        """The answers ``rows``."""
        return Answers(
            self.t_s[rows], self.low_s[rows], self.high_s[rows], self.rung[rows], self.basis[rows], self.evidence[rows],
            self.outside[rows], self.bases,
        )  # fmt: skip


@dataclass
class Estimator:
    """Answers for one device from an index; what it learns of a group is kept for the next question.

    ``method`` and ``framework`` restrict it to times taken in one way; ``launch`` says whether an analytic answer holds
    a launch.
    """

    index: Index
    device: str
    rungs: Sequence[Rung] = ALL_RUNGS
    method: str | None = None
    framework: str | None = None
    launch: bool = False
    _learned: dict[tuple[str, int], Group | None] = field(default_factory=dict)
    _taken_over: dict[tuple[str, int, Basis], Transfer | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own: Counter[Basis] = Counter()
        others: Counter[Basis] = Counter()
        for group in (g for groups in self.index.groups.values() for g in groups):
            (own if group.device == self.device else others)[group.basis] += group.rows
        # What this device was measured by comes before what only others were.
        ordered = dict.fromkeys([*_in_order(own), *_in_order(others)])
        self.bases = tuple(ordered)
        self.gpu = devices.facts(self.device)
        named = {g.device for groups in self.index.groups.values() for g in groups} - {self.device}
        self.other_gpus = {name: gpu for name in sorted(named) if (gpu := devices.facts(name)) is not None}

    def estimate(self, ops: Operators) -> Answers:
        """Estimate each of n operators."""
        # A trace asks for the same few operators over and over.
        _, first, which = np.unique(ops.keys, return_index=True, return_inverse=True)
        asked = ops.take(first)
        distinct = _unanswered(len(first), self.bases)
        told = self.index.families.get(ops.family)
        if told is not None and Rung.EXACT in self.rungs:
            self._exact(told, self.index.groups[ops.family], asked.keys, distinct)
        if told is not None and Rung.INTERPOLATED in self.rungs:
            self._interpolated(told, self.index.groups[ops.family], asked, distinct)
        if told is not None and Rung.SAME_SHAPE in self.rungs:
            self._same_shape(told, self.index.groups[ops.family], asked, distinct)
        if Rung.ANALYTIC in self.rungs:
            self._analytic(asked, distinct)
        return distinct.take(which.reshape(-1))

    def _ranks(self, groups: list[GroupInfo]) -> Int64:
        """The place of each group's basis in the order of preference; -1 for groups that may not answer."""
        ranks = [
            self.bases.index(g.basis) if g.device == self.device and self._may_answer(g.basis) else -1 for g in groups
        ]
        return np.array(ranks, dtype=np.int64)

    def _may_answer(self, basis: Basis) -> bool:
        return self.method in (None, basis.method) and self.framework in (None, basis.framework)

    def _exact(self, told: FamilyIndex, groups: list[GroupInfo], keys: UInt64, answers: Answers) -> None:
        first, last = told.find(keys)
        count = last - first
        query = np.repeat(np.arange(len(keys)), count)
        row = np.repeat(first - np.append(0, np.cumsum(count)[:-1]), count) + np.arange(int(count.sum()))
        rank = self._ranks(groups)[told.group[row]]
        good = (rank >= 0) & (told.aside[row] == Aside.SOUND)
        query, row, rank = query[good], row[good], rank[good]
        best = np.full(len(keys), len(self.bases), dtype=np.int64)
        np.minimum.at(best, query, rank)
        chosen = rank == best[query]
        query, row = query[chosen], row[chosen]
        if not len(query):
            return
        t, low, high = (np.asarray(column[row]) for column in (told.t_s, told.t_low_s, told.t_high_s))
        sigma = np.where(np.isnan(high - low), UNKNOWN_SIGMA, (high - low) / t / _SIGMAS_IN_RANGE)
        sigma = np.maximum(sigma, LEAST_SIGMA)
        order = np.lexsort((t, query))
        query, t, sigma = query[order], t[order], sigma[order]
        asked, start = np.unique(query, return_index=True)
        # The inverse-variance-weighted median: the first time at which half of the weight is reached.
        weight = 1 / sigma**2
        total = np.add.reduceat(weight, start)
        number = np.cumsum(np.append(0, np.diff(query) != 0))
        reached = np.cumsum(weight) - np.append(0, np.cumsum(total)[:-1])[number]
        half = np.flatnonzero(reached >= 0.5 * total[number] * (1 - 1e-9))
        middle = half[np.searchsorted(number[half], np.arange(len(asked)))]
        answers.t_s[asked] = t[middle]
        # Conflicts are a distribution: the range holds what every one of them says.
        answers.low_s[asked] = np.minimum.reduceat(t * np.exp(-_SIGMAS_OF_90 * sigma), start)
        answers.high_s[asked] = np.maximum.reduceat(t * np.exp(_SIGMAS_OF_90 * sigma), start)
        answers.rung[asked], answers.basis[asked] = Rung.EXACT, best[asked]
        answers.evidence[asked] = np.diff(np.append(start, len(query)))

    def _interpolated(self, told: FamilyIndex, groups: list[GroupInfo], asked: Operators, answers: Answers) -> None:
        open_ = np.flatnonzero(answers.rung == Rung.NONE)
        if not len(open_):
            return
        ranks = self._ranks(groups)
        able: dict[int, list[tuple[int, int]]] = {}
        for info, rank in zip(groups, ranks.tolist(), strict=True):
            if rank >= 0:
                able.setdefault(info.key, []).append((rank, info.number))
        keys = asked.group_keys[open_]
        for key in np.unique(keys).tolist():
            for rank, number in sorted(able.get(key, [])):
                group = self._group(asked.family, told, number)
                if group is None:
                    continue
                rows = open_[keys == key]
                ops = asked.take(rows)
                t, low, high, outside = group.estimate(log_sizes(ops), work(ops))
                near = np.ones(len(rows), dtype=np.bool_)
                if self.gpu is not None and Rung.ANALYTIC in self.rungs:
                    launch = groups[number].basis.launch == "with launch"
                    near = (outside == 0) | _law_knows_better(self.gpu, group, ops, t, high / low, launch=launch)
                rows = rows[near]
                answers.t_s[rows], answers.low_s[rows], answers.high_s[rows] = t[near], low[near], high[near]
                answers.rung[rows], answers.basis[rows], answers.evidence[rows] = Rung.INTERPOLATED, rank, len(group)
                answers.outside[rows] = outside[near]
                break

    def _group(self, family: str, told: FamilyIndex, number: int) -> Group | None:
        if (family, number) not in self._learned:
            self._learned[family, number] = fit_group(_measured(told, told.rows_of(number)))
        return self._learned[family, number]

    def _same_shape(self, told: FamilyIndex, groups: list[GroupInfo], asked: Operators, answers: Answers) -> None:
        open_ = np.flatnonzero((answers.rung == Rung.NONE) & answers_analytically(self.gpu, asked))
        if self.gpu is None or not len(open_):
            return
        wanted = set(asked.group_keys[open_].tolist())
        able: dict[tuple[int, int], list[tuple[int, Gpu]]] = {}
        for info in groups:
            gpu = self.other_gpus.get(info.device)
            if gpu is not None and self._may_answer(info.basis) and info.key in wanted:
                able.setdefault((self.bases.index(info.basis), info.key), []).append((info.number, gpu))
        for (rank, key), sources in sorted(able.items(), key=lambda item: item[0]):
            basis = self.bases[rank]
            launch, place = basis.launch == "with launch", (asked.family, key, basis)
            rows = open_[(asked.group_keys[open_] == np.uint64(key)) & (answers.rung[open_] == Rung.NONE)]
            if not len(rows):
                continue
            if place not in self._taken_over:
                self._taken_over[place] = fit_transfer(asked.take(rows[:1]), told, sources, launch=launch)
            transfer = self._taken_over[place]
            if transfer is None:
                continue
            at = transfer.find(asked.keys[rows])
            rows, at = rows[at >= 0], at[at >= 0]
            ops = asked.take(rows)
            t, low, high = transfer.estimate(self.gpu, ops, at, launch=launch)
            answers.t_s[rows], answers.low_s[rows], answers.high_s[rows] = t, low, high
            answers.rung[rows], answers.basis[rows] = Rung.SAME_SHAPE, rank
            answers.evidence[rows] = transfer.devices[at]

    def _analytic(self, asked: Operators, answers: Answers) -> None:
        rows = np.flatnonzero((answers.rung == Rung.NONE) & answers_analytically(self.gpu, asked))
        if self.gpu is None or not len(rows):
            return
        t, low, high = analytic_s(self.gpu, asked.take(rows), launch=self.launch)
        answers.t_s[rows], answers.low_s[rows], answers.high_s[rows] = t, low, high
        answers.rung[rows] = Rung.ANALYTIC


def _in_order(rows: Counter[Basis]) -> list[Basis]:
    """The bases of so many rows each, the preferred one first: of two frameworks the one that was measured more."""
    return sorted(rows, key=lambda basis: (METHOD_ORDER.index(basis.method), -rows[basis], basis))


def _unanswered(size: int, bases: tuple[Basis, ...]) -> Answers:
    t, low, high = (np.full(size, np.nan) for _ in range(3))
    rung, basis = np.full(size, Rung.NONE, dtype=np.int8), np.full(size, -1, dtype=np.int32)
    return Answers(t, low, high, rung, basis, np.zeros(size, dtype=np.int64), np.zeros(size), bases)


def _law_knows_better(gpu: Gpu, group: Group, ops: Operators, t_s: Float64, ratio: Float64, *, launch: bool) -> Bool:
    """Mask, shape (n,), of the operators outside of what was measured for which its law knows better than a data sheet.

    It does where its range is the narrower one, and where it cannot be wrong in kind: not below what the device can
    do, and not bound by the device's memory when all that was measured fits the second-level cache.
    """
    _, low, high = analytic_s(gpu, ops, launch=launch)
    cache_bytes = gpu.l2_mbyte * 1e6
    cached = (work(ops)[1] > cache_bytes) & (group.most_bytes < _CLEARLY_OUTSIDE * cache_bytes)
    cached &= memory_s(gpu, ops) > compute_s(gpu, ops)
    better = (ratio < high / low) & (t_s >= bound_s(gpu, ops, cold=False)) & ~cached
    return np.asarray(better | ~answers_analytically(gpu, ops), dtype=np.bool_)


def _measured(told: FamilyIndex, rows: Int64) -> Measured:
    """What a group learns from: its rows but the impossible ones; the middle sound one stands for each operator."""
    aside = np.asarray(told.aside[rows])
    rows, aside = rows[aside != Aside.IMPOSSIBLE], aside[aside != Aside.IMPOSSIBLE]
    keys, t = np.asarray(told.keys[rows]), np.asarray(told.t_s[rows])
    order = np.lexsort((t, aside, keys))
    rows, aside, keys = rows[order], aside[order], keys[order]
    # Sound rows come first within an operator.
    distinct, start, operator = np.unique(keys, return_index=True, return_inverse=True)
    operator = operator.reshape(-1)
    sound = np.bincount(operator, weights=aside == Aside.SOUND, minlength=len(distinct)).astype(np.int64)
    stands = (start + (sound - 1) // 2)[sound > 0]
    place = np.where(sound > 0, np.cumsum(sound > 0) - 1, -1)
    return Measured(
        told.log_sizes[rows], told.flops[rows], told.moved_bytes[rows], told.t_s[rows], stands, place[operator]
    )
