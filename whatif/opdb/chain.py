"""The chain of estimators: the first source that can answer does, with a range, and the answer names it.

1. exact: the operator itself was measured on the device.
2. interpolated: operators of other sizes were measured; see ``whatif.opdb.interpolate``.
3. learned: a model of the device's measurements; see ``whatif.opdb.learned``. It comes before 2 for operators on which
   its error was smaller on data that neither had seen.
4. same_chip: a model of another board with the same chip, scaled by the ratio of the two data sheets' times.
5. same_shape: the operator itself was measured on at least two other devices of the same vendor; see
   ``whatif.opdb.same_shape``.
6. learned_across: a model of several devices' measurements, for those of the same vendor.
7. analytic: the device's data sheet; see ``whatif.opdb.analytic``.

The last three use no measurements of the device itself: they answer together, weighted by the error of each on devices
left out (``whatif.opdb.blending``); the answer names the one with the most weight. There is no silent fallback: an
operator that no source can answer for is NaN, with the source NONE.
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
from whatif.opdb.groups import is_better_than_sheet, measured_in
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


# Preference among methods if an operator was measured with several: times of kernels alone come first,
# which is what a task of a trace is.
METHOD_ORDER = ("graph_replay", "kernel", "chain_difference", "trace", "event_pair", "wall", "unknown")
# With this many measurements a device interpolates well or has its own model; fewer anchor that of other devices.
ENOUGH_TO_LEARN = 200
# Added to the half-width of a range for another board of the same chip, log: other clocks under load. Our estimate.
CHIP_WIDTH = 0.1
# Cached queries: a what-if makes about twenty, of up to a few hundred operators each.
QUESTIONS = 512


@dataclass(eq=False)
class Estimator:
    """Estimates times for one device from an index and models; fits of groups and answers are cached.

    ``method`` and ``framework`` restrict it to times measured in one way; ``launch`` says whether an analytic answer
    includes a launch. With ``kernels_alone`` the launch is subtracted from models fitted to times with launches.
    ``conv_law`` is the model that estimates convolutions from the data sheet alone (``whatif.opdb.analytic``).
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
    _fitted: dict[tuple[str, int], Group | None] = field(default_factory=dict)
    _anchored: dict[tuple[str, np.uint64], Anchors | None] = field(default_factory=dict)
    _transfers: dict[tuple[str, int, Basis], Transfer | None] = field(default_factory=dict)
    _twins: dict[str, Estimator] = field(default_factory=dict, init=False)
    _answered: dict[tuple[tuple[AnswerSource, ...], bytes], Answers] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.gpu = devices.facts(self.device)
        self.able_models = [model for model in self.models if self._is_able(model.facts)]
        own_rows: Counter[Basis] = Counter()
        other_rows: Counter[Basis] = Counter()
        for group in (g for groups in self.index.groups.values() for g in groups):
            (own_rows if group.device == self.device else other_rows)[group.basis] += group.rows
        for facts in (model.facts for model in self.able_models):
            (other_rows if facts.across else own_rows)[facts.measured_as] += facts.rows
        # Bases of this device's measurements come before those that only other devices have.
        ordered = dict.fromkeys([*_in_order(own_rows), *_in_order(other_rows)])
        self.bases = tuple(ordered)
        other_devices = {g.device for groups in self.index.groups.values() for g in groups} - {self.device}
        # Another vendor's devices run other libraries: their times do not carry over.
        vendor = self.gpu.vendor if self.gpu is not None else ""
        facts_by_name = {name: devices.facts(name) for name in sorted(other_devices)}
        self.other_gpus = {name: gpu for name, gpu in facts_by_name.items() if gpu is not None and gpu.vendor == vendor}

    def restricted(self, sources: Sequence[AnswerSource]) -> Estimator:
        """Return the chain limited to ``sources``; the two share their caches."""
        part = copy(self)
        part.sources = [source for source in sources if source in self.sources]
        return part

    def estimate(self, ops: Operators) -> Answers:
        """Estimate each of n operators."""
        # A trace repeats the same few operators, and so does the next what-if.
        keys, first, inverse = np.unique(ops.keys, return_index=True, return_inverse=True)
        question = (tuple(self.sources), keys.tobytes())
        answers = self._answered.get(question)
        if answers is None:
            if len(self._answered) >= QUESTIONS:
                self._answered.clear()
            answers = self._answered[question] = self._distinct(ops.take(first))
        return answers.take(inverse.reshape(-1))

    def _distinct(self, asked: Operators) -> Answers:
        """Estimate operators without duplicates."""
        distinct = unanswered(len(asked), self.bases)
        measured = self.index.families.get(asked.family)
        groups = self.index.groups.get(asked.family, [])
        if measured is not None and AnswerSource.EXACT in self.sources:
            self._exact(measured, groups, asked.keys, distinct)
        if AnswerSource.LEARNED in self.sources:
            self._device_models(asked, distinct, better_only=AnswerSource.INTERPOLATED in self.sources)
        if measured is not None and AnswerSource.INTERPOLATED in self.sources:
            self._interpolated(measured, groups, asked, distinct)
        if AnswerSource.LEARNED in self.sources:
            self._device_models(asked, distinct, better_only=False)
        if AnswerSource.SAME_CHIP in self.sources:
            self._same_chip(asked, distinct)
        self._from_other_devices(measured, groups, asked, distinct)
        return distinct

    def _from_other_devices(
        self, measured: FamilyIndex | None, groups: list[GroupInfo], asked: Operators, answers: Answers
    ) -> None:
        """Answer the rest from sources without measurements of this device, weighted by their expected errors."""
        found: list[Candidate] = []
        if measured is not None and AnswerSource.SAME_SHAPE in self.sources:
            shapes = answers.copy()
            self._same_shape(measured, groups, asked, shapes)
            found.append(Candidate(AnswerSource.SAME_SHAPE, shapes))
        if AnswerSource.LEARNED_ACROSS in self.sources:
            across = answers.copy()
            anchored, sigma = self._models_across(asked, across)
            # An interpolation of few measurements gives way to the model that those measurements anchor.
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
        """Whether the data sheet's times must include a launch to match those they are averaged with, shape (n,)."""
        launch = np.full(size, self.launch)
        for candidate in reversed(found):
            includes_launch = np.array([basis.has_launch and not self.kernels_alone for basis in self.bases] + [False])
            answered = candidate.answers.answered_by == candidate.source
            launch = np.where(answered, includes_launch[candidate.answers.basis], launch)
        return np.asarray(launch, dtype=np.bool_)

    def _ranks(self, groups: list[GroupInfo]) -> Int64:
        """The preference rank of each group's basis, 0 first; -1 for groups that may not answer."""
        ranks = [
            self.bases.index(g.basis) if g.device == self.device and self._may_answer(g.basis) else -1 for g in groups
        ]
        return np.array(ranks, dtype=np.int64)

    def _may_answer(self, basis: Basis) -> bool:
        return self.method in (None, basis.method) and self.framework in (None, basis.framework)

    def _is_able(self, facts: ModelFacts) -> bool:
        """Whether a model applies to this device: fitted to it, or across devices of its vendor."""
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
        answered, middle, low, high, count = weighted_medians(query, *times)
        answers.fill(answered, Estimates(middle, low, high), AnswerSource.EXACT, best[answered], count)

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
                    near = (outside == 0) | is_better_than_sheet(self.gpu, group, ops, t, high / low, launch=launch)
                answers.fill(rows[near], estimates.take(near), AnswerSource.INTERPOLATED, rank, len(group))
                break

    def _group(self, family: str, measured: FamilyIndex, number: int) -> Group | None:
        if (family, number) not in self._fitted:
            self._fitted[family, number] = fit_group(measured_in(measured, measured.rows_of(number)))
        return self._fitted[family, number]

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
            if place not in self._transfers:
                self._transfers[place] = fit_transfer(asked.take(rows[:1]), measured, sources, launch=launch)
            transfer = self._transfers[place]
            if transfer is None:
                continue
            at = transfer.find(asked.keys[rows])
            rows, at = rows[at >= 0], at[at >= 0]
            estimates = Estimates(*transfer.estimate(self.gpu, asked.take(rows), at, launch=launch))
            answers.fill(rows, estimates, AnswerSource.SAME_SHAPE, rank, transfer.devices[at])

    def _device_models(self, asked: Operators, answers: Answers, *, better_only: bool) -> None:
        """Answer from the models of this device, the preferred basis first.

        With ``better_only`` they answer only for operators on which their error is smaller than an interpolation's.
        """
        for model, rank, names in best_first(self._models_of(self.device, asked.family)):
            rows = np.flatnonzero(answers.answered_by == AnswerSource.NONE)
            if not len(rows) or (better_only and model.shipped):
                continue
            part = asked.take(rows)
            known, mapped, extra = model.covers(part)
            known &= model.of_name(mapped, dict.fromkeys(names, 1.0), 0.0) > 0
            if better_only:
                known &= model.of_name(mapped, dict.fromkeys(model.facts.before_interpolation, 1.0), 0.0) > 0
                # Not operators of groups that were measured here on a basis preferred to the model's.
                known &= ~np.isin(part.group_keys, _keys(self._measured(asked.family, range(rank))))
            if known.any():
                estimates, near = self._ask(model, mapped.take(known), extra[known])
                answers.fill(rows[known][near], estimates.take(near), AnswerSource.LEARNED, rank, model.facts.rows)

    def _same_chip(self, asked: Operators, answers: Answers) -> None:
        """Answer from models of another board with the same chip, scaled by the ratio of the data sheets' times.

        The ratio covers clocks, power (through the sustained rates) and bandwidth.
        """
        if self.gpu is None:
            return
        for twin in sorted({m.facts.device for m in self.models if not m.facts.across} - {self.device}):
            twin_gpu = devices.facts(twin)
            rows = np.flatnonzero(answers.answered_by == AnswerSource.NONE)
            if twin_gpu is None or not len(rows) or not same_chip(self.gpu, twin_gpu):
                continue
            part = asked.take(rows)
            able = answers_analytically(self.gpu, part)
            chain = self._twin(twin)
            given = chain.estimate(part)
            able &= given.answered_by == AnswerSource.LEARNED
            basis = np.array([b in self.bases and b.has_launch for b in chain.bases] + [False])
            launch = basis[given.basis] & (not self.kernels_alone)
            sheet_s, twin_sheet_s = (_sheet_s(gpu, part, launch) for gpu in (self.gpu, twin_gpu))
            ratio, width = sheet_s / twin_sheet_s, np.exp(CHIP_WIDTH)
            rank = np.array([self.bases.index(b) if b in self.bases else -1 for b in chain.bases] + [-1])[given.basis]
            bound, t_s = bound_s(self.gpu, part, cold=False), np.maximum(given.t_s * ratio, least_s(self.gpu, part))
            low_s = np.minimum(np.maximum(given.low_s * ratio / width, bound), t_s)
            scaled = Estimates(t_s, low_s, np.maximum(given.high_s * ratio * width, t_s), given.outside)
            answers.fill(rows[able], scaled.take(able), AnswerSource.SAME_CHIP, rank[able], given.evidence[able])

    def _twin(self, device: str) -> Estimator:
        """The chain of another board, limited to its models."""
        if device not in self._twins:
            self._twins[device] = Estimator(
                self.index, device, (AnswerSource.LEARNED,), self.method, self.framework, self.launch, self.models,
                self.kernels_alone,
            )  # fmt: skip
        return self._twins[device]

    def _models_across(self, asked: Operators, answers: Answers) -> tuple[Bool, Float64]:
        """Answer from the models across devices of this vendor, anchored by this device's few measurements of a group.

        A model replaces the interpolation of those few if its range is narrower. Returns a mask of the operators that
        anchored models answered for, and the addition to the standard deviation of a model's error (log) for its
        distance from this device and from its training data, shape (n,) both.
        """
        by_anchors, sigma = np.zeros(len(asked), dtype=np.bool_), np.zeros(len(asked))
        for model, rank in self._models_of("", asked.family):
            few_measured = (answers.answered_by == AnswerSource.INTERPOLATED) & (answers.evidence < ENOUGH_TO_LEARN)
            rows = np.flatnonzero(few_measured | (answers.answered_by == AnswerSource.NONE))
            if not len(rows):
                break
            part = asked.take(rows)
            known, mapped, extra = model.covers(part)
            known &= self._at_one_rate(part, mapped)
            keys = np.where(known, asked.group_keys[rows], np.uint64(0))
            measured = _keys(self._measured(asked.family, range(rank, rank + 1)))
            for key in (np.uint64(0), *measured):
                # Key 0: all groups that were not measured here.
                of_key = known & (~np.isin(keys, measured) if not key else keys == key)
                if not of_key.any():
                    continue
                anchors = self._anchors(model, rank, part.take(of_key).take(np.array([0]))) if key else None
                (estimates, near), at = self._ask(model, mapped.take(of_key), extra[of_key], anchors), rows[of_key]
                open_ = answers.answered_by[at] == AnswerSource.NONE
                with np.errstate(invalid="ignore"):
                    narrower = estimates.high_s / estimates.low_s < answers.high_s[at] / answers.low_s[at]
                chosen = np.where(open_, near, narrower)
                answers.fill(at[chosen], estimates.take(chosen), AnswerSource.LEARNED_ACROSS, rank, model.facts.rows)
                by_anchors[at[chosen]] = anchors is not None
                distance_sigma = device_distance(model.facts, self.gpu) if self.gpu is not None else 0.0
                sigma[at[chosen]] = np.hypot(model.facts.growth * np.asarray(estimates.outside)[chosen], distance_sigma)
        return by_anchors, sigma

    def _at_one_rate(self, ops: Operators, mapped: Operators) -> Bool:
        """Mask of the operators whose format runs at the same rate as the format that the model substitutes.

        fp16 and bf16 replace one another, but not on a device with tensor cores for only one of them.
        """
        if self.gpu is None:
            return np.ones(len(ops), dtype=np.bool_)
        gpu = self.gpu
        rates, model_rates = (
            np.array([rate_tflops(gpu, dtype, "matmul", tf32=False) for dtype in each.dtypes]) for each in (ops, mapped)
        )
        return np.asarray(rates == model_rates, dtype=np.bool_)

    def _models_of(self, device: str, family: str) -> list[tuple[LearnedModel, int]]:
        """The models of a device ("": across devices) that may answer, each with the rank of its basis; best first."""
        of_device = (m for m in self.able_models if (m.facts.device, m.facts.family) == (device, family))
        able = [m for m in of_device if self._may_answer(m.facts.measured_as)]
        ranked = [(m, self.bases.index(m.facts.measured_as)) for m in able]
        return sorted(ranked, key=lambda pair: (pair[1], pair[0].name))

    def _measured(self, family: str, ranks: range) -> list[GroupInfo]:
        """The groups of this device whose basis has a rank in ``ranks``."""
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
        """Fit a model's correction to this device's own measurements of a group."""
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
        for launched in (False, True):
            rows = np.flatnonzero(able & (launch == launched))
            if self.gpu is None or not len(rows):
                continue
            times = analytic.analytic_answers(self.gpu, asked.take(rows), launch=launched, conv_law=self.conv_law)
            answers.fill(rows, Estimates(*times), AnswerSource.ANALYTIC, -1, 0)


