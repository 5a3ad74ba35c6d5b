# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# mypy: disable-error-code="valid-type, no-any-return, untyped-decorator"
"""Algorithm 1 by events, with free orders and shared resources: one source for both forms (whatif.runtime.loops)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import cython  # what the compiler reads; nothing imports Cython at run time
else:
    from whatif.runtime import uncompiled as cython

COMPILED = cython.compiled


def _whole(n: int, value: int = 0) -> Any:
    """Scratch of int64: uncompiled, a list is faster than an array."""
    return np.full(n, value, dtype=np.int64) if cython.compiled else [value] * n


def _small(n: int, value: int = 0) -> Any:
    return np.full(n, value, dtype=np.int32) if cython.compiled else [value] * n


def _scratch(n: int) -> Any:
    """The same with any values."""
    return np.empty(n, dtype=np.int32) if cython.compiled else [0] * n


def _real(n: int, value: float = 0.0) -> Any:
    return np.full(n, value) if cython.compiled else [value] * n


@cython.final
@cython.cclass
class Threads:
    """The waiting tasks of each thread, its running task, and a tournament of threads by their next event.

    A leaf of the tournament is a thread: its event is the end of its running task, or the start of its next task. Each
    thread has two heaps at the two ends of its part of ``heap``: ``late`` by (ready time, urgency, id) and, if tasks
    have an urgency, ``due`` by (urgency, ready time, id), for tasks that can start as soon as the thread is free.
    ``behind`` is the negative urgency.
    """

    heap: cython.int[::1]
    base: cython.const[cython.longlong][::1]  # where the part of each thread begins
    n_due: cython.int[::1]
    n_late: cython.int[::1]
    behind: cython.const[cython.longlong][::1]
    by_urgency: cython.bint
    free_order: cython.const[cython.uchar][::1]  # threads whose order is chosen
    ready_ns: cython.longlong[::1]  # of each task, until it starts
    free_ns: cython.longlong[::1]  # of each thread
    task_on: cython.int[::1]  # the running task of each thread that shares a resource; -1 for none
    event_ns: cython.longlong[::1]  # of that task
    winner: cython.int[::1]
    leaves: cython.Py_ssize_t
    thread: cython.const[cython.int][::1]  # of each task
    missing: cython.int[::1]  # number of unmet dependencies of each task
    shares: cython.bint
    row: cython.const[cython.int][::1]  # each task's row in the columns of uses, 0 for none; empty if nothing is shared
    at_once: cython.bint  # whether tasks of ordered threads that share nothing run as soon as their predecessors have
    alone: cython.int[::1]  # the ready ones of these tasks
    n_alone: cython.Py_ssize_t

    def __init__(
        self, thread: Any, base: Any, missing: Any, behind: Any, by_urgency: bool, free_order: Any, shares: bool,
        row: Any, at_once: bool, times: Any,
    ) -> None:  # fmt: skip
        n: cython.Py_ssize_t = len(thread)
        n_threads: cython.Py_ssize_t = len(free_order)
        t: cython.Py_ssize_t
        self.heap, self.base = _scratch(n), base
        self.n_due, self.n_late = _small(n_threads), _small(n_threads)
        self.behind, self.by_urgency, self.free_order = behind, by_urgency, free_order
        self.ready_ns, self.free_ns = times, _whole(n_threads)
        self.task_on, self.event_ns = _small(n_threads, -1), _whole(n_threads)
        self.thread, self.missing = thread, missing
        self.shares, self.row = shares, row
        self.at_once, self.n_alone = at_once, 0
        self.alone = _scratch(n if at_once else 1)
        self.leaves = 1
        while self.leaves < n_threads:
            self.leaves *= 2
        self.winner = _small(2 * self.leaves, -1)
        for t in range(n_threads):
            self.winner[self.leaves + t] = t

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def readier(self, a: cython.int, b: cython.int) -> cython.bint:
        if self.ready_ns[a] != self.ready_ns[b]:
            return self.ready_ns[a] < self.ready_ns[b]
        if self.by_urgency and self.behind[a] != self.behind[b]:
            return self.behind[a] < self.behind[b]
        return a < b

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def more_urgent(self, a: cython.int, b: cython.int) -> cython.bint:
        if self.behind[a] != self.behind[b]:
            return self.behind[a] < self.behind[b]
        return self.ready_ns[a] < self.ready_ns[b] or (self.ready_ns[a] == self.ready_ns[b] and a < b)

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def push_late(self, t: cython.Py_ssize_t, task: cython.int) -> cython.void:
        first: cython.longlong = self.base[t]
        at: cython.Py_ssize_t = self.n_late[t]
        up: cython.Py_ssize_t
        self.n_late[t] += 1
        while at > 0:
            up = (at - 1) >> 1
            if not self.readier(task, self.heap[first + up]):
                break
            self.heap[first + at] = self.heap[first + up]
            at = up
        self.heap[first + at] = task

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def pop_late(self, t: cython.Py_ssize_t) -> cython.int:
        first: cython.longlong = self.base[t]
        size: cython.Py_ssize_t = self.n_late[t] - 1
        found: cython.int = self.heap[first]
        task: cython.int = self.heap[first + size]
        at: cython.Py_ssize_t = 0
        down: cython.Py_ssize_t
        self.n_late[t] = size
        while True:
            down = 2 * at + 1
            if down >= size:
                break
            if down + 1 < size and self.readier(self.heap[first + down + 1], self.heap[first + down]):
                down += 1
            if not self.readier(self.heap[first + down], task):
                break
            self.heap[first + at] = self.heap[first + down]
            at = down
        self.heap[first + at] = task
        return found

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def push_due(self, t: cython.Py_ssize_t, task: cython.int) -> cython.void:
        last: cython.longlong = self.base[t + 1] - 1
        at: cython.Py_ssize_t = self.n_due[t]
        up: cython.Py_ssize_t
        self.n_due[t] += 1
        while at > 0:
            up = (at - 1) >> 1
            if not self.more_urgent(task, self.heap[last - up]):
                break
            self.heap[last - at] = self.heap[last - up]
            at = up
        self.heap[last - at] = task

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def pop_due(self, t: cython.Py_ssize_t) -> cython.int:
        last: cython.longlong = self.base[t + 1] - 1
        size: cython.Py_ssize_t = self.n_due[t] - 1
        found: cython.int = self.heap[last]
        task: cython.int = self.heap[last - size]
        at: cython.Py_ssize_t = 0
        down: cython.Py_ssize_t
        self.n_due[t] = size
        while True:
            down = 2 * at + 1
            if down >= size:
                break
            if down + 1 < size and self.more_urgent(self.heap[last - down - 1], self.heap[last - down]):
                down += 1
            if not self.more_urgent(self.heap[last - down], task):
                break
            self.heap[last - at] = self.heap[last - down]
            at = down
        self.heap[last - at] = task
        return found

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def next_task(self, t: cython.Py_ssize_t) -> cython.int:
        """The task that the thread takes next; -1 for none."""
        if self.n_due[t] > 0:
            return self.heap[self.base[t + 1] - 1]
        return self.heap[self.base[t]] if self.n_late[t] > 0 else -1

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def has_event(self, t: cython.Py_ssize_t) -> cython.bint:
        return self.task_on[t] >= 0 or self.n_late[t] > 0 or self.n_due[t] > 0

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def take(self, t: cython.Py_ssize_t) -> cython.int:
        return self.pop_due(t) if self.n_due[t] > 0 else self.pop_late(t)

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def put(self, t: cython.Py_ssize_t, task: cython.int) -> cython.void:
        """Queue a ready task on its thread."""
        if self.by_urgency and self.ready_ns[task] <= self.free_ns[t]:
            self.push_due(t, task)
        else:
            self.push_late(t, task)

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def free_at(self, t: cython.Py_ssize_t, time_ns: cython.longlong) -> cython.void:
        """Free the thread from a time on: tasks ready at that time are due."""
        self.free_ns[t] = time_ns if time_ns > 0 else 0
        if self.by_urgency:
            while self.n_late[t] > 0 and self.ready_ns[self.heap[self.base[t]]] <= self.free_ns[t]:
                self.push_due(t, self.pop_late(t))

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def start_of(self, t: cython.Py_ssize_t, task: cython.int) -> cython.longlong:
        return self.ready_ns[task] if self.ready_ns[task] > self.free_ns[t] else self.free_ns[t]

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def sooner(self, a: cython.int, b: cython.int) -> cython.int:
        """Return the thread with the earlier event; ties: ends, by id, before starts, by (ready, id).

        With urgencies ordered threads start first, then the others in the order of the threads.
        """
        task_a: cython.int
        task_b: cython.int
        start_a: cython.longlong
        start_b: cython.longlong
        if a < 0:
            return b
        if b < 0:
            return a
        if self.task_on[a] >= 0:
            if self.task_on[b] >= 0:
                if self.event_ns[a] != self.event_ns[b]:
                    return a if self.event_ns[a] < self.event_ns[b] else b
                return a if self.task_on[a] < self.task_on[b] else b
            task_b = self.next_task(b)
            return a if task_b < 0 or self.event_ns[a] <= self.start_of(b, task_b) else b
        task_a = self.next_task(a)
        if task_a < 0:
            return b
        start_a = self.start_of(a, task_a)
        if self.task_on[b] >= 0:
            return a if start_a < self.event_ns[b] else b
        task_b = self.next_task(b)
        if task_b < 0:
            return a
        start_b = self.start_of(b, task_b)
        if start_a != start_b:
            return a if start_a < start_b else b
        if self.by_urgency and (self.free_order[a] or self.free_order[b]):
            if self.free_order[a] != self.free_order[b]:
                return b if self.free_order[a] else a
            return a if a < b else b
        if self.ready_ns[task_a] != self.ready_ns[task_b]:
            return a if self.ready_ns[task_a] < self.ready_ns[task_b] else b
        return a if task_a < task_b else b

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def climb(self, t: cython.Py_ssize_t) -> cython.void:
        """Replay the tournament upward from the leaf of a thread."""
        node: cython.Py_ssize_t = (self.leaves + t) >> 1
        while node >= 1:
            self.winner[node] = self.sooner(self.winner[2 * node], self.winner[2 * node + 1])
            node >>= 1

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def meet(self, target: cython.int, time_ns: cython.longlong, t: cython.int) -> cython.void:
        """Satisfy one dependency of a task from a time on; after the last one the task is ready."""
        if time_ns > self.ready_ns[target]:
            self.ready_ns[target] = time_ns
        self.missing[target] -= 1
        if self.missing[target] == 0:
            self.let(target, t)

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def uses_any(self, task: cython.int) -> cython.bint:
        return self.shares and self.row[task] > 0

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def let(self, task: cython.int, t: cython.int) -> cython.void:
        """Queue a task that waits only for its thread; the thread ``t`` updates the tournament itself."""
        other: cython.int = self.thread[task]
        if self.at_once and not self.free_order[other] and not self.uses_any(task):
            self.alone[self.n_alone] = task
            self.n_alone += 1
            return
        self.put(other, task)
        if other != t:
            self.climb(other)


@cython.final
@cython.cclass
class Sharing:
    """The users of shared resources, and the rate of each running task: ``whatif.simulation.rate_sharing``.

    ``role`` and ``link`` are those of ``whatif.simulation.sharing``. The users of a resource are a linked list of
    threads in the order of (share, task): the first in ``head``, each thread's successor in ``behind``. Devices come
    first in both, then links.
    """

    threads: Threads
    role: cython.const[cython.schar][::1]
    compute: cython.const[cython.double][::1]
    memory: cython.const[cython.double][::1]
    slowed: cython.const[cython.double][::1]
    link_share: cython.const[cython.double][::1]
    head: cython.int[::1]
    behind: cython.int[::1]
    leading: cython.int[::1]  # whether a thread's running task does not use its resources yet
    left: cython.double[::1]  # of the running task, ns
    since_ns: cython.longlong[::1]  # the time up to which ``left`` is computed
    rate: cython.double[::1]
    at_device: cython.double[::1]
    at_link: cython.double[::1]
    n_threads: cython.Py_ssize_t
    least: cython.double

    def __init__(
        self, threads: Threads, role: Any, compute: Any, memory: Any, slowed: Any, link_share: Any, least: float
    ) -> None:
        n: cython.Py_ssize_t = len(threads.free_ns)
        self.threads, self.role, self.compute, self.memory = threads, role, compute, memory
        self.slowed, self.link_share, self.least, self.n_threads = slowed, link_share, least, n
        self.head = _small(2 * (n + 1), -1)
        self.behind, self.leading = _small(2 * n, -1), _small(n)
        self.left, self.since_ns, self.rate = _real(n), _whole(n), _real(n, 1.0)
        self.at_device, self.at_link = _real(n, 1.0), _real(n, 1.0)

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def row_on(self, t: cython.int) -> cython.int:
        """The row of the resources that a thread's task uses."""
        return self.threads.row[self.threads.task_on[t]]

    @cython.cfunc
    @cython.nogil
    @cython.inline
    @cython.exceptval(check=False)
    def share(self, t: cython.int, is_link: cython.bint) -> cython.double:
        return self.link_share[self.row_on(t)] if is_link else self.compute[self.row_on(t)]

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def enter(self, thing: cython.Py_ssize_t, t: cython.int, is_link: cython.bint) -> cython.void:
        """Add a thread's task to the users of a resource."""
        task: cython.int = self.threads.task_on[t]
        share: cython.double = self.share(t, is_link)
        other: cython.double
        first: cython.Py_ssize_t = self.n_threads if is_link else 0
        before: cython.int = -1
        at: cython.int = self.head[thing]
        while at >= 0:
            other = self.share(at, is_link)
            if other > share or (other == share and self.threads.task_on[at] >= task):
                break
            before, at = at, self.behind[first + at]
        self.behind[first + t] = at
        if before < 0:
            self.head[thing] = t
        else:
            self.behind[first + before] = t

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def leave(self, thing: cython.Py_ssize_t, t: cython.int, is_link: cython.bint) -> cython.void:
        """Remove a thread's task from the users of a resource."""
        first: cython.Py_ssize_t = self.n_threads if is_link else 0
        at: cython.int = self.head[thing]
        if at == t:
            self.head[thing] = self.behind[first + t]
            return
        while self.behind[first + at] != t:
            at = self.behind[first + at]
        self.behind[first + at] = self.behind[first + t]

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def proceed(self, t: cython.int, now_ns: cython.longlong) -> cython.bint:
        """Continue a thread's task at the slower of its rates; return whether its end moved."""
        new: cython.double = self.at_device[t] if self.at_device[t] < self.at_link[t] else self.at_link[t]
        left: cython.double
        if new == self.rate[t]:
            return False
        left = self.left[t] - self.rate[t] * (now_ns - self.since_ns[t])
        self.left[t] = left if left > 0.0 else 0.0
        self.since_ns[t], self.rate[t] = now_ns, new
        left = self.left[t] / new
        # Round halves to even: above 2^52 doubles have no fraction.
        if left < 4503599627370496.0:
            left = (left + 4503599627370496.0) - 4503599627370496.0
        self.threads.event_ns[t] = now_ns + cython.cast(cython.longlong, left)
        return True

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def reckon(self, thing: cython.Py_ssize_t, is_link: cython.bint) -> cython.void:
        """Compute the rates of the users of one resource: ``rate_sharing.rates``."""
        held: cython.double = 0.0
        held_memory: cython.double = 0.0
        sharers: cython.int = 0
        others: cython.bint = False
        first: cython.Py_ssize_t = self.n_threads if is_link else 0
        row: cython.int
        t: cython.int = self.head[thing]
        most: cython.double
        rest: cython.double
        memory_rest: cython.double
        left: cython.double
        rate: cython.double
        share: cython.double
        part: cython.double
        while t >= 0:
            row = self.row_on(t)
            if is_link:
                others = True
                sharers += 1
            elif self.role[row] == 1:
                held += self.compute[row]
                held_memory += self.memory[row]
            else:
                others = True
                sharers += 1 if self.role[row] == 3 else 0
            t = self.behind[first + t]
        most = held if held > held_memory else held_memory
        rest = 1.0 - held if 1.0 - held > self.least else self.least
        memory_rest = 1.0 - held_memory if 1.0 - held_memory > self.least else self.least
        left = rest
        t = self.head[thing]
        while t >= 0:
            row = self.row_on(t)
            rate = 1.0
            share = self.share(t, is_link)
            if not is_link and self.role[row] == 1:
                if most > 1.0:
                    rate = 1.0 / most
                if others and self.slowed[row] > 1.0:
                    rate /= self.slowed[row]
            else:
                if is_link or self.role[row] == 3:
                    part = left / sharers
                    if share < part:
                        part = share
                    left -= part
                    sharers -= 1
                    if part < share:
                        rate = part / share
                elif held > 0.0 and share > rest:
                    rate = rest / share
                if not is_link and self.memory[row] > memory_rest and memory_rest / self.memory[row] < rate:
                    rate = memory_rest / self.memory[row]
            if is_link:
                self.at_link[t] = rate
            else:
                self.at_device[t] = rate
            t = self.behind[first + t]

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def change(
        self, thing: cython.int, t: cython.int, is_link: cython.bint, joins: cython.bint, now_ns: cython.longlong
    ) -> cython.void:
        """Let a thread's task join or leave the users of a resource, and update their rates and ends."""
        place: cython.Py_ssize_t = thing + (self.n_threads + 1 if is_link else 0)
        first: cython.Py_ssize_t = self.n_threads if is_link else 0
        user: cython.int
        if joins:
            self.enter(place, t, is_link)
        else:
            self.leave(place, t, is_link)
        self.reckon(place, is_link)
        user = self.head[place]
        while user >= 0:
            if self.proceed(user, now_ns):
                self.threads.climb(user)
            user = self.behind[first + user]


