"""A schedule by priority: which of the waiting transfers a channel takes next (Daydream, Algorithm 7, Schedule)."""

from __future__ import annotations

import heapq
from itertools import islice

import numpy as np

from whatif.simulation.simulator import Frontier

# The attached column that tells how urgent a task is: the largest goes first.
PRIORITY = "priority"


def by_priority(frontier: Frontier) -> int:
    """Return the task that starts first; of those that a channel could start at that time the most urgent one.

    Channels are the threads without a fixed order. Ties: tasks of ordered threads, then priority, ready time, id.
    """
    queues = frontier.memory.get("queues")
    if queues is None:
        queues = frontier.memory["queues"] = _Queues(frontier)
    return int(queues.pick())


class _Queues:
    """The frontier, sorted: a heap of the tasks of ordered threads, and two for each channel."""

    def __init__(self, frontier: Frontier) -> None:
        graph = frontier.graph
        self.ready_ns, self.free_ns, self.thread = frontier.ready_ns, frontier.free_ns, frontier.thread
        urgency = graph.attached.get(PRIORITY, np.zeros(len(graph), dtype=np.int64))
        self.behind: list[int] = (-urgency).tolist()
        self.fixed: list[tuple[int, int, int]] = []  # (start, ready, task)
        free = [code for code, thread in enumerate(graph.threads) if not thread.ordered]
        self.later: dict[int, list[tuple[int, int, int]]] = {code: [] for code in free}  # (ready, -priority, task)
        self.waiting: dict[int, list[tuple[int, int, int]]] = {code: [] for code in free}  # (-priority, ready, task)
        self.known = 0

    def pick(self) -> int:
        """Take in what has become ready since the last pick, and give the next task."""
        ready_ns, free_ns, thread = self.ready_ns, self.free_ns, self.thread
        # A dict keeps the order of insertion, so the new ones stand at its end.
        for task in islice(reversed(ready_ns), len(ready_ns) - self.known):
            t, ready = thread[task], ready_ns[task]
            if t in self.later:
                heapq.heappush(self.later[t], (ready, self.behind[task], task))
            else:
                # An ordered thread has run all that comes before a ready task: its start is certain.
                heapq.heappush(self.fixed, (max(ready, free_ns[t]), ready, task))
        best, best_start = -1, self.fixed[0][0] if self.fixed else -1
        for t, later in self.later.items():
            waiting, free = self.waiting[t], free_ns[t]
            while later and later[0][0] <= free:
                ready, behind, task = heapq.heappop(later)
                heapq.heappush(waiting, (behind, ready, task))
            if waiting or later:
                start = free if waiting else later[0][0]
                if best_start < 0 or start < best_start:
                    best, best_start = t, start
        self.known = len(ready_ns) - 1
        if best < 0:
            return heapq.heappop(self.fixed)[2]
        return heapq.heappop(self.waiting[best] or self.later[best])[2]
