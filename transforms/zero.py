"""ZeRO: shard optimizer state, gradients and parameters among `workers` machines.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020 (figure 1:
        memory; section 7: 2, 2 and 3 times the parameters are communicated); DeepSpeed's configuration of its stages.
Model:  stages 1 and 2 reduce-scatter every bucket of gradients, update a part of the parameters on each worker, and
        gather all parameters after the update, which the next step waits for. Stage 1 keeps full gradients and sends
        them in a step's last pass, stage 2 in each pass (DeepSpeed's stage_1_and_2.py). With overlap=true a bucket is
        sent as soon as it is full, during the backward pass, else after that pass (DeepSpeed's default below stage 3).
        DeepSpeed's buckets are larger than these 25 MiB, which are DDP's: use bucket=2GB. Stage 3 is `fsdp` with its
        defaults; name `fsdp` for its options. Around a pipeline only stage 1 is possible, as in DeepSpeed. A copy of
        each bucket and the calls cost their time; the update takes its kernels' start-up and its share of the rest. On
        a CPU (gloo) every call blocks, takes its work from the core, and a reduce-scatter is an all-reduce. Ignored:
        the slower kernels beside NCCL, offloading, partitions of the activations. In the range: 34 % more than theory
        (Daydream §6.5).
Effort: medium: DeepSpeed around the model and the optimizer with zero_optimization.stage in its configuration.
"""

from whatif import TaskGraph, WhatifError
from whatif.models import Bandwidth, Size
from whatif.models.exchange.buckets import gradients_source, step_gradients
from whatif.models.exchange.collective_tasks import check_exchanges_nothing
from whatif.models.exchange.network_options import network_of
from whatif.models.parallel.other_workers import on_other_workers, recorded_on_several
from whatif.models.parallel.sharding import FullSharding, fully_sharded, sharded_gradients
from whatif.models.parallel.stage_gradients import is_pipelined, refuse_stages, sharded_stages, with_gradient_bytes

BUCKET = Size("25MiB")

AXIS = "data"


def transform(
    graph: TaskGraph,
    *,
    stage: int = 2,
    workers: int | None = None,
    bandwidth: Bandwidth | None = None,
    latency_us: float | None = None,
    cluster: str | None = None,
    algorithm: str = "auto",
    table: str | None = None,
    bucket: Size = BUCKET,
    overlap: bool = True,
    gradient_mb: float | None = None,
    spread_pct: float | None = None,
) -> TaskGraph:
    """Shard the state of the stage; set `gradient_mb` if the recording lacks the gradients."""
    if stage not in (1, 2, 3):
        raise WhatifError(f"zero: expected stage 1, 2 or 3, got {stage}.")
    network = network_of(graph, "zero", workers=workers, bandwidth=bandwidth, latency_us=latency_us, cluster=cluster,
                         algorithm=algorithm, table=table, spread_pct=spread_pct)  # fmt: skip
    if workers is not None and recorded_on_several(graph):
        chosen = None if bandwidth is None and cluster is None and table is None else network
        return on_other_workers(graph, "zero", network.workers, chosen)
    check_exchanges_nothing(graph, "zero")
    if network.workers == 1:
        return graph.unchanged("zero: one worker has no other to share its state with; nothing changes")
    if stage > 1:
        refuse_stages(graph, f"zero:stage={stage}")
    if is_pipelined(graph):
        graph = with_gradient_bytes(graph, gradient_mb, "zero")
        return sharded_stages(graph, "zero", network).note(
            f"zero: {network.workers} copies of the pipeline share the state of each stage"
        )
    source, gradients = gradients_source(graph, gradient_mb), step_gradients(graph, gradient_mb, "zero")
    if stage == 3:
        return fully_sharded(graph, "zero", gradients, network, FullSharding())
    first = gradients.step == gradients.step.min()
    graph = sharded_gradients(graph, gradients, bucket.size_bytes, network, stage=stage, overlap=overlap)
    return graph.note(
        f"zero: {gradients.size_bytes[first].sum() / 1e6:,.1f} MB of gradients a step{source and f' (by {source})'}, "
        f"network: {network.described}; the batch is per worker ({network.workers} workers)"
    )
