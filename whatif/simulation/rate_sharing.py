"""The simulator for tasks that share resources: each runs at a rate that changes as others come and go.

Progress integration: a task of ``duration_ns`` ends once the integral of its rate reaches that; alone its rate is 1.
Events are starts and ends; each recomputes the rates of the tasks that share a resource with the task, and times stay
whole nanoseconds. This is exact because rates are constant between events: there is nothing to iterate. If every task
is alone, the timeline equals that of ``whatif.simulation.simulator``.

Order of simultaneous events: ends first, by task id; then starts, as the schedule picks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Int64
from whatif.simulation.sharing import Role, checked
from whatif.simulation.simulator import (
    LEAST,
    Frontier,
    cycle,
    not_ready,
)

_HOLDS, _SHARES = int(Role.HOLDS), int(Role.SHARES)


class User(NamedTuple):
    """A concurrent user of a device or a link. Users are kept in the order of (compute, task)."""

    compute: float
    task: int
    memory: float
    role: int
    slowed: float


def rates(users: Sequence[User]) -> list[float]:
    """Return the rate, 0 to 1, of each user of one device; ``users`` are sorted.

    Holders take their shares; a yielding task gets at most the multiprocessors and memory bandwidth that they leave
    (and may demand more than all, if losing some costs more than their share); sharers split the remaining
    multiprocessors with max-min fairness. A link is a device that all its users share.
    """
    compute = memory = 0.0
    sharers, others = 0, False
    for user in users:
        if user.role == _HOLDS:
            compute += user.compute
            memory += user.memory
        else:
            others = True
            sharers += user.role == _SHARES
    most = max(compute, memory)
    rest, memory_rest = max(1.0 - compute, LEAST), max(1.0 - memory, LEAST)
    left = rest
    found = []
    for user in users:
        rate = 1.0
        if user.role == _HOLDS:
            if most > 1.0:
                rate = 1.0 / most
            if others and user.slowed > 1.0:
                rate /= user.slowed
        else:
            if user.role == _SHARES:
                part = min(user.compute, left / sharers)
                left -= part
                sharers -= 1
                if part < user.compute:
                    rate = part / user.compute
            elif compute > 0.0 and user.compute > rest:
                rate = rest / user.compute
            if user.memory > memory_rest:
                rate = min(rate, memory_rest / user.memory)
        found.append(rate)
    return found


class _Running:
    """A running task that shares a resource: its remaining work, ns, and the start of its present rate."""

    __slots__ = ("at_device", "at_link", "event_ns", "leading", "left", "rate", "since_ns", "task")

    def __init__(self, task: int, event_ns: int) -> None:
        self.task, self.event_ns = task, event_ns
        self.leading = True  # it does not use its resources yet
        self.left, self.rate, self.since_ns = 0.0, 1.0, 0
        self.at_device = self.at_link = 1.0

    def proceed(self, now_ns: int) -> bool:
        """Continue at the slower of the rates of its device and its link; return whether that changed."""
        rate = min(self.at_device, self.at_link)
        if rate == self.rate:
            return False
        self.left = max(self.left - self.rate * (now_ns - self.since_ns), 0.0)
        self.since_ns, self.rate = now_ns, rate
        self.event_ns = now_ns + round(self.left / rate)
        return True


class _Shared:
    """The running tasks that share resources, and the users of each device and link."""

    def __init__(self, graph: TaskGraph, free_ns: list[int]) -> None:
        rows, fields = checked(graph)
        uses = {name: column[rows] for name, column in fields.items()}
        self._free_ns, self._thread = free_ns, graph.thread.tolist()
        self._lag_ns = [max(thread.lag_ns, 0) for thread in graph.threads]
        device, link, role = uses["device"], uses["link"], uses["role"]
        self.uses_any: list[bool] = ((device > 0) | (link > 0)).tolist()
        self.device: list[int] = device.tolist()
        self.link: list[int] = link.tolist()
        self.lead_ns: list[int] = uses["lead_ns"].tolist()
        self._user = list(
            zip(uses["compute"].tolist(), range(len(graph)), uses["memory"].tolist(), role.tolist(),
                uses["slowed"].tolist(), strict=True)
        )  # fmt: skip
        self._link_share: list[float] = uses["link_share"].tolist()
        self.running: dict[int, _Running] = {}
        self._devices: dict[int, list[User]] = {}
        self._links: dict[int, list[User]] = {}

    def next_event(self) -> _Running | None:
        """Return the running task that has the earliest end (or end of its lead), ties by id."""
        return min(self.running.values(), key=lambda active: (active.event_ns, active.task)) if self.running else None

    def join(self, active: _Running, now_ns: int, left: float) -> None:
        """Let a task use its resources from now on, with ``left`` of its work remaining."""
        active.leading, active.left, active.since_ns, active.event_ns = False, left, now_ns, now_ns + round(left)
        task = active.task
        self.busy_until(task, active.event_ns)
        if self.device[task]:
            self._enter(self._devices, self.device[task], User(*self._user[task]), now_ns)
        if self.link[task]:
            user = User(self._link_share[task], task, 0.0, _SHARES, 0.0)
            self._enter(self._links, self.link[task], user, now_ns)

    def busy_until(self, task: int, end_ns: int) -> None:
        """Show the schedule that a running task's thread is busy until its end at present rates."""
        t = self._thread[task]
        self._free_ns[t] = end_ns + self._lag_ns[t]

    def leave(self, active: _Running, now_ns: int) -> None:
        """Remove a finished task."""
        task = active.task
        del self.running[task]
        for users_of, resource in ((self._devices, self.device[task]), (self._links, self.link[task])):
            if resource:
                users_of[resource] = [user for user in users_of[resource] if user.task != task]
                self._update_rates(users_of, resource, now_ns)

    def _enter(self, users_of: dict[int, list[User]], resource: int, user: User, now_ns: int) -> None:
        users_of[resource] = sorted([*users_of.get(resource, ()), user])
        self._update_rates(users_of, resource, now_ns)

    def _update_rates(self, users_of: dict[int, list[User]], resource: int, now_ns: int) -> None:
        users = users_of[resource]
        for user, rate in zip(users, rates(users), strict=True):
            active = self.running[user.task]
            if users_of is self._devices:
                active.at_device = rate
            else:
                active.at_link = rate
            if active.proceed(now_ns):
                self.busy_until(active.task, active.event_ns)


