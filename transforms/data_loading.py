"""Data loading: change the time to load a batch, or the number of workers that load.

Source: Daydream (USENIX ATC 2020) §4.2.1; PyTorch marks these tasks on the main thread (`enumerate(DataLoader)#...`).
Model:  the loading tasks of the median step last `time_ms` together. Shorter times scale every step's loading; longer
        ones are each step's minimum. Worker processes take CPU time and memory bandwidth from the training process: its
        CPU work grows, by an amount that no single recording shows (4 to 12 % on the main thread and 11 to 33 % on the
        backward thread when four workers took over the loading of ResNet-50 on a V100). The range runs from no growth
        to `cpu_growth` if all loading is removed, at most the loading saved; the prediction is its middle. For a longer
        time the number of workers may have changed either way: the range extends as far on both sides. With `workers`
        the recorded loading moves to that many processes, on the cores left by training: the step waits for loading
        that does not fit into a step without it, and fetching takes 1.5 ms (measured 1.4, 1.7).
Effort: small: DataLoader(num_workers=4, pin_memory=True, persistent_workers=True).
"""

import numpy as np

from whatif import Selection, TaskGraph, TaskKind, WhatifError, simulate

PLACE = "loading"
FETCH_MS = 1.5
MOST_WORKERS = 10_000


def transform(
    graph: TaskGraph, *, time_ms: float = 0.0, workers: int | None = None, cpu_growth: float = 0.1
) -> TaskGraph:
    """Set the loading time of each step, directly or by the number of processes that load."""
    if not (0 <= time_ms < np.inf and 0 <= cpu_growth < np.inf):
        raise WhatifError(f"data_loading: expected times of 0 or more, got time_ms={time_ms}, cpu_growth={cpu_growth}.")
    loading = graph.select(kind=TaskKind.DATA_LOADING)
    if not loading.any():
        raise WhatifError(
            f"data_loading: {graph.info.path or 'this recording'} has no data-loading tasks; record with a DataLoader, "
            "or mark the loading with record_function('enumerate(DataLoader)#NAME')."
        )
    if graph.has_gpu and loading.ids.max() < graph.on_gpu.ids[0]:
        graph = graph.note("data_loading: all loading ends before the first kernel, where the span begins to count")
    usual_ns, cpu_ns = (per_step_ns(graph, tasks) for tasks in (loading, graph.on_cpu & ~loading))
    if workers is not None:
        if not 0 < workers <= MOST_WORKERS or time_ms:
            raise WhatifError(
                f"data_loading: expected either 1 to {MOST_WORKERS:,} workers or time_ms, got {workers=}, {time_ms=}."
            )
        time_ms = waiting_ms(graph, loading, usual_ns / 1e6, workers)
    removed_ns = max(usual_ns - time_ms * 1e6, 0.0)
    growth = min(cpu_growth * removed_ns / max(usual_ns, 1.0), removed_ns / max(cpu_ns, 1.0))
    if time_ms * 1e6 <= usual_ns:
        graph = graph.scale(loading, time_ms * 1e6 / max(usual_ns, 1.0))
    else:
        _, of_step, tasks = np.unique(graph.step[loading], return_inverse=True, return_counts=True)
        totals_ns = np.bincount(of_step, weights=graph.duration_ns[loading])
        more_ns = (np.maximum(time_ms * 1e6 - totals_ns, 0.0) / tasks)[of_step]
        columns = (graph.duration_ns, graph.low_ns, graph.high_ns)
        times_ns, low_ns, high_ns = (column[loading] + more_ns for column in columns)
        graph = graph.with_duration(loading, times_ns, low_ns=low_ns, high_ns=high_ns)
    if growth > 0:
        graph = graph.scale(graph.on_cpu & ~loading, 1 + growth / 2, low=1.0, high=1 + growth)
    elif time_ms * 1e6 > usual_ns:
        spread = min(cpu_growth * (1 - usual_ns / (time_ms * 1e6)), 1.0)
        graph = graph.scale(graph.on_cpu & ~loading, 1.0, low=1 - spread, high=1 + spread)
    return graph.note(f"data_loading: {usual_ns / 1e6:.1f} ms a step in the baseline, {time_ms:g} ms now")


def waiting_ms(graph: TaskGraph, loading: Selection, loading_ms: float, workers: int) -> float:
    """Return the time that a step waits for its batch, including fetching, with ``workers`` loading processes, ms."""
    cores = graph.info.recorded.cpu_cores
    free_cores = workers if cores is None else max(cores - 1, 1)
    batch_ms = loading_ms / min(workers, free_cores)
    rest_ms = simulate(graph.scale(loading, 0.0)).step_ns / 1e6
    return max(batch_ms - rest_ms, FETCH_MS)


def per_step_ns(graph: TaskGraph, tasks: Selection) -> float:
    """Return the median over steps of the total time of ``tasks``, ns; without steps, their total."""
    in_step = graph.step[tasks] >= 0
    if not in_step.any():
        return float(graph.duration_ns[tasks].sum())
    totals = np.bincount(graph.step[tasks][in_step], weights=graph.duration_ns[tasks][in_step])
    return float(np.median(totals[np.unique(graph.step[tasks][in_step])]))
