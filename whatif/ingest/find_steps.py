"""Where training steps begin: profiler marks, else optimizer marks, else the repetition of the kernels."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.order import places
from whatif.graph.task_graph import matching
from whatif.graph.types import Bool, Int64, among
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.grouped import rows_named
from whatif.ingest.marks import NameMarks, sequences_served
from whatif.ingest.nest import outermost
from whatif.runtime.errors import WhatifError

# A period explains a trace when this share of the kernels equals the one a period later.
REPEATS = 0.97
# And when this share of its distinct kernels comes about once a period.
KERNELS_IN_STEP = 0.9
# The shorter of two periods is the step if the share of kernels that do not repeat exceeds twice that of the best
# period by no more than this: a layer repeats as well, but not what lies around the layers.
MISSED_BEYOND = 0.002
# A handful of kernels in a row is a loop inside a step, not a step.
LEAST_KERNELS = 8
# A loop of this many repeats may be that many steps or one; a shorter one is part of a step.
LEAST_LOOP = 10
# This many candidate periods are checked one by one.
CANDIDATES = 48
# In a file that ends early, a last step with less than this share of the fullest step's work was cut.
WHOLE_SHARE = 0.9
# A last mark that is shorter than this share of the usual one was cut by the end of the recording.
STUB_SHARE = 0.05


class Steps(Struct, frozen=True):
    """Boundaries of consecutive steps, ns, shape (n_steps + 1,) or (0,); ``source`` says where they come from."""

    edges_ns: Int64
    source: str
    loop: tuple[int, int] = (0, 0)  # GPU tasks and repeats of a loop of too few tasks for a step
    doubt: str = ""  # a sentence if other steps are as likely
    whole: bool = True  # False: the file ends early, and no step is known to be whole
    sequences: int | None = None  # served by a serving engine in most steps

    def of(self, time_ns: Int64) -> Int64:
        """Return the step of each time, -1 outside all steps."""
        if not len(self.edges_ns):
            return np.full(len(time_ns), -1, dtype=np.int64)
        step = places(self.edges_ns, time_ns, side="right") - 1
        return np.where(step < len(self.edges_ns) - 1, step, -1)


class StepRule(Struct, frozen=True):
    """The user's rule for the steps: how many the recording holds, or what marks their beginnings."""

    count: int | None = None
    mark: str | None = None  # a regular expression of names of annotations or operators

    @property
    def option(self) -> tuple[str, ...]:
        """The rule as arguments of a command line; () if there is none."""
        if self.count is not None:
            return "--step-count", str(self.count)
        return () if self.mark is None else ("--step-mark", self.mark)


class Launched(Struct, frozen=True):
    """GPU tasks in the order of their launches, shape (n_gpu,): time and call (-1 unknown) of the launch, and name."""

    time_ns: Int64
    call: Int64
    name: Int64


def find_steps(
    events: Events, marks: NameMarks, main: int, launched: Launched, graph_launch: Bool, rule: StepRule
) -> Steps:
    """Find the steps of a trace: by the user's rule, else by marks, else by the repetition of kernels.

    ``graph_launch`` is the mask of the calls that launch CUDA graphs, shape (n_calls,). Raises WhatifError if nothing
    in the trace fits the rule.
    """
    if rule.mark is not None:
        return _by_mark(events, rule.mark)
    if rule.count is not None:
        return _by_count(events, main, launched, rule.count)
    rows = rows_named(events, EventCategory.ANNOTATION, marks.step)
    profiler = _outermost(events, rows[events.track[rows] == main])
    if len(profiler[0]):
        start_ns, end_ns = _without_stub(*profiler)
        return Steps(np.append(start_ns, end_ns[-1]), "profiler marks")
    served = _by_serving(events)
    if served is not None:
        return served
    optimizer = _outermost(events, rows_named(events, EventCategory.ANNOTATION, marks.optimizer))
    if len(optimizer[0]) >= 2:
        # A step ends with the optimizer; the first one began before the recording, or with it.
        first_ns = int(events.start_ns[events.track == main].min(initial=optimizer[0][0]))
        edges_ns = _of_one_step_each(events, marks, *optimizer)
        if _first_is_whole(first_ns, edges_ns):
            edges_ns = np.append(first_ns, edges_ns)
        return Steps(edges_ns, "optimizer marks")
    return _repetition(launched, graph_launch)


