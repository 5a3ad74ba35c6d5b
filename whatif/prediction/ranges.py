"""The width of predicted ranges: errors common to all kernels, errors of each kernel, and differences between runs.

An error of one source for all kernels (a device's rate, a model's bias, the profiler's cost) has one direction: it adds
up. Measurements of single operators, different sources, and the families of kernels that a model distinguishes have
independent errors: they add as squares. Two runs of one program differ as well. No recording shows by how much: a floor
represents that.
"""

from __future__ import annotations

import math

import numpy as np

from whatif.graph.kernels import KernelFamily
from whatif.graph.order import quartiles
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Float64, Int64, TaskKind, ThreadKind, among
from whatif.models.durations.estimator import Source, sources
from whatif.models.durations.measured import CONTEXT_SPREAD

# Fitted on the pairs that docs/accuracy.md scores; benchmarks/ranges.py refits them without each pair and reports
# coverage and width. Shares of the step on a CPU: of one worker, and of several that wait for each other.
RUN_TO_RUN, RUN_TO_RUN_WORKERS = 0.05, 0.07
# Assumed: no two runs of one program on a GPU are available. Recordings of two versions of modded-nanogpt that should
# take equally long differ by 0.9 %.
RUN_TO_RUN_GPU = 0.02
# The upper end of a collective is NCCL's next to other kernels on its GPU (Daydream, figure 9). This share of it is
# gloo's next to CPU work; chosen on the lab's pairs, which are not left out when they are scored.
GLOO_SLOWED = 0.15
# A model of a GPU's kernels has errors by family, products in one direction and layer norms in the other (the
# pairs of docs/device.md): this share of a kernel's bound is the same error for all of them. Chosen on those pairs.
SHARED_BY_FAMILIES = 0.25
_MODELS = (Source.LEARNED, Source.OTHER_DEVICES, Source.ROOFLINE)
# For steps that were not recorded: the share of the ranges of a family's kernels that adds up, below and above (single
# kernels err upwards further than the sum of many), and errors that models of single operators do not cover (other
# versions of a model, memory allocated inside a step). `python -m benchmarks.published timm neusight` chooses them on
# both tables, and scores them on left-out families of models and devices.
PREDICTED_SHARE, PREDICTED_REST = (0.9, 0.4), 0.10
# The ratio of two steps on GPUs misses by this, beside the errors of both (runs, stragglers, slowed kernels): the least
# multiple of 0.5 % with 90 % of NVIDIA's weak-scaling cells (docs/published.md) inside, loader-bound ones left out, and
# each model left out in turn.
SCALED_REST_GPU = 0.05
# The quartiles of the step represent the difference of two medians of this many steps (normal steps).
STEPS_OF_A_MEDIAN = 20


def simulated_at(graph: TaskGraph) -> TaskGraph:
    """Return the graph whose bounds are simulated: collectives on a CPU have a separate upper end."""
    if graph.has_gpu:
        return graph
    collectives = (graph.kind == TaskKind.COMMUNICATION) & (sources(graph) == Source.PAPER)
    if not collectives.any():
        return graph
    more_ns = np.rint(GLOO_SLOWED * (graph.high_ns - graph.duration_ns)).astype(np.int64)
    return graph.replace(high_ns=np.where(collectives, graph.duration_ns + more_ns, graph.high_ns))


def error_sums(graph: TaskGraph) -> Float64:
    """Return the sums over tasks that decide a range's width, ns, one row: linear in the durations and bounds.

    Below and then above: the sum of all bounds, the part that adds up within each source, the independent parts of each
    operator and each family of kernels; last the GPU's work.
    """
    return np.concatenate(_columns(graph))[None, :]


def error_sums_between(first: TaskGraph, last: TaskGraph, along: Float64) -> Float64:
    """Return the error sums on the line through two graphs, one row for each of ``along`` (0 first, 1 last).

    More passes in a pipeline have more names of operators: the other graph has none of theirs.
    """
    columns = []
    for begin, end in zip(_columns(first), _columns(last), strict=True):
        longest = max(len(begin), len(end))
        begin, end = (np.pad(column, (0, longest - len(column))) for column in (begin, end))
        columns.append(begin + along[:, None] * (end - begin))
    return np.concatenate(columns, axis=1)


def _columns(graph: TaskGraph) -> list[Float64]:
    gpu = graph.on_gpu.ids
    in_step = graph.step[gpu] >= 0
    counted = gpu[in_step] if in_step.any() else gpu  # without marks all is one step
    # Below, then above.
    ends = [(graph.low_ns, graph.duration_ns), (graph.duration_ns, graph.high_ns)]
    if graph.info.is_predicted:
        columns = [
            column
            for (least, most), share in zip(ends, PREDICTED_SHARE, strict=True)
            for column in _by_family(graph, most - least, share)
        ]
    else:
        columns = _sums(graph, ends)
    return [*columns, np.array([graph.duration_ns[counted].sum()], dtype=np.float64)]


def _by_family(graph: TaskGraph, width_ns: Int64, share: float) -> list[Float64]:
    """Sum widths by family: one chain of estimators has the same error on all kernels of a family."""
    group = np.where(graph.on_gpu.mask, graph.family.astype(np.int64) + 1, 0)
    by_family = np.bincount(group, weights=width_ns.astype(np.float64), minlength=len(KernelFamily) + 1)
    return [np.array([width_ns.sum()], dtype=np.float64), np.asarray(share * by_family, dtype=np.float64)]


