"""Find stragglers: waiting and transfer of each rank, which one comes last, and what it spends more time on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct

from whatif.graph.kernels import FAMILY_WORDS
from whatif.graph.order import grouped
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    PHASE_NAMES,
    Array,
    Bool,
    Float64,
    Int64,
    TaskKind,
)
from whatif.ingest.ranks.merge import COLLECTIVE, place_of_threads, rank_numbers
from whatif.ingest.ranks.read import Ranks
from whatif.prediction.baseline import Baseline
from whatif.simulation.breakdown import Breakdown, breakdown
from whatif.simulation.intervals import covered_until, union
from whatif.simulation.steps import CLOCK_NOUNS, MIN_STEPS
from whatif.simulation.timeline import Timeline

# Our choice: a rank that holds the others up by less than this share of a step is no straggler.
STRAGGLES = 0.01
# Our choice: what explains less than this share of a straggler's delay is not reported.
EXPLAINS = 0.1
# Number of parts reported of each kind.
MOST_PARTS = 3


class Excess(Struct, frozen=True):
    """Work that a rank spends more time on than the median of the others, ms a step or span."""

    of: str  # phase, family or layer
    name: str
    ms: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {self.of: self.name, "ms": round(self.ms, 6)}


class RankRow(Struct, frozen=True):
    """One rank, times in ms a step or span: waiting and transfer, and the breakdown."""

    rank: int
    path: str
    clock_offset_us: float
    clock_drift_ppm: float
    clock_spread_us: float
    collectives: int
    unmatched: int
    waiting_ms: float  # while it computes nothing else
    transfer_ms: float
    last_pct: float  # of the collectives that it takes part in
    late_ms: float  # mean wait of the others in the collectives to which it comes last
    breakdown: Breakdown | None  # None if there are too many ranks for one each
    excess: tuple[Excess, ...] = ()  # of stragglers

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return {
            "rank": self.rank,
            "trace": self.path,
            "clock_offset_us": round(self.clock_offset_us, 3),
            "clock_drift_ppm": round(self.clock_drift_ppm, 3),
            "clock_spread_us": round(self.clock_spread_us, 3),
            "collectives": self.collectives,
            "unmatched": self.unmatched,
            "waiting_ms": round(self.waiting_ms, 6),
            "transfer_ms": round(self.transfer_ms, 6),
            "last_pct": round(self.last_pct, 3),
            "late_ms": round(self.late_ms, 6),
            "breakdown": self.breakdown.to_dict() if self.breakdown else None,
            "gpu_busy_ms": round(self.breakdown.gpu_busy_ms, 6) if self.breakdown else None,
            "cpu_busy_ms": round(self.breakdown.cpu_busy_ms, 6) if self.breakdown else None,
            "excess": [part.to_dict() for part in self.excess],
        }


class RankReport(Struct, frozen=True):
    """All ranks, and the stragglers among them, the worst one first."""

    world_size: int
    collectives: int
    step_ms: float
    noun: str  # the unit of the times: step, or span
    rows: tuple[RankRow, ...]
    stragglers: tuple[RankRow, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """One sentence on each straggler, or one that there is none."""
        if not self.stragglers:
            return (f"no straggler: no rank holds the others up by more than one percent of a {self.noun}.",)
        return tuple(_sentence(row, self.step_ms, self.noun) for row in self.stragglers)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "world_size": self.world_size,
            "collectives": self.collectives,
            "ranks": [row.to_dict() for row in self.rows],
            "stragglers": [row.rank for row in self.stragglers],
            "sentences": list(self.sentences),
        }


class Meetings(Struct, frozen=True):
    """Ranks in the matched collectives of a timeline: a row for each rank of each, shape (n_members,) each."""

    task: Array  # of its transfer
    rank: Array  # its index among the ranks of the graph
    step: Array
    arrival_ns: Array
    all_here_ns: Array  # when all have arrived; its own arrival if it waits for none
    transfer_ns: Array
    last_rank: Array  # the index of the rank that arrives last
    last: Bool  # whether the rank arrives after all others


def meetings(timeline: Timeline) -> Meetings:
    """Return the waits and transfers of all ranks in the timeline of a merged graph."""
    graph = timeline.graph
    part_of = graph.attached[COLLECTIVE]
    members = np.flatnonzero(part_of)
    rank = place_of_threads(graph).take(graph.thread[members])
    by_collective = np.lexsort((rank, np.abs(part_of[members])))
    members, rank = members[by_collective], rank[by_collective]
    # Arrivals and transfers are both sorted by collective and rank, so that they correspond.
    arrives = graph.kind[members] == TaskKind.WAIT
    arrival, transfer = members[arrives], members[~arrives]
    collective, place = np.abs(part_of[arrival]), rank[arrives]
    arrival_ns = timeline.end_ns[arrival]
    first = np.flatnonzero(np.append(True, collective[1:] != collective[:-1]))[: len(collective)]
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(collective))))
    all_here_ns = np.maximum.reduceat(arrival_ns, first)[group] if len(first) else arrival_ns
    by_arrival = np.lexsort((place, arrival_ns, group))
    ends = np.append(first[1:], len(group))[: len(first)] - 1
    latest, before = by_arrival[ends], by_arrival[np.maximum(ends - 1, first)]
    last = np.zeros(len(arrival), dtype=np.bool_)
    last[latest] = arrival_ns[latest] > arrival_ns[before]
    return Meetings(
        task=transfer,
        rank=place,
        step=graph.step[arrival],
        arrival_ns=arrival_ns,
        all_here_ns=np.where(part_of[transfer] > 0, all_here_ns, arrival_ns),
        transfer_ns=graph.duration_ns[transfer],
        last_rank=place[latest][group] if len(first) else place,
        last=last,
    )


def report(ranks: Ranks, baseline: Baseline, most: int = 64) -> RankReport:
    """Report each rank of a baseline's graph, with breakdowns of the first ``most`` ranks and of stragglers only.

    Times are means over the simulated steady steps (over all steps if there are few), or of the whole span if that
    is the baseline's clock. They exclude the profiler if the baseline does.
    """
    graph = baseline.graph
    steps = _timed_steps(baseline)
    met, matched, count = meetings(baseline.timeline), ranks.matched, len(ranks.numbers)
    counted = _counted(met, steps)
    waiting_ms = _covered_ms(baseline, met, met.arrival_ns, met.all_here_ns, idle=True)
    transfer_ms = _covered_ms(baseline, met, met.all_here_ns, met.all_here_ns + met.transfer_ns)
    late_ms = _late_ms(baseline, met)
    taken = np.bincount(met.rank[counted], minlength=count)
    last = np.bincount(met.rank[counted & met.last], minlength=count)
    step_ms = baseline.step_ms
    worst = [i for i in np.argsort(-late_ms, kind="stable").tolist() if late_ms[i] > STRAGGLES * step_ms]
    bounds, by_rank = grouped(count + 1, place_of_threads(graph).astype(np.int32).take(graph.thread))
    tasks_of = [by_rank[begin:end] for begin, end in pairwise(bounds.tolist())]
    offsets_ns = ranks.clock_offsets_ns
    excess = {i: _excess(graph, steps, i, float(late_ms[i])) for i in worst[:most]} if count > 1 else {}
    shown = {*range(min(count, most)), *worst[:most]}
    rows = tuple(
        RankRow(
            rank=number,
            path=ranks.paths[i],
            clock_offset_us=offsets_ns[i] / 1e3,
            clock_drift_ppm=ranks.clocks[i].drift * 1e6,
            clock_spread_us=ranks.clocks[i].spread_ns / 1e3,
            collectives=len(ranks.collectives[i]),
            unmatched=matched.unmatched[i],
            waiting_ms=float(waiting_ms[i]),
            transfer_ms=float(transfer_ms[i]),
            last_pct=100.0 * last[i] / max(taken[i], 1),
            late_ms=float(late_ms[i]),
            breakdown=breakdown(baseline.timeline, baseline.clock, tasks_of[i]) if i in shown else None,
            excess=excess.get(i, ()),
        )
        for i, number in enumerate(ranks.numbers)
    )
    noun = CLOCK_NOUNS[baseline.clock]
    return RankReport(ranks.world_size, matched.n_collectives, step_ms, noun, rows, tuple(rows[i] for i in worst))


def held_up_by(baseline: Baseline) -> tuple[int, float] | None:
    """Return the rank for which the others wait longest, and how long on average, ms a step or span.

    None in a graph of one rank. It is the largest ``late_ms`` of the table of ranks.
    """
    if COLLECTIVE not in baseline.graph.attached or len(rank_numbers(baseline.graph)) < 2:
        return None
    late_ms = _late_ms(baseline, meetings(baseline.timeline))
    worst = int(late_ms.argmax())
    return (int(rank_numbers(baseline.graph)[worst]), float(late_ms[worst])) if late_ms[worst] else None


def _late_ms(baseline: Baseline, met: Meetings) -> Float64:
    """The mean wait of the others for each rank, ms, shape (n_ranks,), in the collectives to which it comes last."""
    count = len(rank_numbers(baseline.graph))
    waits_ms = _covered_ms(baseline, met, met.arrival_ns, met.all_here_ns, met.last_rank, idle=True)
    return np.asarray(waits_ms / max(count - 1, 1))


def _counted(met: Meetings, steps: Array) -> Bool:
    """The mask of the meetings in ``steps``; all if there are none."""
    return np.isin(met.step, steps) if len(steps) else np.ones(len(met.step), dtype=np.bool_)


def _covered_ms(
    baseline: Baseline, met: Meetings, start_ns: Array, end_ns: Array, owner: Array | None = None, *, idle: bool = False
) -> Float64:
    """The time of each rank between start and end, ms a step or span, shape (n_ranks,); with ``owner``, by owner.

    With ``idle`` only that in which the rank computes nothing: on its GPU, or without GPUs on its CPU.
    """
    steps, count = _timed_steps(baseline), len(rank_numbers(baseline.graph))
    counted = _counted(met, steps)
    # Where collectives of one rank overlap, time counts once: each owner and rank gets a separate stretch of time.
    stretch_ns = baseline.timeline.makespan_ns + 1
    stretch = met.rank[counted] + (0 if owner is None else count * owner[counted])
    order = np.argsort(start_ns[counted] + stretch * stretch_ns, kind="stable")
    shift_ns = stretch[order] * stretch_ns
    starts, ends = union(start_ns[counted][order] + shift_ns, end_ns[counted][order] + shift_ns)
    row = starts // stretch_ns if owner is None else starts // (stretch_ns * count)
    spent_ns = ends - starts
    if idle:
        graph, timeline = baseline.graph, baseline.timeline
        tasks = np.flatnonzero((graph.gpu_work if graph.has_gpu else graph.on_cpu).mask)
        of_rank_ns = place_of_threads(graph).take(graph.thread[tasks]) * stretch_ns
        order = np.argsort(timeline.start_ns[tasks] + of_rank_ns, kind="stable")
        busy = union((timeline.start_ns[tasks] + of_rank_ns)[order], (timeline.end_ns[tasks] + of_rank_ns)[order])
        back_ns = starts // (stretch_ns * count) * stretch_ns * count  # from the owner's stretch to the rank's own
        spent_ns = spent_ns - covered_until(*busy, ends - back_ns) + covered_until(*busy, starts - back_ns)
    total = np.bincount(row, spent_ns.astype(np.float64), minlength=count)
    return np.asarray(total / 1e6 / max(len(steps), 1), dtype=np.float64)


def _timed_steps(baseline: Baseline) -> Array:
    """The steps over which times are averaged; none for the whole span, in which everything counts."""
    return np.empty(0, dtype=np.int64) if baseline.clock == "span" else steady_steps(baseline.graph)


def steady_steps(graph: TaskGraph) -> Array:
    """Return the steps that are neither first nor last if there are enough, else all that have tasks."""
    first, last = graph.info.steady
    if graph.info.n_steps >= MIN_STEPS and last > first:
        return np.arange(first, last)
    return np.unique(graph.step[graph.step >= 0])


def in_steps(graph: TaskGraph, steps: Array) -> Bool:
    """Return a mask, shape (n_tasks,), of the tasks of ``steps``; of all tasks without any."""
    return np.isin(graph.step, steps) if len(steps) else np.ones(len(graph), dtype=np.bool_)


def work_ms(graph: TaskGraph, tasks: Int64, codes: Array, n_codes: int) -> Float64:
    """Return the time of ``tasks`` (ids, of ranks) by rank and code, ms in all, shape (n_ranks, n_codes)."""
    place = place_of_threads(graph).take(graph.thread[tasks])
    flat = place * n_codes + codes[tasks]
    ms = np.bincount(flat, graph.duration_ns[tasks] / 1e6, minlength=len(rank_numbers(graph)) * n_codes)
    return np.asarray(ms, dtype=np.float64).reshape(-1, n_codes)


def _excess(graph: TaskGraph, steps: Array, index: int, late_ms: float) -> tuple[Excess, ...]:
    """What takes one rank longer than the median of the others, by phase, family and layer, the largest first."""
    inside = in_steps(graph, steps)
    found: list[Excess] = []
    sides = [("GPU", graph.gpu_work)] if graph.has_gpu else []
    sides.append(("CPU", graph.on_cpu))
    for side, work in sides:
        tasks = np.flatnonzero((work & inside).mask)
        known = tasks[graph.family[tasks] >= 0] if side == "GPU" or not graph.has_gpu else tasks[:0]
        for of, rows, codes, names in (
            ("phase", tasks, graph.phase, PHASE_NAMES),
            ("family", known, graph.family, FAMILY_WORDS),
            ("layer", tasks[graph.layer[tasks] > 0], graph.layer, graph.layers),
        ):
            ms = work_ms(graph, rows, codes, len(names)) / max(len(steps), 1)
            # The median of the others: with two ranks, the slow one would be half of the median of all.
            more_ms = ms[index] - np.median(np.delete(ms, index, axis=0), axis=0)
            order = np.argsort(-more_ms, kind="stable")[:MOST_PARTS].tolist()
            found += [
                Excess(of, f"{names[code]} ({side})", float(more_ms[code]))
                for code in order
                if more_ms[code] > EXPLAINS * late_ms
            ]
    return tuple(sorted(found, key=lambda part: -part.ms))


def _sentence(row: RankRow, step_ms: float, noun: str) -> str:
    who = (
        f"rank {row.rank} holds the others up by {row.late_ms:.2f} ms a {noun} ({100 * row.late_ms / step_ms:.0f} %): "
        f"it comes last to {row.last_pct:.0f} % of the collectives"
    )
    parts = []
    for of in ("phase", "family", "layer"):
        named = [f"{part.name} {part.ms:+z.2f}" for part in row.excess if part.of == of][:MOST_PARTS]
        if named:
            parts.append(f"{of} {', '.join(named)}")
    if not parts:
        most_ms = EXPLAINS * row.late_ms
        return f"{who}; no phase, family or layer takes it over {most_ms:.2f} ms longer than the others."
    return f"{who}; it works longer in {'; '.join(parts)} ms."
