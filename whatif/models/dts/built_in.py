"""The five architectures of DTS: their roles and their schedules (Robinson et al., MASCOTS 2022, §III)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.types import Phase
from whatif.models.dts.allocate import Assignment
from whatif.models.dts.cuts import halves, narrow_cuts, parts_of, pipeline_cuts
from whatif.models.dts.dnn import Dnn, Part
from whatif.models.dts.machines import Machines
from whatif.models.dts.plan import Plan, Role, Training


class Architecture(Struct, frozen=True):
    """The roles of an architecture and their schedule in a round.

    Optional: candidate cuts of the network (the fastest is used) and an allocation heuristic.
    """

    name: str
    summary: str
    roles: Callable[[Dnn, Training], Sequence[Role]]
    play: Callable[[Plan, Training], None]
    cuts: Callable[[Dnn, Training, Machines], Iterable[tuple[int, ...]]] | None = None
    allocate: Callable[[Sequence[Role], Machines], Assignment] | None = None
    options: tuple[str, ...] = ()  # those of `clients`, `cut` and `workers` that it reads


def _pipeline_roles(dnn: Dnn, training: Training) -> list[Role]:
    """One worker per part; it exchanges its input and the input's gradient with the worker before it."""
    parts = parts_of(dnn, training.cuts)
    found = []
    for number, part in enumerate(parts, 1):
        partners = {f"worker {number - 1}": 2 * part.in_bytes} if number > 1 else {}
        partners |= {f"worker {number + 1}": 2 * part.out_bytes} if number < len(parts) else {}
        found.append(Role(f"worker {number}", part.work_ns, part.memory_bytes, partners))
    return found


def _play_pipeline(plan: Plan, training: Training) -> None:
    """Each batch passes through all workers and back: equation (1), which sums the transfers over all layers."""
    parts = parts_of(plan.dnn, training.cuts)
    done: list[int] = []
    for plan.batch in range(training.batches):
        done = [plan.compute("worker 1", plan.dnn.fetch_ns, "fetch", Phase.DATA, done)]
        for number, part in enumerate(parts, 1):
            if number > 1:
                done = [plan.send(f"worker {number - 1}", f"worker {number}", part.in_bytes, "activations", done)]
            done = [plan.compute(f"worker {number}", part.forward_ns, "forward", Phase.FORWARD, done)]
        for number, part in reversed(list(enumerate(parts, 1))):
            done = [plan.compute(f"worker {number}", part.backward_ns, "backward", Phase.BACKWARD, done)]
            if number > 1:
                ends = f"worker {number}", f"worker {number - 1}"
                done = [plan.send(*ends, part.in_bytes, "gradients", done, Phase.BACKWARD)]


def _federated_roles(dnn: Dnn, training: Training) -> list[Role]:
    """Clients that hold the whole network, and a server that holds all their weights."""
    whole, weights, clients = dnn.whole, dnn.whole.weights_bytes, _clients(training)
    average_ns = dnn.average_ns(training.clients, weights)
    server = Role("server", average_ns, (training.clients + 1) * weights, dict.fromkeys(clients, 2 * weights))
    return [
        server,
        *(Role(name, whole.work_ns, whole.memory_bytes, {"server": 2 * weights}, "client") for name in clients),
    ]


def _play_federated(plan: Plan, training: Training) -> None:
    """All clients in parallel, then the averaging: equation (2).

    A client sends as soon as it is done. Equation (2) adds the slowest client's work to the slowest transfer of the
    weights: the same for equal clients, longer if they differ.
    """
    dnn, whole, sent, clients = plan.dnn, plan.dnn.whole, [], _clients_of(plan)
    for client in clients:
        done: list[int] = []
        for plan.batch in range(training.batches):
            done = [plan.compute(client, dnn.fetch_ns, "fetch", Phase.DATA, done)]
            done = [plan.compute(client, whole.forward_ns, "forward", Phase.FORWARD, done)]
            done = [plan.compute(client, whole.backward_ns, "backward", Phase.BACKWARD, done)]
        sent.append(plan.send(client, "server", whole.weights_bytes, "weights", done, Phase.UPDATE))
    _average(plan, clients, whole.weights_bytes, sent)


