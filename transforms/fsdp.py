"""FSDP: shard parameters among `workers` machines, and gather a unit's parameters when it runs.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; torch.distributed.
        fsdp (fully_shard of torch 2.13; FullyShardedDataParallel); Rajbhandari et al., "ZeRO", SC 2020, stage 3.
Model:  a unit (the blocks that repeat, the layers that `unit` names, or layers of `unit_size` together) is gathered
        before its forward and its backward work, its gradients are reduce-scattered after the latter, and each worker
        updates its part. The rest belongs to the root: gathered once, reduced last. All collectives run on one channel
        in the order of the calls (one communicator), beside the kernels; `limit` units are gathered at once. Prefetch:
        the next unit is requested before (pre) or after (post) a unit's backward work, or when it is needed;
        `forward_prefetch` requests units one earlier in the forward pass too. Copies out of and into the buffers and
        hooks take time (the hooks: half of what we measured; 0.15 to 1.5 ms per call). `half` sends 16 bits. On a CPU
        (gloo) every call blocks, takes its work from the core, and a reduce-scatter is an all-reduce. Ignored: that
        under FSDP1 the CPU waits at the limit; padding; offloading. With hybrid=true (paper, §3.2.2; HSDP) the workers
        of one node of the `cluster` share the parameters, and each part of the gradients is summed across nodes on a
        separate channel. In the range: 34 % more than theory (Daydream §6.5).
Effort: medium: torch.distributed.fsdp.fully_shard on each block and on the model, torchrun, a DistributedSampler.
"""

from typing import Literal

from whatif import TaskGraph, WhatifError
from whatif.models import Bandwidth, Size
from whatif.models.exchange.buckets import step_gradients
from whatif.models.exchange.collective_tasks import check_exchanges_nothing
from whatif.models.exchange.network_options import network_of
from whatif.models.parallel.other_workers import on_other_workers, recorded_on_several
from whatif.models.parallel.sharding import FullSharding, fully_sharded
from whatif.models.parallel.stage_gradients import refuse_stages

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
    unit: str | None = None,
    unit_size: Size | None = None,
    backward_prefetch: Literal["pre", "post", "none"] = "pre",
    forward_prefetch: bool = False,
    reshard_after_forward: bool = True,
    limit: int = 2,
    hybrid: bool = False,
    half: bool = False,
    gradient_mb: float | None = None,
    spread_pct: float | None = None,
) -> TaskGraph:
    """Gather and scatter every unit; set `gradient_mb` if the recording lacks the gradients."""
    network = network_of(graph, "fsdp", workers=workers, bandwidth=bandwidth, latency_us=latency_us, cluster=cluster,
                         algorithm=algorithm, table=table, spread_pct=spread_pct)  # fmt: skip
    if not 1 <= limit <= 1000:
        raise WhatifError(f"fsdp: expected a limit of 1 unit or more, got {limit}.")
    if workers is not None and recorded_on_several(graph):
        chosen = None if bandwidth is None and cluster is None and table is None else network
        return on_other_workers(graph, "fsdp", network.workers, chosen)
    check_exchanges_nothing(graph, "fsdp")
    refuse_stages(graph, "fsdp")
    if network.workers == 1:
        return graph.unchanged("fsdp: one worker has no other to share its parameters with; nothing changes")
    fsdp = FullSharding(backward_prefetch, forward_prefetch, reshard_after_forward, limit, 0.5 if half else 1.0, hybrid)
    return fully_sharded(
        graph, "fsdp", step_gradients(graph, gradient_mb, "fsdp"), network, fsdp, unit,
        unit_size.size_bytes if unit_size else None,
    )  # fmt: skip
