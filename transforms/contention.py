"""Contention: let collectives, kernels and transfers that run at the same time slow each other down.

Source: Tianshu (Huang et al., EMSS 2024) §3.3: an all-reduce occupies 16 multiprocessors of a GPU; Daydream (USENIX ATC
        2020) §6.5: NCCL takes 34 % more than theory beside kernels, and §7.5: concurrent kernels; Pei et al., eq. 31.
Model:  with mode=rates each collective, recorded or inserted by an earlier what-if (so name this one last), occupies
        `sms` multiprocessors while it runs; concurrent compute-bound kernels run at (SM - sms) / SM of their rate, or
        at half if one wave of blocks no longer fits; memory-bound ones at the remaining bandwidth; inserted collectives
        take `gamma` times as long while other kernels run. streams=true: kernels of several streams share the remaining
        multiprocessors, by the share that their blocks fill. `at_once`: the number of transfers of a channel that share
        its link fairly at a time (gloo has two threads) instead of queueing. `core`: the share of the step's core that
        new transfers take, for a recording of a CPU (`distributed` already includes gloo's work). Recorded work that
        overlapped recorded work counts with its time alone, so that only a change of the overlap changes the step.
        mode=virtual is Tianshu's model: `operations` kernels for each new collective, together sms / SM of its time, on
        the compute stream, without `gamma` and `streams`. mode=none leaves the GPU unchanged. Ignored: caches, clocks,
        copies, and which kernels share a multiprocessor.
Effort: none: a question about the model; on a real machine contention is always present.
"""

from typing import Literal

from whatif import TaskGraph, WhatifError
from whatif.models.exchange.contention import (
    occupy,
    occupy_cpu,
    on_channels,
    on_gpus,
    share_link,
    share_streams,
    virtual_operations,
)

PLACE = "sharing"
WHOLE_PASSES = True


def transform(
    graph: TaskGraph,
    *,
    sms: int = 16,
    mode: Literal["rates", "virtual", "none"] = "rates",
    gamma: float = 1.34,
    streams: bool = False,
    operations: int = 1,
    sm_count: int | None = None,
    at_once: int | None = None,
    core: float = 0.0,
) -> TaskGraph:
    """Let concurrent tasks share their resources; `sm_count` for a GPU that is not listed."""
    on_gpu, before = graph.has_gpu, graph
    if not on_gpu and not core and at_once is None:
        raise WhatifError(
            "contention: expected a recording of a GPU, or core or at_once for one of a CPU, got neither."
        )
    if at_once is not None:
        graph = share_link(graph, on_channels(graph), at_once)
    if core:
        graph = occupy_cpu(graph, on_channels(graph), core)
    collectives = on_gpus(graph)
    if on_gpu and mode == "virtual":
        graph = virtual_operations(graph, collectives, operations, sms, sm_count=sm_count)
    elif on_gpu and mode == "rates":
        graph = occupy(graph, collectives, sms, gamma=gamma, sm_count=sm_count)
        graph = share_streams(graph) if streams else graph
    if graph is before:
        why = "no collective overlaps other work" if on_gpu else "no what-if inserted a transfer"
        why = "mode=none" if mode == "none" else why
        return graph.unchanged(f"contention: {why}; nothing changes")
    return graph
