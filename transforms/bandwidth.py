"""Bandwidth: make every network link `factor` times as fast.

Source: Daydream (USENIX ATC 2020) figure 2 (c), "what if network bandwidth is 2x".
Model:  each communication task of the recording takes 1 / `factor` of its time. The recording of one
        rank does not show which part of a collective was waiting for other ranks: the range runs from a pure transfer
        to one that does not get faster at all. For communication that another what-if added (distributed, p3, ...)
        the parts are known: the bytes take 1 / `factor` of their time, the latency stays, and the range stays as it is.
Effort: none: a hypothetical question.
"""

import numpy as np

from whatif import TaskGraph, TaskKind, WhatifError
from whatif.simulation.transfers import latency_of, workers_of


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
    modelled = communication & (workers_of(graph) > 0)
    tasks, latency_ns = np.flatnonzero(modelled), latency_of(graph)[modelled]
    now_ns = np.maximum(graph.duration_ns[tasks], 1)
    ratio = (latency_ns + (graph.duration_ns[tasks] - latency_ns) / factor) / now_ns
    graph = graph.scale(tasks, ratio)
    bounds = sorted((1 / factor, 1.0))
    return graph.scale(communication & ~modelled, 1 / factor, low=bounds[0], high=bounds[1])