def work_times_ns(events: Events, main: int, launched: Launched) -> Int64:
    """The launch time of each GPU task, or without any the start of each operator of the main thread, shape (n,)."""
    if len(launched.time_ns):
        return launched.time_ns
    time_ns: Int64 = events.start_ns[(events.track == main) & (events.category == EventCategory.CPU_OP)]
    return time_ns


def without_cut_step(steps: Steps, work_ns: Int64) -> Steps:
    """Leave out the last step of a file that ends early if it lacks work; ``whole`` says whether a whole one is left.

    A single step is known to be whole when work after its end was read: a thread's events are written in order.
    """
    n_steps = len(steps.edges_ns) - 1
    if n_steps <= 1:
        return replace(steps, whole=n_steps == 1 and bool(work_ns.max(initial=0) >= steps.edges_ns[-1]))
    of_work = steps.of(work_ns)
    counts = np.bincount(of_work[of_work >= 0], minlength=n_steps)
    cut = counts[-1] < WHOLE_SHARE * counts.max()
    return replace(steps, edges_ns=steps.edges_ns[:-1]) if cut else steps


def _by_mark(events: Events, pattern: str) -> Steps:
    if not pattern:
        raise WhatifError("--step-mark: expected a regular expression, got an empty one; name what starts a step.")
    named = matching(tuple(events.names), pattern)
    can_mark = among(events.category, [EventCategory.ANNOTATION, EventCategory.CPU_OP, EventCategory.MODULE])
    rows = np.flatnonzero(named.take(events.name) & can_mark)
    if len(rows) < 2:
        found = "none" if not len(rows) else "one"
        raise WhatifError(
            f"--step-mark {pattern!r}: expected 2 or more matching annotations or operators, got {found}."
        )
    start_ns, end_ns = _outermost(events, rows)
    return Steps(np.append(start_ns, end_ns[-1]), f"marks like {pattern!r}")


def _by_serving(events: Events) -> Steps | None:
    """Steps by the annotations of a serving engine; None if it has written fewer than two."""
    sequences = {code: n for code, name in enumerate(events.names) if (n := sequences_served(name)) is not None}
    served = np.zeros(len(events.names), dtype=np.bool_)
    served[list(sequences)] = True
    rows = rows_named(events, EventCategory.ANNOTATION, served)
    if len(rows) < 2:
        return None
    start_ns, end_ns = _outermost(events, rows)
    kinds, count = np.unique(events.name[rows], return_counts=True)
    usual = int(kinds[count.argmax()])
    doubt = ""
    if len(kinds) > 1:
        doubt = (
            f"the recording mixes {len(kinds)} kinds of steps, {int(count.max())} of {len(rows)} are "
            f"{events.names[usual]}: the step time is the median of all"
        )
    return Steps(np.append(start_ns, end_ns[-1]), "serving marks", doubt=doubt, sequences=sequences[usual] or None)


def _by_count(events: Events, main: int, launched: Launched, count: int) -> Steps:
    """Steps with equal numbers of kernels, or of operators on the main thread if there is no kernel."""
    time_ns = work_times_ns(events, main, launched)
    if not 1 <= count <= len(time_ns):
        raise WhatifError(f"--step-count {count}: expected 1 to {len(time_ns)} steps, at most one per kernel.")
    first = np.round(np.arange(count) * len(time_ns) / count).astype(np.int64)
    edges_ns = np.append(time_ns[first], max(int(time_ns[-1]), int(events.start_ns[-1])) + 1)
    return Steps(np.maximum.accumulate(edges_ns), f"{count} steps, as requested")


def _outermost(events: Events, rows: Int64) -> tuple[Int64, Int64]:
    """Starts and ends of the outermost marks: some are recorded twice, one inside the other."""
    outer = rows[outermost(events.end_ns[rows])]
    return events.start_ns[outer], events.end_ns[outer]


