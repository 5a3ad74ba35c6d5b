"""What a step gains if one part of it gets faster: causal profiling, by simulation instead of by slowing the rest.

Source: Curtsinger and Berger, "COZ: Finding Code that Counts with Causal Profiling", SOSP 2015, applied to the layers,
kernel families, phases and execution threads of a training step. COZ delays everything else at run time; a simulator
can shorten the part itself. Concurrent work is neither slowed nor sped up by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.kernels import FAMILY_NAMES
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    PHASE_NAMES,
    Array,
    Bool,
    Int32,
)
from whatif.prediction.predict import Baseline
from whatif.questions.explain import family_codes, step_work_ms
from whatif.runtime.errors import WhatifError
from whatif.simulation.group_scenarios import simulate_groups
from whatif.simulation.steps import (
    edge_tasks,
    edge_times_ns,
    span_tasks,
    step_ns,
)

# How much faster, percent: at 10 % a tenth of the time is gone, at 100 % all of it.
SPEEDUPS_PCT = (10.0, 50.0, 100.0)
# Parts are ranked by the gain at this speed-up: that of a good kernel or a fused one.
RANKED_AT_PCT = 50.0

# What a part can be, in the order of the report.
KINDS = ("side", "phase", "thread", "family", "layer")
# The sides of the machine.
GPU_SIDE, CPU_SIDE = "all GPU work", "all CPU work"

# A part below this share of a step cannot change more of it, and is not simulated.
LEAST_WORK_PCT = 0.1
# A part gets a note if its work is at least this share of a step ...
NOTED_WORK_PCT = 1.0
# ... and removing it shortens the step by less than this share of that work, or by nothing.
HIDDEN_BELOW, NOTHING_PCT = 0.25, 0.05
CHANGES_NOTHING, HIDDEN = "changes nothing", "mostly hidden"


class Sensitive(Struct, frozen=True):
    """One part of a step, and what the step gains if it is faster."""

    kind: str  # one of KINDS
    name: str
    code: int  # in its column of the graph
    gpu_ms: float  # its work in a step
    cpu_ms: float
    gain_ms: tuple[float, ...]  # one per speed-up; below 0 if the step by its clock gets longer

    @property
    def work_ms(self) -> float:
        """Its work in a step on all threads together, ms: the most that it can gain, apart from uneven steps."""
        return self.gpu_ms + self.cpu_ms


class Sensitivity(Struct, frozen=True):
    """The parts of a step that matter, of each kind the ``top`` by gain at 50 %."""

    baseline: Baseline
    speedups_pct: tuple[float, ...]
    parts: tuple[Sensitive, ...]  # by kind, then by gain
    n_parts: dict[str, int]  # of each kind, those simulated

    @property
    def step_ms(self) -> float:
        """The simulated step, ms."""
        return self.baseline.step_ms

    def of_kind(self, kind: str) -> tuple[Sensitive, ...]:
        """Return the parts of one kind, largest gain first."""
        return tuple(part for part in self.parts if part.kind == kind)

    def pct(self, ms: float) -> float:
        """Return a time as a share of the step, percent."""
        return 100.0 * ms / self.step_ms if self.step_ms > 0 else 0.0

    def note(self, part: Sensitive) -> str:
        """Return a note if a part's speed affects the step far less than its work suggests; else ""."""
        if self.pct(part.work_ms) < NOTED_WORK_PCT:
            return ""
        if self.pct(max(part.gain_ms)) < NOTHING_PCT:
            return CHANGES_NOTHING
        return HIDDEN if part.gain_ms[-1] < HIDDEN_BELOW * part.work_ms else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the parts as a JSON object, by kind."""
        return {kind: [self._part(part) for part in self.of_kind(kind)] for kind in KINDS if self.n_parts.get(kind)}

    def _part(self, part: Sensitive) -> dict[str, Any]:
        return {
            "name": part.name,
            "gpu_ms": round(part.gpu_ms, 6),
            "cpu_ms": round(part.cpu_ms, 6),
            "work_pct": round(self.pct(part.work_ms), 4),
            "gains": [
                # Adding zero turns -0.0 into 0.0.
                {
                    "speedup_pct": speedup,
                    "gain_ms": round(gain_ms, 6) + 0.0,
                    "gain_pct": round(self.pct(gain_ms), 4) + 0.0,
                }
                for speedup, gain_ms in zip(self.speedups_pct, part.gain_ms, strict=True)
            ],
            "note": self.note(part),
        }


def sensitivity(baseline: Baseline, top: int = 10) -> Sensitivity:
    """Return what a step gains if a layer, kernel family, phase or thread were 10 %, 50 % and 100 % faster.

    By the baseline's clock, the median of the steady steps. Of each kind the ``top`` by their gain at 50 %.
    """
    columns = _columns(baseline.graph)
    found = [part for kind in KINDS for part in _parts(baseline, kind, *columns[kind])]
    found = list(gains(baseline, found, SPEEDUPS_PCT))
    ranked_by = SPEEDUPS_PCT.index(RANKED_AT_PCT)
    found.sort(key=lambda part: (KINDS.index(part.kind), -part.gain_ms[ranked_by], -part.work_ms, part.code))
    n_parts = {kind: sum(part.kind == kind for part in found) for kind in KINDS}
    shown = [part for kind in KINDS for part in [p for p in found if p.kind == kind][:top]]
    return Sensitivity(baseline, SPEEDUPS_PCT, tuple(shown), n_parts)


def at_speedups(found: Sensitivity, speedups_pct: Sequence[float]) -> Sensitivity:
    """Return the same parts at other speed-ups, percent, ascending: for a curve.

    Raises WhatifError on a speed-up outside 0 to 100 %.
    """
    if not speedups_pct or not all(0 <= speedup <= 100 for speedup in speedups_pct):
        raise WhatifError(f"sensitivity: expected speed-ups from 0 to 100 %, got {list(speedups_pct)}.")
    parts = gains(found.baseline, found.parts, speedups_pct)
    return replace(found, speedups_pct=tuple(speedups_pct), parts=parts)


def gains(baseline: Baseline, parts: Sequence[Sensitive], speedups_pct: Sequence[float]) -> tuple[Sensitive, ...]:
    """Return the parts with what the step gains at each speed-up, ms: all scenarios in one batched simulation."""
    graph, clock = baseline.graph, baseline.clock
    if not parts:
        return ()
    kinds = [kind for kind in KINDS if any(part.kind == kind for part in parts)]
    groups = np.full((len(kinds), len(graph)), -1, dtype=np.int32)
    working, columns = graph.on_gpu | graph.on_cpu, _columns(graph)
    for row, kind in enumerate(kinds):
        codes, table = columns[kind]
        group_of = np.full(len(table) + 1, -1, dtype=np.int32)  # the last entry is for -1: in no group
        for group, part in enumerate(parts):
            if part.kind == kind:
                group_of[part.code] = group
        groups[row] = np.where(working, group_of[codes], -1)
    factors = 1.0 - np.asarray(speedups_pct, dtype=np.float64) / 100.0
    steps_ns = _steps_ns(graph, clock, groups, len(parts), factors)
    gain_ms = (baseline.step_ns - steps_ns) / 1e6
    return tuple(replace(part, gain_ms=tuple(gain_ms[group].tolist())) for group, part in enumerate(parts))


def _steps_ns(graph: TaskGraph, clock: str, groups: Int32, n_groups: int, factors: Array) -> Array:
    """The step of every scenario by a clock, ns, shape (n_groups, n_factors)."""
    uncounted = np.zeros(len(graph), dtype=np.bool_)
    if clock == "span":
        no_tasks = np.empty(0, dtype=np.int64)
        counted = span_tasks(graph)
        simulated = simulate_groups(graph, groups, n_groups, factors, observed=no_tasks, counted=counted)
        return np.asarray(simulated.until_ns - simulated.begin_ns)
    tasks = edge_tasks(graph, clock)[0]
    simulated = simulate_groups(graph, groups, n_groups, factors, observed=tasks, counted=uncounted)
    times_ns = np.diff(edge_times_ns(graph, simulated.start_ns, simulated.end_ns, clock), axis=0)
    return np.array(
        [
            [step_ns(tuple(times_ns[:, group, f].tolist()), graph, clock) for f in range(len(factors))]
            for group in range(n_groups)
        ]
    )


def _columns(graph: TaskGraph) -> dict[str, tuple[Array, tuple[str, ...]]]:
    """By kind the code of each task, -1 for none, and the table of names."""
    sides: Array = np.where(graph.on_gpu, 0, np.where(graph.on_cpu, 1, -1))
    if not graph.has_gpu:
        sides = np.full(len(graph), -1)  # one side has nothing to distinguish
    return {
        "side": (sides, (GPU_SIDE, CPU_SIDE)),
        "phase": (graph.phase, PHASE_NAMES),
        "thread": (graph.thread, tuple(thread.name for thread in graph.threads)),
        "family": (family_codes(graph), FAMILY_NAMES),
        "layer": (np.where(graph.layer > 0, graph.layer, -1), graph.layers),
    }


def _parts(baseline: Baseline, kind: str, codes: Array, table: tuple[str, ...]) -> list[Sensitive]:
    """The parts of one kind that work enough to be reported, without gains."""
    graph = baseline.graph
    gpu_ms, cpu_ms = (
        _work_ms(baseline, side & (codes >= 0), codes, len(table)) for side in (graph.on_gpu.mask, graph.on_cpu.mask)
    )
    enough = np.flatnonzero((gpu_ms + cpu_ms) * 100 > LEAST_WORK_PCT * baseline.step_ns / 1e6)
    return [
        Sensitive(kind, table[code], code, float(gpu_ms[code]), float(cpu_ms[code]), ()) for code in enough.tolist()
    ]


def _work_ms(baseline: Baseline, chosen: Bool, codes: Array, n_codes: int) -> Array:
    """The work of chosen tasks by code, ms, shape (n_codes,): the median of the steady steps, or what is in the span.

    By the step that tasks belong to, not by when they run: a CPU that runs ahead works on a step during another.
    """
    graph = baseline.graph
    if baseline.clock == "span":
        return np.bincount(codes[chosen], weights=step_work_ms(baseline)[chosen], minlength=n_codes)
    first, last = graph.info.steady if graph.info.steady[1] > graph.info.steady[0] else (0, graph.info.n_steps)
    chosen = chosen & (graph.step >= first) & (graph.step < last)
    n_steps = max(last - first, 1)
    place = codes[chosen].astype(np.int64) * n_steps + graph.step[chosen] - first
    sums = np.bincount(place, weights=graph.duration_ns[chosen], minlength=n_codes * n_steps)
    return np.asarray(np.median(sums.reshape(n_codes, n_steps), axis=1) / 1e6)