def by_schedule(graph: TaskGraph, schedule: Callable[[Frontier], int]) -> Int64:
    """Return the starts and ends of all tasks, ns, with ``schedule`` picking from the frontier.

    While a sharing task runs, ``free_ns`` of its thread is its end at its present rate. A pick for that thread runs
    next on it, whenever that is. A pick that starts before the latest event (a negative lag, or a schedule that takes a
    later task first) runs alone until then. Raises WhatifError on a cycle, or on a pick that is not ready.
    """
    return _Simulation(graph).run(schedule)


class _Simulation:
    """Algorithm 1 in which the end of a sharing task is a separate event."""

    def __init__(self, graph: TaskGraph) -> None:
        n = len(graph)
        offsets, dependencies = graph.outgoing
        self.offsets: list[int] = offsets.tolist()
        self.edges: list[tuple[int, int, int]] = list(
            zip(dependencies.target.tolist(), dependencies.lag_ns.tolist(), dependencies.anchor.tolist(), strict=True)
        )
        following, missing = graph.waits_for
        self.following: list[int] = following.tolist()
        self.missing: list[int] = missing.tolist()
        self.duration_ns: list[int] = graph.duration_ns.tolist()
        self.lag_ns = [thread.lag_ns for thread in graph.threads]
        self.thread: list[int] = graph.thread.tolist()
        self.reached_ns = [0] * n
        self.starts, self.ends = [0] * n, [0] * n
        self.free_ns = [0] * len(graph.threads)
        self.busy = [False] * len(graph.threads)  # with a task that shares something
        ready_ns = {int(task): 0 for task in np.flatnonzero(missing == 0)}
        self.frontier = Frontier(graph, ready_ns, self.free_ns, self.thread)
        self.shared = _Shared(graph, self.free_ns)
        self.clock_ns = 0  # the time up to which shares are computed
        self.done = 0

    def run(self, schedule: Callable[[Frontier], int]) -> Int64:
        ready_ns, shared, n = self.frontier.ready_ns, self.shared, len(self.thread)
        by_default = schedule is Frontier.earliest
        while ready_ns or shared.running:
            event, first = shared.next_event(), -1
            if event is not None or by_default:
                first = self.frontier.earliest()
                if event is not None and (first < 0 or event.event_ns <= self.frontier.start_ns(first)):
                    self._process(event)
                    continue
            task = first if by_default else schedule(self.frontier)
            ready = ready_ns.pop(task, None)
            if ready is None:
                raise not_ready(task, len(ready_ns))
            t = self.thread[task]
            # A schedule may take a task that is not the first to start: process all earlier ends.
            while (event := shared.next_event()) is not None and (
                self.busy[t] or event.event_ns <= max(ready, self.free_ns[t])
            ):
                self._process(event)
            start_ns = max(ready, self.free_ns[t])
            self._start(task, start_ns)
        if self.done < n:
            raise cycle(n - self.done)
        return np.array(self.starts + self.ends, dtype=np.int64)

    def _start(self, task: int, start_ns: int) -> None:
        self.starts[task] = start_ns
        self._release(task, start_ns, at_start=True)
        shared, duration_ns = self.shared, self.duration_ns[task]
        lead_ns = shared.lead_ns[task] if shared.uses_any[task] else duration_ns
        if lead_ns >= duration_ns:
            self._end(task, start_ns + duration_ns)
            return
        self.busy[self.thread[task]] = True
        active = shared.running[task] = _Running(task, start_ns + lead_ns)
        shared.busy_until(task, start_ns + duration_ns)
        if not lead_ns:
            self._process(active)

    def _process(self, active: _Running) -> None:
        """Process the end of a running task's lead, or of the task."""
        task, shared = active.task, self.shared
        if active.leading:
            late_ns = max(self.clock_ns - active.event_ns, 0)
            left = self.duration_ns[task] - shared.lead_ns[task] - late_ns
            if left > 0:
                self.clock_ns = max(self.clock_ns, active.event_ns)
                shared.join(active, self.clock_ns, float(left))
                return
            del shared.running[task]
            end_ns = self.starts[task] + self.duration_ns[task]
        else:
            end_ns = active.event_ns
            self.clock_ns = max(self.clock_ns, end_ns)
            shared.leave(active, end_ns)
        self.busy[self.thread[task]] = False
        self._end(task, end_ns)

    def _end(self, task: int, end_ns: int) -> None:
        t = self.thread[task]
        self.ends[task] = end_ns
        self.free_ns[t] = max(end_ns + self.lag_ns[t], 0)
        self.done += 1
        after = self.following[task]
        if after >= 0:
            self._meet_dependency(after)
        self._release(task, end_ns, at_start=False)

    def _release(self, task: int, time_ns: int, *, at_start: bool) -> None:
        for target, lag, anchor in self.edges[self.offsets[task] : self.offsets[task + 1]]:
            if bool(anchor) == at_start:
                if time_ns + lag > self.reached_ns[target]:
                    self.reached_ns[target] = time_ns + lag
                self._meet_dependency(target)

    def _meet_dependency(self, task: int) -> None:
        self.missing[task] -= 1
        if not self.missing[task]:
            self.frontier.ready_ns[task] = self.reached_ns[task]