def simulate(
    thread: cython.const[cython.int][::1],
    of_thread: cython.const[cython.longlong][::1],
    duration_ns: cython.const[cython.longlong][::1],
    following: cython.const[cython.int][::1],
    missing: cython.int[::1],
    offsets: cython.const[cython.longlong][::1],
    targets: cython.const[cython.int][::1],
    lags_ns: cython.const[cython.longlong][::1],
    anchors: cython.const[cython.schar][::1],
    thread_lag_ns: cython.const[cython.longlong][::1],
    free_order: cython.const[cython.uchar][::1],
    by_urgency: cython.bint,
    behind: cython.const[cython.longlong][::1],
    shares: cython.bint,
    uses: cython.const[cython.int][::1],
    device: cython.const[cython.int][::1],
    role: cython.const[cython.schar][::1],
    compute: cython.const[cython.double][::1],
    memory: cython.const[cython.double][::1],
    slowed: cython.const[cython.double][::1],
    link: cython.const[cython.int][::1],
    link_share: cython.const[cython.double][::1],
    lead_ns: cython.const[cython.longlong][::1],
    least: cython.double,
    times: cython.longlong[::1],
) -> int:
    """Run the graph and fill ``times`` with start (first half) and end (second half); return the tasks that ran.

    ``times`` are zero at first; until a task starts, they hold when it is ready. ``of_thread``, shape (n_threads + 1,),
    is the number of tasks on earlier threads. ``following`` is the next task on an ordered thread, else -1;
    ``missing``, each task's number of dependencies, is consumed. If no task is ready before its predecessors start,
    tasks of ordered threads that share nothing are no events: they run as soon as their predecessors have run, whatever
    the time. This does not apply if a tie with one of them may decide: with threads that choose without urgencies, or
    among sharing tasks. ``uses`` is each task's row in ``device`` to ``lead_ns``, 0 if it shares nothing. Without
    ``by_urgency`` the column ``behind``, and without ``shares`` these, may be empty.
    """
    n: cython.Py_ssize_t = len(thread)
    task: cython.int
    row: cython.Py_ssize_t
    done: cython.Py_ssize_t = 0
    t: cython.int
    start_ns: cython.longlong
    end_ns: cython.longlong
    now_ns: cython.longlong
    to_do_ns: cython.longlong
    clock_ns: cython.longlong = 0
    runs_on: cython.bint
    joins: cython.bint
    early: cython.bint = False
    at_once: cython.bint = shares or by_urgency
    for t in range(len(thread_lag_ns)):
        at_once = at_once and thread_lag_ns[t] >= 0 and not (shares and free_order[t])
    for row in range(len(lags_ns)):
        early = early or lags_ns[row] < 0
    if early:
        at_once = at_once and not shares
        for task in range(n):
            for row in range(offsets[task], offsets[task + 1]):
                at_once = at_once and lags_ns[row] + (0 if anchors[row] == 1 else duration_ns[task]) >= 0
    threads: Threads = Threads(thread, of_thread, missing, behind, by_urgency, free_order, shares, uses, at_once, times)
    alone: cython.int[::1] = threads.alone
    ready_ns: cython.longlong[::1] = threads.ready_ns
    free_ns: cython.longlong[::1] = threads.free_ns
    sharing: Sharing = Sharing(threads, role, compute, memory, slowed, link_share, least)
    with cython.nogil:
        for task in range(n):
            if missing[task] == 0:
                threads.let(task, thread[task])
        for t in range(threads.leaves - 1, 0, -1):
            threads.winner[t] = threads.sooner(threads.winner[2 * t], threads.winner[2 * t + 1])
        while True:
            while threads.n_alone > 0:
                threads.n_alone -= 1
                task = alone[threads.n_alone]
                t = thread[task]
                while True:  # then the next task of the thread, if it waits for nothing else
                    start_ns = ready_ns[task] if ready_ns[task] > free_ns[t] else free_ns[t]
                    end_ns = start_ns + duration_ns[task]
                    times[task], times[n + task] = start_ns, end_ns
                    free_ns[t] = end_ns + thread_lag_ns[t]
                    done += 1
                    for row in range(offsets[task], offsets[task + 1]):
                        threads.meet(targets[row], (start_ns if anchors[row] == 1 else end_ns) + lags_ns[row], t)
                    task = following[task]
                    if task < 0:
                        break
                    missing[task] -= 1
                    if missing[task] > 0:
                        break
                    if threads.uses_any(task):
                        threads.put(t, task)
                        break
                if threads.has_event(t):  # without an event before and after, it is not in the tournament
                    threads.climb(t)
            t = threads.winner[1]
            if t < 0:
                break
            task = threads.task_on[t]
            runs_on = task >= 0
            if runs_on:
                start_ns = times[task]
            else:
                if threads.next_task(t) < 0:
                    break
                task = threads.take(t)
                start_ns = threads.start_of(t, task)
                times[task] = start_ns
                if threads.uses_any(task) and lead_ns[uses[task]] < duration_ns[task]:
                    for row in range(offsets[task], offsets[task + 1]):
                        if anchors[row] == 1:
                            threads.meet(targets[row], start_ns + lags_ns[row], t)
                    threads.task_on[t] = task
                    threads.event_ns[t] = start_ns + lead_ns[uses[task]]
                    sharing.leading[t] = 1
                    runs_on = True
                    if lead_ns[uses[task]] > 0:
                        threads.climb(t)
                        continue
            end_ns = start_ns + duration_ns[task]
            if runs_on:
                now_ns = threads.event_ns[t]
                joins = False
                if sharing.leading[t]:
                    to_do_ns = duration_ns[task] - lead_ns[uses[task]]
                    if clock_ns > now_ns:
                        to_do_ns -= clock_ns - now_ns
                        now_ns = clock_ns
                    joins = to_do_ns > 0
                else:
                    end_ns = now_ns
                if joins:
                    sharing.leading[t] = 0
                    sharing.left[t], sharing.rate[t], sharing.since_ns[t] = to_do_ns, 1.0, now_ns
                    sharing.at_device[t], sharing.at_link[t] = 1.0, 1.0
                    threads.event_ns[t] = now_ns + to_do_ns
                    clock_ns = now_ns
                elif not sharing.leading[t] and now_ns > clock_ns:
                    clock_ns = now_ns
                if joins or not sharing.leading[t]:
                    if device[uses[task]] > 0:
                        sharing.change(device[uses[task]], t, False, joins, now_ns)
                    if link[uses[task]] > 0:
                        sharing.change(link[uses[task]], t, True, joins, now_ns)
                if joins:
                    threads.climb(t)
                    continue
                threads.task_on[t] = -1
            times[n + task] = end_ns
            threads.free_at(t, end_ns + thread_lag_ns[t])
            done += 1
            if following[task] >= 0:
                threads.meet(following[task], 0, t)
            for row in range(offsets[task], offsets[task + 1]):
                if anchors[row] == 0:
                    threads.meet(targets[row], end_ns + lags_ns[row], t)
                elif not runs_on:  # else its start was counted
                    threads.meet(targets[row], start_ns + lags_ns[row], t)
            threads.climb(t)
    return done
