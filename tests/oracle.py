"""A slow and obvious simulator: Daydream's Algorithm 1 with lags and anchors, on dicts, without the library."""

from __future__ import annotations


def simulate(tasks: list[tuple[int, int]], edges: list[tuple[int, int, int, bool]],
             threads: list[tuple[int, bool]]) -> dict[int, tuple[int, int]]:  # fmt: skip
    """Start and end of each task that can run.

    ``tasks``: (thread, duration). ``edges``: (source, target, lag, counts from the source's start). ``threads``:
    (lag after each task, runs in the order of ids). Of the tasks that are ready the one runs that has the smallest
    (start, ready time, id).
    """
    free = dict.fromkeys(range(len(threads)), 0)
    done: dict[int, tuple[int, int]] = {}
    while True:
        ready = []
        for task, (thread, _) in enumerate(tasks):
            ahead = threads[thread][1] and any(t not in done and tasks[t][0] == thread for t in range(task))
            waits = [e for e in edges if e[1] == task]
            if task in done or ahead or any(e[0] not in done for e in waits):
                continue
            time = max([0, *(done[source][0 if at_start else 1] + lag for source, _, lag, at_start in waits)])
            ready.append((max(time, free[thread]), time, task))
        if not ready:
            return done
        start, _, task = min(ready)
        thread, duration = tasks[task]
        done[task] = start, start + duration
        free[thread] = max(0, start + duration + threads[thread][0])
