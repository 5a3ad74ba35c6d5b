"""Tensor parallel: split each transformer block across `workers` GPUs, with two all-reduces per pass.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019,
        section 3 (columns, then rows; the operators f and g; two all-reduces forward and two backward a block).
Model:  the parts of a block are found by the shapes of its linear layers in the order of their calls: layers that leave
        the stream (query, key and value; up, gate) are cut by columns, layers that return to it by rows, and all
        between does 1 / n of its work, in the time of a batch of 1 / n (whatif/models/kernels/batch.py: start-up stays,
        and kernels that leave the GPU half empty gain less; products of few rows, as in decoding, read 1 / n of their
        weights). Normalization, dropout and sums of the stream are not split. After a part's last product, and after
        its first one's backward work, an activation of the stream is all-reduced, which the next kernel waits for; a
        forward pass alone has only the former. The update works on the worker's parameters. Launches and calls keep
        their CPU time. With vocabulary=true the largest embedding and the output layer of that vocabulary are split
        too, and the loss after it (its all-reduces of one number per token are ignored). With sequence_parallel=true
        (Korthikanti et al., 2022, section 4.2.2) work between parts is split along the sequence, which is gathered
        before a part and scattered after it. The batch is that of all workers together; for several such groups, on
        another network, name distributed, zero or fsdp after this one, and activation_checkpoint as well. Ignored:
        overlap of the backward all-reduce with the gradients of the weights (later Megatron), blocks that are called
        twice in a pass. In the range: 34 % more than theory (Daydream §6.5).
Effort: medium: torch.distributed.tensor.parallel (ColwiseParallel, RowwiseParallel), or Megatron-LM's layers; NVLink.
"""

from whatif import Change, TaskGraph, WhatifError
from whatif.models import Bandwidth
from whatif.models.durations.estimator import device
from whatif.models.exchange.collective_tasks import check_exchanges_nothing
from whatif.models.exchange.network_options import network_of
from whatif.models.parallel.stage_gradients import refuse_stages
from whatif.models.parallel.tensor_parallel import (
    check_divides,
    find_split,
    is_split,
    split_blocks,
)

# The NVLink rate of a GPU in an A100 node, one direction (NVIDIA A100 data sheet: 600 GB/s both ways).
NVLINK, NVLINK_LATENCY_US = Bandwidth("300GB/s"), 3.0

AXIS = "tensor"


def transform(
    graph: TaskGraph,
    *,
    workers: int | None = None,
    bandwidth: Bandwidth | None = None,
    latency_us: float | None = None,
    cluster: str | None = None,
    algorithm: str = "auto",
    table: str | None = None,
    layers: str | None = None,
    vocabulary: bool = False,
    sequence_parallel: bool = False,
) -> TaskGraph:
    """Split the blocks, or the `layers` (a regular expression of their names)."""
    if cluster is None:
        workers = 2 if workers is None else workers
        if device(graph) is None:
            bandwidth, latency_us = bandwidth or NVLINK, NVLINK_LATENCY_US if latency_us is None else latency_us
    network = network_of(graph, "tensor_parallel", workers=workers, bandwidth=bandwidth, latency_us=latency_us,
                         cluster=cluster, algorithm=algorithm, table=table)  # fmt: skip
    if network.workers == 1:
        return graph.unchanged("tensor_parallel: one worker has no other to share its blocks with; nothing changes")
    if is_split(graph):
        raise WhatifError("tensor_parallel: expected a whole model, got one that is cut across workers already.")
    refuse_stages(graph, "tensor_parallel")
    check_exchanges_nothing(graph, "tensor_parallel", updates=False)
    if Change.RECOMPUTES in graph.info.changes:
        raise WhatifError("tensor_parallel: expected steps that recompute nothing; name it before the checkpoints.")
    split = find_split(graph, layers, vocabulary=vocabulary)
    check_divides(graph, split, network.workers)
    sent = sum(split.size_bytes) / len(split.size_bytes) / 1e6
    return split_blocks(graph, split, network, sequence=sequence_parallel).note(
        f"tensor_parallel: {split.n_blocks} parts of blocks are cut in {network.workers}; each sum is of {sent:,.2f} "
        f"MB, network: {network.described}"
    )
