"""Bandwidth: make every network link `factor` times as fast.

Source: Daydream (USENIX ATC 2020) figure 2 (c), "what if network bandwidth is 2x".
Model:  the transfer of each recorded collective takes 1 / `factor` of its time; its wait for other ranks stays. In the
        recording of one rank the wait is the time beyond the shortest of equal collectives, or far beyond that of the
        GPU's usual links; the range runs from a pure transfer to no gain at all. For communication that another what-if
        added (distributed, p3, ...) the parts are known: the bytes take 1 / `factor` of their time, the latency stays,
        and the range stays as it is.
Effort: none: a hypothetical question.
"""

import numpy as np

from whatif import TaskGraph, TaskKind, WhatifError
from whatif.models.exchange.stragglers import waiting_for_peers
from whatif.simulation.transfers import parts_of, with_parts, workers_of

PLACE = "network"
WHOLE_PASSES = True


def transform(graph: TaskGraph, *, factor: float = 2.0) -> TaskGraph:
    """Divide the durations of communication tasks by the factor."""
    if not factor > 0:
        raise WhatifError(f"bandwidth: expected a factor above 0, got {factor}.")
    communication = graph.select(kind=TaskKind.COMMUNICATION)
    if not communication.any():
        raise WhatifError(
            f"bandwidth: {graph.info.path or 'this recording'} has no communication that could get faster; give "
            "a recording of one rank of a distributed run, or first name a transform that adds communication."
        )
    if factor == 1:
        return graph
    modelled = communication & (workers_of(graph) > 0)
    tasks, now = np.flatnonzero(modelled), parts_of(graph, modelled.mask)
    then = now.over(factor)
    graph = with_parts(graph.scale(tasks, then.duration_ns / np.maximum(now.duration_ns, 1)), tasks, then)
    bounds = sorted((1 / factor, 1.0))
    recorded = np.flatnonzero(communication & ~modelled)
    now_ns, waits_ns = np.maximum(graph.duration_ns[recorded], 1), waiting_for_peers(graph)[recorded]
    if waits_ns.sum() > 0:
        share = 100 * waits_ns.sum() / now_ns.sum()
        graph = graph.note(f"bandwidth: {share:.0f} % of the recorded communication waits for other ranks, which stays")
    ratio = (waits_ns + (now_ns - waits_ns) / factor) / now_ns
    return graph.scale(recorded, ratio, low=np.minimum(bounds[0], ratio), high=np.maximum(bounds[1], ratio))
