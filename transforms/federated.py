"""Federated learning: every client trains the whole network on data of its own; a server averages their weights.

Source: Robinson et al., "DTS" (MASCOTS 2022) §III-B, equation (2); McMahan et al., AISTATS 2017 (federated averaging).
Model:  each of `clients` trains on `batches` batches, sends its weights to the server, which averages all of them and
        sends them back; a step is all of that. With one batch it is the paper's batch, with all of an epoch its epoch.
        The averaging takes the time of reading every model and writing one. Roles go by the heuristic of §II-C, up to
        `max_paths` of them (0: all), on the processors of the file `cluster`, else on machines like the recorded one.
        The update counts with the backward pass. A client sends when it is done: (2), which adds the slowest client's
        work to the slowest way of the weights, is the same where all are equal, and more where they differ.
Effort: medium: a loop over clients around the training, state_dict sent and averaged; flower or PySyft have it.
"""

from whatif import Phase, TaskGraph
from whatif.dts.dnn import Dnn
from whatif.dts.options import train_distributed
from whatif.dts.plan import Plan, Role, Training
from whatif.units import Bandwidth

GIGABIT = Bandwidth("1Gbps")


def roles(dnn: Dnn, training: Training) -> list[Role]:
    """Clients that hold the whole network, and a server that holds all their weights."""
    weights, clients = dnn.whole.weights_bytes, [f"client {number}" for number in range(1, training.clients + 1)]
    average_ns = dnn.average_ns(training.clients, weights)
    server = Role("server", average_ns, (training.clients + 1) * weights, dict.fromkeys(clients, 2 * weights))
    whole = dnn.whole
    return [
        server,
        *(Role(name, whole.work_ns, whole.memory_bytes, {"server": 2 * weights}, "client") for name in clients),
    ]


def play(plan: Plan, training: Training) -> None:
    """All clients at once, then the averaging."""
    dnn, whole, sent = plan.dnn, plan.dnn.whole, []
    clients = [name for name in plan.assignment if name != "server"]
    for client in clients:
        done: list[int] = []
        for plan.batch in range(training.batches):
            done = [plan.compute(client, dnn.fetch_ns, "fetch", Phase.DATA, done)]
            done = [plan.compute(client, whole.forward_ns, "forward", Phase.FORWARD, done)]
            done = [plan.compute(client, whole.backward_ns, "backward", Phase.BACKWARD, done)]
        sent.append(plan.send(client, "server", whole.weights_bytes, "weights", done, Phase.UPDATE))
    average_ns = dnn.average_ns(len(clients), whole.weights_bytes)
    averaged = plan.compute("server", average_ns, "averaging", Phase.UPDATE, sent)
    for client in clients:
        plan.send("server", client, whole.weights_bytes, "weights", [averaged], Phase.UPDATE)


def transform(
    graph: TaskGraph,
    *,
    clients: int = 3,
    batches: int = 1,
    cluster: str | None = None,
    bandwidth: Bandwidth = GIGABIT,
    latency_us: float = 100.0,
    max_paths: int = 100,
) -> TaskGraph:
    """Let clients train on their own, and average them."""
    return train_distributed(
        graph, "federated", clients=clients, batches=batches, cluster=cluster, bandwidth=bandwidth,
        latency_us=latency_us, max_paths=max_paths,
    )  # fmt: skip
