"""BlueConnect: all-reduce in stages within and between nodes, instead of one ring over all workers.

Source: Cho et al., "BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network Hierarchy", IBM
        Journal of Research and Development 63(6), 2019; Daydream (USENIX ATC 2020) §5.2 and Algorithm 8; nccl-tests
        for the time of a stage, (p - 1) / p S / bandwidth among p workers, and (p - 1) latencies.
Model:  with factors=4x2, 4 workers per node and 2 nodes, every all-reduce of the graph becomes a reduce-scatter among
        4, one among 2 of the remaining quarter, and the two all-gathers in reverse. Each factor has a channel, so that
        stages of several buckets overlap. The first factor's links have `inner_bandwidth`, the others `bandwidth`, by
        default that of the all-reduce itself (by its size and time; a recorded one may have waited for others, and
        waiting counts as transfer). The workers of a node share its link to the others; with shared=false each has its
        own. A `cluster` sets factors, rates and sharing; a hop's latency is always the mean of the all-reduce's. Each
        stage is a separate CPU call (55 us in a recording, 20 at the lower end). Ignored: the cost of cutting buffers.
        In the range: 34 % more than theory (Daydream §6.5). Deviation from the paper: Algorithm 8 is right, but A.6
        says all-reduce where all-gather is meant.
Effort: medium: NCCL on separate process groups between nodes and within them, or Horovod's hierarchical mode.
"""

import math

import numpy as np

from whatif import TaskGraph, WhatifError
from whatif.hardware.cluster.network import Level
from whatif.models import Bandwidth
from whatif.models.exchange.collective_tasks import all_reduces, recorded_workers
from whatif.models.exchange.compression import EXCHANGE
from whatif.models.exchange.hierarchy import SCATTER, decompose, flat_byte_s
from whatif.models.exchange.network_options import network_of
from whatif.simulation.transfers import workers_of

# NCCL's rate of PCI Express 3.0 with 16 lanes (its topo.h).
PCIE = Bandwidth("12GB/s")
PLACE = "sums"
WHOLE_PASSES = True


def transform(
    graph: TaskGraph,
    *,
    factors: str = "4x2",
    bandwidth: Bandwidth | None = None,
    inner_bandwidth: Bandwidth = PCIE,
    shared: bool = True,
    cluster: str | None = None,
) -> TaskGraph:
    """Decompose every all-reduce; the product of the factors is the number of workers."""
    levels: list[Level] = []
    if cluster is not None:
        known_workers = int(workers_of(graph).max()) or recorded_workers(graph)
        levels = [level for level in network_of(graph, "blueconnect", workers=known_workers, cluster=cluster).levels
                  if level.workers > 1]  # fmt: skip
        factors = "x".join(str(level.workers) for level in levels)
    parts = factors.lower().split("x")
    if not (len(parts) > 1 and all(part.isdecimal() and 2 <= int(part[:7]) <= 100_000 for part in parts)):
        raise WhatifError(f"blueconnect: expected factors of 2 or more as in factors=4x2, got {factors!r}.")
    numbers = [int(part) for part in parts]
    tasks = np.flatnonzero(all_reduces(graph))
    if not len(tasks):
        if graph.select(name=f"^{SCATTER} among").any():
            return graph.unchanged("blueconnect: the all-reduces are in stages already; nothing changes")
        if graph.select(name=f"^{EXCHANGE}$").any():
            raise WhatifError("blueconnect: expected all-reduces, got the all-gathers of dgc; name one of the two.")
        raise WhatifError(
            "blueconnect: expected all-reduces to split, got none; name distributed before it, or give the "
            "recording of one rank of data parallel training."
        )
    known = int(workers_of(graph)[tasks].max()) or recorded_workers(graph)
    if known and math.prod(numbers) != known:
        raise WhatifError(f"blueconnect: expected factors whose product is {known} workers, got {factors}: set them.")
    rate = flat_byte_s(graph, tasks, math.prod(numbers), bandwidth)
    if cluster is not None:
        faster = [level.link.exchange_byte_s / rate for level in levels]
        return decompose(graph, tasks, numbers, faster, shared=[level.shared for level in levels])
    inner, outer = (
        None if given is None else network_of(graph, "blueconnect", bandwidth=given).levels[0].link.byte_s
        for given in (inner_bandwidth, bandwidth)
    )
    faster = [(inner or rate) / rate, *[(outer or rate) / rate] * (len(numbers) - 1)]
    return decompose(graph, tasks, numbers, faster, shared=[shared] * len(numbers))
