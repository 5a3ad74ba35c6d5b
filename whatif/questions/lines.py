"""The time of a step by source line, the lines' waits for the GPU, and the gain from removing each."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import SYNC_NAME, Array, Bool, Float64, Int64, Phase, TaskKind
from whatif.ingest.lines import By, Lines, read_lines
from whatif.prediction.baseline import Baseline
from whatif.prediction.utilization import steady_tasks
from whatif.questions.explain import Part, parts_by
from whatif.questions.stragglers import held_up_by
from whatif.runtime.errors import WhatifError
from whatif.simulation.simulator import simulate
from whatif.simulation.steps import CLOCK_NOUNS, steady
from whatif.simulation.timeline import Timeline
from whatif.units import counted

# The removal of at most this many lines is simulated, and by default no more are shown.
MOST_GAINS = 12
# Lines that wait for the GPU are named in advice; our choice.
MOST_WAITING = 3
# Our choices: a line costs much if the mean step is shorter by this share without it, and it is outside if no more than
# this share of its work lies inside.
COSTLY, IN_TRAINING = 0.05, 0.1
# Where costly lines lie, as reports say it.
OUTSIDE = "outside the layers, the backward pass and the optimizer"
# How read_lines names the backward pass of a line's operators.
BACKWARD_OF = "backward of "
# The operators that hand a tensor's value to Python: of `.item()`, of a print, of a tensor as a condition.
READS = frozenset(("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"))


class LinePart(Struct, frozen=True):
    """A line's part of a step, ms; ``gain_ms`` is the mean step's gain without it, None if not simulated."""

    part: Part
    mean_ms: float  # the main thread's work on it in the mean step, including work that only some steps do
    waits: float  # calls per step that wait for the GPU
    blocked_ms: float  # time per step in which they wait
    gain_ms: float | None  # without the CPU's work and the waits of the line; the GPU's work stays

    def to_dict(self, by: str) -> dict[str, Any]:
        """Return the line as a JSON object."""
        return {
            **self.part.to_dict(by),
            "mean_cpu_ms": round(self.mean_ms, 6),
            "waits_per_step": round(self.waits, 3),
            "blocked_ms": round(self.blocked_ms, 6),
            "gain_ms": None if self.gain_ms is None else round(self.gain_ms, 6),
        }


class LineParts(Struct, frozen=True):
    """The lines, files or layers of a step, by their time on the critical path; the first ``top`` are to be shown."""

    baseline: Baseline
    by: By
    parts: tuple[LinePart, ...]
    top: int

    @property
    def shown(self) -> tuple[LinePart, ...]:
        """The parts to be shown."""
        return self.parts[: self.top]

    @property
    def headline(self) -> str:
        """One sentence: the costliest line, the one that waits longest for the GPU, and the one that gains most."""
        step_noun, step_ms = CLOCK_NOUNS[self.baseline.clock], mean_step_ms(self.baseline, self.baseline.timeline)
        none = nowhere(self.by)
        known = [line for line in self.parts if line.part.name != none]
        if not known:
            missing, command = "no code of your own", "whatif collect --lines"
            if self.by == "layer":
                missing, command = "no forward function of a model", "whatif collect"
            return f"no {self.by} of the {step_noun} is known: its call stacks show {missing}; record with `{command}`."
        most = max(known, key=lambda line: line.part.critical_ms)
        sentence = (
            f"{most.part.name} holds more of the critical path than any other {self.by}: {most.part.critical_ms:,.2f} "
            f"of {self.baseline.step_ms:,.2f} ms"
        )
        unknown_ms = sum(line.part.critical_ms for line in self.parts if line.part.name == none)
        if unknown_ms > most.part.critical_ms:
            sentence += f" ({unknown_ms:,.2f} ms belong to no {self.by} that is known)"
        waiting = max(known, key=lambda line: line.blocked_ms)
        if waiting.blocked_ms > 0:
            sentence += (
                f"; {waiting.part.name} waits for the GPU {waiting.waits:.3g} time{'s' * (waiting.waits != 1)} a "
                f"{step_noun}, {waiting.blocked_ms:,.2f} ms"
            )
        gaining = max(known, key=lambda line: line.gain_ms or 0.0)
        if gaining.gain_ms:
            sentence += (
                f"; removing the CPU part of {gaining.part.name} shortens the mean {step_noun} of {step_ms:,.2f} ms by "
                f"{gaining.gain_ms:,.2f} ms"
            )
        return f"{sentence}."

    def to_dict(self) -> dict[str, Any]:
        """Return the lines as a JSON object."""
        return {
            "trace": self.baseline.graph.info.path,
            "step_clock": self.baseline.clock,
            "baseline_ms": self.baseline.step_ms,
            "mean_ms": mean_step_ms(self.baseline, self.baseline.timeline),
            "by": self.by,
            "headline": self.headline,
            "lines": [line.to_dict(self.by) for line in self.shown],
        }


def nowhere(by: By) -> str:
    """Return the name for work that belongs to no line, file or layer."""
    return f"(no {by} known)"


def line_parts(baseline: Baseline, by: By, top: int = 10) -> LineParts:
    """Return the lines (files, layers) of a baseline's step, read from its trace; ``top`` of them are to be shown.

    Layers are those of the recording if it has any. Raises WhatifError if the trace has no stacks, and for several
    ranks.
    """
    graph = baseline.graph
    if by == "layer" and (graph.layer > 0).any():
        lines = Lines(by, graph.layers, np.where(graph.layer > 0, graph.layer, -1).astype(np.int32))
    elif graph.info.ranks:
        held = held_up_by(baseline)
        suggested = f"rank {held[0]}, for which the others wait longest" if held else "one rank"
        raise WhatifError(
            f"{graph.info.path}: expected the file of one rank alone, whose call stacks name each {by}, got "
            f"{counted(len(graph.info.ranks), 'rank')} of a run; name the file of {suggested}."
        )
    else:
        lines = read_lines(graph, by)
    if len(lines.code) != len(graph):
        raise WhatifError(f"{graph.info.path}: expected the tasks of the trace, got a graph that was edited.")
    unknown = len(lines.names)
    codes = np.where(lines.code >= 0, lines.code, unknown)
    names = [*lines.names, nowhere(by)]
    blocked_ns = blocked(baseline)
    inside, n_steps = _steps(baseline)
    waits = _sums(codes, len(names), inside & (blocked_ns > 0)) / n_steps
    blocked_ms = _sums(codes, len(names), inside, blocked_ns / 1e6) / n_steps
    # What only one step in three does may be missing in the reported step.
    mean_ms = _sums(codes, len(names), inside & _on_main(graph), graph.duration_ns / 1e6) / n_steps
    place = {name: code for code, name in enumerate(names)}
    parts = parts_by(baseline, codes, names)
    listed = {part.name for part in parts}
    parts += [Part(names[code], 0.0, 0.0, 0.0, 0.0) for code in np.flatnonzero(mean_ms) if names[code] not in listed]
    parts.sort(key=lambda part: -max(part.critical_ms, blocked_ms[place[part.name]], mean_ms[place[part.name]]))
    before_ms = mean_step_ms(baseline, baseline.timeline)
    found = []
    for rank, part in enumerate(parts):
        code = place[part.name]
        gain_ms = None
        if rank < MOST_GAINS and code != unknown and by != "file":
            without = simulate(_without(graph, codes == code))
            gain_ms = before_ms - mean_step_ms(baseline, without)
        found.append(LinePart(part, float(mean_ms[code]), float(waits[code]), float(blocked_ms[code]), gain_ms))
    return LineParts(baseline, by, tuple(found), top)


class WaitingLine(Struct, frozen=True):
    """A line that waits for the GPU: its waits in a step, their time, and the mean step's gain without it, ms."""

    line: str
    waits: float
    blocked_ms: float
    gain_ms: float

    def to_dict(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        return {
            "line": self.line,
            "waits_per_step": round(self.waits, 3),
            "blocked_ms": round(self.blocked_ms, 6),
            "gain_ms": round(self.gain_ms, 6),
        }


def waiting_lines(baseline: Baseline, lines: Lines) -> tuple[WaitingLine, ...]:
    """Return the lines of a step that wait for the GPU longest; a line's gain is that of ``remove_syncs`` for it."""
    graph = baseline.graph
    waiting_ms = blocked(baseline) / 1e6
    inside, n_steps = _steps(baseline)
    chosen = inside & (waiting_ms > 0) & (lines.code >= 0)
    size = len(lines.names)
    blocked_ms = _sums(lines.code, size, chosen, waiting_ms) / n_steps
    waits = _sums(lines.code, size, chosen) / n_steps
    before_ms = mean_step_ms(baseline, baseline.timeline)
    return tuple(
        WaitingLine(
            lines.names[code], float(waits[code]), float(blocked_ms[code]),
            before_ms - mean_step_ms(baseline, simulate(graph.without_waits((lines.code == code) & (graph.step >= 0)))),
        )
        for code in np.argsort(-blocked_ms, kind="stable")[:MOST_WAITING].tolist()
        if blocked_ms[code] > 0
    )  # fmt: skip


class CostlyLine(Struct, frozen=True):
    """A line ``OUTSIDE``: the main thread's work on it, and the mean step's gain without it, ms."""

    line: str
    mean_ms: float
    gain_ms: float  # as of LinePart
    step_ms: float  # the mean step

    @property
    def gain_pct(self) -> float:
        """The gain, percent of the mean step."""
        return 100.0 * self.gain_ms / self.step_ms

    def to_dict(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        return {
            "line": self.line,
            "mean_cpu_ms": round(self.mean_ms, 6),
            "gain_ms": round(self.gain_ms, 6),
            "gain_pct": round(self.gain_pct, 6),
            "mean_ms": self.step_ms,
        }


def costly_lines(baseline: Baseline, lines: Lines) -> tuple[CostlyLine, ...]:
    """Return the lines outside the layers, the backward pass and the optimizer without which a step gains most.

    None if the recording does not show all three of these. Between a step's first layer and its optimizer only lines
    that read values (`.item()`, a print) count: others may belong to the training (clipping, a teacher's forward pass).
    Lines whose operators have a backward pass do not count either, nor those of a module's `forward`.
    """
    graph = baseline.graph
    before_ms = mean_step_ms(baseline, baseline.timeline)
    parts = (graph.layer > 0, graph.phase == Phase.BACKWARD, graph.in_optimizer)
    if not before_ms or not all(part.any() for part in parts):
        return ()
    inside, n_steps = _steps(baseline)
    begin_ns, end_ns = np.full(graph.info.n_steps + 1, 2**62), np.full(graph.info.n_steps + 1, -(2**62))
    np.minimum.at(begin_ns, graph.step[parts[0]], graph.start_ns[parts[0]])
    np.maximum.at(end_ns, graph.step[parts[2]], graph.start_ns[parts[2]])
    reads = np.array([name in READS for name in graph.names], dtype=np.bool_).take(graph.name) & (lines.code >= 0)
    read = np.isin(lines.code, lines.code[reads])
    between = (graph.start_ns >= begin_ns[graph.step]) & (graph.start_ns <= end_ns[graph.step])
    training = np.logical_or.reduce(parts) | (between & ~read)
    training |= (graph.phase == Phase.DATA) | (graph.kind == TaskKind.COMMUNICATION)
    main, size = inside & (lines.code >= 0) & _on_main(graph), len(lines.names)
    mean_ms, training_ms = (
        _sums(lines.code, size, mask, graph.duration_ns / 1e6) / n_steps for mask in (main, main & training)
    )
    names = frozenset(lines.names)
    trained = [
        name.startswith(BACKWARD_OF) or f"{BACKWARD_OF}{name}" in names or name.endswith(": forward")
        for name in lines.names
    ]
    chosen = (mean_ms >= COSTLY * before_ms) & (training_ms <= IN_TRAINING * mean_ms) & ~np.array(trained)
    found = [
        CostlyLine(
            lines.names[code], float(mean_ms[code]),
            before_ms - mean_step_ms(baseline, simulate(_without(graph, lines.code == code))), before_ms,
        )
        for code in np.flatnonzero(chosen).tolist()
    ]  # fmt: skip
    costly = [line for line in found if line.gain_ms >= COSTLY * before_ms]
    return tuple(sorted(costly, key=lambda line: -line.gain_ms))


def _sums(codes: Array, n_codes: int, chosen: Bool, values: Array | None = None) -> Float64:
    """Sum the values of the ``chosen`` tasks by their code, or count these, shape (n_codes,)."""
    weights = None if values is None else values[chosen]
    return np.bincount(codes[chosen], weights=weights, minlength=n_codes).astype(np.float64)


def _on_main(graph: TaskGraph) -> Bool:
    return np.asarray((graph.thread == 0) & graph.on_cpu.mask)


def waits_for_gpu(graph: TaskGraph) -> Int64:
    """Return the tasks in which a CPU thread waits for the GPU."""
    if SYNC_NAME not in graph.names:
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero((graph.kind == TaskKind.WAIT) & (graph.name == graph.names.index(SYNC_NAME)))


def blocked(baseline: Baseline) -> Float64:
    """Return the length of each wait for the GPU in the simulated baseline, ns, shape (n_tasks,); 0 for other tasks."""
    graph, timeline = baseline.graph, baseline.timeline
    waiting = np.zeros(len(graph))
    tasks = waits_for_gpu(graph)
    before = graph.neighbours[0][tasks]
    ready_ns = np.where(before >= 0, timeline.end_ns[np.maximum(before, 0)], timeline.start_ns[tasks])
    waiting[tasks] = timeline.end_ns[tasks] - ready_ns
    return waiting


def mean_step_ms(baseline: Baseline, timeline: Timeline) -> float:
    """Return the mean of the steady steps of a timeline, ms: unlike the median it includes rare pauses."""
    graph, clock = baseline.graph, baseline.clock
    times_ns = steady(timeline.step_times_ns(clock), graph, clock)
    return float(np.mean(times_ns)) / 1e6 if times_ns else 0.0


def _without(graph: TaskGraph, chosen: Bool) -> TaskGraph:
    """The graph without the CPU's work and the waits of some tasks."""
    return graph.with_duration(chosen & graph.on_cpu.mask, 0).without_waits(chosen)


def _steps(baseline: Baseline) -> tuple[Bool, int]:
    """The tasks of the steady steps of the first rank, and how many steps these are."""
    steady, n_steps = steady_tasks(baseline.graph, baseline.clock)
    return steady & baseline.graph.of_clock.mask, n_steps
