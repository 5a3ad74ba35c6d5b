"""Flame graph of a step's critical path: time by call stack, else by phase and layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Int64, Phase, TaskKind
from whatif.ingest.lines import SEPARATOR, Lines, lines_if_any
from whatif.prediction.baseline import Baseline
from whatif.questions.explain import LAG, step_critical_ms
from whatif.questions.lines import nowhere
from whatif.simulation.steps import CLOCK_NOUNS
from whatif.units import counted

# A narrower frame would be less than a pixel wide: its time counts in its parent.
LEAST_SHARE = 1 / 1000
# A table lists frames of at least this share of the step: our choice.
TABLE_SHARE = 0.01
# More frames cannot be read: only the widest are shown.
MOST_FRAMES = 400
# Work outside the user's frames: threads of libraries.
NOWHERE = nowhere("line")
WAITING = "waiting"


class Frame(Struct, frozen=True):
    """A function and line, layer or kernel below its callers, with its ms of the critical path and where they begin."""

    name: str
    depth: int
    begin_ms: float
    ms: float
    self_ms: float  # outside the frames shown below it

    def to_dict(self) -> dict[str, Any]:
        """Return the frame as a JSON object."""
        times = {"begin_ms": self.begin_ms, "ms": self.ms, "self_ms": self.self_ms}
        return {"name": self.name, "depth": self.depth, **{name: round(ms, 6) for name, ms in times.items()}}


class Flame(Struct, frozen=True):
    """Frames from the outermost on, each before those within it; the outermost ones add up to the step."""

    baseline: Baseline
    of: Literal["stacks", "layers"]
    frames: tuple[Frame, ...]
    n_frames: int

    @property
    def wide(self) -> list[Frame]:
        """The frames of a table: those of at least ``TABLE_SHARE`` of the step."""
        return [frame for frame in self.frames if frame.ms >= TABLE_SHARE * self.whole_ms]

    @property
    def whole_ms(self) -> float:
        """Time of the outermost frames: the step without what is too narrow."""
        return sum(frame.ms for frame in self.frames if frame.depth == 0)

    @property
    def headline(self) -> str:
        """State what the widths measure, by which frames, and how many are not shown."""
        noun, of = CLOCK_NOUNS[self.baseline.clock], "call stacks" if self.of == "stacks" else "phases and layers"
        why = " (the recording has no call stacks)"
        if self.baseline.graph.info.ranks:
            why = " (call stacks are read of one rank's file, named alone)"
        why = "" if self.of == "stacks" else why
        left = self.n_frames - len(self.frames)
        narrow = f"; not shown: {counted(left, 'narrower frame')}" if left else ""
        return f"what the {noun} of {self.baseline.step_ms:,.2f} ms waits for, by {of}{why}{narrow}."

    def to_dict(self) -> dict[str, Any]:
        """Return the frames as a JSON object."""
        return {
            "trace": self.baseline.graph.info.path,
            "step_clock": self.baseline.clock,
            "baseline_ms": self.baseline.step_ms,
            "of": self.of,
            "headline": self.headline,
            "frames": [frame.to_dict() for frame in self.frames],
        }


def flame(baseline: Baseline, path: Path | None = None) -> Flame:
    """Return the flame graph of a baseline's step; ``path`` is its trace, if the graph no longer records that.

    Without call stacks in the trace, frames are phases, layers and the parts of their names.
    """
    graph = baseline.graph
    critical_ms, lag_ms = step_critical_ms(baseline)
    lines = lines_if_any(graph, "stack", path)
    tree = _Tree()
    tasks = np.flatnonzero(critical_ms > 0)
    first, alike = _alike(graph, tasks, lines)
    ms = np.bincount(alike, weights=critical_ms[tasks])
    weighted_ns = np.bincount(alike, weights=critical_ms[tasks] * baseline.timeline.start_ns[tasks])
    for task, group_ms, group_weighted_ns in zip(first.tolist(), ms.tolist(), weighted_ns.tolist(), strict=True):
        outer = _layers(graph, task) if lines is None else _callers(lines, task)
        tree.add([*outer, *_innermost(graph, task)], group_ms, group_weighted_ns)
    if lag_ms > 0:
        tree.add([LAG], lag_ms, lag_ms * baseline.timeline.makespan_ns)
    frames = tree.frames(LEAST_SHARE * baseline.step_ns / 1e6)
    return Flame(baseline, "layers" if lines is None else "stacks", tuple(frames), len(tree.widths()))


def _alike(graph: TaskGraph, tasks: Int64, lines: Lines | None) -> tuple[Int64, Int64]:
    """Return the first of each group of ``tasks`` that share a path, and each task's group, shape (n_tasks,)."""
    outer = graph.phase * np.int64(len(graph.layers)) + graph.layer if lines is None else lines.code
    key = (outer[tasks] * np.int64(len(TaskKind)) + graph.kind[tasks]) * len(graph.names) + graph.name[tasks]
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return tasks[first], group


def _callers(lines: Lines, task: int) -> list[str]:
    code = int(lines.code[task])
    return lines.names[code].split(SEPARATOR) if code >= 0 else [NOWHERE]


def _layers(graph: TaskGraph, task: int) -> list[str]:
    layer = graph.layers[graph.layer[task]]
    return [Phase(int(graph.phase[task])).name.lower(), *(layer.split(".") if layer else [])]


def _innermost(graph: TaskGraph, task: int) -> list[str]:
    """The innermost frame of a task, its name; none for Python code, whose time belongs to its line."""
    kind = graph.kind[task]
    if kind == TaskKind.GAP:
        return []
    name = WAITING if kind == TaskKind.WAIT else graph.names[graph.name[task]]
    return [name] if name else []


class _Tree:
    """Times by path, ms, and the sum of their start times weighted by duration."""

    def __init__(self) -> None:
        self.ms = self.weighted_ns = 0.0
        self.below: dict[str, _Tree] = {}

    def add(self, path: list[str], ms: float, weighted_ns: float) -> None:
        node = self
        for name in path:
            node = node.below.setdefault(name, _Tree())
            node.ms += ms
            node.weighted_ns += weighted_ns

    def frames(self, least_ms: float) -> list[Frame]:
        """The frames of more than ``least_ms``, the widest if there are too many, depth first."""
        widths = sorted(self.widths(), reverse=True)
        least_ms = max(least_ms, widths[MOST_FRAMES] if len(widths) > MOST_FRAMES else 0.0)
        found: list[Frame] = []
        # An explicit stack: a trace can be deeper than Python's.
        pending: list[tuple[str, _Tree, int, float]] = [("", self, -1, 0.0)]
        while pending:
            name, node, depth, begin_ms = pending.pop()
            shown = [(key, child) for key, child in node.below.items() if child.ms > least_ms]
            shown.sort(key=lambda item: item[1].weighted_ns / item[1].ms)
            if depth >= 0:
                found.append(Frame(name, depth, begin_ms, node.ms, node.ms - sum(child.ms for _, child in shown)))
            at_ms = begin_ms
            inner = []
            for key, child in shown:
                inner.append((key, child, depth + 1, at_ms))
                at_ms += child.ms
            pending += reversed(inner)
        return found

    def widths(self) -> list[float]:
        found, pending = [], [self]
        while pending:
            node = pending.pop()
            found += [child.ms for child in node.below.values()]
            pending += node.below.values()
        return found
