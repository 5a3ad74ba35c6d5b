"""P3: train with parameter servers that are sent slices of gradients, those of the first layers first.

Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", MLSys 2019 (slices of
        50,000 parameters; MXNet's P3Store cuts at 40,000); Daydream (USENIX ATC 2020) §5.1, §6.6 and Algorithm 7.
Model:  each slice is pushed on the sending link once its layer's backward work is done, pulled on the receiving one
        once it is pushed, and the layer's forward work of the next step waits for it. A link that is free takes the
        slice whose layer is used first; with priority=false gradients go whole, in the order in which they finish, and
        those above a million parameters are split over the servers: MXNet's KVStore, the baseline. Servers stand beside
        the workers unless `servers` machines are theirs alone; they update the weights, so the worker's update goes.
        Deviations from the print: there the priority is the negative distance to the output, which prefers the layers
        that are used last; pushes to the own server are sent to itself, one for all workers, where the others send
        to it; and a slice is pulled for the layer's backward work. Ignored: the servers' own work, copies between
        host and GPU, the worker's calls. In the range: 34 % more than theory (Daydream §6.5 measured it for NCCL), and
        messages whose latencies overlap (in the prediction each holds its link up).
Effort: large: a parameter server with priorities, as MXNet's P3Store or BytePS, in place of PyTorch's DDP.
"""

import numpy as np

from whatif import Frontier, TaskGraph, WhatifError
from whatif.cluster.links import LATENCY_US
from whatif.models.buckets import step_gradients
from whatif.models.collective_tasks import communicates, link_of
from whatif.models.parameter_server import push_and_pull, server_arrays, server_slices, without_update
from whatif.models.priority import by_priority
from whatif.units import Bandwidth, Size

ETHERNET, SLICE = Bandwidth("25Gbps"), Size("200kB")


def transform(
    graph: TaskGraph,
    *,
    workers: int = 4,
    servers: int | None = None,
    bandwidth: Bandwidth = ETHERNET,
    slice_size: Size = SLICE,
    priority: bool = True,
    latency_us: float = LATENCY_US,
    gradient_mb: float | None = None,
) -> TaskGraph:
    """Push and pull every gradient; `gradient_mb` where the recording does not tell the gradients."""
    if not 2 <= workers <= 100_000 or not (servers is None or 1 <= servers <= 100_000):
        raise WhatifError(f"p3: expected from 2 to 100,000 workers and 1 or more servers, got {workers} and {servers}.")
    if not 0 <= latency_us <= 1e6:
        raise WhatifError(f"p3: expected latency_us from 0 to 1,000,000, got {latency_us}.")
    if communicates(graph):
        return graph.note("p3: the steps exchange their gradients already; nothing changes")
    graph = without_update(graph)
    gradients = step_gradients(graph, gradient_mb, "p3")
    if len(np.unique(gradients.step)) < 2:
        raise WhatifError(
            "p3: expected a recording of two steps or more, since a step pulls for the next one, got one."
        )
    places = workers if servers is None else servers
    slices = server_slices(gradients, slice_size.size_bytes, places) if priority else server_arrays(gradients, places)
    link = link_of(graph, bandwidth, latency_us)
    sent = int((gradients.step[slices.gradient] == gradients.step[0]).sum())
    graph = push_and_pull(graph, gradients, slices, workers, servers, link, prioritised=priority)
    return graph.note(f"p3: {sent:,} {'slices' if priority else 'arrays or parts of one'} a step; the servers update")


def schedule(frontier: Frontier) -> int:
    """Take what starts first, and of the slices that wait for a link the most urgent one."""
    return by_priority(frontier)
