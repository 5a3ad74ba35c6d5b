"""Distributed: train the recorded model on `workers` machines at once, with an all-reduce for every gradient bucket.

Source: Daydream (USENIX ATC 2020) §5.1, §6.5 and Algorithm 6; PyTorch's DistributedDataParallel (its documentation,
        and reducer.cpp for the rule of the buckets); nccl-tests, doc/PERFORMANCE.md (a ring all-reduce of S bytes
        among n takes 2 (n - 1) / n S / bandwidth) plus a latency for each of its 2 (n - 1) steps.
Model:  gradients finish in the recorded order, with the last backward work of their layer; each is copied into its
        bucket (25 MiB, the first 1 MiB, or `bucket_mb` for all, or as the recording tells), a bucket that is full is
        all-reduced on the network, in order, beside the backward pass, and behind that pass every sum is copied back
        before the update. Calls and copies cost the CPU and the GPU their time; `sync` puts a synchronisation before
        each call. Theory is the prediction and 34 % more its upper end (3 % with `sync`): what Daydream measured of
        NCCL beside other kernels. Ignored: the slower kernels beside NCCL, stragglers, sharing of the link, buffers
        that are broadcast, the barrier at the start. Deviation from the print: Algorithm 6 lets forward layers start
        the all-reduce; §5.1 means backward ones. `bandwidth` is that of the ring's slowest link, one direction;
        from a CPU (gloo) the headers of TCP take 5 % of it.
Effort: medium: torch.nn.parallel.DistributedDataParallel around the model, torchrun, a DistributedSampler, machines.
"""

from whatif import TaskGraph, WhatifError
from whatif.cluster.links import LATENCY_US
from whatif.models.buckets import bucket_of, step_gradients
from whatif.models.collective_tasks import communicates, link_of
from whatif.models.data_parallel import all_reduce_buckets
from whatif.units import Bandwidth

ETHERNET = Bandwidth("25Gbps")


def transform(
    graph: TaskGraph,
    *,
    workers: int = 8,
    bandwidth: Bandwidth = ETHERNET,
    latency_us: float = LATENCY_US,
    bucket_mb: float | None = None,
    gradient_mb: float | None = None,
    gradient_as_bucket_view: bool = False,
    sync: bool = False,
) -> TaskGraph:
    """Put the buckets of DDP into every step; `gradient_mb` where the recording does not tell the gradients."""
    if not 1 <= workers <= 100_000:
        raise WhatifError(f"distributed: expected from 1 to 100,000 workers, got {workers}.")
    if not 0 <= latency_us <= 1e6:
        raise WhatifError(f"distributed: expected latency_us from 0 to 1,000,000, got {latency_us}.")
    if communicates(graph):
        return graph.note(
            "distributed: the steps communicate already, so they are of one worker of several; nothing changes"
        )
    if workers == 1:
        return graph.note("distributed: one worker has nobody to exchange gradients with; nothing changes")
    if sync and not graph.on_gpu.any():
        raise WhatifError("distributed: expected a recording of a GPU for sync=true, got one of a CPU, which waits.")
    gradients = step_gradients(graph, gradient_mb, "distributed")
    bucket = bucket_of(graph, gradients, bucket_mb)
    link = link_of(graph, bandwidth, latency_us)
    graph = all_reduce_buckets(
        graph, gradients, bucket, workers, link, synchronised=sync, bucket_view=gradient_as_bucket_view
    )
    first = gradients.step == gradients.step.min()
    return graph.note(
        f"distributed: {gradients.size_bytes[first].sum() / 1e6:,.1f} MB of gradients a step in "
        f"{len(set(bucket[first].tolist()))} buckets; the batch is that of each of the {workers} workers"
    )
