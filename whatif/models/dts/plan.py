"""A round of training as work on processors and transfers between them, and its schedule in time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from whatif.graph.types import Float64, Phase
from whatif.models.dts.dnn import Dnn
from whatif.models.dts.machines import Machines, Wire
from whatif.runtime.errors import WhatifError


class Training(Struct, frozen=True):
    """The training setup: the clients, their batches in one round, and the cuts of the network.

    A round ends when the models are averaged; it is an epoch if it has all batches of one.
    """

    clients: int = 3
    batches: int = 1
    cuts: tuple[int, ...] = ()  # the number of layers before each cut
    workers: int = 0  # of pipeline learning; 0: as few as hold the network

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 1 <= self.clients <= 1000:
            raise WhatifError(f"dts: expected from 1 to 1,000 clients, got {self.clients}.")
        if not 1 <= self.batches <= 100_000:
            raise WhatifError(f"dts: expected from 1 to 100,000 batches a client, got {self.batches}.")
        if self.workers != 0 and not 2 <= self.workers <= 1000:
            raise WhatifError(f"dts: expected from 2 to 1,000 workers, or 0 for as few as do, got {self.workers}.")


class Role(Struct, frozen=True):
    """The work of one processor per batch, and the bytes that it exchanges with each partner."""

    name: str
    work_ns: float  # on the recorded machine
    memory_bytes: int
    partners: Mapping[str, int]
    kind: str = ""  # roles of one kind do the same work: they are interchangeable


class Activity(NamedTuple):
    """Work or a transfer: its place, duration and predecessors (numbers of activities)."""

    place: str  # the processor's name, or the link's channel
    duration_ns: int
    after: tuple[int, ...]
    name: str
    phase: Phase
    size_bytes: int  # of a transfer; -1 for work
    latency_ns: int
    fluctuation: float
    batch: int


class Plan:
    """The activities of a round in order; an architecture's ``play`` adds them with ``compute`` and ``send``."""

    def __init__(self, dnn: Dnn, machines: Machines, assignment: Mapping[str, str]) -> None:
        self.dnn = dnn
        self.machines = machines
        self.assignment = assignment
        self.activities: list[Activity] = []
        self.batch = 0  # activities of one batch share a draw of the fluctuations
        self._slowdown = {name: p.slowdown(dnn.gflop_s) for name, p in machines.by_name.items()}

    def compute(
        self, role: str, work_ns: float, name: str, phase: Phase = Phase.FORWARD, after: Iterable[int] = ()
    ) -> int:
        """Add work of ``role`` that takes ``work_ns`` on the recorded machine; return its number."""
        place = self.assignment[role]
        processor = self.machines.by_name[place]
        duration_ns = round(work_ns * self._slowdown[place])
        return self._add(
            Activity(
                place, duration_ns, tuple(after), f"{role}: {name}", phase, -1, 0, processor.power_fluctuation,
                self.batch,
            )
        )  # fmt: skip

    def send(
        self, source: str, target: str, size_bytes: float, name: str, after: Iterable[int] = (),
        phase: Phase = Phase.FORWARD,
    ) -> int:  # fmt: skip
        """Add a transfer of ``size_bytes`` from one role to another; return its number."""
        wire = self.wire(source, target)
        latency_ns = round(wire.latency_ns)
        duration_ns = latency_ns + round(size_bytes * 1e9 / wire.byte_s)
        return self._add(
            Activity(
                wire.channel, duration_ns, tuple(after), f"{source} -> {target}: {name}", phase, round(size_bytes),
                latency_ns, wire.fluctuation, self.batch,
            )
        )  # fmt: skip

    def wire(self, source: str, target: str) -> Wire:
        """Return the wire between the processors of two roles. Raises WhatifError if there is none."""
        ends = self.assignment[source], self.assignment[target]
        wire = self.machines.wire(*ends)
        if wire is None:
            raise WhatifError(f"dts: expected a link from {ends[0]!r} to {ends[1]!r}, which {source} needs, got none.")
        return wire

    def _add(self, activity: Activity) -> int:
        for number in activity.after:
            if not 0 <= number < len(self.activities):
                raise WhatifError(f"dts: {activity.name!r} waits for activity {number}, which does not come before it.")
        self.activities.append(activity)
        return len(self.activities) - 1


class Times(NamedTuple):
    """Start and end of each activity, ns."""

    start_ns: list[int]
    end_ns: list[int]

    @property
    def total_ns(self) -> int:
        """The end of the last activity."""
        return max(self.end_ns, default=0)


def run(activities: list[Activity]) -> Times:
    """Return the times: each place runs one activity at a time, the one that can start first.

    Ties are broken by (start, ready time, number), as in the simulator. This plain second implementation is fast on the
    few activities of a plan; a search for roles calls it many times.
    """
    n = len(activities)
    start, end = [0] * n, [0] * n
    missing = [len(activity.after) for activity in activities]
    ready = [0] * n
    followers: list[list[int]] = [[] for _ in range(n)]
    for number, activity in enumerate(activities):
        for before in activity.after:
            followers[before].append(number)
    free: dict[str, int] = {}
    queue = [(0, 0, number) for number in range(n) if not missing[number]]
    heapq.heapify(queue)
    while queue:
        at, was_ready, number = heapq.heappop(queue)
        activity = activities[number]
        begin = max(was_ready, free.get(activity.place, 0))
        if begin > at:  # its place has been taken since
            heapq.heappush(queue, (begin, was_ready, number))
            continue
        start[number], end[number] = begin, begin + activity.duration_ns
        free[activity.place] = end[number]
        for follower in followers[number]:
            missing[follower] -= 1
            ready[follower] = max(ready[follower], end[number])
            if not missing[follower]:
                known = max(ready[follower], free.get(activities[follower].place, 0))
                heapq.heappush(queue, (known, ready[follower], follower))
    return Times(start, end)


def busy_ns(activities: list[Activity], assignment: Mapping[str, str]) -> dict[str, int]:
    """Return the delay that each role causes, ns: its work and the transfers it takes part in."""
    delay = dict.fromkeys(assignment, 0)
    for activity in activities:
        ends, _, _ = activity.name.partition(":")
        for role in ends.split(" -> "):
            if role in delay:
                delay[role] += activity.duration_ns
    return delay


def spread_ns(activities: list[Activity], samples: int, seed: int) -> Float64:
    """Return the total time under ``samples`` draws of the fluctuations, ns, shape (samples,).

    In each batch every processor and link draws its rate uniformly from 1 - f to 1 + f times its usual rate. Each place
    keeps its order without fluctuations, so one sweep computes all draws.
    """
    times = run(activities)
    rng = np.random.default_rng(seed)
    order = sorted(range(len(activities)), key=lambda number: (times.start_ns[number], times.end_ns[number], number))
    drawn: dict[tuple[str, int], Float64] = {}
    end: dict[int, Float64] = {}
    free: dict[str, Float64] = {}
    nothing = np.zeros(samples)
    for number in order:
        activity = activities[number]
        begin = free.get(activity.place, nothing)
        for before in activity.after:
            begin = np.maximum(begin, end[before])
        key = activity.place, activity.batch
        if activity.fluctuation and key not in drawn:
            drawn[key] = 1.0 / rng.uniform(1 - activity.fluctuation, 1 + activity.fluctuation, samples)
        slower = drawn[key] if activity.fluctuation else 1.0
        end[number] = begin + activity.latency_ns + (activity.duration_ns - activity.latency_ns) * slower
        free[activity.place] = end[number]
    return np.maximum.reduce(list(end.values())) if end else nothing
