"""Why one step takes longer than another: how their critical paths differ, and the part that grew most on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from whatif.graph.kernels import FAMILY_WORDS
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import PHASE_NAMES, Array, Float64, TaskKind, among
from whatif.ingest.lines import Lines
from whatif.prediction.baseline import Baseline
from whatif.questions.comparison.differences import without_wrappers
from whatif.questions.explain import LAG, Explanation, step_critical_ms, step_work_ms

# Without a GPU, the only calls are those that start an exchange between workers.
CALLS, CALLS_ON_CPU = "CUDA / HIP calls and launches", "communication calls and hand-overs"
# The groups of work on a critical path, as named in a sentence: their task kinds, and the columns that detail them.
GROUPS = {
    "data loading": (("data_loading",), ()),
    "communication": (("communication",), ()),
    "kernels": (("kernel",), ("layer", "family")),
    "copies": (("memcpy", "memset"), ("layer",)),
    "operators": (("cpu_op",), ("layer", "family")),
    "Python and the framework": (("gap",), ("layer", "phase")),
    CALLS: (("runtime", LAG), ("layer", "phase")),
    "waits that nothing explains": (("wait",), ()),
}
# Our choice: a part is named if it holds this share of a growth, a cause if it explains this share of the step's
# change.
NAMED_SHARE = 0.25


class Cause(Struct, frozen=True):
    """One group of work on two critical paths, ms a step, and the part of it that grew most; "" for none."""

    name: str
    before_ms: float
    after_ms: float
    where: str = ""
    work_ms: float = 0.0  # growth of all work of this kind in the second step, on the path or off it

    @property
    def change_ms(self) -> float:
        """The growth of its time on the critical path, ms."""
        return self.after_ms - self.before_ms

    def explains_ms(self, sign: int) -> float:
        """Return how much of a growth (``sign`` 1) or of a saving (-1) it explains, ms.

        If only the route of the path changed, the work that is newly on it did not grow and is no cause.
        """
        return min(sign * self.change_ms, sign * self.work_ms)

    def __str__(self) -> str:
        where = f"; largest change: {self.where}" if self.where else ""
        return f"{self.name}, {self.before_ms:,.2f} → {self.after_ms:,.2f} ms of the critical path{where}"

    def to_dict(self) -> dict[str, Any]:
        """Return the cause as a JSON object."""
        return {
            "cause": self.name,
            "a_ms": round(self.before_ms, 6),
            "b_ms": round(self.after_ms, 6),
            "change_ms": round(self.change_ms, 6),
            "work_change_ms": round(self.work_ms, 6),
            "where": self.where or None,
        }


def causes(explained: tuple[Explanation, Explanation], lines: tuple[Lines, Lines] | None = None) -> tuple[Cause, ...]:
    """Return the differences of two critical paths, the largest first; with source lines if both have them."""
    before, after = (each.critical_path_ms for each in explained)
    critical = [(each.baseline.graph, step_critical_ms(each.baseline)[0]) for each in explained]
    work_ms = [_by_kind(each.baseline) for each in explained]
    on_gpu = any(graph.has_gpu for graph, _ in critical)
    found = []
    for name, (kinds, looked_into) in GROUPS.items():
        old_ms, new_ms = (sum(path.get(kind, 0.0) for kind in kinds) for path in (before, after))
        if old_ms or new_ms:
            members = [TaskKind[kind.upper()] for kind in kinds if kind != LAG]
            places = [next(filter(None, (_where(by, members, critical, new_ms - old_ms) for by in looked_into)), "")]
            if lines:
                places.append(_where("line", members, critical, new_ms - old_ms, lines))
            more_ms = float(work_ms[1][members].sum() - work_ms[0][members].sum())
            if LAG in kinds:
                more_ms += after.get(LAG, 0.0) - before.get(LAG, 0.0)
            name = CALLS_ON_CPU if name == CALLS and not on_gpu else name
            found.append(Cause(name, old_ms, new_ms, ", ".join(filter(None, places)), more_ms))
    return tuple(sorted(found, key=lambda cause: -abs(cause.change_ms)))


def cause_of(found: Sequence[Cause], change_ms: float) -> Cause | None:
    """Return the cause that explains most of a change of the step, ms; None if none explains ``NAMED_SHARE`` of it."""
    sign = 1 if change_ms > 0 else -1
    best = max(found, key=lambda cause: cause.explains_ms(sign), default=None)
    return best if best is not None and best.explains_ms(sign) >= NAMED_SHARE * abs(change_ms) > 0 else None


def _by_kind(baseline: Baseline) -> Float64:
    """The work of a step by task kind, ms, that of the rank that has most of it: the others wait for it."""
    graph, work_ms, n_kinds = baseline.graph, step_work_ms(baseline), len(TaskKind)
    # A row for what all ranks share (-1), then one for each.
    row = np.array([thread.rank + 1 for thread in graph.threads], dtype=np.int64)
    sums = np.bincount(
        row[graph.thread] * n_kinds + graph.kind, weights=work_ms, minlength=(int(row.max(initial=1)) + 1) * n_kinds
    ).reshape(-1, n_kinds)
    return np.asarray(sums[0] + sums[1:].max(axis=0), dtype=np.float64)


def _where(
    by: str, kinds: Sequence[TaskKind], critical: Sequence[tuple[TaskGraph, Float64]], change_ms: float,
    lines: tuple[Lines, Lines] | None = None,
) -> str:  # fmt: skip
    """The layer, family, phase or line that holds ``NAMED_SHARE`` of a growth or of a saving; else ""."""
    growth_ms: dict[str, float] = {}
    for side, (graph, critical_ms) in enumerate(critical):
        factor = 2 * side - 1
        chosen = among(graph.kind, kinds) & (critical_ms > 0)
        codes, names = _of_line(lines[side]) if lines else _codes(by, graph)
        sums = np.bincount(codes[chosen], weights=critical_ms[chosen], minlength=len(names))
        for code in np.flatnonzero(sums).tolist():
            growth_ms[names[code]] = growth_ms.get(names[code], 0.0) + factor * float(sums[code])
    for nameless in ("", "unknown"):
        growth_ms.pop(nameless, None)
    sign = 1 if change_ms > 0 else -1
    best = max(growth_ms, key=lambda name: sign * growth_ms[name], default="")
    if not best or sign * growth_ms[best] < max(NAMED_SHARE * abs(change_ms), 1e-6):
        return ""
    return f"{by} {best} ({growth_ms[best]:+z,.2f} ms)"


def _of_line(lines: Lines) -> tuple[Array, Sequence[str]]:
    """Each task's line code, the last one for no line, and the names of the codes."""
    return np.where(lines.code >= 0, lines.code, len(lines.names)), [*lines.names, ""]


def _codes(by: str, graph: TaskGraph) -> tuple[Array, Sequence[str]]:
    """Each task's code in the column ``by``, and the names of the codes."""
    if by == "layer":
        return graph.layer, [without_wrappers(name) for name in graph.layers]
    if by == "phase":
        return graph.phase, PHASE_NAMES
    return np.where(graph.family >= 0, graph.family, len(FAMILY_WORDS)), [*FAMILY_WORDS, ""]
