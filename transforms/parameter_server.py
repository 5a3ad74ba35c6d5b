"""Parameter server: push gradients to servers, which add them up, update, and send the weights back.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Pei et al., "Iteration
        Time Prediction for CNN in Multi-GPU Platform", IEEE Access 2019, §III D (a server on the CPU: copies over
        links that `gpus_per_link` GPUs share, a sum that reads every worker's gradient and writes one).
Model:  gradients are sent unsliced in the order of completion, those above a million parameters in parts to all servers
        (MXNet's KVStore); each is pushed on the sending link, added up and applied by a server's CPU at the rate of its
        memory, pulled on the receiving one, and the layer's forward work of the next step waits for it (sync=true);
        with sync=false that of the step after it does (weights one step old), so that only the links may delay it.
        `servers` is the number of dedicated machines; servers=0 puts one beside each worker. On a GPU gradients are
        copied to the host and weights back. The worker's update is removed. `p3` cuts slices and sends the most urgent
        one. In the range: 34 % more than theory (Daydream §6.5), half and twice the server's work (our estimate).
        Ignored: the worker's calls, the pinned buffers, workers that finish at different times.
Effort: large: parameter servers, as MXNet's KVStore, BytePS or torch.distributed.rpc, in place of PyTorch's DDP.
"""

from whatif import TaskGraph, WhatifError
from whatif.models import Bandwidth
from whatif.models.exchange.buckets import step_gradients
from whatif.models.exchange.collective_tasks import check_exchanges_nothing
from whatif.models.exchange.data_parallel import as_workers
from whatif.models.exchange.network_options import network_of
from whatif.models.exchange.parameter_server import push_and_pull, server_arrays, updated_by_servers
from whatif.models.parallel.stage_gradients import refuse_stages

AXIS = "data"


def transform(
    graph: TaskGraph,
    *,
    workers: int | None = None,
    servers: int = 1,
    bandwidth: Bandwidth | None = None,
    latency_us: float | None = None,
    cluster: str | None = None,
    table: str | None = None,
    gpus_per_link: int = 1,
    sync: bool = True,
    gradient_mb: float | None = None,
) -> TaskGraph:
    """Push, reduce and pull every gradient; set `gradient_mb` if the recording lacks the gradients."""
    name = "parameter_server"
    network = network_of(graph, name, workers=workers, bandwidth=bandwidth, latency_us=latency_us, cluster=cluster,
                         table=table)  # fmt: skip
    if network.workers < 2 or not 0 <= servers <= 100_000:
        got = f"{network.workers} and {servers}"
        raise WhatifError(f"{name}: expected 2 workers or more and from 0 to 100,000 servers, got {got}.")
    if not 1 <= gpus_per_link <= 64:
        raise WhatifError(f"{name}: expected from 1 to 64 GPUs on a link to the host, got {gpus_per_link}.")
    refuse_stages(graph, "parameter_server")
    check_exchanges_nothing(graph, "parameter_server")
    graph = updated_by_servers(graph)
    gradients = step_gradients(graph, gradient_mb, name)
    arrays = server_arrays(gradients, servers or network.workers)
    graph = push_and_pull(graph, gradients, arrays, network, servers or None, prioritised=False, reduced=True,
                          link_share=gpus_per_link, waited_for=sync)  # fmt: skip
    sent_mb = gradients.size_bytes[gradients.step == gradients.step[0]].sum() / 1e6
    return as_workers(graph, network.workers, 0).note(
        f"{name}: {sent_mb:,.1f} MB a step to {servers or 'the workers as'} servers and back, "
        f"network: {network.described}; the servers update"
    )
