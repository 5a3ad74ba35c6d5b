"""Bandwidth: what if every link were `factor` times as fast?

Source: Daydream (USENIX ATC 2020) figure 2 (c), "what if network bandwidth is 2x".
Model:  each communication task of the recording takes 1 / `factor` of its time. What part of a recorded collective
        was waiting for other ranks, one rank's recording does not tell: the range runs from a pure transfer to one
        that does not get faster at all.
"""

from whatif import TaskGraph, TaskKind, WhatifError


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
    bounds = sorted((1 / factor, 1.0))
    return graph.scale(communication, 1 / factor, low=bounds[0], high=bounds[1])