def _parallel_roles(dnn: Dnn, training: Training) -> list[Role]:
    """Equal clients, and a server with the remaining layers for all of them."""
    head, tail = halves(dnn, training.cuts)
    names, flow = _clients(training), 2 * tail.in_bytes
    server = Role("server", training.clients * tail.work_ns, tail.memory_bytes, dict.fromkeys(names, flow))
    return [server, *(Role(name, head.work_ns, head.memory_bytes, {"server": flow}) for name in names)]


def _split_roles(dnn: Dnn, training: Training) -> list[Role]:
    """A server, and clients that pass their weights along a chain."""
    head, _ = halves(dnn, training.cuts)
    server, *clients = _parallel_roles(dnn, training)
    names = [client.name for client in clients]
    chained = [server]
    for before, client, behind in zip([None, *names], clients, [*names[1:], None], strict=False):
        chain = {other: head.weights_bytes for other in (before, behind) if other}
        chained.append(replace(client, partners={**client.partners, **chain}))
    return chained


def _play_split(plan: Plan, training: Training) -> None:
    """One client after the other, each with the server: the schedule of equation (3)."""
    parts, clients = halves(plan.dnn, training.cuts), _clients_of(plan)
    done: list[int] = []
    for client, following in zip(clients, [*clients[1:], None], strict=True):
        done = _train_split(plan, client, "server", parts, training.batches, done)
        if following:
            done = [plan.send(client, following, parts[0].weights_bytes, "weights", done, Phase.UPDATE)]


def _play_parallel(plan: Plan, training: Training) -> None:
    """All clients in parallel, the server serving one at a time; the next batch begins when all are done.

    The server begins with the first client to arrive. In equation (4) it waits for all: the same for equal clients,
    longer if they differ. Its sum is over the server's passes, though the print uses the clients' symbols.
    """
    head, tail = halves(plan.dnn, training.cuts)
    clients = _clients_of(plan)
    all_done: list[int] = []
    for plan.batch in range(training.batches):
        ends = []
        for client in clients:
            done = [plan.compute(client, plan.dnn.fetch_ns, "fetch", Phase.DATA, all_done)]
            done = [plan.compute(client, head.forward_ns, "forward", Phase.FORWARD, done)]
            done = [plan.send(client, "server", tail.in_bytes, "activations", done)]
            both_ns = tail.work_ns  # forward and backward at once: no other client comes between
            done = [plan.compute("server", both_ns, f"both passes for {client}", Phase.BACKWARD, done)]
            done = [plan.send("server", client, tail.in_bytes, "gradients", done, Phase.BACKWARD)]
            ends.append(plan.compute(client, head.backward_ns, "backward", Phase.BACKWARD, done))
        all_done = ends


def _federated_split_roles(dnn: Dnn, training: Training) -> list[Role]:
    """A server, and pairs of an edge server and a client."""
    head, tail = halves(dnn, training.cuts)
    weights, flow = 2 * tail.weights_bytes, 2 * tail.in_bytes
    edges = [f"edge {number}" for number in range(1, training.clients + 1)]
    average_ns = dnn.average_ns(training.clients, tail.weights_bytes)
    server_bytes = (training.clients + 1) * tail.weights_bytes
    found = [Role("server", average_ns, server_bytes, dict.fromkeys(edges, weights))]
    for number, edge in enumerate(edges, 1):
        found.append(Role(edge, tail.work_ns, tail.memory_bytes, {f"client {number}": flow, "server": weights}))
        found.append(Role(f"client {number}", head.work_ns, head.memory_bytes, {edge: flow}))
    return found


