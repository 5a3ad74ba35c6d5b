"""Distributed: train on `workers` machines with an all-reduce for each gradient bucket (DDP).

Source: Daydream (USENIX ATC 2020) §5.1, §6.5 and Algorithm 6; PyTorch's DistributedDataParallel (its documentation,
        and reducer.cpp for the rule of the buckets); nccl-tests, doc/PERFORMANCE.md (a ring all-reduce of S bytes
        among n takes 2 (n - 1) / n S / bandwidth) plus a latency for each of its 2 (n - 1) steps; docs/cluster.md.
Model:  gradients are ready in the recorded order, with the last backward work of their layer; each is copied into its
        bucket (25 MiB, the first 1 MiB, or `bucket_mb` for all, or as recorded), full buckets are all-reduced on the
        network, in order, during the backward pass (overlap=false: after it), and after that pass every sum is copied
        back before the update. Calls and copies take CPU and GPU time; `sync` adds a synchronisation before each call;
        compress=fp16 is DDP's hook: casts around half the bytes. On a CPU gloo's threads take time from the core, and
        buffers of batch normalization are broadcast. All wait for the slowest worker: steps vary like the recorded
        ones, on GPUs by 1.5 % or more (`spread_pct`); kernels lose 5 bytes of memory traffic per byte that NCCL sums
        beside them (both fitted to NVIDIA's tables, docs/data_parallel.md). Upper end: 34 % over theory (3 % with
        `sync`), as Daydream measured. Ignored: a worker that is always slower (`straggler`), buffers broadcast on a
        GPU. Deviation: in Algorithm 6 forward layers start the all-reduce.
Effort: medium: torch.nn.parallel.DistributedDataParallel around the model, torchrun, a DistributedSampler, machines.
"""

from whatif import TaskGraph, WhatifError
from whatif.models import Bandwidth
from whatif.models.exchange.buckets import bucket_of, gradients_source, sparse_gradients, step_gradients
from whatif.models.exchange.collective_tasks import check_exchanges_nothing
from whatif.models.exchange.compression import exchange_cast
from whatif.models.exchange.data_parallel import all_reduce_buckets, as_workers
from whatif.models.exchange.network_options import network_of
from whatif.models.parallel.other_workers import on_other_workers, recorded_on_several
from whatif.models.parallel.stage_gradients import copied_stages, is_pipelined

AXIS = "data"


def transform(
    graph: TaskGraph,
    *,
    workers: int | None = None,
    bandwidth: Bandwidth | None = None,
    latency_us: float | None = None,
    cluster: str | None = None,
    algorithm: str = "auto",
    table: str | None = None,
    bucket_mb: float | None = None,
    gradient_mb: float | None = None,
    gradient_as_bucket_view: bool = False,
    overlap: bool = True,
    compress: str = "none",
    sync: bool = False,
    spread_pct: float | None = None,
) -> TaskGraph:
    """Insert DDP's buckets into every step; set `gradient_mb` if the recording lacks the gradients."""
    network = network_of(graph, "distributed", workers=workers, bandwidth=bandwidth, latency_us=latency_us,
                         cluster=cluster, algorithm=algorithm, table=table, spread_pct=spread_pct)  # fmt: skip
    if compress not in ("none", "fp16"):
        raise WhatifError(f"distributed: expected compress=none or compress=fp16, got {compress!r}.")
    if is_pipelined(graph) and network.workers > 1:
        check_exchanges_nothing(graph, "distributed")
        if bucket_mb is not None or compress != "none" or sync or gradient_as_bucket_view:
            raise WhatifError("distributed: expected no DDP options after pipeline, which sends at once.")
        return copied_stages(graph, "distributed", network, gradient_mb)
    if workers is not None and recorded_on_several(graph):
        chosen = None if bandwidth is None and cluster is None and table is None else network
        return on_other_workers(graph, "distributed", network.workers, chosen)
    check_exchanges_nothing(graph, "distributed")
    if network.workers == 1:
        return graph.unchanged("distributed: one worker has no other to exchange gradients with; nothing changes")
    if sync and not graph.has_gpu:
        raise WhatifError("distributed: expected a recording of a GPU for sync=true, got one of a CPU, which waits.")
    source, gradients = gradients_source(graph, gradient_mb), step_gradients(graph, gradient_mb, "distributed")
    bucket = bucket_of(graph, gradients, bucket_mb)
    graph = all_reduce_buckets(
        graph, gradients, bucket, network, overlap=overlap, synchronised=sync, bucket_view=gradient_as_bucket_view
    )
    if compress == "fp16":
        graph = exchange_cast(graph, network)
    first = gradients.step == gradients.step.min()
    size_bytes = int(gradients.size_bytes[first].sum())
    return as_workers(graph, network.workers, size_bytes, bucket_view=gradient_as_bucket_view).note(
        f"distributed: {size_bytes / 1e6:,.1f} MB of gradients a step{source and f' (by {source})'} in "
        f"{len(set(bucket[first].tolist()))} buckets, network: {network.described}, {network.algorithm}; "
        f"the batch is per worker ({network.workers} workers){sparse_gradients(graph, gradient_mb)}"
    )
