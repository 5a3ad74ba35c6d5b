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

# Fewer kinds of calls that both have say nothing of the pace at which a machine runs them.
LEAST_CALLS = 10
# Nor do calls that are a smaller share of the step's work say it of the rest: our choice, on half of the pairs of
# docs/compare.md.
LEAST_SHARE = 0.2
# A call whose predicted time is this near to the recorded one is left alone by a what-if.
UNCHANGED = 0.02


class Calls(Struct, frozen=True):
    """Kinds of calls of a step, in the order of their codes: how often each runs and what one takes. Shape (n,)."""

    code: Int64
    count: Float64
    mean_ns: Float64

    @property
    def total_ns(self) -> Float64:
        """What all calls of a kind take in a step, shape (n,)."""
        return self.count * self.mean_ns


class CallCodes(Struct, frozen=True):
    """Numbers for kinds of calls, the same in every graph: name, layer, phase, number format, bytes and FLOPs.

    If ``of_any_batch``, only those of the update: the others depend on the batch, which not all recordings have.
    """

    of_any_batch: bool = False
    words: dict[str, int] = field(default_factory=dict)

    def calls(self, graph: TaskGraph, clock: str) -> Calls:
        """Return the calls of the steady steps that are grouped by family: kernels, or operators without a GPU."""
        counted, n_steps = steady_tasks(graph, clock)
        # What a collective takes says more of the other ranks than of this machine.
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
    """The calls of two recordings; ``work_ns`` is what all of a step's calls take in each."""

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
        """Return what a call takes in the second recording over what it takes in the first: the median by time.

        Of a ``changed`` first graph only calls count that are left as long as they were, where their predicted time is
        spread over as many calls as the second has. None where fewer than ``LEAST_CALLS`` kinds are left, or less than
        ``LEAST_SHARE`` of the work.
        """
        first, second = self.first, self.second
        code, one, other = np.intersect1d(first.code, second.code, assume_unique=True, return_indices=True)
        if changed is not None:
            predicted = self.codes.calls(changed, self.clock)
            _, kept, at = np.intersect1d(code, predicted.code, assume_unique=True, return_indices=True)
            one, other = one[kept], other[kept]
            each_ns = predicted.total_ns[at] / np.maximum(second.count[other], 1e-9)
            left_alone = np.abs(each_ns - first.mean_ns[one]) <= UNCHANGED * first.mean_ns[one]
            one, other = one[left_alone], other[left_alone]
        timed = first.mean_ns[one] > 0
        one, other = one[timed], other[timed]
        weight_ns = np.minimum(first.count[one], second.count[other]) * first.mean_ns[one]
        if len(one) < LEAST_CALLS or not weight_ns.sum() > LEAST_SHARE * self.work_ns[0]:
            return None
        ratio = second.mean_ns[other] / first.mean_ns[one]
        order = np.argsort(ratio, kind="stable")
        share = np.cumsum(weight_ns[order]) / weight_ns.sum()
        return float(ratio[order][np.searchsorted(share, 0.5)])