def _play_federated_split(plan: Plan, training: Training) -> None:
    """All pairs in parallel, then the averaging: equation (5).

    Equation (5) counts the edge's backward pass twice and omits the transfer of the averaged weights back to the edges,
    which the next epoch needs.
    """
    parts = halves(plan.dnn, training.cuts)
    edges, sent = [name for name in plan.assignment if name.startswith("edge")], []
    for edge in edges:
        done = _train_split(plan, edge.replace("edge", "client"), edge, parts, training.batches, [])
        sent.append(plan.send(edge, "server", parts[1].weights_bytes, "weights", done, Phase.UPDATE))
    _average(plan, edges, parts[1].weights_bytes, sent)


def _clients(training: Training) -> list[str]:
    return [f"client {number}" for number in range(1, training.clients + 1)]


def _clients_of(plan: Plan) -> list[str]:
    return [name for name in plan.assignment if name != "server"]


def _train_split(
    plan: Plan, client: str, server: str, parts: tuple[Part, Part], batches: int, done: list[int]
) -> list[int]:
    """Train a client's batches with the server that has its last layers; return the last activity."""
    head, tail = parts
    for plan.batch in range(batches):
        done = [plan.compute(client, plan.dnn.fetch_ns, "fetch", Phase.DATA, done)]
        done = [plan.compute(client, head.forward_ns, "forward", Phase.FORWARD, done)]
        done = [plan.send(client, server, tail.in_bytes, "activations", done)]
        done = [plan.compute(server, tail.forward_ns, "forward", Phase.FORWARD, done)]
        done = [plan.compute(server, tail.backward_ns, "backward", Phase.BACKWARD, done)]
        done = [plan.send(server, client, tail.in_bytes, "gradients", done, Phase.BACKWARD)]
        done = [plan.compute(client, head.backward_ns, "backward", Phase.BACKWARD, done)]
    return done


def _average(plan: Plan, senders: Sequence[str], weights_bytes: int, sent: Sequence[int]) -> None:
    """Average the senders' weights on the server and send them back."""
    average_ns = plan.dnn.average_ns(len(senders), weights_bytes)
    averaged = plan.compute("server", average_ns, "averaging", Phase.UPDATE, sent)
    for sender in senders:
        plan.send("server", sender, weights_bytes, "weights", [averaged], Phase.UPDATE)


def _narrow_cuts(dnn: Dnn, training: Training, machines: Machines) -> list[tuple[int, ...]]:
    return narrow_cuts(dnn)


def _pipeline_cuts(dnn: Dnn, training: Training, machines: Machines) -> list[tuple[int, ...]]:
    return pipeline_cuts(dnn, machines, training.workers)


BUILT_IN = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "pipeline_learning",
            "Pipeline learning: keep the layers on several processors, each of which passes on what it computed.",
            _pipeline_roles, _play_pipeline, _pipeline_cuts, options=("workers", "cut"),
        ),
        Architecture(
            "federated",
            "Federated learning: every client trains the whole network on data of its own; a server averages their "
            "weights.",
            _federated_roles, _play_federated, options=("clients",),
        ),
        Architecture(
            "split",
            "Split learning: clients keep the first layers and their data, one after the other trains with a server's "
            "layers.",
            _split_roles, _play_split, _narrow_cuts, options=("clients", "cut"),
        ),
        Architecture(
            "parallel_split",
            "Parallel split learning: all clients keep the first layers and work at once, a server's layers serve them "
            "in turn.",
            _parallel_roles, _play_parallel, _narrow_cuts, options=("clients", "cut"),
        ),
        Architecture(
            "federated_split",
            "Federated split learning: each client has an edge server for the last layers; a server averages the edge "
            "servers.",
            _federated_split_roles, _play_federated_split, _narrow_cuts, options=("clients", "cut"),
        ),
    )
}  # fmt: skip
