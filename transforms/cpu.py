"""CPU: make the host CPU `speedup` times as fast.

Source: Daydream (USENIX ATC 2020) §2.2 and figure 6 (after AMP the CPU is the bottleneck); Curtsinger and Berger, "COZ:
        Finding Code that Counts with Causal Profiling", SOSP 2015, which asks the same of source lines.
Model:  all work of CPU threads (operators, calls, the time between them) takes 1 / `speedup` of its time. Waits follow
        from the simulation, and the GPU's work stays. `loading=false` leaves data loading unchanged, if other processes
        or a disk determine it. It is applied after all other what-ifs, in any position: the CPU work that they add runs
        on that CPU, too. Ignored: the driver's lags of 1 to 3 us per launch.
Effort: none: a hypothetical question, though another host or more free cores may come close.
"""

from whatif import TaskGraph, TaskKind, WhatifError

PLACE = "host"
WHOLE_PASSES = True


def transform(graph: TaskGraph, *, speedup: float = 2.0, loading: bool = True) -> TaskGraph:
    """Divide the durations of CPU tasks by the speedup."""
    if not 0 < speedup < 1e6:
        raise WhatifError(f"cpu: expected a speedup above 0 and below a million, got {speedup}.")
    tasks = graph.on_cpu if loading else graph.on_cpu & ~graph.select(kind=TaskKind.DATA_LOADING)
    return graph if speedup == 1 else graph.scale(tasks, 1 / speedup)