def _sums(graph: TaskGraph, ends_ns: list[tuple[Int64, Int64]]) -> list[Float64]:
    """Sum widths by source, operator and family; the sum of recorded tasks is the total less all others."""
    rows, source = int(graph.measured.max(initial=-1)) + 1, sources(graph)
    waits = graph.kind == TaskKind.WAIT
    others = np.flatnonzero((source != Source.RECORDED) | waits)
    source = source[others]
    # Waits that may vanish are independent of the CPU's work.
    group = (source + np.int8(len(Source)) * waits[others]).astype(np.intp)
    measured = np.flatnonzero(source == Source.MEASURED)
    modelled = np.flatnonzero(graph.on_gpu.mask[others] & among(source, _MODELS))
    family = graph.family[others[modelled]] + 1  # no family is -1
    columns = []
    for least_ns, most_ns in ends_ns:
        others_ns = most_ns.take(others) - least_ns.take(others)
        total_ns = int(most_ns.sum()) - int(least_ns.sum())
        width_ns = others_ns.astype(np.float64)
        uncertain = measured[width_ns[measured] > 0]
        tasks = others[uncertain]
        # Caches affect all operators measured alone in the same way; the rest is each measurement's noise.
        noise_ns = np.maximum(width_ns[uncertain] - CONTEXT_SPREAD * graph.duration_ns[tasks], 0)
        operator = np.where(graph.measured[tasks] >= 0, graph.measured[tasks], rows + graph.name[tasks])
        by_source = np.bincount(group, weights=width_ns, minlength=2 * len(Source))
        by_source[Source.RECORDED] = total_ns - int(others_ns.sum())
        by_source[Source.MEASURED] -= noise_ns.sum()
        by_operator = np.bincount(operator, weights=noise_ns, minlength=rows + len(graph.names))
        independent_ns = (1 - SHARED_BY_FAMILIES) * width_ns[modelled]
        by_source -= np.bincount(group[modelled], weights=independent_ns, minlength=len(by_source))
        by_family = np.bincount(family, weights=independent_ns, minlength=len(KernelFamily) + 1)
        columns += [np.array([float(total_ns)]), by_source, by_operator, by_family]
    return columns


def combined_shares(sums: Float64) -> tuple[Float64, Float64]:
    """Return the shares of the sums of all bounds that remain if only common errors add up, shape (n,) each."""
    sides = np.split(sums[:, :-1], 2, axis=1)
    below, above = (
        np.where(side[:, 0] > 0, np.sqrt((side[:, 1:] ** 2).sum(axis=1)) / np.maximum(side[:, 0], 1), 1.0)
        for side in sides
    )
    return below, above


def shares_beside(
    step: tuple[float, float, float], reference: tuple[float, float, float], *, on_gpu: bool, share: float = 1.0
) -> tuple[float, float]:
    """Return the shares of ``step`` by which it may be shorter and longer than predicted, beside a ``reference``.

    Both are a time and the ends of its range, above 0, in one unit. The errors of the reference are those of a
    ``share`` of the step as well, so that their squares are taken off; what is left is at most the step's own range.
    The rest of the step, such as communication, lacks these errors: beside a longer reference it is shorter.
    """
    rest = SCALED_REST_GPU if on_gpu else float(np.hypot(RUN_TO_RUN, RUN_TO_RUN_WORKERS))
    own, common = ((1 - low / time, high / time - 1) for time, low, high in (step, reference))
    below, above = (
        min(mine, math.sqrt(max(mine**2 - (share * shared) ** 2, 0.0) + rest**2))
        for mine, shared in zip(own, common, strict=True)
    )
    time, low, high = reference
    shorter, longer = ((1 - share) * math.log(ratio) for ratio in (high / time, time / low))
    return (
        -math.expm1(-math.hypot(math.log1p(-below), shorter)),
        math.expm1(math.hypot(math.log1p(above), longer)),
    )


def several_workers(graph: TaskGraph) -> bool:
    """Return whether the step waits for other workers: the slowest of several runs decides its time."""
    channels = any(thread.kind == ThreadKind.CHANNEL for thread in graph.threads)
    return channels or bool((graph.kind == TaskKind.COMMUNICATION).any())


def run_to_run(graph: TaskGraph, sums: Float64, step_ns: Array, n_steps: int) -> Float64:
    """Return the share of a step by which two runs of one program differ (nominal 90 %), shape (n,) as the steps.

    The CPU's share of the step varies like a CPU step, the GPU's like a GPU step. ``n_steps``: the number of steps of
    length ``step_ns`` in the graph; a span is one.
    """
    on_cpu = RUN_TO_RUN_WORKERS if several_workers(graph) else RUN_TO_RUN
    busy = np.minimum(sums[:, -1] / n_steps / step_ns, 1.0)
    return np.asarray(busy * RUN_TO_RUN_GPU + (1 - busy) * on_cpu, dtype=np.float64)


def spread_of_steps(times_ns: tuple[int, ...]) -> tuple[float, float]:
    """Return the shares by which the median of another run's steps may be below and above this one's.

    The difference of two medians of 20 steps stays within one quartile distance in 90 % of the cases (normal steps),
    that of fewer steps in proportion to 1 / the root of their number; below, the ratio of the medians does, so that no
    step takes no time, however much the steps differ.
    """
    if len(times_ns) < 2 or not np.median(times_ns) > 0:
        return 0.0, 0.0
    q25, median, q75 = quartiles(times_ns)
    scale = (STEPS_OF_A_MEDIAN / min(len(times_ns), STEPS_OF_A_MEDIAN)) ** 0.5
    return 1 - (q25 / median) ** scale, scale * (q75 / median - 1)
