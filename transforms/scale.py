"""Scale: multiply the durations of some tasks by a factor.

Source: Daydream (USENIX ATC 2020) §4.4, the shrink / scale primitive; Curtsinger and Berger, "COZ: Finding Code that
        Counts with Causal Profiling", SOSP 2015, which asks the same of source lines.
Model:  every selected task lasts `factor` times as long. Concurrent tasks keep their durations.
Effort: none: a hypothetical question.
"""

from typing import Literal

from whatif import Phase, TaskGraph, TaskKind, WhatifError

WHOLE_PASSES = True


def transform(
    graph: TaskGraph,
    *,
    kind: Literal["all", "cpu", "gpu", "communication", "data"] = "all",
    name: str = "",
    layer: str = "",
    phase: Literal["", "data", "forward", "backward", "update"] = "",
    factor: float = 1.0,
) -> TaskGraph:
    """Scale the tasks of a kind whose name and layer match the regular expressions."""
    tasks = {
        "all": graph.on_cpu | graph.on_gpu,
        "cpu": graph.on_cpu,
        "gpu": graph.on_gpu,
        "communication": graph.select(kind=TaskKind.COMMUNICATION),
        "data": graph.select(kind=TaskKind.DATA_LOADING),
    }[kind]
    tasks &= graph.select(name=name or None, layer=layer or None, phase=Phase[phase.upper()] if phase else None)
    if not tasks.any():
        raise WhatifError(f"scale: no task matches kind={kind!r}, name={name!r}, layer={layer!r}, phase={phase!r}.")
    return graph if factor == 1 else graph.scale(tasks, factor)
