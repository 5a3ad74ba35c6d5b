"""Parallel split learning: all clients keep the first layers and work at once, a server's layers serve them in turn.

Source: Robinson et al., "DTS" (MASCOTS 2022) §III-D, equation (4); Jeon, Kim, ICOIN 2020.
Model:  in every batch all clients go forward and send what flows through the cut; the server goes forward and backward
        with one client's after the other's and sends the gradients back; the clients go backward, and the next batch
        begins when all have. A step is `batches` such batches. The `cut` is a number of layers or the last one of a
        client, where it is not given the fastest of the narrowest. Roles go by the heuristic of §II-C, up to
        `max_paths` of them (0: all), on the processors of the file `cluster`, else on machines like the recorded one.
        The update counts with the backward pass. The server begins with the client that is there first: (4) lets it
        wait for all, and is the same where all are equal, else more. Its sum is of the server's passes, though the
        print names them as the clients'.
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
    """Equal clients, and a server that does the rest for all of them."""
    mine, rest = halves(dnn, training.cuts)
    names, flow = [f"client {number}" for number in range(1, training.clients + 1)], 2 * rest.in_bytes
    server = Role("server", training.clients * rest.work_ns, rest.memory_bytes, dict.fromkeys(names, flow))
    return [server, *(Role(name, mine.work_ns, mine.memory_bytes, {"server": flow}) for name in names)]


def play(plan: Plan, training: Training) -> None:
    """All clients at once, the server with one after the other."""
    mine, rest = halves(plan.dnn, training.cuts)
    clients = [name for name in plan.assignment if name != "server"]
    all_done: list[int] = []
    for plan.batch in range(training.batches):
        ends = []
        for client in clients:
            done = [plan.compute(client, plan.dnn.fetch_ns, "fetch", Phase.DATA, all_done)]
            done = [plan.compute(client, mine.forward_ns, "forward", Phase.FORWARD, done)]
            done = [plan.send(client, "server", rest.in_bytes, "activations", done)]
            both_ns = rest.work_ns  # forward and backward in one go: no other client comes between
            done = [plan.compute("server", both_ns, f"both passes for {client}", Phase.BACKWARD, done)]
            done = [plan.send("server", client, rest.in_bytes, "gradients", done, Phase.BACKWARD)]
            ends.append(plan.compute(client, mine.backward_ns, "backward", Phase.BACKWARD, done))
        all_done = ends


def transform(
    graph: TaskGraph, *, clients: int = 3, cut: str = "", batches: int = 1, cluster: str | None = None,
    bandwidth: Bandwidth = GIGABIT, latency_us: float = 100.0, max_paths: int = 100,
) -> TaskGraph:  # fmt: skip
    """Split the network between clients that work at once and a server."""
    return train_distributed(
        graph, "parallel_split", clients=clients, cut=cut, batches=batches, cluster=cluster, bandwidth=bandwidth,
        latency_us=latency_us, max_paths=max_paths,
    )  # fmt: skip
