"""Split learning: clients keep the first layers and their data, one after the other trains with a server's layers.

Source: Robinson et al., "DTS" (MASCOTS 2022) §III-C, equation (3); Gupta, Raskar, 2018.
Model:  each of `clients` trains on `batches` batches: its forward pass, what flows through the cut to the server, the
        server's passes, the gradient back, its backward pass. Then it hands its weights to the next client, n - 1
        times; a step is all of that. With one batch it is the paper's batch, with all of an epoch its epoch. The `cut`
        is a number of layers or the last one of a client, where it is not given the fastest of the narrowest. Roles go
        by the heuristic of §II-C, up to `max_paths` of them (0: all), on the processors of the file `cluster`, else on
        machines like the recorded one. The update counts with the backward pass. (3) is this very schedule.
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
    """A server, and clients that hand their weights along a chain."""
    mine, rest = halves(dnn, training.cuts)
    names = [f"client {number}" for number in range(1, training.clients + 1)]
    server_ns, flow = training.clients * rest.work_ns, 2 * rest.in_bytes
    found = [Role("server", server_ns, rest.memory_bytes, dict.fromkeys(names, flow))]
    for before, name, behind in zip([None, *names], names, [*names[1:], None], strict=False):
        chain = {other: mine.weights_bytes for other in (before, behind) if other}
        found.append(Role(name, mine.work_ns, mine.memory_bytes, {"server": flow, **chain}))
    return found


def play(plan: Plan, training: Training) -> None:
    """Client after client, each with the server."""
    mine, rest = halves(plan.dnn, training.cuts)
    clients = [name for name in plan.assignment if name != "server"]
    done: list[int] = []
    for client, following in zip(clients, [*clients[1:], None], strict=True):
        for plan.batch in range(training.batches):
            done = [plan.compute(client, plan.dnn.fetch_ns, "fetch", Phase.DATA, done)]
            done = [plan.compute(client, mine.forward_ns, "forward", Phase.FORWARD, done)]
            done = [plan.send(client, "server", rest.in_bytes, "activations", done)]
            done = [plan.compute("server", rest.forward_ns, "forward", Phase.FORWARD, done)]
            done = [plan.compute("server", rest.backward_ns, "backward", Phase.BACKWARD, done)]
            done = [plan.send("server", client, rest.in_bytes, "gradients", done, Phase.BACKWARD)]
            done = [plan.compute(client, mine.backward_ns, "backward", Phase.BACKWARD, done)]
        if following:
            done = [plan.send(client, following, mine.weights_bytes, "weights", done, Phase.UPDATE)]


def transform(
    graph: TaskGraph, *, clients: int = 3, cut: str = "", batches: int = 1, cluster: str | None = None,
    bandwidth: Bandwidth = GIGABIT, latency_us: float = 100.0, max_paths: int = 100,
) -> TaskGraph:  # fmt: skip
    """Split the network between clients, which take turns, and a server."""
    return train_distributed(
        graph, "split", clients=clients, cut=cut, batches=batches, cluster=cluster, bandwidth=bandwidth,
        latency_us=latency_us, max_paths=max_paths,
    )  # fmt: skip
