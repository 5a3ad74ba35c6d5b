"""The search: estimate every plan that fits, simulate the best as what-ifs, rank them by throughput or by cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from msgspec import Struct, structs

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Phase
from whatif.hardware.cluster.cluster_file import load_cluster
from whatif.hardware.gpu import gpu_asked_for
from whatif.models.durations.estimator import device
from whatif.models.exchange.collective_tasks import communicates, recorded_workers
from whatif.models.layers.segments import segments
from whatif.prediction.baseline import Baseline, ends_ns
from whatif.prediction.composition import Kept, compose, in_order, spelled
from whatif.prediction.peak_fit import fits, high_peak_bytes
from whatif.prediction.predict import Prediction
from whatif.prediction.predict import predicted as predicted_under
from whatif.prediction.ranges import error_sums, error_sums_between, simulated_at
from whatif.prediction.totals import totals
from whatif.prediction.transform import AXES, Transform, load_transform
from whatif.questions.plan.estimate import Composer, Estimate, Parts, median_step, steady_passes
from whatif.questions.plan.launch import BATCH, launch_flags
from whatif.questions.plan.space import DDP, FSDP, Plan, micro_batches, plans_of
from whatif.questions.recommend.prices import Prices
from whatif.questions.sweep.spread import spread
from whatif.runtime.errors import WhatifError
from whatif.runtime.progress import Progress
from whatif.simulation.steps import step_ns
from whatif.units import counted, size

# Blocks are split across neighbours in one node: between nodes four sums a layer take longer than the split saves.
MOST_TENSOR = 8
# Micro-batches larger than this multiple of the recorded one cannot be predicted from its kernels.
MOST_TIMES = 8
# The places of what-ifs that change what a plan itself adds, and that one device does not have.
COMMUNICATION = ("sums", "network", "paces")
# Number of the best plans simulated: estimates from pieces only rank plans whose steps differ by a few percent.
SIMULATED = 4
# Passes of all stages together up to which a pipeline is simulated without extrapolation.
SIMULATED_PASSES = 4096
# Up to this many are simulated as long as an estimate is better than all simulations.
MOST_SIMULATED = 8
_KEPT = 60  # estimates kept of each way of cutting, to compare with the other ways


class Asked(Struct, frozen=True):
    """One question: devices of a cluster, samples per step of all of them; memory, power and price of a device."""

    gpus: int
    cluster: str
    global_batch: int
    memory_bytes: int | None = None
    power_watt: float | None = None
    per_hour: float | None = None
    what_ifs: tuple[Transform, ...] = ()  # applied with every plan, before it


class Row(Struct, frozen=True):
    """A plan with its step and memory; ``simulated`` ones by their what-ifs, others estimated from pieces."""

    asked: Asked
    plan: Plan
    parts: Parts
    peak_bytes: int | None
    step_ms: float
    low_ms: float | None
    high_ms: float | None
    samples_per_s: float
    energy_j: float | None
    what_ifs: tuple[str, ...]
    high_bytes: int | None  # the upper end of the peak's range
    simulated: bool = False

    @property
    def fits(self) -> bool | None:
        """Whether it fits, as ``whatif.prediction.peak_fit.fits`` says."""
        return fits(self.peak_bytes, self.high_bytes, self.asked.memory_bytes)

    @property
    def cost(self) -> float | None:
        """Price of a million samples; None without prices."""
        price = self.asked.per_hour
        return None if price is None else price * self.plan.devices / 3600 / self.samples_per_s * 1e6

    @property
    def memory_left(self) -> int | None:
        """Free bytes of the fullest device; None if its memory or the peak is unknown."""
        held = self.asked.memory_bytes
        return None if self.peak_bytes is None or held is None else held - self.peak_bytes

    @property
    def rest_ms(self) -> float:
        """The simulated step minus its parts, ms; below 0 if parts overlap, 0 for an estimate."""
        return self.step_ms - self.parts.step_ms

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return {
            "cluster": self.asked.cluster, **self.plan.to_dict(), "predicted_ms": self.step_ms, "low_ms": self.low_ms,
            "high_ms": self.high_ms, "simulated": self.simulated, "samples_per_s": self.samples_per_s,
            "energy_j": self.energy_j, "cost_per_million_samples": self.cost, "peak_memory_bytes": self.peak_bytes,
            "high_peak_memory_bytes": self.high_bytes, "memory_left_bytes": self.memory_left, "fits": self.fits,
            "parts": self.parts._asdict(), "rest_ms": self.rest_ms, "what_ifs": list(self.what_ifs),
        }  # fmt: skip


class Planned(Struct, frozen=True):
    """Plans, the best first; plain DDP and FSDP for comparison; and the ways without a plan, with the reason.

    ``each``: the best plan for each question in ``asked``, simulated, if there are several.
    """

    baseline: Baseline
    asked: tuple[Asked, ...]
    rows: tuple[Row, ...]
    plain: dict[str, Row | str]
    counted: int  # plans that were estimated
    left_out: dict[str, str]
    by: str
    currency: str
    unit: str  # what a sample is: "samples", or "recorded batches" if their size is unknown
    each: tuple[Row, ...] = ()

    @property
    def best(self) -> Row:
        """The best plan."""
        return self.rows[0]

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions about a recording without a batch size, or whose clock has no steps."""
        notes = []
        if not self.in_samples:
            notes.append(f"plan: the trace lacks its batch size: put it in place of {BATCH} in the launch flags.")
        if self.baseline.clock == "span":
            count = steps_in(self.baseline)
            taken = f"a step is taken to be the span divided by its {count} steps" if count > 1 else (
                "the whole span is taken to be one step; if it holds several, set --step-count"
            )  # fmt: skip
            notes.append(f"plan: {taken}.")
        return tuple(notes)

    @property
    def in_samples(self) -> bool:
        """Whether plans count samples; if not, recorded batches of unknown size."""
        return self.unit == "samples"

    @property
    def launch(self) -> dict[str, str]:
        """The flags of the best plan by launcher or library."""
        plan, cluster = self.best.plan, self.best.asked.cluster
        blocks = len(segments(self.baseline.graph, None))
        return launch_flags(plan, cluster, in_samples=self.in_samples, blocks=blocks)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as a JSON object with the keys that scripts rely on."""
        return {
            "trace": self.baseline.graph.info.path, "step_clock": self.baseline.clock,
            "baseline_ms": self.baseline.step_ms, "ranked_by": self.by, "unit": self.unit,
            "currency": self.currency or None,
            "asked": [
                {"gpus": question.gpus, "cluster": question.cluster, "global_batch": question.global_batch,
                 "memory_bytes": question.memory_bytes} for question in self.asked
            ],
            "plans_estimated": self.counted,
            "plans": [row.to_dict() for row in self.rows],
            "best_of_each": [row.to_dict() for row in self.each],
            "plain": {name: row if isinstance(row, str) else row.to_dict() for name, row in self.plain.items()},
            "left_out": self.left_out, "notes": list(self.notes),
            "launch": self.launch,
        }  # fmt: skip


def asked_of(
    baseline: Baseline, gpus: int, cluster: str = "", *, global_batch: int | None = None,
    memory_bytes: int | None = None, prices: Prices | None = None, what_ifs: Sequence[Transform] = (),
) -> Asked:  # fmt: skip
    """Return a question with defaults from the cluster and the recording.

    The batch is by default the recorded one on every device, the memory that of the GPU. The cluster is by default the
    usual one of the recorded GPU, with such GPUs; for a named cluster of other GPUs the what-if ``device`` comes first.
    Raises WhatifError on recordings of one or all of several workers or of inference, on an unknown cluster or GPU, and
    on what-ifs of devices, passes and recomputation, which the search sets itself, and of communication.
    """
    for name, place in ((what_if.name, what_if.place) for what_if in what_ifs):
        if name == "gradient_accumulation":
            raise _changes_batch(name)
        if name == "device":
            raise WhatifError(
                "plan: expected what-ifs that go with the cluster's GPU, got device; name a cluster of that GPU with "
                "--cluster."
            )
        if name == "activation_checkpoint":
            raise WhatifError(f"plan: {name} is part of the search: it tries each plan with and without recomputation.")
        if place in AXES:
            raise WhatifError(
                f"plan: expected what-ifs of one device, got {name}, which adds devices; the search does that."
            )
        if place in COMMUNICATION:
            raise WhatifError(
                f"plan: expected what-ifs of one device, got {name}, which changes communication among several; search "
                "without it, then apply it with the what-ifs of a plan."
            )
    info = baseline.graph.info
    ranks = f"the recordings of {counted(len(info.ranks), 'rank')}, whose work is that of all together"
    worker = "that of one worker of several, which waits for the others"
    if info.ranks or communicates(baseline.graph) or (recorded_workers(baseline.graph) or 1) > 1:
        raise WhatifError(
            f"plan: expected a step of one GPU, got {ranks if info.ranks else worker}; record one worker, or "
            "ask for one plan with `whatif apply distributed:workers=8` and the files of all ranks."
        )
    if not (baseline.graph.phase == Phase.BACKWARD).any():
        raise WhatifError(
            "plan: expected a recording of training, got one without a backward pass; inference needs no plan, because "
            "each GPU runs batches of its own."
        )
    recorded_gpu = device(baseline.graph)
    usual = recorded_gpu.cluster if recorded_gpu is not None else ""
    if not cluster and not usual:
        why = "the recorded GPU has no usual one" if info.gpu else "the recording is of no GPU"
        raise WhatifError(f"plan: expected --cluster NAME, as {why}; see docs/cluster.md.")
    named_gpu = load_cluster(cluster).gpu if cluster and baseline.graph.has_gpu else None
    gpu = gpu_asked_for(named_gpu) if named_gpu else recorded_gpu
    is_other = gpu is not None and (recorded_gpu is None or recorded_gpu.name != gpu.name)
    move = (load_transform("device", to=gpu.name),) if gpu is not None and is_other else ()
    capacity_bytes = memory_bytes or (gpu.memory_bytes if gpu is not None else info.gpu_memory_bytes)
    price = prices.per_hour.get(gpu.name) if prices and gpu is not None else None
    batch = global_batch or gpus * (info.batch_size or 1)
    watt = None if gpu is None else gpu.power_watt
    return Asked(gpus, cluster or usual, batch, capacity_bytes, watt, price, (*move, *what_ifs))


def unpriced(asked: Sequence[Asked]) -> str:
    """Return the names of the clusters whose GPUs have no price; "" if all have one."""
    return ", ".join(dict.fromkeys(question.cluster for question in asked if question.per_hour is None))


def plan(
    baseline: Baseline,
    asked: Sequence[Asked],
    *,
    by: str = "throughput",
    currency: str = "",
    jobs: str | int = 1,
    progress: Progress | None = None,
) -> Planned:
    """Search the plans of every question in ``asked`` and rank them ``by`` "throughput" or "cost".

    Raises WhatifError if no plan fits, with the reason, or on "cost" if a GPU has no price.
    """
    if by == "cost" and (names := unpriced(asked)):
        raise WhatifError(
            f"plan: expected a price for the GPUs of each cluster to rank by cost, got none for {names}; "
            "add it to the file that --prices names."
        )
    unit = "samples"
    if baseline.graph.info.batch_size is None:
        unit = "recorded batches"
        baseline = structs.replace(
            baseline, graph=baseline.graph.replace(info=replace(baseline.graph.info, batch_size=1))
        )
    rows: list[Row] = []
    searched: list[tuple[str, Asked, str]] = []  # with the reason if there are no plans
    smallest_plans: list[tuple[Estimate, Asked]] = []
    tried = 0
    for question in asked:
        ways = [Plan(tensor, 1, 1, DDP, 1, 1, again) for tensor in _tensors(question) for again in (False, True)]
        compositions = [(*question.what_ifs, *map(load_transform, way.inner(question.cluster))) for way in ways]
        found = spread(partial(_estimated, question), baseline, compositions, jobs=jobs)
        for place, (way, (estimates, count, reason, smallest)) in enumerate(zip(ways, found, strict=True)):
            tried += count
            smallest_plans += [(smallest, question)] if smallest else []
            searched.append((_named(way), question, reason))
            rows += [_row(baseline, question, estimate) for estimate in estimates]
            if progress is not None:
                progress(place + 1, len(ways))
    left_out = _left_out(searched)
    if not rows and not smallest_plans:
        raise WhatifError(f"plan: expected a plan of these devices, got none: {next(iter(left_out.values()))}")
    if not rows:
        raise WhatifError(_none_fits(*min(smallest_plans, key=lambda entry: entry[0].peak_bytes or 0)))
    kept: Kept = {}
    ranked, refused = _simulated(baseline, rows, by, kept)
    if not ranked:
        closest = min(rows, key=lambda row: row.peak_bytes or 0)
        last = next(reversed(refused.values()), "")
        raise WhatifError(f"plan: expected a plan that can be simulated, got none: {last}" if last
                          else _none_fits(closest, closest.asked))  # fmt: skip
    plain = _plain(baseline, asked, ranked, refused, kept)
    ranked = _with_plain(ranked, plain, by)
    each = _best_of_each(baseline, asked, ranked, by, kept) if len(asked) > 1 else ()
    return Planned(baseline, tuple(asked), tuple(ranked), plain, tried, left_out, by, currency, unit, each)


def _names_changing_batch(graph: TaskGraph, what_ifs: Sequence[Transform]) -> Iterator[str]:
    """Yield the names of the what-ifs that change the batch."""
    for what_if in in_order(what_ifs):
        before, graph = graph, compose(graph, [what_if])
        if graph.info.batch_size != before.info.batch_size or graph.info.passes != before.info.passes:
            yield what_if.name


def _changes_batch(names: str) -> WhatifError:
    return WhatifError(
        f"plan: expected what-ifs that leave the batch as it is, got {names}; the search varies micro-batches and "
        "passes itself: say --global-batch instead."
    )


def _tensors(asked: Asked) -> list[int]:
    known = load_cluster(asked.cluster).levels
    node = (known[0].workers or 1) if known else MOST_TENSOR
    return [way for way in (1, 2, 4, 8) if way <= min(node, MOST_TENSOR) and asked.gpus % way == 0]


def _estimated(
    asked: Asked, baseline: Baseline, transforms: Sequence[Transform]
) -> tuple[list[Estimate], int, str, Estimate | None]:
    """The best estimates of one way of splitting and recomputing, the number of plans, and why there are none.

    If none fits, also the one that takes the least memory.
    """
    tensor = next((int(str(t.options["workers"])) for t in transforms if t.name == "tensor_parallel"), 1)
    recompute = any(transform.name == "activation_checkpoint" for transform in transforms)
    try:
        composer = Composer(compose(median_step(baseline), transforms), asked.cluster)
    except WhatifError as error:
        return [], 0, str(error), None
    if composer.batch != (baseline.graph.info.batch_size or 1):
        raise _changes_batch(", ".join(_names_changing_batch(baseline.graph, asked.what_ifs)))
    micros = micro_batches(asked.global_batch, MOST_TIMES * composer.batch)
    levels = load_cluster(asked.cluster).levels
    node = (levels[0].workers or 0) if len(levels) > 1 else 0
    plans = list(
        plans_of(
            tensor, asked.gpus, asked.global_batch, most_stages=composer.most_stages, micros=micros,
            recompute=recompute, node=node,
        )
    )  # fmt: skip
    found = list(islice(composer.estimates(iter(plans), asked.memory_bytes), _KEPT))
    if tensor == 1:  # plans of whole copies are kept for comparison
        for level in (DDP, FSDP):
            copies = (plan for plan in plans if plan.is_plain(level))
            found += islice(composer.estimates(copies, asked.memory_bytes), 1)
    least = None
    if not found and plans:
        least = min(composer.estimates(iter(plans), None), key=lambda estimate: estimate.peak_bytes or 0, default=None)
    reason = "" if plans else (
        f"a global batch of {asked.global_batch:,} cannot be divided among groups of so many devices with as many "
        "micro-batches as pipeline stages, or more; try another --global-batch or --gpus"
    )  # fmt: skip
    if plans and not found and least is None:  # the cluster has no such groups
        try:
            composer.parts(plans[0])
        except WhatifError as error:
            reason = str(error)
    return list(dict.fromkeys(found)), len(plans), reason, least


def _row(baseline: Baseline, asked: Asked, estimate: Estimate) -> Row:
    plan, step_ms = estimate.plan, estimate.parts.step_ms
    energy = None if asked.power_watt is None else asked.power_watt * plan.devices * step_ms / 1e3
    what_ifs = (*map(spelled, asked.what_ifs), *plan.what_ifs(asked.cluster, baseline.graph.info.batch_size or 1))
    return Row(
        asked, plan, estimate.parts, estimate.peak_bytes, step_ms, None, None, plan.samples / step_ms * 1e3, energy,
        what_ifs, _high_bytes(baseline, estimate.peak_bytes, what_ifs),
    )  # fmt: skip


def simulated(baseline: Baseline, row: Row, kept: Kept | None = None) -> Row:
    """Return the row with the step and the peak of its what-ifs, applied one after the other.

    ``kept``: graphs that other rows begin with, as in ``applied_in_turn``.

    A pipeline's steps of many passes are extrapolated from fewer, as each further pass adds the same time to each step,
    at its bounds too, and the same to the errors. Raises WhatifError if a what-if does not apply.
    """
    plan, asked = row.plan, row.asked
    recorded = baseline.graph.info.batch_size or 1

    def predicted(passes: int) -> Prediction:
        what_ifs = map(load_transform, plan.what_ifs(asked.cluster, recorded, passes))
        return predicted_under(baseline, [*asked.what_ifs, *what_ifs], kept)

    few, more = steady_passes(plan.pipeline, SIMULATED_PASSES)
    long = plan.pipeline > 1 and plan.passes > more
    first = predicted(few if long else plan.passes)
    last, along = (predicted(more), (plan.passes - few) / (more - few)) if long else (first, 0.0)
    times_ns = (
        np.rint(np.array(begin) + along * np.subtract(end, begin)).astype(np.int64)
        for begin, end in zip(first.times_ns, last.times_ns, strict=True)
    )
    steps_ns = [step_ns(tuple(times.tolist()), first.graph, baseline.clock) for times in times_ns]
    bounded = simulated_at(first.graph)
    sums = error_sums_between(bounded, simulated_at(last.graph), np.array([along])) if long else error_sums(bounded)
    step_ms, low_ms, high_ms = (
        time_ns / 1e6 / steps_in(baseline) for time_ns in (steps_ns[0], *ends_ns(baseline, first.graph, steps_ns, sums))
    )
    total = totals(first.graph, step_ms, baseline.clock)
    most = first.graph.info.peak_bytes
    most = row.peak_bytes if most is None or long else most
    return structs.replace(
        row, step_ms=step_ms, low_ms=low_ms, high_ms=high_ms, samples_per_s=plan.samples / step_ms * 1e3,
        energy_j=total.energy_j, peak_bytes=most, simulated=True,
        high_bytes=_high_bytes(baseline, most, row.what_ifs),
    )  # fmt: skip


def _high_bytes(baseline: Baseline, peak_bytes: int | None, what_ifs: Sequence[str]) -> int | None:
    """The upper end of the range of a peak under what-ifs as written on a command line, bytes."""
    transforms = [load_transform(name) for name in what_ifs]
    return None if peak_bytes is None else high_peak_bytes(baseline.graph.info, peak_bytes, transforms)


def steps_in(baseline: Baseline) -> int:
    """Return the number of steps in one period of the baseline's clock: several only in a span."""
    return max(baseline.graph.info.n_steps, 1) if baseline.clock == "span" else 1


