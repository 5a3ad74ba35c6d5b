"""DTS: train on several processors by pipeline, federated or split learning.

Source: Robinson et al., "DTS" (MASCOTS 2022) §III, equations (1) to (5); McMahan et al., AISTATS 2017 (federated);
        Gupta, Raskar, 2018 (split); Jeon, Kim, ICOIN 2020 (parallel split); Turina et al., IEEE CLOUD 2021 (federated
        split).
Model:  a step is one round in which each client trains on `batches` batches: one batch is the paper's batch, all of an
        epoch its epoch. `federated`: clients train the whole network in parallel, a server averages their weights.
        `split`: clients have the layers before the cut and train one after the other with the server, then pass their
        weights on. `parallel_split`: all clients in parallel, the server serves one at a time. `federated_split`: each
        client has an edge server for the layers after the cut, a server averages these. `pipeline_learning`: every
        batch passes through all `workers` and back without overlap (`pipeline` has micro-batches); by default as few
        workers as hold the network. `cut` names the last layer of a client or counts its layers (of several workers,
        with commas); by default it is the fastest of the narrowest cuts. Roles are assigned by the heuristic of §II-C,
        over up to `max_paths` assignments (0: all), to the processors of the file `cluster`, else to machines like the
        recorded one. The update counts as backward work. docs/dts.md lists where rounds differ from the equations.
Effort: large: a process for each role, torch.distributed send and recv between them, machines.
"""

from typing import Literal

from whatif import TaskGraph
from whatif.models import Bandwidth
from whatif.models.dts.options import train_distributed

GIGABIT = Bandwidth("1Gbps")
PLACE = "pipeline"
WHOLE_PASSES = True


def transform(
    graph: TaskGraph,
    *,
    architecture: Literal["pipeline_learning", "federated", "split", "parallel_split", "federated_split"] = "federated",
    clients: int | None = None,
    workers: int | None = None,
    cut: str | None = None,
    batches: int = 1,
    cluster: str | None = None,
    bandwidth: Bandwidth = GIGABIT,
    latency_us: float = 100.0,
    max_paths: int = 100,
) -> TaskGraph:
    """Replace every step by a round of the architecture; 3 clients unless `clients` says otherwise."""
    return train_distributed(
        graph, architecture, clients=clients, workers=workers, cut=cut, batches=batches, cluster=cluster,
        bandwidth=bandwidth, latency_us=latency_us, max_paths=max_paths,
    )  # fmt: skip
