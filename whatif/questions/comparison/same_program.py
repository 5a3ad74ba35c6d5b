"""Whether two recordings make the same calls, which no pace changes, and in which phases of a step they differ."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Phase, TaskKind, among
from whatif.prediction.baseline import Baseline
from whatif.prediction.utilization import steady_tasks
from whatif.questions.comparison.step_profile import StepProfile, work_rows

# The calls of a phase differ if more than this share of them does: a single extra call does not count.
OTHER_CALLS = 0.02
# A what-if concerns the differing calls if at least this share of the work that it changes is in their phases.
ABOUT_THEM = 0.5
# The kinds of tasks compared. Driver calls are not: how often a thread polls depends on the pace.
_COUNTED = (TaskKind.CPU_OP, TaskKind.KERNEL, TaskKind.MEMCPY, TaskKind.DATA_LOADING, TaskKind.COMMUNICATION)

_Call = tuple[Any, ...]


class CallDifference(Struct, frozen=True):
    """The phases in which the calls of two steps differ: ``phases`` is a mask, shape (n_phases,).

    A new layout, for example, shows in calls around the operators that it speeds up, so only phases are distinguished.
    ``same``: both are runs of one program, with the same operator calls by name and shapes, equally often, and GPU work
    in the same number formats. The number of kernels of an operator is the choice of its library.
    """

    phases: Bool
    same: bool

    @staticmethod
    def of(before: Baseline, after: Baseline) -> CallDifference:
        """Compare how often a step makes each call: the median over the steady steps."""
        old, new = (_calls(side.graph, side.clock) for side in (before, after))
        total, differing = np.zeros(len(Phase)), np.zeros(len(Phase))
        for call in old.keys() | new.keys():
            counts = old.get(call, 0.0), new.get(call, 0.0)
            total[call[0]] += max(counts)
            differing[call[0]] += abs(counts[0] - counts[1])
        same = _program(old) == _program(new)
        if _loading(before.graph) != _loading(after.graph):  # its calls may be none of PyTorch's
            same, differing[Phase.DATA] = False, np.inf
        return CallDifference(differing > OTHER_CALLS * total, same)

    def asked_for_by(self, source: StepProfile, changed: StepProfile) -> bool:
        """Whether a what-if from the step ``source`` to ``changed`` mostly changes phases whose calls differ."""
        moved_ms = np.abs(changed.work_ms - source.work_ms).reshape(-1, len(Phase)).sum(axis=0)
        return float(moved_ms[self.phases].sum()) >= ABOUT_THEM * float(moved_ms.sum())


def _program(calls: dict[_Call, float]) -> tuple[dict[_Call, float], set[_Call]]:
    """The calls that neither pace nor a library's choice changes; all of them if there are no operators."""
    operators = {call: count for call, count in calls.items() if count and call[1]}
    return (operators, {(call[0], *call[2:4]) for call in calls if not call[1]}) if operators else (calls, set())


def _loading(graph: TaskGraph) -> tuple[bool, int | None]:
    """Whether worker processes load the batches, and how many if recorded."""
    recorded = graph.info.recorded.data_loading
    return graph.info.loads_in_processes, None if recorded is None else recorded.workers


def _calls(graph: TaskGraph, clock: str) -> dict[_Call, float]:
    """How often a step makes each call: an operator by its name and operands, GPU work by its kind and size.

    For equal steps libraries may pick kernels of other names and sizes, so these are ignored if shapes are known.
    """
    counted, _ = steady_tasks(graph, clock)
    tasks = np.flatnonzero(counted & among(graph.kind, _COUNTED))
    # An operator that launches kernels has a task after each launch: it counts once.
    pieces = np.stack([graph.operator[tasks], graph.name[tasks]])
    once = np.zeros(len(tasks), dtype=np.bool_)
    once[np.unique(pieces, axis=1, return_index=True)[1]] = True
    tasks = tasks[once | (graph.operator[tasks] < 0) | graph.on_gpu.mask[tasks]]
    on_gpu = graph.on_gpu.mask[tasks]
    columns = np.stack([
        graph.phase[tasks],
        np.where(on_gpu, -1, graph.name[tasks]),
        work_rows(graph)[tasks],
        graph.dtype[tasks],
        graph.called[tasks],
        np.where(on_gpu & (graph.called[tasks] < 0), graph.warps[tasks], -1),
    ])  # fmt: skip
    kinds, row = np.unique(columns, axis=1, return_inverse=True)
    step = np.unique(np.zeros_like(tasks) if clock == "span" else graph.step[tasks], return_inverse=True)[1]
    n_steps = int(step.max(initial=0)) + 1
    times = np.bincount(row.ravel() * n_steps + step, minlength=kinds.shape[1] * n_steps).reshape(-1, n_steps)
    # A convolution in another layout is the same call.
    operators = [replace(op, layout="") if op.family == "conv" else op for op in graph.info.operators]
    found: dict[_Call, float] = {}
    for (phase, name, kind, dtype, called, warps), count in zip(
        kinds.T.tolist(), np.median(times, axis=1).tolist(), strict=True
    ):
        call = (
            phase, graph.names[name] if name >= 0 else "", kind, dtype,
            operators[called] if called >= 0 else None, warps,
        )  # fmt: skip
        found[call] = found.get(call, 0.0) + count
    return found
