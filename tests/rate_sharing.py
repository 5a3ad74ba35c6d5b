"""Graphs whose tasks share a device or a link, and the simulator that every test of them asks."""

from __future__ import annotations

import sys
from typing import Any

from tests.helpers import loops_in_form
from whatif import Frontier, TaskGraph, Thread, ThreadKind
from whatif.simulation.rate_sharing import by_schedule
from whatif.simulation.sharing import (
    USES,
    Role,
    uses_of,
)

simulator: Any = sys.modules[Frontier.__module__]


simulate, Schedule = simulator.simulate, simulator.Schedule


NCCL = Thread("stream 20", ThreadKind.STREAM, 0, 20)


NET, NET_2 = (Thread(f"network {i}", ThreadKind.CHANNEL) for i in (1, 2))


H, Y, S = Role.HOLDS, Role.YIELDS, Role.SHARES


def using(graph: TaskGraph, **uses: dict[str, Any]) -> TaskGraph:
    """The graph in which each named task uses something: on device 1 unless specified."""
    column = uses_of(graph)
    table = list(graph.names)
    for name, fields in uses.items():
        row = graph.name == table.index(name)
        for field, value in fields.items():
            column[field][row] = value
        if "role" in fields and "device" not in fields:
            column["device"][row] = 1
    return graph.attach(**{USES: column})


def both(graph: TaskGraph) -> list[tuple[int, int]]:
    """Start and end of every task, the same by the loop in both forms and by the schedule in Python."""
    times = by_schedule(graph, Frontier.earliest).tolist()
    for form in ("plain", "compiled"):
        with loops_in_form(form):
            timeline = simulate(graph)
        assert [*timeline.start_ns.tolist(), *timeline.end_ns.tolist()] == times
    return list(zip(times[: len(graph)], times[len(graph) :], strict=True))


def spans(graph: TaskGraph) -> dict[str, tuple[int, int]]:
    return {graph.names[code]: times for code, times in zip(graph.name.tolist(), both(graph), strict=True)}
