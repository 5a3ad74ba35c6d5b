"""Defaults for questions about several workers: the what-if that spreads a step, and the network speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whatif.graph.task_graph import TaskGraph
from whatif.models.exchange.buckets import gradients_source, step_gradients
from whatif.models.exchange.collective_tasks import communicates
from whatif.models.exchange.network_options import ETHERNET
from whatif.prediction.transform import LOADERS, Transform, load_transform
from whatif.questions.sweep.scaling import OPTION
from whatif.questions.sweep.values import Varied, parse_vary
from whatif.runtime.errors import WhatifError

# From the network of an office to that of two GPU servers.
BANDWIDTHS = "bandwidth=1Gbps,2.5Gbps,5Gbps,10Gbps,25Gbps,40Gbps,50Gbps,100Gbps,200Gbps,400Gbps"
# For recorded communication only the ratio of speeds is known.
FACTORS = "factor=0.25,0.5,0.75,1,1.5,2,4,8,16"
WORKERS = 8
# For a question about the network that names no workers.
FEW_WORKERS = "distributed.workers=2,4,8,16"
FASTER, FACTOR = "bandwidth", 2.0
# What-ifs that add transfers but do not spread the step over ``workers``.
COMMUNICATING = ("dts", "pipeline", "straggler")
# What a run is assumed to train with if nothing is known: PyTorch's DDP.
DATA_PARALLEL = "distributed"


def spread_of(graph: TaskGraph, asked: Sequence[Transform] = ()) -> tuple[tuple[Transform, ...], tuple[str, ...]]:
    """Return ``asked`` if it spreads the step over workers, else with data parallelism added; and what is assumed."""
    if any(_spreads(transform) for transform in asked):
        free = [
            replace(t, options={key: value for key, value in t.options.items() if key != OPTION}) if _spreads(t) else t
            for t in asked
        ]
        return tuple(free), ()
    source = gradients_source(graph, None)
    assumed = (f"The recording lists no gradients: their sizes come from {source}.",) if source else ()
    return (*asked, load_transform(DATA_PARALLEL)), assumed


def bandwidths_of(
    graph: TaskGraph, asked: Sequence[Transform] = ()
) -> tuple[tuple[Transform, ...], Varied, tuple[str, ...]]:
    """Return the what-ifs, the varied speed and the assumptions of a question about a faster network.

    For the recorded communication, else for the step spread over workers.
    """
    if communicates(graph):
        chosen = (*asked, load_transform("bandwidth"))
        return chosen, parse_vary(f"bandwidth.{FACTORS}", chosen), ("How fast the recorded network was is not known.",)
    spread, assumed = spread_of(graph, asked)
    named = {t.name: t.options[OPTION] for t in asked if _spreads(t) and t.options.get(OPTION)}
    chosen = tuple(t.with_options({OPTION: named.get(t.name, WORKERS)}) if _spreads(t) else t for t in spread)
    return chosen, parse_vary(BANDWIDTHS, chosen), assumed


def faster_links(
    graph: TaskGraph, asked: Sequence[Transform]
) -> tuple[tuple[Transform, ...], tuple[Varied, Varied], tuple[str, ...]] | None:
    """Return the sweep that ``bandwidth`` means for one worker: data parallelism on a few, at 1 and ``factor`` times.

    None if the steps communicate, as recorded or by a what-if in ``asked`` (the question is about those transfers), or
    if their gradients are unknown.
    """
    place = next((at for at, transform in enumerate(asked) if transform.name == FASTER), None)
    if place is None or communicates(graph) or any(_spreads(t) or t.name in COMMUNICATING for t in asked):
        return None
    try:
        step_gradients(graph, None, DATA_PARALLEL)
    except WhatifError:
        return None
    source = gradients_source(graph, None)
    chosen = (*asked[:place], load_transform(DATA_PARALLEL), *asked[place + 1 :])
    factor = float(asked[place].options.get("factor", FACTOR))
    rates = f"distributed.bandwidth={ETHERNET},{float(str(ETHERNET).removesuffix('Gbps')) * factor:g}Gbps"
    assumed = (
        f"the recording has no communication: DDP on links of {ETHERNET}, and of {factor:g} times that, is assumed "
        "(distributed:bandwidth= or cluster= sets others)",
        *([f"the sizes of its gradients come from {source}"] if source else []),
    )
    return chosen, (parse_vary(FEW_WORKERS, chosen), parse_vary(rates, chosen)), assumed


def _spreads(transform: Transform) -> bool:
    """Whether the what-if spreads the step over several workers on a network."""
    return OPTION in transform.parameters and "bandwidth" in transform.parameters and transform.name not in LOADERS
