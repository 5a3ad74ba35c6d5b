"""Visits operators again and again, each time in another process, until the interval of the time of each is narrow.

One long look at an operator would find the machine in one mood: clocks and neighbours change from second to second, and
where tensors lie in memory from process to process. So each operator gets several short visits, some time apart.
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

# Operators that are visited in turns; so many take half a minute on a CPU: what disturbs a visit is over at the next.
BLOCK = 256
FEWEST_VISITS, MOST_VISITS = 3, 9
# Quantiles of Student's distribution, 90 % between -t and t, for 2 to 8 degrees of freedom (any table of it).
_STUDENT = {3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860}
CRASHED = "ended the measuring process, or took too long"


class Question(NamedTuple):
    """An operator in the database's words, and a call of it."""

    what: Described
    call: RecordedCall


class Visit(NamedTuple):
    """Times of one call in ns by each round, and the machine's pace beside each; no pace where it is not taken."""

    ns: list[float]
    pace_ns: list[float]

    def at(self, pace_ns: float, exponent: float) -> list[float]:
        """Each round's time in ns at another pace than the one beside it; as it is where no pace was taken."""
        if not self.pace_ns:
            return self.ns
        return [ns * (pace_ns / pace) ** exponent for ns, pace in zip(self.ns, self.pace_ns, strict=True)]


@dataclass
class Visited:
    """What the visits to an operator found, and how its time goes with the pace; or why there is none."""

    visits: list[Visit] = field(default_factory=list)
    skipped: str | None = None
    exponent: float = COMPUTES

    @property
    def half_width(self) -> float:
        """Half of the 90 % interval of the time, as a share of it; infinite under three visits."""
        middles = [statistics.median(visit.at(1.0, self.exponent)) for visit in self.visits]
        if len(middles) < FEWEST_VISITS or min(middles) <= 0:
            return float("inf")
        error = statistics.stdev(middles) / math.sqrt(len(middles))
        return _STUDENT[min(len(middles), MOST_VISITS)] * error / statistics.mean(middles)

    def is_settled(self, wanted: float) -> bool:
        """Whether another visit is not needed, or would not help."""
        return self.skipped is not None or len(self.visits) >= MOST_VISITS or self.half_width <= wanted

    def timed(self, what: Described, pace_ns: float) -> Timed | None:
        """Return the time at a pace: the median of all rounds, with 10 to 90 % of them. None where there is none."""
        if self.skipped is not None or not self.visits:
            return None
        rounds = [ns for visit in self.visits for ns in visit.at(pace_ns, self.exponent)]
        middle = statistics.median(rounds)
        if middle <= 0:
            return None
        tenths = statistics.quantiles(rounds, n=10, method="inclusive") if len(rounds) > 1 else [middle]
        low, high = max(0.0, tenths[0]), tenths[-1]
        return Timed(what, middle * 1e-9, low * 1e-9, high * 1e-9, len(rounds))


def fastest_pace_ns(found: Iterable[Visited]) -> float:
    """Return the fastest pace of any visit, by the median of its rounds; infinite where none was taken."""
    paces = (statistics.median(visit.pace_ns) for one in found for visit in one.visits if visit.pace_ns)
    return min(paces, default=float("inf"))


def visit_all(
    questions: Sequence[Question],
    found: dict[Described, Visited],
    way: Way,
    *,
    wanted: float,
    end_s: float,
    keep: Callable[[Described, dict[str, Any]], None],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Visit every question until it is settled, or until ``time.monotonic()`` reaches ``end_s``.

    ``found`` holds what is known already and what is found; ``keep`` gets each answer as soon as it is there.
    """
    for start in range(0, len(questions), BLOCK):
        block = questions[start : start + BLOCK]
        while time.monotonic() < end_s:
            visited = [found.setdefault(q.what, Visited(exponent=sensitivity(q.what))) for q in block]
            unsettled = [q for q, one in zip(block, visited, strict=True) if not one.is_settled(wanted)]
            if not unsettled:
                break
            for _ in _pass(unsettled, way, end_s, found, keep):
                if progress:
                    visits = sum(min(len(one.visits), FEWEST_VISITS) for one in visited)
                    skipped = sum(one.skipped is not None for one in visited)
                    progress(min(start + skipped + visits // FEWEST_VISITS, len(questions)), len(questions))


def _pass(
    questions: Sequence[Question],
    way: Way,
    end_s: float,
    found: dict[Described, Visited],
    keep: Callable[[Described, dict[str, Any]], None],
) -> Iterator[None]:
    """Visit each question once, all in one process unless one ends it; yield each that is done."""
    waiting = list(reversed(questions))
    while waiting and time.monotonic() < end_s:
        with _measuring(way) as process:
            while waiting:  # to begin one takes seconds: it answers at least once
                question = waiting.pop()
                job = {"call": question.call, "dtype": question.what.dtype}
                try:
                    answer = process.measure(job)
                except EndedError:
                    answer = {"skipped": CRASHED}
                visited = found[question.what]
                if "ns" in answer:
                    visited.visits.append(Visit(answer["ns"], answer.get("pace_ns", [])))
                else:
                    visited.skipped = answer["skipped"]
                keep(question.what, answer)
                yield
                if answer.get("skipped") == CRASHED or time.monotonic() >= end_s:
                    break


def _measuring(way: Way) -> MeasuringProcess | RankGroup:
    return (
        RankGroup(way) if way.ranks else MeasuringProcess(f"{__package__}.worker", way._asdict(), threads=way.threads)
    )
