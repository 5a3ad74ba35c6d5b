"""Straggler: train with some slower workers, or with workers whose speed varies by step.

Source: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, §1 (all wait for the slowest); David and Nagaraja,
        "Order Statistics", 2003, §2.1 (the slowest of n).
Model:  every collective begins when all workers have reached it. Equal workers are one class, which is simulated once:
        this worker, and one that takes `slowdown` times as long for its compute (`what`: on the gpu, the cpu, or all),
        which represents `count` workers. With `jitter_pct` the time of every worker's compute is lognormal with that
        standard deviation, independent in every step; then all wait for the slowest of each class, at the mean of its
        distribution (90 % of it is the range): a thousand workers with 5 % wait for one that takes 1.17 times the mean;
        this replaces the spread that an earlier what-if included. Ignored: noise between the collectives of one step
        that evens out, backup workers, and waits that a recorded collective already includes.
Effort: none: a hypothetical question.
"""

from typing import Literal

from whatif import TaskGraph, TaskKind, WhatifError
from whatif.models.exchange.collective_tasks import recorded_workers
from whatif.models.exchange.replicate import classes, compute_tasks
from whatif.models.exchange.stragglers import without_slowest, worker_classes
from whatif.simulation.transfers import workers_of

ACROSS_RANKS = True  # it turns one rank into several
PLACE = "paces"
WHOLE_PASSES = True


def transform(
    graph: TaskGraph,
    *,
    slowdown: float = 1.5,
    count: int = 1,
    workers: int | None = None,
    what: Literal["all", "gpu", "cpu"] = "all",
    jitter_pct: float = 0.0,
) -> TaskGraph:
    """Make this worker wait for slower ones; `workers` defaults to that of the communication."""
    if not 1 <= slowdown <= 1000:
        raise WhatifError(f"straggler: expected a slowdown from 1 to 1,000, got {slowdown}.")
    if not 0 <= jitter_pct <= 200:
        raise WhatifError(f"straggler: expected jitter_pct from 0 to 200, got {jitter_pct}.")
    if workers is not None and not 1 <= workers <= 1_000_000:
        raise WhatifError(f"straggler: expected from 1 to 1,000,000 workers, got {workers}.")
    if any(thread.rank for thread in graph.threads):
        raise WhatifError(
            "straggler: expected the steps of one worker, got those of several, whose pace is known; name one of them."
        )
    if not (graph.kind == TaskKind.COMMUNICATION).any():
        raise WhatifError(
            "straggler: expected steps that communicate, got none; first name a transform that adds "
            "communication, as in `whatif apply distributed straggler TRACE`."
        )
    known = int(workers_of(graph).max(initial=0)) or recorded_workers(graph)
    together = workers or known or count + 1
    if not 0 <= count < together:
        raise WhatifError(
            f"straggler: expected a count from 0 to {together - 1}, as this worker of {together} is not slow, "
            f"got {count}."
        )
    if not compute_tasks(graph, what).any():
        raise WhatifError(f"straggler: expected a recording with work of the {what}, got one without; try what=all.")
    found = worker_classes(together, count if slowdown > 1 else 0, slowdown, jitter_pct)
    if len(found) == 1:
        return graph.unchanged("straggler: all workers are equally fast, so none waits; nothing changes")
    mean, low, high = zip(*found, strict=True)
    others = f"; the step's own communication is among {known}" if known not in (None, together) else ""
    return classes(without_slowest(graph) if jitter_pct else graph, mean, low=low, high=high, slowed=what).note(
        f"straggler: the slowest of {together} workers takes {max(mean):.3g} times as long as this one{others}"
    )
