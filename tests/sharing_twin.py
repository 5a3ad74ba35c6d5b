"""A slow and obvious simulator of tasks that share what they run on: exact fractions, everything reckoned anew always.

Only for threads in fixed order and lags of 0 or more. Without the library but for the words of its column.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

LEAST = Fraction(1, 100)
HOLDS, YIELDS, SHARES = 1, 2, 3
Use = dict[str, Any]  # device, role, compute, memory, slowed, link, link_share (Fractions), lead_ns


def simulate(tasks: list[tuple[int, int]], edges: list[tuple[int, int, int, bool]], lags: list[int],
             uses: list[Use]) -> list[tuple[Fraction, Fraction]]:  # fmt: skip
    """Start and end of each task; ``tasks``: (thread, duration), ``edges``: (source, target, lag, from its start)."""
    start: dict[int, Fraction] = {}
    end: dict[int, Fraction] = {}
    left: dict[int, Fraction] = {}  # work of those that run, without their lead
    now = Fraction(0)
    while len(end) < len(tasks):
        changed = True
        while changed:
            changed = False
            for task in list(left):
                if left[task] == 0 and now >= start[task] + uses[task]["lead_ns"]:
                    end[task] = now
                    del left[task]
                    changed = True
            for task in range(len(tasks)):
                ready = _ready(task, tasks, edges, lags, start, end)
                if task not in start and ready is not None and ready <= now:
                    start[task] = now
                    lead = min(uses[task]["lead_ns"], tasks[task][1])
                    left[task] = Fraction(tasks[task][1] - lead)
                    uses[task]["lead_ns"] = lead
                    changed = True
        if len(end) == len(tasks):
            break
        rate = _rates({t: uses[t] for t in left if now >= start[t] + uses[t]["lead_ns"]})
        times = [now + left[t] / rate[t] for t in rate if left[t] > 0]
        times += [start[t] + uses[t]["lead_ns"] for t in left if t not in rate]
        known = [_ready(t, tasks, edges, lags, start, end) for t in range(len(tasks)) if t not in start]
        following = min([*times, *(time for time in known if time is not None and time > now)])
        for task in rate:
            left[task] -= rate[task] * (following - now)
        now = following
    return [(start[t], end[t]) for t in range(len(tasks))]


def _ready(task: int, tasks: Any, edges: Any, lags: list[int], start: Any, end: Any) -> Fraction | None:
    """When a task can start; None while that is not known."""
    times = [Fraction(0)]
    thread = tasks[task][0]
    for other in range(task):
        if tasks[other][0] == thread:
            if other not in end:
                return None
            times.append(end[other] + lags[thread])
    for source, target, lag, from_start in edges:
        if target == task:
            known = start if from_start else end
            if source not in known:
                return None
            times.append(known[source] + lag)
    return max(times)


def _rates(running: dict[int, Use]) -> dict[int, Fraction]:
    """The rate of each running task: the least that its device and its link give it."""
    found = {}
    for task, use in running.items():
        rate = Fraction(1)
        if use["role"] and use["device"]:
            beside = [other for other in running.values() if other["role"] and other["device"] == use["device"]]
            held = sum((other["compute"] for other in beside if other["role"] == HOLDS), Fraction(0))
            memory = sum((other["memory"] for other in beside if other["role"] == HOLDS), Fraction(0))
            if use["role"] == HOLDS:
                rate /= max(held, memory, 1)
                if use["slowed"] > 1 and any(other["role"] != HOLDS for other in beside):
                    rate /= use["slowed"]
            else:
                rest, memory_rest = max(1 - held, LEAST), max(1 - memory, LEAST)
                sharing = [other["compute"] for other in beside if other["role"] == SHARES]
                most = _level(sharing, rest) if use["role"] == SHARES else rest
                if use["compute"] > most and (held or use["role"] == SHARES):
                    rate = min(rate, most / use["compute"])
                if use["memory"] > memory_rest:
                    rate = min(rate, memory_rest / use["memory"])
        if use["link"]:
            wanted = [other["link_share"] for other in running.values() if other["link"] == use["link"]]
            most = _level(wanted, Fraction(1))
            if use["link_share"] > most:
                rate = min(rate, most / use["link_share"])
        found[task] = rate
    return found


def _level(wanted: list[Fraction], room: Fraction) -> Fraction:
    """How much each may have at most so that all together have no more than there is (max-min fairness)."""
    if sum(wanted) <= room:
        return max(wanted)
    # The level lies between two of the wishes: those below it are content, the others share the rest.
    ascending = sorted(wanted)
    for content in range(len(wanted)):
        level = (room - sum(ascending[:content])) / (len(wanted) - content)
        if level <= ascending[content]:
            return level
    raise AssertionError(wanted)
