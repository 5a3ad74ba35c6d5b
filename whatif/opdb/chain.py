"""The chain of estimators: the first one that can answer does, with a range, and its name stands beside the answer.

1. exact: the operator itself was measured on the device.
2. interpolated: operators of other sizes were; see ``whatif.opdb.interpolate``.
3. learned: a model of the device's measurements; see ``whatif.opdb.learned``. Where it missed less than 2 on data that
   neither had seen, it comes before it.
4. same_chip: a model of another board with the same chip, by the ratio of the two data sheets' times.
5. same_shape: the operator itself was measured on two other devices or more of the same vendor; see
   ``whatif.opdb.same_shape``.
6. learned_across: a model of several devices' measurements, for those of the same vendor.
7. analytic: the device's data sheet; see ``whatif.opdb.analytic``.

The last three know nothing of the device itself: they answer together, weighted by how far each misses devices that
were left out (``whatif.opdb.blending``); the one with the most weight is named. Nothing falls back in silence: what
no source can answer is NaN, with the source NONE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from whatif.graph.types import Bool, Float64, Int64
from whatif.hardware.gpu import Gpu
from whatif.hardware.roofline import over_other_devices
from whatif.opdb import analytic, devices
from whatif.opdb.anchors import Anchors
from whatif.opdb.answers import ALL_SOURCES, Answers, AnswerSource, unanswered
from whatif.opdb.blending import Candidate, blend, device_distance
from whatif.opdb.data_sheet import answers_analytically, bound_s, least_s, rate_tflops
from whatif.opdb.exact import weighted_medians
from whatif.opdb.family_index import FamilyIndex, GroupInfo
from whatif.opdb.groups import law_knows_better, measured_in
from whatif.opdb.index import Index
from whatif.opdb.interpolate import Group, fit_group
from whatif.opdb.keys import UInt64
from whatif.opdb.learned import LearnedModel, ModelFacts
from whatif.opdb.model_answers import Estimates, anchors_of, ask_model, best_first
from whatif.opdb.provenance import Basis
from whatif.opdb.quarantine import Aside, log_sizes
from whatif.opdb.rows import Operators
from whatif.opdb.same_shape import Transfer, fit_transfer, of_sizes
from whatif.opdb.work import work

__all__ = ["ALL_SOURCES", "Answers", "Estimator", "AnswerSource"]


# Which times are answered with where an operator was measured in several ways: those of the kernels alone come first,
# which is what a task of a trace is.
METHOD_ORDER = ("graph_replay", "kernel", "chain_difference", "trace", "event_pair", "wall", "unknown")
# As many measurements of a device make a model of its own, and interpolate well; fewer anchor that of other devices.
ENOUGH_TO_LEARN = 200
# What another board of one chip adds to the half-width of a range, log: other clocks under load. Our estimate.
CHIP_WIDTH = 0.1
# Questions whose answers are kept: a what-if asks some twenty, of up to some hundred operators each.
QUESTIONS = 512


@dataclass(eq=False)
class Estimator:
    """Answers for one device from an index and models; what it learns of a group is kept for the next question.

    ``method`` and ``framework`` restrict it to times taken in one way; ``launch`` says whether an analytic answer holds
    a launch. With ``kernels_alone`` the launch is taken out of what models say that learned times with launches.
    ``conv_law`` is who answers for convolutions from the data sheet alone (``whatif.opdb.analytic``).
    """

    index: Index
    device: str
    sources: Sequence[AnswerSource] = ALL_SOURCES
    method: str | None = None
    framework: str | None = None
    launch: bool = False
    models: Sequence[LearnedModel] = ()
    kernels_alone: bool = False
    conv_law: analytic.ConvLaw = "queue"
    _learned: dict[tuple[str, int], Group | None] = field(default_factory=dict)
    _anchored: dict[tuple[str, np.uint64], Anchors | None] = field(default_factory=dict)
    _taken_over: dict[tuple[str, int, Basis], Transfer | None] = field(default_factory=dict)
    _twins: dict[str, Estimator] = field(default_factory=dict, init=False)
    _answered: dict[tuple[tuple[AnswerSource, ...], bytes], Answers] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.gpu = devices.facts(self.device)
        self.able_models = [model for model in self.models if self._is_able(model.facts)]
        own: Counter[Basis] = Counter()
        others: Counter[Basis] = Counter()
        for group in (g for groups in self.index.groups.values() for g in groups):
            (own if group.device == self.device else others)[group.basis] += group.rows
        for facts in (model.facts for model in self.able_models):
            (others if facts.across else own)[facts.measured_as] += facts.rows
        # What this device was measured by comes before what only others were.
        ordered = dict.fromkeys([*_in_order(own), *_in_order(others)])
        self.bases = tuple(ordered)
        named = {g.device for groups in self.index.groups.values() for g in groups} - {self.device}
        # Another vendor's devices run other libraries: what they take says nothing of this one.
        vendor = self.gpu.vendor if self.gpu is not None else ""
        facts_by_name = {name: devices.facts(name) for name in sorted(named)}
        self.other_gpus = {name: gpu for name, gpu in facts_by_name.items() if gpu is not None and gpu.vendor == vendor}

    def restricted(self, sources: Sequence[AnswerSource]) -> Estimator:
        """Return the chain with those of ``sources`` that it has; what either learns, both know."""
        part = copy(self)
        part.sources = [source for source in sources if source in self.sources]
        return part

    def estimate(self, ops: Operators) -> Answers:
        """Estimate each of n operators."""
        # A trace asks for the same few operators over and over, and so does the next what-if.
        keys, first, which = np.unique(ops.keys, return_index=True, return_inverse=True)
        question = (tuple(self.sources), keys.tobytes())
        answers = self._answered.get(question)
        if answers is None:
            if len(self._answered) >= QUESTIONS:
                self._answered.clear()
            answers = self._answered[question] = self._distinct(ops.take(first))
        return answers.take(which.reshape(-1))

    def _distinct(self, asked: Operators) -> Answers:
        """Estimate each of operators that differ."""
        distinct = unanswered(len(asked), self.bases)
        measured = self.index.families.get(asked.family)
        groups = self.index.groups.get(asked.family, [])
        if measured is not None and AnswerSource.EXACT in self.sources:
            self._exact(measured, groups, asked.keys, distinct)
        if AnswerSource.LEARNED in self.sources:
            self._own_models(asked, distinct, better_only=AnswerSource.INTERPOLATED in self.sources)
        if measured is not None and AnswerSource.INTERPOLATED in self.sources:
            self._interpolated(measured, groups, asked, distinct)
        if AnswerSource.LEARNED in self.sources:
            self._own_models(asked, distinct, better_only=False)
        if AnswerSource.SAME_CHIP in self.sources:
            self._same_chip(asked, distinct)
        self._from_others(measured, groups, asked, distinct)
        return distinct

    def _from_others(
        self, measured: FamilyIndex | None, groups: list[GroupInfo], asked: Operators, answers: Answers
    ) -> None:
        """Let the sources that know nothing of this device answer what is left, each weighted by its expected error."""
        found: list[Candidate] = []
        if measured is not None and AnswerSource.SAME_SHAPE in self.sources:
            shapes = answers.copy()
            self._same_shape(measured, groups, asked, shapes)
            found.append(Candidate(AnswerSource.SAME_SHAPE, shapes))
        if AnswerSource.LEARNED_ACROSS in self.sources:
            across = answers.copy()
            anchored, sigma = self._models_across(asked, across)
            # A few measurements of this device, interpolated, give way to the model that they anchor.
            took_over = anchored & (answers.answered_by == AnswerSource.INTERPOLATED)
            answers.put(np.flatnonzero(took_over), across)
            found.append(Candidate(AnswerSource.LEARNED_ACROSS, across, anchored, sigma))
        launched = self._launches(found, len(asked))
        if AnswerSource.ANALYTIC in self.sources:
            sheet = answers.copy()
            self._analytic(asked, sheet, launched)
            found.append(Candidate(AnswerSource.ANALYTIC, sheet))
        open_ = np.flatnonzero(answers.answered_by == AnswerSource.NONE)
        blend(asked, answers, found, launched)
        if self.gpu is not None:
            factor = _over_other_devices(self.gpu, asked)[open_]
            for column in (answers.t_s, answers.low_s, answers.high_s):
                column[open_] *= factor

    def _launches(self, found: Sequence[Candidate], size: int) -> Bool:
        """Whether the data sheet's times have to hold a launch, as those that they are weighted with, shape (n,)."""
        launch = np.full(size, self.launch)
        for one in reversed(found):
            held = np.array([basis.has_launch and not self.kernels_alone for basis in self.bases] + [False])
            there = one.answers.answered_by == one.source
            launch = np.where(there, held[one.answers.basis], launch)
        return np.asarray(launch, dtype=np.bool_)

    def _ranks(self, groups: list[GroupInfo]) -> Int64:
        """The place of each group's basis in the order of preference; -1 for groups that may not answer."""
        ranks = [
            self.bases.index(g.basis) if g.device == self.device and self._may_answer(g.basis) else -1 for g in groups
        ]
        return np.array(ranks, dtype=np.int64)

    def _may_answer(self, basis: Basis) -> bool:
        return self.method in (None, basis.method) and self.framework in (None, basis.framework)

    def _is_able(self, facts: ModelFacts) -> bool:
        """Whether a model knows this device: as its own, or as one of a vendor's whose devices it has seen."""
        if facts.across:
            return self.gpu is not None and facts.knows_vendor_of(self.gpu)
        return facts.device == self.device

    def _exact(self, measured: FamilyIndex, groups: list[GroupInfo], keys: UInt64, answers: Answers) -> None:
        first, last = measured.find(keys)
        count = last - first
        query = np.repeat(np.arange(len(keys)), count)
        row = np.repeat(first - np.append(0, np.cumsum(count)[:-1]), count) + np.arange(int(count.sum()))
        rank = self._ranks(groups)[measured.group[row]]
        good = (rank >= 0) & (measured.aside[row] == Aside.SOUND)
        query, row, rank = query[good], row[good], rank[good]
        best = np.full(len(keys), len(self.bases), dtype=np.int64)
        np.minimum.at(best, query, rank)
        chosen = rank == best[query]
        query, row = query[chosen], row[chosen]
        if not len(query):
            return
        times = (np.asarray(column[row]) for column in (measured.t_s, measured.t_low_s, measured.t_high_s))
        asked, middle, low, high, count = weighted_medians(query, *times)
        answers.fill(asked, Estimates(middle, low, high), AnswerSource.EXACT, best[asked], count)

    def _interpolated(self, measured: FamilyIndex, groups: list[GroupInfo], asked: Operators, answers: Answers) -> None:
        open_ = np.flatnonzero(answers.answered_by == AnswerSource.NONE)
        if not len(open_):
            return
        able: dict[int, list[tuple[int, int]]] = {}
        for info, rank in zip(groups, self._ranks(groups).tolist(), strict=True):
            if rank >= 0:
                able.setdefault(info.key, []).append((rank, info.number))
        keys = asked.group_keys[open_]
        for key in np.unique(keys).tolist():
            for rank, number in sorted(able.get(key, [])):
                group = self._group(asked.family, measured, number)
                if group is None:
                    continue
                rows = open_[keys == key]
                ops = asked.take(rows)
                estimates = Estimates(*group.estimate(log_sizes(ops), work(ops)))
                t, low, high, outside = estimates
                near = np.ones(len(rows), dtype=np.bool_)
                if self.gpu is not None and AnswerSource.ANALYTIC in self.sources:
                    launch = groups[number].basis.has_launch
                    near = (outside == 0) | law_knows_better(self.gpu, group, ops, t, high / low, launch=launch)
                answers.fill(rows[near], estimates.take(near), AnswerSource.INTERPOLATED, rank, len(group))
                break

    def _group(self, family: str, measured: FamilyIndex, number: int) -> Group | None:
        if (family, number) not in self._learned:
            self._learned[family, number] = fit_group(measured_in(measured, measured.rows_of(number)))
        return self._learned[family, number]

    def _same_shape(self, measured: FamilyIndex, groups: list[GroupInfo], asked: Operators, answers: Answers) -> None:
        open_ = np.flatnonzero((answers.answered_by == AnswerSource.NONE) & answers_analytically(self.gpu, asked))
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
            launch, place = basis.has_launch, (asked.family, key, basis)
            rows = open_[
                (asked.group_keys[open_] == np.uint64(key)) & (answers.answered_by[open_] == AnswerSource.NONE)
            ]
            if not len(rows):
                continue
            if place not in self._taken_over:
                self._taken_over[place] = fit_transfer(asked.take(rows[:1]), measured, sources, launch=launch)
            transfer = self._taken_over[place]
            if transfer is None:
                continue
            at = transfer.find(asked.keys[rows])
            rows, at = rows[at >= 0], at[at >= 0]
            estimates = Estimates(*transfer.estimate(self.gpu, asked.take(rows), at, launch=launch))
            answers.fill(rows, estimates, AnswerSource.SAME_SHAPE, rank, transfer.devices[at])

    def _own_models(self, asked: Operators, answers: Answers, *, better_only: bool) -> None:
        """Ask the models of this device, the preferred way of measuring first.

        With ``better_only`` they answer for the operators that they miss less than an interpolation does.
        """
        for model, rank, names in best_first(self._models_of(self.device, asked.family)):
            rows = np.flatnonzero(answers.answered_by == AnswerSource.NONE)
            if not len(rows) or (better_only and model.shipped):
                continue
            part = asked.take(rows)
            known, spoken, extra = model.covers(part)
            known &= model.of_name(spoken, dict.fromkeys(names, 1.0), 0.0) > 0
            if better_only:
                known &= model.of_name(spoken, dict.fromkeys(model.facts.before_interpolation, 1.0), 0.0) > 0
                # Not those whose like were measured here in a way that comes before the model's.
                known &= ~np.isin(part.group_keys, _keys(self._measured(asked.family, range(rank))))
            if known.any():
                estimates, near = self._ask(model, spoken.take(known), extra[known])
                answers.fill(rows[known][near], estimates.take(near), AnswerSource.LEARNED, rank, model.facts.rows)

    def _same_chip(self, asked: Operators, answers: Answers) -> None:
        """Ask the models of another board of the same chip, and scale by what the two data sheets say of each operator.

        The ratio holds clocks, power (by the sustained rates) and bandwidth.
        """
        if self.gpu is None:
            return
        for twin in sorted({m.facts.device for m in self.models if not m.facts.across} - {self.device}):
            other = devices.facts(twin)
            rows = np.flatnonzero(answers.answered_by == AnswerSource.NONE)
            if other is None or not len(rows) or not same_chip(self.gpu, other):
                continue
            part = asked.take(rows)
            able = answers_analytically(self.gpu, part)
            there = self._twin(twin)
            told = there.estimate(part)
            able &= told.answered_by == AnswerSource.LEARNED
            basis = np.array([b in self.bases and b.has_launch for b in there.bases] + [False])
            launch = basis[told.basis] & (not self.kernels_alone)
            here, that = (_sheet_s(gpu, part, launch) for gpu in (self.gpu, other))
            ratio, width = here / that, np.exp(CHIP_WIDTH)
            rank = np.array([self.bases.index(b) if b in self.bases else -1 for b in there.bases] + [-1])[told.basis]
            bound, t_s = bound_s(self.gpu, part, cold=False), np.maximum(told.t_s * ratio, least_s(self.gpu, part))
            low_s = np.minimum(np.maximum(told.low_s * ratio / width, bound), t_s)
            scaled = Estimates(t_s, low_s, np.maximum(told.high_s * ratio * width, t_s), told.outside)
            answers.fill(rows[able], scaled.take(able), AnswerSource.SAME_CHIP, rank[able], told.evidence[able])

    def _twin(self, device: str) -> Estimator:
        """The models of another board."""
        if device not in self._twins:
            self._twins[device] = Estimator(
                self.index, device, (AnswerSource.LEARNED,), self.method, self.framework, self.launch, self.models,
                self.kernels_alone,
            )  # fmt: skip
        return self._twins[device]

    def _models_across(self, asked: Operators, answers: Answers) -> tuple[Bool, Float64]:
        """Ask the models across devices of this vendor; this device's own few measurements of a group anchor them.

        One answers beside those few, interpolated, where its range is the narrower one. Gives
        which operators anchored models answered for, and what a model's distance from this device and from what it was
        fitted to adds to the standard deviation of its error (log), shape (n,) both.
        """
        by_anchors, sigma = np.zeros(len(asked), dtype=np.bool_), np.zeros(len(asked))
        for model, rank in self._models_of("", asked.family):
            few = (answers.answered_by == AnswerSource.INTERPOLATED) & (answers.evidence < ENOUGH_TO_LEARN)
            rows = np.flatnonzero(few | (answers.answered_by == AnswerSource.NONE))
            if not len(rows):
                break
            part = asked.take(rows)
            known, spoken, extra = model.covers(part)
            known &= self._at_one_rate(part, spoken)
            keys = np.where(known, asked.group_keys[rows], np.uint64(0))
            measured = _keys(self._measured(asked.family, range(rank, rank + 1)))
            for key in (np.uint64(0), *measured):
                # Key 0 stands for all that was not measured here.
                of_key = known & (~np.isin(keys, measured) if not key else keys == key)
                if not of_key.any():
                    continue
                anchors = self._anchors(model, rank, part.take(of_key).take(np.array([0]))) if key else None
                (estimates, near), here = self._ask(model, spoken.take(of_key), extra[of_key], anchors), rows[of_key]
                open_ = answers.answered_by[here] == AnswerSource.NONE
                with np.errstate(invalid="ignore"):
                    narrower = estimates.high_s / estimates.low_s < answers.high_s[here] / answers.low_s[here]
                chosen = np.where(open_, near, narrower)
                answers.fill(here[chosen], estimates.take(chosen), AnswerSource.LEARNED_ACROSS, rank, model.facts.rows)
                by_anchors[here[chosen]] = anchors is not None
                far = device_distance(model.facts, self.gpu) if self.gpu is not None else 0.0
                sigma[here[chosen]] = np.hypot(model.facts.growth * np.asarray(estimates.outside)[chosen], far)
        return by_anchors, sigma

    def _at_one_rate(self, ops: Operators, spoken: Operators) -> Bool:
        """Mask of the operators whose format the device multiplies as fast as that in which a model speaks of them.

        fp16 and bf16 stand in for one another, but not on a device that has tensor cores for one of them alone.
        """
        if self.gpu is None:
            return np.ones(len(ops), dtype=np.bool_)
        gpu = self.gpu
        told, said = (
            np.array([rate_tflops(gpu, dtype, "matmul", tf32=False) for dtype in each.dtypes]) for each in (ops, spoken)
        )
        return np.asarray(told == said, dtype=np.bool_)

    def _models_of(self, device: str, family: str) -> list[tuple[LearnedModel, int]]:
        """The models of a device ("": across devices) that may answer, each with the rank of its basis; best first."""
        mine = (m for m in self.able_models if (m.facts.device, m.facts.family) == (device, family))
        able = [m for m in mine if self._may_answer(m.facts.measured_as)]
        ranked = [(m, self.bases.index(m.facts.measured_as)) for m in able]
        return sorted(ranked, key=lambda pair: (pair[1], pair[0].name))

    def _measured(self, family: str, ranks: range) -> list[GroupInfo]:
        """The groups that this device was measured of in the ways of ``ranks``."""
        groups = self.index.groups.get(family, [])
        return [group for group, rank in zip(groups, self._ranks(groups).tolist(), strict=True) if rank in ranks]

    def _ask(
        self, model: LearnedModel, ops: Operators, extra: Float64, anchors: Anchors | None = None
    ) -> tuple[Estimates, Bool]:
        return ask_model(
            model, ops, extra, self.gpu, kernels_alone=self.kernels_alone,
            give_way=AnswerSource.ANALYTIC in self.sources, anchors=anchors,
        )  # fmt: skip

    def _anchors(self, model: LearnedModel, rank: int, like: Operators) -> Anchors | None:
        """What this device's own measurements of a group say of a model across devices."""
        family, place = self.index.families.get(like.family), (model.name, like.group_keys[0])
        if family is None or self.gpu is None:
            return None
        if place not in self._anchored:
            self._anchored[place] = None
            measured = self._measured(like.family, range(rank, rank + 1))
            for number in (group.number for group in measured if group.key == int(place[1])):
                rows = family.sound_rows_of(number)
                rows = rows[:: max(len(rows) // ENOUGH_TO_LEARN, 1)]  # sorted by key: a fair sample
                ops = of_sizes(like, np.asarray(family.log_sizes[rows]))
                self._anchored[place] = anchors_of(model, ops, np.asarray(family.t_s[rows]), self.gpu)
        return self._anchored[place]

    def _analytic(self, asked: Operators, answers: Answers, launch: Bool) -> None:
        able = (answers.answered_by == AnswerSource.NONE) & analytic.answers_analytically(self.gpu, asked)
        for held in (False, True):
            rows = np.flatnonzero(able & (launch == held))
            if self.gpu is None or not len(rows):
                continue
            times = analytic.analytic_answers(self.gpu, asked.take(rows), launch=held, conv_law=self.conv_law)
            answers.fill(rows, Estimates(*times), AnswerSource.ANALYTIC, -1, 0)


def same_chip(gpu: Gpu, other: Gpu) -> bool:
    """Say whether two boards carry one chip with as many multiprocessors."""
    chip = (gpu.vendor, gpu.arch, gpu.compute_capability, gpu.sm_count, gpu.l2_mbyte)
    return chip == (other.vendor, other.arch, other.compute_capability, other.sm_count, other.l2_mbyte)


def _sheet_s(gpu: Gpu, ops: Operators, launch: Bool) -> Float64:
    """What a data sheet says of operators, seconds, shape (n,), with a launch if asked."""
    alone, launched = (
        analytic.analytic_answers(gpu, ops, launch=held)[0] if np.any(launch == held) else np.zeros(len(ops))
        for held in (False, True)
    )
    return np.where(launch, launched, alone)


def _over_other_devices(gpu: Gpu, ops: Operators) -> Float64:
    """What whole steps of a device say of answers that come from others, shape (n,)."""
    if ops.family not in ("matmul", "elementwise", "normalization"):
        return np.ones(len(ops))
    names, dtypes = ops.texts["name"], ops.texts["dtype"]
    words = [
        ops.family if ops.family != "normalization" else "layer_norm" if name == "layer_norm" else "softmax"
        for name in names.table
    ]
    table = [[over_other_devices(gpu, word, dtype) for dtype in dtypes.table] for word in words]
    return np.array(table or [[1.0]])[names.codes, dtypes.codes]


def _keys(groups: list[GroupInfo]) -> UInt64:
    return np.array([group.key for group in groups], dtype=np.uint64)


def _in_order(rows: Counter[Basis]) -> list[Basis]:
    """The bases of so many rows each, the preferred one first: of two frameworks the one that was measured more."""
    return sorted(rows, key=lambda basis: (METHOD_ORDER.index(basis.method), -rows[basis], basis))
