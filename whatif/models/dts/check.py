"""The paper's equations for an assignment of roles: a cross-check of the simulated round."""

from __future__ import annotations

from collections.abc import Callable

from whatif.models.dts import equations
from whatif.models.dts.built_in import BUILT_IN
from whatif.models.dts.cuts import parts_of
from whatif.models.dts.dnn import Part
from whatif.models.dts.estimate import Estimate
from whatif.models.dts.plan import Plan


def equation_ns(found: Estimate) -> float | None:
    """Return the time per batch by the equation of a built-in architecture, ns; None for other architectures.

    Equal to the simulated time for pipeline and split learning, and for equal clients with equal links. If clients
    differ, (2) and (4) are longer: they add the slowest work to the slowest transfer, and the server waits for all.
    """
    name = found.architecture.name
    equation: Callable[[], float] | None = getattr(_Times(found), name) if name in BUILT_IN else None
    return equation and equation()


class _Times:
    """The terms of the equations for the processors that have the roles."""

    def __init__(self, found: Estimate) -> None:
        self.found, self.dnn = found, found.dnn
        self.plan = Plan(found.dnn, found.machines, found.assignment)
        self.parts = parts_of(found.dnn, found.training.cuts)
        self.roles = [role.name for role in found.roles]
        self.clients = [name for name in self.roles if name.startswith("client")]

    def on(self, role: str, work_ns: float) -> int:
        processor = self.found.machines.by_name[self.found.assignment[role]]
        return round(work_ns * processor.slowdown(self.dnn.gflop_s))

    def send(self, source: str, target: str, size_bytes: int) -> int:
        wire = self.plan.wire(source, target)
        return round(wire.latency_ns) + round(size_bytes * 1e9 / wire.byte_s)

    def both_ways(self, one: str, other: str, size_bytes: int) -> float:
        """The mean of the two directions: the equations use one time for both."""
        return (self.send(one, other, size_bytes) + self.send(other, one, size_bytes)) / 2

    def columns(self, roles: list[str], part: Part) -> tuple[list[int], list[int], list[int]]:
        """Fetching, forward and backward work of ``part`` on the processor of each role."""
        times_ns = (self.dnn.fetch_ns, part.forward_ns, part.backward_ns)
        fetch, forward, backward = ([self.on(role, work_ns) for role in roles] for work_ns in times_ns)
        return fetch, forward, backward

    def pipeline_learning(self) -> float:
        named = list(zip(self.roles, self.parts, strict=True))
        pairs = list(zip(self.roles, self.roles[1:], self.parts[1:], strict=False))
        return equations.pipeline_learning(
            [self.on(self.roles[0], self.dnn.fetch_ns), *(self.send(a, b, part.in_bytes) for a, b, part in pairs)],
            [self.on(role, part.forward_ns) for role, part in named],
            [self.on(role, part.backward_ns) for role, part in named],
            [self.send(b, a, part.in_bytes) for a, b, part in pairs],
        )

    def federated(self) -> float:
        whole = self.dnn.whole
        fetch, forward, backward = self.columns(self.clients, whole)
        transfer = [self.both_ways(name, "server", whole.weights_bytes) for name in self.clients]
        average_ns = self.on("server", self.dnn.average_ns(len(self.clients), whole.weights_bytes))
        # Equation (2) omits fetching data; it is the clients', as in (3) to (5).
        forward = [fetch_ns + forward_ns for fetch_ns, forward_ns in zip(fetch, forward, strict=True)]
        return equations.federated(forward, backward, transfer, average_ns)

    def split(self) -> float:
        head, tail = self.parts
        n = len(self.clients)
        transfer = [self.both_ways(name, "server", tail.in_bytes) for name in self.clients]
        hand_over = [self.send(*pair, head.weights_bytes) for pair in zip(self.clients, self.clients[1:], strict=False)]
        forward, backward = ([self.on("server", work_ns)] * n for work_ns in (tail.forward_ns, tail.backward_ns))
        return equations.split(*self.columns(self.clients, head), transfer, forward, backward, hand_over)

    def parallel_split(self) -> float:
        head, tail = self.parts
        transfer = [self.both_ways(name, "server", tail.in_bytes) for name in self.clients]
        # One value for both passes, rounded as in the simulation.
        server = [self.on("server", tail.work_ns)] * len(self.clients)
        return equations.parallel_split(*self.columns(self.clients, head), transfer, server, [0] * len(server))

    def federated_split(self) -> float:
        head, tail = self.parts
        edges = [name.replace("client", "edge") for name in self.clients]
        transfer = [self.both_ways(*pair, tail.in_bytes) for pair in zip(self.clients, edges, strict=True)]
        upload = [self.send(edge, "server", tail.weights_bytes) for edge in edges]
        back = [self.send("server", edge, tail.weights_bytes) for edge in edges]
        _, forward, backward = self.columns(edges, tail)
        average_ns = self.on("server", self.dnn.average_ns(len(edges), tail.weights_bytes))
        return equations.federated_split(
            *self.columns(self.clients, head), transfer, forward, backward, upload, average_ns, back
        )
