"""The hot loop of ``whatif.simulation.rate_sharing``, compiled with numba: the same events and arithmetic in the same
order."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Int8,
    Int32,
    Int64,
)
from whatif.simulation.compiled import meld, without_root
from whatif.simulation.jit import jit
from whatif.simulation.rate_sharing import LEAST
from whatif.simulation.sharing import Role, checked
from whatif.simulation.simulator import cycle, outgoing_dependencies

_HOLDS, _SHARES = int(Role.HOLDS), int(Role.SHARES)
_LEAST = LEAST


def simulate_compiled(graph: TaskGraph) -> Int64:
    """Return the starts and behind them the ends of all tasks, ns, by the default schedule."""
    n = len(graph)
    uses = checked(graph)
    offsets, dependencies = outgoing_dependencies(graph)
    previous, following = graph.neighbours
    times = np.zeros(2 * n, dtype=np.int64)

    def column(name: str) -> Array:
        return np.ascontiguousarray(uses[name])

    role = column("role")
    done = simulate_loop(
        graph.thread, graph.duration_ns, previous, following,
        np.array([thread.ordered for thread in graph.threads], dtype=np.bool_),
        offsets, dependencies.target, dependencies.lag_ns, dependencies.anchor,
        np.array([thread.lag_ns for thread in graph.threads], dtype=np.int64),
        np.where(role > 0, uses["device"], 0).astype(np.int32), role, column("compute"), column("memory"),
        column("slowed"), column("link"), column("link_share"), column("lead_ns"), times,
    )  # fmt: skip
    if done < n:
        raise cycle(n - done)
    return times


@jit
def _enter(head: Int32, behind: Int32, thing: int, t: int, task_on: Int64, share: Array) -> None:
    """Put the task of thread ``t`` among the users of a thing, which are linked in the order of (share, task)."""
    task = task_on[t]
    before, at = -1, head[thing]
    while at >= 0 and (share[task_on[at]] < share[task] or (share[task_on[at]] == share[task] and task_on[at] < task)):
        before, at = at, behind[at]
    behind[t] = at
    if before < 0:
        head[thing] = t
    else:
        behind[before] = t


@jit
def _leave(head: Int32, behind: Int32, thing: int, t: int) -> None:
    """Take the task of thread ``t`` out of the users of a thing."""
    if head[thing] == t:
        head[thing] = behind[t]
        return
    at = head[thing]
    while behind[at] != t:
        at = behind[at]
    behind[at] = behind[t]


@jit
def _proceed(
    t: int, now_ns: int, at_device: Array, at_link: Array, rate: Array, left: Array, since_ns: Int64, event_ns: Int64
) -> bool:
    """Let the task of a thread go on at the slower of its rates; say whether its end moved."""
    new = min(at_device[t], at_link[t])
    if new == rate[t]:
        return False
    left[t] = max(left[t] - rate[t] * (now_ns - since_ns[t]), 0.0)
    since_ns[t], rate[t] = now_ns, new
    event_ns[t] = now_ns + np.int64(np.rint(left[t] / new))
    return True


@jit
def _rates(
    first: int, behind: Int32, task_on: Int64, role: Int8, compute: Array, memory: Array, slowed: Array,
    is_link: bool, at: Array,
) -> None:  # fmt: skip
    """Fill in the rates of the users of one thing: ``rate_sharing.rates``."""
    held, held_memory, sharers, others = 0.0, 0.0, 0, False
    t = first
    while t >= 0:
        task = task_on[t]
        if is_link:
            others, sharers = True, sharers + 1
        elif role[task] == _HOLDS:
            held += compute[task]
            held_memory += memory[task]
        else:
            others = True
            sharers += 1 if role[task] == _SHARES else 0
        t = behind[t]
    most = max(held, held_memory)
    rest, memory_rest = max(1.0 - held, _LEAST), max(1.0 - held_memory, _LEAST)
    left = rest
    t = first
    while t >= 0:
        task = task_on[t]
        rate, share = 1.0, compute[task]
        if not is_link and role[task] == _HOLDS:
            if most > 1.0:
                rate = 1.0 / most
            if others and slowed[task] > 1.0:
                rate /= slowed[task]
        else:
            if is_link or role[task] == _SHARES:
                part = min(share, left / sharers)
                left -= part
                sharers -= 1
                if part < share:
                    rate = part / share
            elif held > 0.0 and share > rest:
                rate = rest / share
            if not is_link and memory[task] > memory_rest:
                rate = min(rate, memory_rest / memory[task])
        at[t] = rate
        t = behind[t]


@jit
def _before(a: int, b: int, task_on: Int64, event_ns: Int64, roots: Int32, free_ns: Int64, ready_ns: Int64) -> bool:
    """Whether of two threads the first has something to do, and that comes first: ends before starts at one time."""
    if a < 0 or (task_on[a] < 0 and roots[a] < 0):
        return False
    if b < 0 or (task_on[b] < 0 and roots[b] < 0):
        return True
    if task_on[a] >= 0:
        if task_on[b] >= 0:
            return bool(event_ns[a] < event_ns[b] or (event_ns[a] == event_ns[b] and task_on[a] < task_on[b]))
        return bool(event_ns[a] <= max(ready_ns[roots[b]], free_ns[b]))
    start_ns = max(ready_ns[roots[a]], free_ns[a])
    if task_on[b] >= 0:
        return bool(start_ns < event_ns[b])
    other_ns = max(ready_ns[roots[b]], free_ns[b])
    if start_ns != other_ns:
        return bool(start_ns < other_ns)
    ready_a, ready_b = ready_ns[roots[a]], ready_ns[roots[b]]
    return bool(ready_a < ready_b or (ready_a == ready_b and roots[a] < roots[b]))


@jit
def _climb(
    t: int, winner: Int32, task_on: Int64, event_ns: Int64, roots: Int32, free_ns: Int64, ready_ns: Int64
) -> None:
    """Play the tournament again from the leaf of a thread upward."""
    node = (len(winner) // 2 + t) // 2
    while node >= 1:
        a, b = winner[2 * node], winner[2 * node + 1]
        winner[node] = a if _before(a, b, task_on, event_ns, roots, free_ns, ready_ns) else b
        node //= 2


@jit
def _change(
    head: Int32, behind: Int32, thing: int, t: int, joins: bool, now_ns: int, task_on: Int64, role: Int8, share: Array,
    memory: Array, slowed: Array, is_link: bool, at: Array, at_link: Array, at_device: Array, rate: Array, left: Array,
    since_ns: Int64, event_ns: Int64, winner: Int32, roots: Int32, free_ns: Int64, ready_ns: Int64,
) -> None:  # fmt: skip
    """Let the task of a thread join or leave the users of a thing, whose rates and ends follow."""
    if joins:
        _enter(head, behind, thing, t, task_on, share)
    else:
        _leave(head, behind, thing, t)
    _rates(head[thing], behind, task_on, role, share, memory, slowed, is_link, at)
    user = head[thing]
    while user >= 0:
        if _proceed(user, now_ns, at_device, at_link, rate, left, since_ns, event_ns):
            _climb(user, winner, task_on, event_ns, roots, free_ns, ready_ns)
        user = behind[user]


@jit
def simulate_loop(
    thread: Int32, duration_ns: Int64, previous: Int32, following: Int32, ordered: Bool, offsets: Int64,
    targets: Int32, lags_ns: Int64, anchors: Int8, thread_lag_ns: Int64, device: Int32, role: Int8, compute: Array,
    memory: Array, slowed: Array, link: Int32, link_share: Array, lead_ns: Int64, times: Int64,
) -> int:  # fmt: skip
    """Run the graph; returns the tasks that ran.

    A leaf of the tournament is a thread: either its running task, whose event is its end, or the task of its heap that
    is ready first. A task that shares nothing ends as soon as it starts.
    """
    n, n_threads = len(thread), len(thread_lag_ns)
    ready_ns = np.zeros(n, dtype=np.int64)
    missing = np.zeros(n, dtype=np.int32)
    child = np.full(n, -1, dtype=np.int32)
    sibling = np.full(n, -1, dtype=np.int32)
    roots = np.full(n_threads, -1, dtype=np.int32)
    free_ns = np.zeros(n_threads, dtype=np.int64)
    # Of the running task of each thread: -1 is none.
    task_on = np.full(n_threads, -1, dtype=np.int64)
    leading = np.zeros(n_threads, dtype=np.bool_)
    event_ns = np.zeros(n_threads, dtype=np.int64)
    since_ns = np.zeros(n_threads, dtype=np.int64)
    left, rate = np.zeros(n_threads), np.ones(n_threads)
    at_device, at_link = np.ones(n_threads), np.ones(n_threads)
    # The users of each thing, as a list: its first thread, and the one behind each thread.
    device_head, device_behind = np.full(n_threads + 1, -1, dtype=np.int32), np.full(n_threads, -1, dtype=np.int32)
    link_head, link_behind = device_head.copy(), device_behind.copy()

    for row in range(len(targets)):
        missing[targets[row]] += 1
    for task in range(n):
        if ordered[thread[task]] and previous[task] >= 0:
            missing[task] += 1
    for task in range(n):
        if missing[task] == 0:
            roots[thread[task]] = meld(roots[thread[task]], task, ready_ns, child, sibling)
    leaves = 1
    while leaves < n_threads:
        leaves *= 2
    winner = np.full(2 * leaves, -1, dtype=np.int32)
    for t in range(n_threads):
        winner[leaves + t] = t
    for node in range(leaves - 1, 0, -1):
        a, b = winner[2 * node], winner[2 * node + 1]
        winner[node] = a if _before(a, b, task_on, event_ns, roots, free_ns, ready_ns) else b
    done, clock_ns = 0, 0
    while True:
        t = winner[1]
        if task_on[t] < 0 and roots[t] < 0:
            return done
        end_ns = 0
        task = task_on[t]
        if task < 0:
            task = roots[t]
            roots[t] = without_root(task, ready_ns, child, sibling)
            child[task] = -1
            start_ns = max(ready_ns[task], free_ns[t])
            times[task] = start_ns
            for row in range(offsets[task], offsets[task + 1]):
                if anchors[row] == 1:
                    target = targets[row]
                    ready_ns[target] = max(ready_ns[target], start_ns + lags_ns[row])
                    missing[target] -= 1
                    if missing[target] == 0:
                        other = thread[target]
                        roots[other] = meld(roots[other], target, ready_ns, child, sibling)
                        _climb(other, winner, task_on, event_ns, roots, free_ns, ready_ns)
            end_ns = start_ns + duration_ns[task]
            if (device[task] > 0 or link[task] > 0) and lead_ns[task] < duration_ns[task]:
                task_on[t], leading[t], event_ns[t] = task, True, start_ns + lead_ns[task]
                if lead_ns[task] > 0:
                    _climb(t, winner, task_on, event_ns, roots, free_ns, ready_ns)
                    continue
        if task_on[t] >= 0:
            now_ns = event_ns[t]
            joins = False
            if leading[t]:
                to_do_ns = duration_ns[task] - lead_ns[task] - max(clock_ns - now_ns, 0)
                now_ns = max(clock_ns, now_ns)
                joins = to_do_ns > 0
                end_ns = times[task] + duration_ns[task]
            else:
                end_ns = now_ns
            if joins:
                leading[t], left[t], rate[t] = False, float(to_do_ns), 1.0
                since_ns[t], event_ns[t], at_device[t], at_link[t] = now_ns, now_ns + to_do_ns, 1.0, 1.0
                clock_ns = now_ns
            elif not leading[t]:
                clock_ns = max(clock_ns, now_ns)
            if joins or not leading[t]:
                if device[task] > 0:
                    _change(
                        device_head, device_behind, device[task], t, joins, now_ns, task_on, role, compute, memory,
                        slowed, False, at_device, at_link, at_device, rate, left, since_ns, event_ns, winner, roots,
                        free_ns, ready_ns,
                    )  # fmt: skip
                if link[task] > 0:
                    _change(
                        link_head, link_behind, link[task], t, joins, now_ns, task_on, role, link_share, memory,
                        slowed, True, at_link, at_link, at_device, rate, left, since_ns, event_ns, winner, roots,
                        free_ns, ready_ns,
                    )  # fmt: skip
            if joins:
                _climb(t, winner, task_on, event_ns, roots, free_ns, ready_ns)
                continue
            task_on[t] = -1
        times[n + task] = end_ns
        free_ns[t] = max(end_ns + thread_lag_ns[t], 0)
        done += 1
        after = following[task]
        if ordered[t] and after >= 0:
            missing[after] -= 1
            if missing[after] == 0:
                roots[t] = meld(roots[t], after, ready_ns, child, sibling)
        for row in range(offsets[task], offsets[task + 1]):
            if anchors[row] != 1:
                target = targets[row]
                ready_ns[target] = max(ready_ns[target], end_ns + lags_ns[row])
                missing[target] -= 1
                if missing[target] == 0:
                    other = thread[target]
                    roots[other] = meld(roots[other], target, ready_ns, child, sibling)
                    if other != t:
                        _climb(other, winner, task_on, event_ns, roots, free_ns, ready_ns)
        _climb(t, winner, task_on, event_ns, roots, free_ns, ready_ns)
