"""Federated split learning: each client has an edge server for the last layers; a server averages the edge servers.

Source: Robinson et al., "DTS" (MASCOTS 2022) §III-E, equation (5); Turina et al., IEEE CLOUD 2021.
Model:  every client and its edge server train on `batches` batches as in split learning, all pairs at once; then each
        edge server sends its weights to the server, which averages them and sends them back; a step is all of that:
        2 n + 1 processors. With one batch it is the paper's batch, with all of an epoch its epoch. The `cut` is a
        number of layers or the last one of a client, where it is not given the fastest of the narrowest. Roles go by
        the heuristic of §II-C, up to `max_paths` of them (0: all), on the processors of the file `cluster`, else on
        machines like the recorded one. The update counts with the backward pass. Deviations: (5) counts the edge's
        backward pass twice, and the weights' way to the server only; without the way back no next epoch could begin.
Effort: large: a process for each side, torch.distributed send and recv between them, machines.
"""

from collections.abc import Iterable

from whatif import Phase, TaskGraph
from whatif.dts.cuts import halves, narrow_cuts
from whatif.dts.dnn import Dnn
from whatif.dts.machines import Machines
from whatif.dts.options import train_distributed
from whatif.dts.plan import Plan, Role, Training
from whatif.units import Bandwidth

GIGABIT = Bandwidth("1Gbps")


def cuts(dnn: Dnn, training: Training, machines: Machines) -> Iterable[tuple[int, ...]]:
    """The cuts through which least flows."""
    return narrow_cuts(dnn)


def roles(dnn: Dnn, training: Training) -> list[Role]:
    """A server, and pairs of an edge server and a client."""
    mine, rest = halves(dnn, training.cuts)
    weights, flow = 2 * rest.weights_bytes, 2 * rest.in_bytes
    edges = [f"edge {number}" for number in range(1, training.clients + 1)]
    average_ns = dnn.average_ns(training.clients, rest.weights_bytes)
    held = (training.clients + 1) * rest.weights_bytes
    found = [Role("server", average_ns, held, dict.fromkeys(edges, weights))]
    for number, edge in enumerate(edges, 1):
        found.append(Role(edge, rest.work_ns, rest.memory_bytes, {f"client {number}": flow, "server": weights}))
        found.append(Role(f"client {number}", mine.work_ns, mine.memory_bytes, {edge: flow}))
    return found


def play(plan: Plan, training: Training) -> None:
    """All pairs at once, then the averaging."""
    mine, rest = halves(plan.dnn, training.cuts)
    edges, sent = [name for name in plan.assignment if name.startswith("edge")], []
    for edge in edges:
        client = edge.replace("edge", "client")
        done: list[int] = []
        for plan.batch in range(training.batches):
            done = [plan.compute(client, plan.dnn.fetch_ns, "fetch", Phase.DATA, done)]
            done = [plan.compute(client, mine.forward_ns, "forward", Phase.FORWARD, done)]
            done = [plan.send(client, edge, rest.in_bytes, "activations", done)]
            done = [plan.compute(edge, rest.forward_ns, "forward", Phase.FORWARD, done)]
            done = [plan.compute(edge, rest.backward_ns, "backward", Phase.BACKWARD, done)]
            done = [plan.send(edge, client, rest.in_bytes, "gradients", done, Phase.BACKWARD)]
            done = [plan.compute(client, mine.backward_ns, "backward", Phase.BACKWARD, done)]
        sent.append(plan.send(edge, "server", rest.weights_bytes, "weights", done, Phase.UPDATE))
    average_ns = plan.dnn.average_ns(len(edges), rest.weights_bytes)
    averaged = [plan.compute("server", average_ns, "averaging", Phase.UPDATE, sent)]
    for edge in edges:
        plan.send("server", edge, rest.weights_bytes, "weights", averaged, Phase.UPDATE)


def transform(
    graph: TaskGraph, *, clients: int = 3, cut: str = "", batches: int = 1, cluster: str | None = None,
    bandwidth: Bandwidth = GIGABIT, latency_us: float = 100.0, max_paths: int = 100,
) -> TaskGraph:  # fmt: skip
    """Split the network between clients and edge servers, and average these."""
    return train_distributed(
        graph, "federated_split", clients=clients, cut=cut, batches=batches, cluster=cluster, bandwidth=bandwidth,
        latency_us=latency_us, max_paths=max_paths,
    )  # fmt: skip
