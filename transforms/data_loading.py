"""Data loading: what if loading a batch took another time, or none?

Source: Daydream (USENIX ATC 2020) §4.2.1, data loading tasks; PyTorch marks them on the main thread
        (`enumerate(DataLoader)#...`).
Model:  the loading tasks of every step last `time_ms` together, spread as they were. Worker processes take CPU time
        and memory bandwidth from the training process: its CPU work grows, by an amount that no single recording
        shows (4 to 12 % on the main thread and 11 to 33 % on the backward thread where four workers took over the
        loading of ResNet-50 on a V100). The range runs from no growth to `cpu_growth` where all loading goes away, and
        the prediction lies in its middle.
"""

import numpy as np

from whatif import TaskGraph, TaskKind, WhatifError


def transform(graph: TaskGraph, *, time_ms: float = 0.0, cpu_growth: float = 0.1) -> TaskGraph:
    """Set the loading time of each step."""
    if time_ms < 0:
        raise WhatifError(f"data_loading: expected time_ms of 0 or more, got {time_ms}.")
    loading = graph.select(kind=TaskKind.DATA_LOADING)
    if not loading.any():
        raise WhatifError(
            f"data_loading: {graph.info.path or 'this recording'} has no data-loading tasks; record with a DataLoader, "
            "or mark the loading with record_function('enumerate(DataLoader)#mine')."
        )
    ids = np.flatnonzero(loading)
    step, duration_ns = graph.step[ids] + 1, graph.duration_ns[ids]
    step_total_ns = np.bincount(step, weights=duration_ns)
    # A batch that is loaded outside all steps is loaded once more, not once a step.
    share = duration_ns / np.maximum(step_total_ns[step], 1)
    usual_ns = np.median(step_total_ns[1:][step_total_ns[1:] > 0]) if len(step_total_ns) > 1 else step_total_ns[0]
    graph = graph.with_duration(ids, share * time_ms * 1e6)
    growth = cpu_growth * max(1 - time_ms * 1e6 / usual_ns, 0.0)
    graph = graph.scale(graph.on_cpu & ~loading, 1 + growth / 2, low=1.0, high=1 + growth)
    return graph.note(f"data_loading: {usual_ns / 1e6:.1f} ms a step in the recording, {time_ms:g} ms now")