def _without_stub(start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
    """Drop the last mark if the recording ended inside it: earlier ones ended by themselves, however short."""
    duration_ns = end_ns - start_ns
    keep = slice(None, -1 if duration_ns[-1] < STUB_SHARE * np.median(duration_ns) else None)
    return start_ns[keep], end_ns[keep]


def _first_is_whole(first_ns: int, edges_ns: Int64) -> bool:
    return len(edges_ns) > 1 and bool(edges_ns[0] - first_ns >= 0.5 * np.median(np.diff(edges_ns)))


def _repetition(launched: Launched, graph_launch: Bool) -> Steps:
    """Steps by the period of the sequence of kernels; none if nothing repeats."""
    # A CUDA graph holds a step or a part of one: its kernels count as one.
    of_graph = (np.append(graph_launch, False)[launched.call] & (launched.call >= 0)).astype(np.bool_)
    same = (launched.call[1:] == launched.call[:-1]) & of_graph[1:]
    begins = np.flatnonzero(np.append(True, ~same)) if len(of_graph) else np.empty(0, dtype=np.int64)
    if not same.any():
        return _by_period(launched, launched.name, begins, of_graph)
    steps = _by_period(launched, _sequence_codes(launched.name, begins), begins, of_graph)
    # If only some steps launch a graph, its kernels are those of the others.
    alike = _by_period(launched, launched.name, np.arange(len(of_graph)), np.zeros_like(of_graph))
    if not len(steps.edges_ns):
        return alike
    # Both kinds in turn are a period as well. A graph divided by a shorter one holds layers, not steps.
    of_step = alike.of(launched.time_ns)
    divides = len(set(np.bincount(of_step[of_step >= 0]).tolist())) > 1
    return alike if len(alike.edges_ns) > len(steps.edges_ns) and not divides else steps


def _by_period(launched: Launched, units: Int64, begins: Int64, of_graph: Bool) -> Steps:
    """Steps by the period of ``units``, each of the kernels from one of ``begins`` to the next."""
    scores = {period: score for period, score in _periods(units).items() if score >= REPEATS}
    most_missed = 2 * (1 - max(scores.values(), default=1.0)) + MISSED_BEYOND
    period = min((p for p, score in scores.items() if 1 - score <= most_missed), default=0)
    none = np.empty(0, dtype=np.int64)
    if not period or not _holds_all(units, len(units) // period):
        return Steps(none, "none")
    n_steps = len(units) // period
    if period < LEAST_KERNELS and not of_graph.any():
        return Steps(none, "none", (period, n_steps) if n_steps >= LEAST_LOOP else (0, 0))
    first = begins[::period]
    end_ns = launched.time_ns[first[n_steps]] if len(first) > n_steps else launched.time_ns[-1] + 1
    return Steps(np.maximum.accumulate(np.append(launched.time_ns[first[:n_steps]], end_ns)), "repetition")


def _sequence_codes(kernel: Int64, begins: Int64) -> Int64:
    """A code for each group of kernels: groups of the same kernels in the same order share one."""
    groups = [group.tobytes() for group in np.split(kernel, begins[1:])]
    codes = {group: code for code, group in enumerate(dict.fromkeys(groups))}
    return np.array([codes[group] for group in groups], dtype=np.int64)


def _periods(sequence: Int64) -> dict[int, float]:
    """Return the most likely periods of a sequence, each with the share of elements that repeat after it.

    Each distinct element gets a random sign. The autocorrelation of the signs, by Fourier transforms, has its peaks at
    the periods of the elements, and only the elements at these distances are compared one by one.
    """
    n = len(sequence)
    if n < 2:
        return {}
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(2, int(sequence.max()) + 1))
    agreement = np.zeros(n // 2 + 1)
    for sign in signs:
        spectrum = np.fft.rfft(sign[sequence], 2 * n)
        agreement += np.fft.irfft(np.abs(spectrum) ** 2, 2 * n)[: n // 2 + 1] / (n - np.arange(n // 2 + 1))
    best = np.argsort(-agreement[1:].round(4), kind="stable")[:CANDIDATES] + 1
    return {int(p): float(np.mean(sequence[:-p] == sequence[p:])) for p in sorted(best.tolist())}


def _holds_all(kernel: Int64, n_steps: int) -> bool:
    """Whether nearly every kernel runs once per step: layers repeat as well, but what is around them does not."""
    count = np.bincount(kernel)
    return bool(np.mean(count[count > 0] >= n_steps - 1) >= KERNELS_IN_STEP)


def _of_one_step_each(events: Events, marks: NameMarks, start_ns: Int64, end_ns: Int64) -> Int64:
    """The ends of the optimizer marks that end a step: two without a backward pass between them are one update."""
    backward = rows_named(events, EventCategory.CPU_OP, marks.autograd)
    begins_ns = np.sort(events.start_ns[backward])
    if not len(begins_ns):
        return end_ns
    passed = np.searchsorted(begins_ns, start_ns[1:]) > np.searchsorted(begins_ns, end_ns[:-1])
    return np.asarray(end_ns[np.append(passed, True)], dtype=np.int64)


def steady_range(n_steps: int, edges_known: bool) -> tuple[int, int]:
    """Return the steady steps [first, last): without the first and the last if at least four are known."""
    if edges_known and n_steps >= 4:
        return 1, n_steps - 1
    return 0, n_steps
