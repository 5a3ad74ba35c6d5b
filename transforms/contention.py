"""Contention: let collectives, kernels and transfers that run at the same time slow each other down.

Source: Tianshu (Huang et al., EMSS 2024) §3.3: an all-reduce occupies 16 multiprocessors of a GPU; Daydream (USENIX ATC
        2020) §6.5: NCCL takes 34 % more than theory beside kernels, and §7.5: concurrent kernels; Pei et al., eq. 31.
Model:  with mode=rates each collective, recorded or put in by a what-if before (so this one comes last), holds `sms`
        multiprocessors while it runs; kernels that compute beside it proceed at (SM - sms) / SM, or at half where one
        wave of blocks no longer fits; those bound by memory at what it leaves of the bandwidth; a collective that a
        what-if put in takes `gamma` times as long while other kernels run. streams=true: kernels of several streams
        share what is left, by what their blocks fill. `at_once`: so many transfers of a channel are under way at a time
        and share its link fairly (gloo has two threads) instead of queueing. `core`: the share of the core of the step
        that new transfers take, for a recording of a CPU (`distributed` counts gloo's own work already). Recorded work
        that overlapped recorded work counts as what it takes alone, so that only a change of the overlap changes the
        step. mode=virtual is Tianshu's own: `operations` kernels for each new collective, sms / SM of its time
        together, on the stream of the computation, without `gamma` and `streams`. mode=none leaves the GPU as it is.
        Ignored: caches, clocks, copies, and which kernels share a multiprocessor.
Effort: none: a question about the model, which a machine answers by itself.
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
    """Let what runs at the same time share what it runs on; `sm_count` for a GPU that is not listed."""
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
        why = "mode=none" if mode == "none" else "no collective runs beside the rest"
        return graph.unchanged(f"contention: {why}; nothing changes")
    return graph
