"""Balance ranks: scale the work of each to the fastest, the median or the mean of all."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Phase
from whatif.ingest.ranks.merge import place_of_threads, rank_numbers
from whatif.questions.stragglers import in_steps, steady_steps, work_ms
from whatif.runtime.errors import WhatifError


def balanced(graph: TaskGraph, name: str, follow: str) -> TaskGraph:
    """Return the graph with each phase's work, on CPU and on GPU, scaled to take every rank equally long.

    ``follow``: scale to the ``fastest`` rank of the phase, the ``median`` one, or the ``mean`` of all, as if the work
    were divided evenly. Communication is unchanged. Raises WhatifError if the graph has one rank.
    """
    if not graph.info.ranks or len(rank_numbers(graph)) < 2:
        raise WhatifError(
            f"{name}: expected the recordings of several ranks, got {graph.info.path or 'one rank'} alone; name all "
            "files of the run, or their folder."
        )
    inside = in_steps(graph, steady_steps(graph))
    place = place_of_threads(graph)
    factor = np.ones(len(graph))
    for work in (graph.gpu_work.mask, graph.on_cpu.mask):
        ms = work_ms(graph, np.flatnonzero(work & inside), graph.phase, len(Phase))
        target_ms = {"fastest": ms.min(axis=0), "median": np.median(ms, axis=0), "mean": ms.mean(axis=0)}[follow]
        ratio = np.where(ms > 0, target_ms / np.where(ms > 0, ms, 1.0), 1.0)
        factor[work] = ratio[place.take(graph.thread[work]), graph.phase[work]]
    changed = np.flatnonzero(factor != 1)
    if not len(changed):
        return graph.unchanged(f"{name}: all ranks compute at one pace already; nothing changes")
    scale = factor[changed]
    return graph.with_duration(
        changed,
        graph.duration_ns[changed] * scale,
        low_ns=graph.low_ns[changed] * scale,
        high_ns=graph.high_ns[changed] * scale,
    )
