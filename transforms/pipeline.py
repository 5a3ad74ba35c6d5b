"""Pipeline: split the model into stages on several GPUs, which pass micro-batches on.

Source: Huang et al., "GPipe", NeurIPS 2019 (`gpipe`, its bubble of (p - 1) / m, `recompute`); Narayanan et al.,
        "PipeDream", SOSP 2019, and "Efficient Large-Scale Language Model Training ... Using Megatron-LM", SC 2021
        (`1f1b` with a flush; `interleaved`: `chunks` parts a stage, bubble (p - 1) / (v m)).
Model:  the layers are cut between blocks that repeat. Of the cuts whose slowest stage or message is fastest (exact)
        over one of ten links, the one with the fastest simulated step over the requested link is used. A pass of a
        micro-batch takes the time that `batch_size` predicts for 1 / `micro_batches` of the recorded batch, including
        its launches: small ones are host-bound. Activations and their gradients cross each cut on the link of the two
        stages, beside the work; calls to send and receive take CPU time. Each stage has its own update and memory. A
        pass is one task of a CPU and one of a GPU: name what-ifs that change kernels first. All-reduces of
        `tensor_parallel` within a pass come after it; `distributed` or `zero` replicate the pipeline, stage by stage.
        Ignored: other synchronisations inside a pass, tensors other than the input of the next layer (skip connections
        over a cut, tied weights), slower kernels beside transfers. docs/pipeline.md has the formulas.
Effort: large: torch.distributed.pipelining (or DeepSpeed, Megatron-LM), the model as stages, as many GPUs.
"""

from typing import Literal

from whatif import TaskGraph
from whatif.models import Bandwidth, add_gradients, with_batch_size
from whatif.models.exchange.collective_tasks import check_exchanges_nothing
from whatif.models.exchange.network_options import network_of
from whatif.models.parallel.pipeline import fastest_of
from whatif.models.parallel.pipeline_plan import (
    check_counts,
    check_one_pass,
    described,
    plans,
    with_stage_memory,
)
from whatif.models.parallel.pipeline_schedule import order
from whatif.models.parallel.stage_gradients import refuse_stages

AXIS = "pipeline"


def transform(
    graph: TaskGraph,
    *,
    stages: int = 4,
    micro_batches: int = 8,
    micro_batch: int | None = None,
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b",
    chunks: int = 2,
    recompute: bool = False,
    activation_mb: float | None = None,
    even: bool = False,
    copies: int = 1,
    bandwidth: Bandwidth | None = None,
    latency_us: float | None = None,
    cluster: str | None = None,
    table: str | None = None,
) -> TaskGraph:
    """Rebuild each step as that of `stages` workers; `activation_mb` crosses a cut if the recording lacks its size.

    A micro-batch has `micro_batch` samples (recorded batches if their size is unknown); by default the recorded batch
    is divided among them. With `even` each stage has equally many repeated blocks, as by default in Megatron-LM. With
    a cluster, the same stages of `copies` pipelines (the workers of the data-parallel what-if that is named too) are
    neighbours, and the next stages behind them.
    """
    chunks = chunks if schedule == "interleaved" else 1
    refuse_stages(graph, "pipeline")
    check_exchanges_nothing(graph, "pipeline")
    check_counts(graph, stages, micro_batches, chunks, micro_batch)
    orders = order(schedule, stages, micro_batches, chunks)
    network = network_of(graph, "pipeline", workers=stages, bandwidth=bandwidth, latency_us=latency_us,
                         cluster=cluster, table=table, neighbours=copies)  # fmt: skip
    if stages == 1:
        return graph.unchanged("pipeline: one stage has no other to pass activations to; nothing changes")
    check_one_pass(graph)
    factor = micro_batch / (graph.info.batch_size or 1) if micro_batch else 1 / micro_batches
    graph = with_batch_size(add_gradients(graph, micro_batches - 1), micro_batches * factor)
    ways = plans(graph, stages * chunks, micro_batches, factor=factor, recompute=recompute, activation_mb=activation_mb,
                 even=even)  # fmt: skip
    planned, changed = fastest_of(graph, ways, orders, network)
    return with_stage_memory(changed, planned, orders, factor).note(
        f"pipeline: {described(graph, planned, stages)}; equal stages would wait for a bubble of "
        f"{100 * (stages - 1) / (chunks * micro_batches):.0f} % of their work{network.unused and f'; {network.unused}'}"
    )