def _key(by: str) -> Any:
    """The order of rows ``by`` throughput or cost; of equal ones first what recomputes nothing."""
    return lambda row: (row.cost if by == "cost" else -row.samples_per_s, row.plan.recompute)


def _simulated(
    baseline: Baseline, rows: list[Row], by: str, kept: Kept, least: int = SIMULATED
) -> tuple[list[Row], dict[Plan, str]]:
    """The rows ranked, the best simulated, without those that then do not apply or fit; and why plans do not apply."""
    key = _key(by)
    done: list[Row] = []
    left = sorted(rows, key=key)
    refused: dict[Plan, str] = {}
    while left and len(done) < MOST_SIMULATED:
        if len(done) >= least and key(left[0]) >= min(map(key, done)):
            break
        row = left.pop(0)
        try:
            changed = simulated(baseline, row, kept)
        except WhatifError as error:
            refused[row.plan] = str(error)
            continue
        if changed.fits is not False:
            done.append(changed)
    return [*sorted(done, key=key), *left], refused


def _plain(
    baseline: Baseline, asked: Sequence[Asked], rows: Sequence[Row], refused: Mapping[Plan, str], kept: Kept
) -> dict[str, Row | str]:
    """The best plans of plain data parallelism: a copy of the model per device, whole (DDP) or sharded (FSDP)."""
    found: dict[str, Row | str] = {}
    for level, name in ((DDP, "DDP"), (FSDP, "FSDP")):
        fitting = [row for row in rows if row.plan.is_plain(level)]
        if not fitting:
            several = [question for question in asked if question.gpus > 1]
            uneven = [question for question in several if question.global_batch % question.gpus]
            found[name] = (
                "one device has no other" if not several
                else f"a global batch of {uneven[0].global_batch:,} cannot be divided among {uneven[0].gpus:,} copies"
                if len(uneven) == len(several)
                else next((why for plan, why in refused.items() if plan.is_plain(level)), "does not fit")
            )  # fmt: skip
            continue
        best = fitting[0]
        try:
            found[name] = best if best.simulated else simulated(baseline, best, kept)
        except WhatifError as error:
            found[name] = str(error)
    return found


