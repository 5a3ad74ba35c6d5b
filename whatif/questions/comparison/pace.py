"""How fast the machine ran in each of two recordings: the ratio over calls that did the same work in both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Float64, Int64, Phase, TaskKind
from whatif.prediction.baseline import Baseline
from whatif.prediction.utilization import steady_tasks
from whatif.questions.comparison.differences import without_wrappers
from whatif.questions.explain import in_families

# With fewer kinds of calls in common the pace of the machine is unknown.
LEAST_CALLS = 10
# Common calls with a smaller share of the step's work do not represent the rest: our choice, on half of the pairs of
# docs/compare.md.
LEAST_SHARE = 0.2
# A what-if leaves a call unchanged if its predicted time is within this share of the recorded one.
UNCHANGED = 0.02


class Calls(Struct, frozen=True):
    """Kinds of calls of a step, in the order of their codes: how often each runs and its mean time. Shape (n,)."""

    code: Int64
    count: Float64
    mean_ns: Float64

    @property
    def total_ns(self) -> Float64:
        """Time of all calls of a kind in a step, ns, shape (n,)."""
        return self.count * self.mean_ns


class CallCodes(Struct, frozen=True):
    """Codes for kinds of calls, equal across graphs, by name, layer, phase, number format, bytes and FLOPs.

    With ``of_any_batch``, only calls of the update: the others depend on the batch, which the recordings do not share.
    """

    of_any_batch: bool = False
    words: dict[str, int] = field(default_factory=dict)

    def calls(self, graph: TaskGraph, clock: str) -> Calls:
        """Return the calls of the steady steps that are grouped by family: kernels, or operators without a GPU."""
        counted, n_steps = steady_tasks(graph, clock)
        # The time of a collective depends more on the other ranks than on this machine.
        counted = counted & in_families(graph) & (graph.kind != TaskKind.COMMUNICATION)
        if self.of_any_batch:
            counted &= graph.phase == Phase.UPDATE
        # A CPU's fused attention runs in pieces with FLOPs by their time, so that no two calls have the same.
        in_pieces = (graph.kind == TaskKind.CPU_OP) & (graph.family == KernelFamily.ATTENTION)
        flops = np.where(in_pieces, -1, graph.flops)
        columns = (
            self._numbers(graph.names).take(graph.name),
            self._numbers([without_wrappers(layer) for layer in graph.layers]).take(graph.layer),
            graph.phase, graph.dtype, graph.size_bytes, flops,
        )  # fmt: skip
        mixed = np.zeros(int(counted.sum()), dtype=np.uint64)
        for column in columns:
            # Knuth's multiplier for 64 bits; two kinds in 10^5 meet by chance once in 10^9 recordings.
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(6364136223846793005)
            mixed += column[counted].astype(np.int64).view(np.uint64)
        code, row = np.unique(mixed.view(np.int64), return_inverse=True)
        times = np.bincount(row, minlength=len(code)).astype(np.float64)
        total_ns = np.bincount(row, weights=graph.duration_ns[counted], minlength=len(code))
        return Calls(code, times / n_steps, total_ns / np.maximum(times, 1))

    def _numbers(self, texts: Sequence[str]) -> Int64:
        return np.array([self.words.setdefault(text, len(self.words)) for text in texts], dtype=np.int64)


class SameWork(Struct, frozen=True):
    """The calls of two recordings; ``work_ns`` is the time of all calls of a step in each."""

    codes: CallCodes
    clock: str
    first: Calls
    second: Calls
    work_ns: tuple[float, float]

    @staticmethod
    def of(first: Baseline, second: Baseline, *, same_batch: bool) -> SameWork:
        """Count the calls of both."""
        codes = CallCodes(of_any_batch=not same_batch)
        found, work_ns = [], []
        for side in (first, second):
            counted, n_steps = steady_tasks(side.graph, side.clock)
            found.append(codes.calls(side.graph, side.clock))
            work_ns.append(float(side.graph.duration_ns[counted & in_families(side.graph)].sum()) / n_steps)
        return SameWork(codes, first.clock, found[0], found[1], (work_ns[0], work_ns[1]))

    def reversed(self) -> SameWork:
        """Return the same from the second recording to the first."""
        return replace(self, first=self.second, second=self.first, work_ns=self.work_ns[::-1])

    def pace(self, changed: TaskGraph | None = None) -> float | None:
        """Return the time of a call in the second recording over that in the first: the median weighted by time.

        With a ``changed`` first graph only calls count that it leaves unchanged, when their predicted time is divided
        among as many calls as the second has. None if fewer than ``LEAST_CALLS`` kinds remain, or less than
        ``LEAST_SHARE`` of the work.
        """
        first, second = self.first, self.second
        code, in_first, in_second = np.intersect1d(first.code, second.code, assume_unique=True, return_indices=True)
        if changed is not None:
            predicted = self.codes.calls(changed, self.clock)
            _, kept, at = np.intersect1d(code, predicted.code, assume_unique=True, return_indices=True)
            in_first, in_second = in_first[kept], in_second[kept]
            each_ns = predicted.total_ns[at] / np.maximum(second.count[in_second], 1e-9)
            left_alone = np.abs(each_ns - first.mean_ns[in_first]) <= UNCHANGED * first.mean_ns[in_first]
            in_first, in_second = in_first[left_alone], in_second[left_alone]
        timed = first.mean_ns[in_first] > 0
        in_first, in_second = in_first[timed], in_second[timed]
        weight_ns = np.minimum(first.count[in_first], second.count[in_second]) * first.mean_ns[in_first]
        if len(in_first) < LEAST_CALLS or not weight_ns.sum() > LEAST_SHARE * self.work_ns[0]:
            return None
        ratio = second.mean_ns[in_second] / first.mean_ns[in_first]
        order = np.argsort(ratio, kind="stable")
        share = np.cumsum(weight_ns[order]) / weight_ns.sum()
        return float(ratio[order][np.searchsorted(share, 0.5)])
