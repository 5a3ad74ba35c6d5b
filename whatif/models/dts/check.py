"""The paper's equations for the roles that were given out: a cross-check of the simulated round."""

from __future__ import annotations

from collections.abc import Callable

from whatif.models.dts import equations
from whatif.models.dts.built_in import BUILT_IN
from whatif.models.dts.cuts import parts_of
from whatif.models.dts.dnn import Part
from whatif.models.dts.estimate import Estimate
from whatif.models.dts.plan import Plan


def equation_ns(found: Estimate) -> float | None:
    """Return the time of a batch by the equation of a built-in architecture, ns; None for any other.

    Equal to the simulated one for pipeline and split learning, and where equal clients have equal links; where clients
    differ, (2) and (4) are longer: they let the slowest work meet the slowest link, and a server wait for all.
    """
    name = found.architecture.name
    equation: Callable[[], float] | None = getattr(_Times(found), name) if name in BUILT_IN else None
    return equation and equation()


class _Times:
    """The terms of the equations, each for the processor that has the role."""

    def __init__(self, found: Estimate) -> None:
        self.found, self.dnn = found, found.dnn
        self.plan = Plan(found.dnn, found.machines, found.assignment)
        self.parts = parts_of(found.dnn, found.training.cuts)
        self.roles = [role.name for role in found.roles]
        self.clients = [name for name in self.roles if name.startswith("client")]

    def on(self, role: str, work_ns: float) -> int:
        processor = self.found.machines.by_name[self.found.assignment[role]]
        return round(work_ns * processor.slowdown(self.dnn.gflop_s))

    def way(self, source: str, target: str, size_bytes: int) -> int:
        wire = self.plan.wire(source, target)
        return round(wire.latency_ns) + round(size_bytes * 1e9 / wire.byte_s)

    def both_ways(self, one: str, other: str, size_bytes: int) -> float:
        """Half of there and back: the equations take one time for both."""
        return (self.way(one, other, size_bytes) + self.way(other, one, size_bytes)) / 2

    def columns(self, roles: list[str], part: Part) -> tuple[list[int], list[int], list[int]]:
        """Fetching, forward and backward work of ``part`` on the processor of each role."""
        times_ns = (self.dnn.fetch_ns, part.forward_ns, part.backward_ns)
        fetch, forward, backward = ([self.on(role, work_ns) for role in roles] for work_ns in times_ns)
        return fetch, forward, backward

    def pipeline_learning(self) -> float:
        named = list(zip(self.roles, self.parts, strict=True))
        pairs = list(zip(self.roles, self.roles[1:], self.parts[1:], strict=False))
        return equations.pipeline_learning(
            [self.on(self.roles[0], self.dnn.fetch_ns), *(self.way(a, b, part.in_bytes) for a, b, part in pairs)],
            [self.on(role, part.forward_ns) for role, part in named],
            [self.on(role, part.backward_ns) for role, part in named],
            [self.way(b, a, part.in_bytes) for a, b, part in pairs],
        )

    def federated(self) -> float:
        whole = self.dnn.whole
        fetch, forward, backward = self.columns(self.clients, whole)
        transfer = [self.both_ways(name, "server", whole.weights_bytes) for name in self.clients]
        average_ns = self.on("server", self.dnn.average_ns(len(self.clients), whole.weights_bytes))
        # The print leaves the fetching of data out; it is the clients' as in (3) to (5).
        forward = [one + other for one, other in zip(fetch, forward, strict=True)]
        return equations.federated(forward, backward, transfer, average_ns)

    def split(self) -> float:
        mine, rest = self.parts
        n = len(self.clients)
        transfer = [self.both_ways(name, "server", rest.in_bytes) for name in self.clients]
        hand_over = [self.way(*pair, mine.weights_bytes) for pair in zip(self.clients, self.clients[1:], strict=False)]
        forward, backward = ([self.on("server", work_ns)] * n for work_ns in (rest.forward_ns, rest.backward_ns))
        return equations.split(*self.columns(self.clients, mine), transfer, forward, backward, hand_over)

    def parallel_split(self) -> float:
        mine, rest = self.parts
        transfer = [self.both_ways(name, "server", rest.in_bytes) for name in self.clients]
        # One number for both passes, so that rounding is that of the simulation.
        server = [self.on("server", rest.work_ns)] * len(self.clients)
        return equations.parallel_split(*self.columns(self.clients, mine), transfer, server, [0] * len(server))

    def federated_split(self) -> float:
        mine, rest = self.parts
        edges = [name.replace("client", "edge") for name in self.clients]
        transfer = [self.both_ways(*pair, rest.in_bytes) for pair in zip(self.clients, edges, strict=True)]
        upload = [self.way(edge, "server", rest.weights_bytes) for edge in edges]
        back = [self.way("server", edge, rest.weights_bytes) for edge in edges]
        _, forward, backward = self.columns(edges, rest)
        average_ns = self.on("server", self.dnn.average_ns(len(edges), rest.weights_bytes))
        return equations.federated_split(
            *self.columns(self.clients, mine), transfer, forward, backward, upload, average_ns, back
        )
