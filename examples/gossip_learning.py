"""Gossip learning in a ring: every peer trains the whole network and averages its weights with one neighbour's.

An architecture of one's own for `whatif dts CLUSTER.toml TRACE --architecture examples/gossip_learning.py`. The script
has `roles` and `play`, and where it wants them `cuts` (where the network may be cut) and `allocate` (who takes which
role, instead of DTS's heuristic). There is no server; after its batches each peer sends its weights to the next one.
"""

from whatif import Phase
from whatif.models.dts.dnn import Dnn
from whatif.models.dts.machines import Machines
from whatif.models.dts.plan import Plan, Role, Training


def roles(dnn: Dnn, training: Training) -> list[Role]:
    """Peers that hold the whole network twice while they average."""
    n, whole = training.clients, dnn.whole
    memory_bytes = whole.memory_bytes + whole.weights_bytes
    return [
        Role(f"peer {number + 1}", whole.work_ns, memory_bytes, {f"peer {(number + 1) % n + 1}": whole.weights_bytes})
        for number in range(n)
    ]


def play(plan: Plan, training: Training) -> None:
    """All peers at once; then each sends to the next one, which averages."""
    dnn, whole = plan.dnn, plan.dnn.whole
    peers, trained = list(plan.assignment), []
    for peer in peers:
        done: list[int] = []
        for plan.batch in range(training.batches):
            done = [plan.compute(peer, dnn.fetch_ns, "fetch", Phase.DATA, done)]
            done = [plan.compute(peer, whole.work_ns, "both passes", Phase.BACKWARD, done)]
        trained.append(done)
    for peer, following, done in zip(peers, [*peers[1:], peers[0]], trained, strict=True):
        if peer != following:
            sent = plan.send(peer, following, whole.weights_bytes, "weights", done, Phase.UPDATE)
            waits = [sent, *trained[peers.index(following)]]
            plan.compute(following, dnn.average_ns(2, whole.weights_bytes), "averaging", Phase.UPDATE, waits)


def allocate(roles: list[Role], machines: Machines) -> dict[str, str]:
    """The strongest processors, in the order of their power."""
    strongest = sorted(machines.processors, key=lambda p: -(p.gflop_s or 0.0) * p.parallelization_factor)
    return dict(zip((role.name for role in roles), (p.name for p in strongest), strict=False))
