"""Gradient accumulation: run several forward and backward passes for each update.

Source: PyTorch's AccumulateGrad: the first gradient of a parameter in a step is kept as it is, every later one is
        added to it; Pei et al., "Iteration Time Prediction for CNN in Multi-GPU Platform", §III (a step is its passes
        and one update).
Model:  loading, forward and backward pass take `passes` times as long, each of a whole recorded batch; the update
        happens once. Every pass but the first adds its gradients to those before: two reads and one write of each, at
        the machine's memory rate, one operator a parameter tensor. Ignored: all-reduces that are left out (no_sync).
Effort: small: several backward passes before optimizer.step(), the loss divided by their number.
"""

import numpy as np

from whatif import Phase, TaskGraph, WhatifError
from whatif.models import accumulated, add_gradients, backward_ends, change_memory, with_batch_size
from whatif.models.durations.work_done import with_work
from whatif.simulation.transfers import LATENCY, latency_of, of_activations


def transform(graph: TaskGraph, *, passes: int = 4) -> TaskGraph:
    """Repeat the passes of each step, and add up their gradients."""
    if not 1 <= passes <= 10_000:
        raise WhatifError(f"gradient_accumulation: expected from 1 to 10,000 passes, got {passes}.")
    if not len(backward_ends(graph)):
        got = "none" if graph.info.n_steps else "one without steps; call profiler.step() after each"
        raise WhatifError(f"gradient_accumulation: expected a recording whose steps have a backward pass, got {got}.")
    if passes == 1:
        return graph
    recorded = graph
    in_pass = np.isin(graph.phase, [Phase.DATA, Phase.FORWARD, Phase.BACKWARD])
    repeated = in_pass & (graph.on_gpu | graph.on_cpu | of_activations(graph))
    # Each repetition of a kernel also follows the one before it on its stream.
    lag_ns = np.array([thread.lag_ns for thread in graph.threads])[graph.thread[repeated]]
    new_ns, low_ns, high_ns = (
        time_ns[repeated] * passes + (passes - 1) * lag_ns
        for time_ns in (graph.duration_ns, graph.low_ns, graph.high_ns)
    )
    graph = graph.with_duration(repeated, new_ns, low_ns=low_ns, high_ns=high_ns)
    sums = of_activations(graph)
    if sums.any():
        graph = graph.attach(**{LATENCY: np.where(sums, passes, 1) * latency_of(graph)})
    graph = change_memory(with_work(graph, repeated, passes), accumulated)
    return with_batch_size(add_gradients(graph, passes - 1, costs_of=recorded), passes)
