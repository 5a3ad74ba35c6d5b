"""Where training steps begin: profiler marks, else optimizer marks, else the repetition of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whatif.graph.types import Bool, Int64
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.marks import NameMarks

# A period explains a trace when this share of the kernels equals the one a period later.
REPEATS = 0.97
# And when this share of its distinct kernels comes about once a period.
KERNELS_IN_STEP = 0.9
# A mark that holds less than this share of the usual one is a stub at the end of a recording.
STUB_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Steps:
    """Boundaries of consecutive steps, ns, shape (n_steps + 1,) or (0,); ``source`` says what told them."""

    edges_ns: Int64
    source: str

    def of(self, time_ns: Int64) -> Int64:
        """Return the step of each time, -1 outside all steps."""
        if not len(self.edges_ns):
            return np.full(len(time_ns), -1, dtype=np.int64)
        step = np.searchsorted(self.edges_ns, time_ns, side="right") - 1
        return np.where(step < len(self.edges_ns) - 1, step, -1)


def find_steps(events: Events, marks: NameMarks, main: int, launch_ns: Int64, kernel: Int64) -> Steps:
    """Find the steps of a trace.

    ``launch_ns`` and ``kernel`` tell when each GPU task was launched and its name, in launch order, for traces without
    any mark.
    """
    profiler = _marks(events, marks.step[events.name] & (events.track == main))
    if len(profiler[0]):
        start_ns, end_ns = _without_stubs(*profiler)
        return Steps(np.append(start_ns, end_ns[-1]), "profiler marks")
    optimizer = _marks(events, marks.optimizer[events.name] & (events.category == EventCategory.ANNOTATION))
    if len(optimizer[0]) >= 2:
        # A step ends with the optimizer; the first one began before the recording, or with it.
        first_ns = int(events.start_ns[events.track == main].min(initial=optimizer[0][0]))
        edges_ns = _of_one_step_each(events, marks, *optimizer)
        if _first_is_whole(first_ns, edges_ns):
            edges_ns = np.append(first_ns, edges_ns)
        return Steps(edges_ns, "optimizer marks")
    edges_ns = _repetition(launch_ns, kernel)
    return Steps(edges_ns, "repetition" if len(edges_ns) else "none")


def _marks(events: Events, chosen: Bool) -> tuple[Int64, Int64]:
    """Starts and ends of the outermost marks: some are recorded twice, one inside the other."""
    rows = np.flatnonzero(chosen & (events.category == EventCategory.ANNOTATION))
    start_ns = events.start_ns[rows]
    end_ns = start_ns + events.duration_ns[rows]
    if not len(rows):
        return start_ns, end_ns
    reach = np.maximum.accumulate(end_ns)
    outer = np.append(True, end_ns[1:] > reach[:-1])
    return start_ns[outer], end_ns[outer]


def _without_stubs(start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
    usual_ns = float(np.median(end_ns - start_ns))
    whole = (end_ns - start_ns) >= STUB_SHARE * usual_ns
    return start_ns[whole], end_ns[whole]


def _first_is_whole(first_ns: int, edges_ns: Int64) -> bool:
    return bool(edges_ns[0] - first_ns >= 0.5 * np.median(np.diff(edges_ns)))


def _repetition(launch_ns: Int64, kernel: Int64) -> Int64:
    """Edges at the launches that begin each period of the kernel sequence; none where nothing repeats."""
    n = len(kernel)
    # The period is the distance to a later occurrence of the rarest repeated kernels: try those distances only.
    for period in _candidate_periods(kernel):
        if n < 2 * period:
            continue
        if np.mean(kernel[:-period] == kernel[period:]) >= REPEATS and _holds_all(kernel, n // period):
            edges = np.append(launch_ns[::period][: n // period], launch_ns[-1] + 1 if n % period == 0 else
                              launch_ns[(n // period) * period])  # fmt: skip
            return np.maximum.accumulate(edges)
    return np.empty(0, dtype=np.int64)


def _holds_all(kernel: Int64, n_steps: int) -> bool:
    """Whether nearly every kernel comes once a step: layers repeat as well, but what is around them does not."""
    count = np.bincount(kernel)
    return bool(np.mean(count[count > 0] >= n_steps - 1) >= KERNELS_IN_STEP)


def _of_one_step_each(events: Events, marks: NameMarks, start_ns: Int64, end_ns: Int64) -> Int64:
    """The ends of the optimizer marks that end a step: two without a backward pass between them are one update."""
    backward = marks.autograd[events.name] & (events.category == EventCategory.CPU_OP)
    begins_ns = np.sort(events.start_ns[backward])
    if not len(begins_ns):
        return end_ns
    passed = np.searchsorted(begins_ns, start_ns[1:]) > np.searchsorted(begins_ns, end_ns[:-1])
    return np.asarray(end_ns[np.append(passed, True)], dtype=np.int64)


def _candidate_periods(kernel: Int64) -> list[int]:
    count = np.bincount(kernel) if len(kernel) else np.empty(0, dtype=np.int64)
    periods: set[int] = set()
    repeated = np.flatnonzero(count >= 2)
    for name in repeated[np.argsort(count[repeated], kind="stable")][:8]:
        positions = np.flatnonzero(kernel == name)
        periods.update(int(d) for d in np.unique(np.diff(positions))[-4:])
        periods.add(round(float(np.median(np.diff(positions)))))
    # A handful of kernels in a row is a loop inside a step, not a step.
    return sorted(p for p in periods if p >= 8)


def steady_range(n_steps: int, edges_known: bool) -> tuple[int, int]:
    """Return the steps [first, last) that are steady: without the first and the last where at least four are known."""
    if edges_known and n_steps >= 4:
        return 1, n_steps - 1
    return 0, n_steps