def _best_of_each(
    baseline: Baseline, asked: Sequence[Asked], rows: Sequence[Row], by: str, kept: Kept
) -> tuple[Row, ...]:
    """The best row of each number of GPUs and cluster, simulated; none if no plan fits those."""
    found = []
    for question in asked:
        of_question = [row for row in rows if row.asked is question]
        if of_question and of_question[0].simulated:
            found.append(of_question[0])
        elif of_question:
            found += _simulated(baseline, of_question, by, kept, 1)[0][:1]
    return tuple(sorted(found, key=_key(by)))


def _with_plain(rows: Sequence[Row], plain: Mapping[str, Row | str], by: str) -> list[Row]:
    """The rows, the plain ones replaced by their simulations, which may be better than the estimates."""
    key = _key(by)
    able = [row for row in plain.values() if isinstance(row, Row) and row.fits is not False]
    beside = {(row.asked.cluster, row.plan): row for row in able}
    found = [beside.get((row.asked.cluster, row.plan), row) for row in rows]
    first = max(key(row) for row in rows if row.simulated)
    return [
        *sorted((row for row in found if row.simulated and key(row) <= first), key=key),
        *sorted((row for row in found if not row.simulated or key(row) > first), key=key),
    ]


def _named(way: Plan) -> str:
    if way.tensor > 1:
        return f"tensor {way.tensor}" + (" with recomputation" if way.recompute else "")
    return "recomputation" if way.recompute else "whole blocks"


def _left_out(searched: Sequence[tuple[str, Asked, str]]) -> dict[str, str]:
    """The reasons why ways have no plans; they name the devices if the reason differs between questions."""
    reasons: dict[str, set[str]] = {}
    for way, _, reason in searched:
        reasons.setdefault(way, set()).add(reason)
    return {
        way if len(reasons[way]) == 1 else f"{way} on {counted(asked.gpus, 'GPU')} of {asked.cluster}": reason
        for way, asked, reason in searched
        if reason
    }


def _none_fits(closest: Estimate | Row, asked: Asked) -> str:
    plan, least = closest.plan, size(closest.peak_bytes or 0)
    of = f" of {size(asked.memory_bytes)}" if asked.memory_bytes else ""
    again = ", all blocks recomputed" if plan.recompute else ""
    return (
        f"plan: expected a plan that fits {counted(plan.devices, 'device')}{of}, got at least {least} (tensor "
        f"{plan.tensor}, pipeline {plan.pipeline}, data {plan.data}, micro-batches of {plan.micro_batch}{again}); try "
        "more --gpus, --memory, or another --global-batch."
    )
