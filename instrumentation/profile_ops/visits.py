"""Visits operators repeatedly, each time in another process, until the interval of each time is narrow enough.

One long measurement would see the machine in one state: clocks and neighbours change from second to second, memory
addresses of tensors from process to process. So each operator gets several short visits, some time apart.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from whatif.graph.described import Described
from whatif.opdb.importers.described import Timed

from ..line_process import EndedError, MeasuringProcess
from ..operators.calls import RecordedCall
from .collectives import RankGroup
from .machine import Way
from .pace import COMPUTES, sensitivity

# Operators visited in turn; a block takes half a minute on a CPU, so a disturbance is over at the next visit.
BLOCK = 256
FEWEST_VISITS, MOST_VISITS = 3, 9
# Quantiles of Student's distribution, 90 % between -t and t, for 2 to 8 degrees of freedom (any table of it).
_STUDENT = {3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860}
CRASHED = "ended the measuring process, or took too long"


class Question(NamedTuple):
    """An operator in the database's terms, and a call of it."""

    operator: Described
    call: RecordedCall


class Visit(NamedTuple):
    """Times of one call in ns by round, and the machine's pace in each; empty if the pace was not measured."""

    ns: list[float]
    pace_ns: list[float]

    def at(self, pace_ns: float, exponent: float) -> list[float]:
        """Return each round's time in ns, scaled to another pace; unchanged without a measured pace."""
        if not self.pace_ns:
            return self.ns
        return [ns * (pace_ns / pace) ** exponent for ns, pace in zip(self.ns, self.pace_ns, strict=True)]


@dataclass
class Visited:
    """Results of the visits to an operator and its exponent of the pace, or the reason for none."""

    visits: list[Visit] = field(default_factory=list)
    skipped: str | None = None
    exponent: float = COMPUTES

    @property
    def half_width(self) -> float:
        """Half of the 90 % interval of the time, as a share of it; infinite for fewer than three visits."""
        medians = [statistics.median(visit.at(1.0, self.exponent)) for visit in self.visits]
        if len(medians) < FEWEST_VISITS or min(medians) <= 0:
            return float("inf")
        error = statistics.stdev(medians) / math.sqrt(len(medians))
        return _STUDENT[min(len(medians), MOST_VISITS)] * error / statistics.mean(medians)

    def is_settled(self, precision: float) -> bool:
        """Whether no further visit is needed or would help."""
        return self.skipped is not None or len(self.visits) >= MOST_VISITS or self.half_width <= precision

    def timed(self, operator: Described, pace_ns: float) -> Timed | None:
        """Return the time at a pace: median, and 10 and 90 % quantiles of all rounds. None without a time."""
        if self.skipped is not None or not self.visits:
            return None
        rounds = [ns for visit in self.visits for ns in visit.at(pace_ns, self.exponent)]
        middle = statistics.median(rounds)
        if middle <= 0:
            return None
        tenths = statistics.quantiles(rounds, n=10, method="inclusive") if len(rounds) > 1 else [middle]
        low, high = max(0.0, tenths[0]), tenths[-1]
        return Timed(operator, middle * 1e-9, low * 1e-9, high * 1e-9, len(rounds))


def fastest_pace_ns(found: Iterable[Visited]) -> float:
    """Return the fastest pace of any visit, by the median of its rounds; infinite if none was measured."""
    paces = (statistics.median(visit.pace_ns) for visited in found for visit in visited.visits if visit.pace_ns)
    return min(paces, default=float("inf"))


def visit_all(
    questions: Sequence[Question],
    found: dict[Described, Visited],
    way: Way,
    *,
    precision: float,
    end_s: float,
    keep: Callable[[Described, dict[str, Any]], None],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Visit every question until it is settled, or until ``time.monotonic()`` reaches ``end_s``.

    ``found`` holds earlier results and receives new ones; ``keep`` is called at once with each answer.
    """
    for start in range(0, len(questions), BLOCK):
        block = questions[start : start + BLOCK]
        while time.monotonic() < end_s:
            visited = [found.setdefault(q.operator, Visited(exponent=sensitivity(q.operator))) for q in block]
            unsettled = [q for q, entry in zip(block, visited, strict=True) if not entry.is_settled(precision)]
            if not unsettled:
                break
            for _ in _pass(unsettled, way, end_s, found, keep):
                if progress:
                    visits = sum(min(len(entry.visits), FEWEST_VISITS) for entry in visited)
                    skipped = sum(entry.skipped is not None for entry in visited)
                    progress(min(start + skipped + visits // FEWEST_VISITS, len(questions)), len(questions))


def _pass(
    questions: Sequence[Question],
    way: Way,
    end_s: float,
    found: dict[Described, Visited],
    keep: Callable[[Described, dict[str, Any]], None],
) -> Iterator[None]:
    """Visit each question once, in one process unless a question crashes it; yield after each."""
    remaining = list(reversed(questions))
    while remaining and time.monotonic() < end_s:
        with _measuring(way) as process:
            while remaining:  # starting the process takes seconds: it answers at least once
                question = remaining.pop()
                job = {"call": question.call, "dtype": question.operator.dtype}
                try:
                    answer = process.measure(job)
                except EndedError:
                    answer = {"skipped": CRASHED}
                visited = found[question.operator]
                if "ns" in answer:
                    visited.visits.append(Visit(answer["ns"], answer.get("pace_ns", [])))
                else:
                    visited.skipped = answer["skipped"]
                keep(question.operator, answer)
                yield
                if answer.get("skipped") == CRASHED or time.monotonic() >= end_s:
                    break


def _measuring(way: Way) -> MeasuringProcess | RankGroup:
    return (
        RankGroup(way) if way.ranks else MeasuringProcess(f"{__package__}.worker", way._asdict(), threads=way.threads)
    )
