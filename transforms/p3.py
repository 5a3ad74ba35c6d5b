"""P3: train with parameter servers, sending gradients in slices, those of the first layers first.

Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", MLSys 2019 (slices of
        50,000 parameters; MXNet's P3Store cuts at 40,000); Daydream (USENIX ATC 2020) §5.1, §6.6 and Algorithm 7.
Model:  each slice is pushed on the sending link once its layer's backward work is done, pulled on the receiving one
        once it is pushed, and the layer's forward work of the next step waits for it. A free link takes the slice whose
        layer is used first; with priority=false gradients are sent unsliced, in the order of completion, and those
        above a million parameters are split over the servers: MXNet's KVStore, the baseline. Servers run beside the
        workers unless there are `servers` dedicated machines; they update the weights, so the worker's update is
        removed. Deviations from the paper: there the priority is the negative distance to the output, which prefers the
        layers that are used last; a slice is pulled for the layer's backward work; a worker also sends to its own
        server. Here all servers are equally busy. Ignored: the servers' work, copies between host and GPU, the worker's
        calls (on a CPU sockets take time from the core of the step). In the range: 34 % more than theory (Daydream §6.5
        measured it for NCCL), and messages whose latencies overlap (in the prediction each occupies its link).
Effort: large: a parameter server with priorities, as MXNet's P3Store or BytePS, in place of PyTorch's DDP.
"""

import numpy as np

from whatif import TaskGraph, WhatifError
from whatif.models import Bandwidth, Size
from whatif.models.exchange.buckets import step_gradients
from whatif.models.exchange.collective_tasks import check_exchanges_nothing
from whatif.models.exchange.data_parallel import as_workers
from whatif.models.exchange.network_options import network_of
from whatif.models.exchange.parameter_server import (
    push_and_pull,
    server_arrays,
    server_slices,
    updated_by_servers,
)
from whatif.models.exchange.priority import attached_priority
from whatif.models.parallel.stage_gradients import refuse_stages

AXIS = "data"
# The paper's cluster has four machines.
WORKERS, SLICE = 4, Size("200kB")


def transform(
    graph: TaskGraph,
    *,
    workers: int | None = None,
    servers: int | None = None,
    bandwidth: Bandwidth | None = None,
    latency_us: float | None = None,
    cluster: str | None = None,
    table: str | None = None,
    slice_size: Size = SLICE,
    priority: bool = True,
    gradient_mb: float | None = None,
) -> TaskGraph:
    """Push and pull every gradient; set `gradient_mb` if the recording lacks the gradients."""
    network = network_of(graph, "p3", workers=WORKERS if workers is None and cluster is None else workers,
                         bandwidth=bandwidth, latency_us=latency_us, cluster=cluster, table=table)  # fmt: skip
    if network.workers < 2 or not (servers is None or 1 <= servers <= 100_000):
        got = f"{network.workers} and {servers}"
        raise WhatifError(f"p3: expected 2 workers or more and from 1 to 100,000 servers, got {got}.")
    refuse_stages(graph, "p3")
    check_exchanges_nothing(graph, "p3")
    graph = updated_by_servers(graph)
    gradients = step_gradients(graph, gradient_mb, "p3")
    places = network.workers if servers is None else servers
    slices = server_slices(gradients, slice_size.size_bytes) if priority else server_arrays(gradients, places)
    sent = int((gradients.step[slices.gradient] == gradients.step[0]).sum())
    graph = push_and_pull(graph, gradients, slices, network, servers, prioritised=priority)
    return as_workers(graph, network.workers, 0).note(
        f"p3: {sent:,} {'slices' if priority else 'arrays or parts of one'} a step, "
        f"network: {network.described}; the servers update"
    )


def priority(graph: TaskGraph) -> np.ndarray:
    """The priorities of waiting slices: first the one whose layer is used first."""
    return attached_priority(graph)