def same_chip(gpu: Gpu, other: Gpu) -> bool:
    """Whether two boards carry the same chip with the same number of multiprocessors."""
    chip = (gpu.vendor, gpu.arch, gpu.compute_capability, gpu.sm_count, gpu.l2_mbyte)
    return chip == (other.vendor, other.arch, other.compute_capability, other.sm_count, other.l2_mbyte)


def _sheet_s(gpu: Gpu, ops: Operators, launch: Bool) -> Float64:
    """Operator times from the data sheet, seconds, shape (n,); ``launch`` marks those that include a launch."""
    alone, launched = (
        analytic.analytic_answers(gpu, ops, launch=flag)[0] if np.any(launch == flag) else np.zeros(len(ops))
        for flag in (False, True)
    )
    return np.where(launch, launched, alone)


def _over_other_devices(gpu: Gpu, ops: Operators) -> Float64:
    """Correction factors, from whole measured steps, for answers based on other devices, shape (n,)."""
    if ops.family not in ("matmul", "elementwise", "normalization"):
        return np.ones(len(ops))
    names, dtypes = ops.texts["name"], ops.texts["dtype"]
    kinds = [
        ops.family if ops.family != "normalization" else "layer_norm" if name == "layer_norm" else "softmax"
        for name in names.table
    ]
    table = [[over_other_devices(gpu, kind, dtype) for dtype in dtypes.table] for kind in kinds]
    return np.array(table or [[1.0]])[names.codes, dtypes.codes]


def _keys(groups: list[GroupInfo]) -> UInt64:
    return np.array([group.key for group in groups], dtype=np.uint64)


def _in_order(rows: Counter[Basis]) -> list[Basis]:
    """Sort bases, given their row counts, by preference; of two frameworks the one with more rows comes first."""
    return sorted(rows, key=lambda basis: (METHOD_ORDER.index(basis.method), -rows[basis], basis))
