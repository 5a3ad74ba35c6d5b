"""How a step is put on several workers, and over which speeds of the network, by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whatif.errors import WhatifError
from whatif.graph.task_graph import TaskGraph
from whatif.models.exchange.buckets import step_gradients
from whatif.models.exchange.collective_tasks import communicates
from whatif.prediction.transform import Transform, load_transform
from whatif.questions.sweep.scaling import LOADERS, OPTION
from whatif.questions.sweep.values import Varied, parse_vary

# From what an office has to what two GPU servers have.
BANDWIDTHS = "bandwidth=1Gbps,2.5Gbps,5Gbps,10Gbps,25Gbps,40Gbps,50Gbps,100Gbps,200Gbps,400Gbps"
# Of what a recording communicates already only the ratio is known.
FACTORS = "factor=0.25,0.5,0.75,1,1.5,2,4,8,16"
WORKERS = 8
# What a run trains with that nothing else is known of: DDP, PyTorch's own.
DATA_PARALLEL = "distributed"


def spread_of(graph: TaskGraph, asked: Sequence[Transform] = ()) -> tuple[tuple[Transform, ...], tuple[str, ...]]:
    """Return ``asked`` where it puts the step on several workers, else data parallelism beside it; what is assumed.

    If the recording lacks its gradients, they are as large as the parameters that its operators' shapes
    show, and an assumption says so.
    """
    if any(_spreads(transform) for transform in asked):
        free = [
            replace(t, options={key: value for key, value in t.options.items() if key != OPTION}) if _spreads(t) else t
            for t in asked
        ]
        return tuple(free), ()
    transform, assumed = load_transform(DATA_PARALLEL), []
    memory = graph.info.memory
    if memory is not None and memory.gradients and not _tells_gradients(graph):
        gradient_mb = round(memory.gradients / 1e6, 3)
        transform = transform.with_options({"gradient_mb": gradient_mb})
        assumed.append(
            f"The recording lacks its gradients: they are assumed to be {gradient_mb:,.1f} MB, as large as the "
            "parameters that the shapes of its operators show, and to finish evenly over the backward pass."
        )
    return (*asked, transform), tuple(assumed)


def bandwidths_of(
    graph: TaskGraph, asked: Sequence[Transform] = ()
) -> tuple[tuple[Transform, ...], Varied, tuple[str, ...]]:
    """Return the question what a faster network brings: what-ifs, the option that says how fast, what is assumed.

    Of the recorded communication, else of the step on workers.
    """
    if communicates(graph):
        chosen = (*asked, load_transform("bandwidth"))
        return chosen, parse_vary(f"bandwidth.{FACTORS}", chosen), ("How fast the recorded network was is not known.",)
    spread, assumed = spread_of(graph, asked)
    named = {t.name: t.options[OPTION] for t in asked if _spreads(t) and t.options.get(OPTION)}
    chosen = tuple(t.with_options({OPTION: named.get(t.name, WORKERS)}) if _spreads(t) else t for t in spread)
    return chosen, parse_vary(BANDWIDTHS, chosen), assumed


def _spreads(transform: Transform) -> bool:
    """Whether the what-if puts the step on several workers over a network."""
    return OPTION in transform.parameters and "bandwidth" in transform.parameters and transform.name not in LOADERS


def _tells_gradients(graph: TaskGraph) -> bool:
    try:
        step_gradients(graph, None, DATA_PARALLEL)
    except WhatifError:
        return False
    return True
