"""Places lines of source in steps that ran without a trace of lines: each step beside one of equal operators."""

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .line_marks import NS_PER_US, RanLine
from .whole_steps import step_number

# Both sides of a step: operators, calls and annotations of the thread.
_ANCHORS = frozenset({"cpu_op", "cuda_runtime", "cuda_driver", "user_annotation"})
# Our choice: beside more events than these, what differs between two steps is not looked into.
_MOST_COMPARED = 3000


class _Step:
    """The events of a thread in one step, in order: names, and where each starts and ends, us."""

    def __init__(self, begin_us: float, end_us: float, events: Sequence[dict[str, Any]]) -> None:
        self.begin_us, self.end_us = begin_us, end_us
        self.names = [event["name"] for event in events]
        self.start_us = np.array([event["ts"] for event in events], dtype=np.float64)
        self.stop_us = self.start_us + np.array([event.get("dur", 0.0) for event in events], dtype=np.float64)


def placed_lines(
    events: Sequence[dict[str, Any]], ran: Sequence[RanLine], thread: int, base_ns: int, first: int, count: int
) -> list[tuple[RanLine, float, float]]:
    """Return lines with their start and end, us, in the `count` steps from the one numbered `first` on.

    `ran` were noted in later steps. Tracing lines makes them slow, so that only their order among the operators counts:
    the start and the end of each operator lead from a step with lines to one without, and between two of them time runs
    evenly. Each step takes the lines of one with equal operators, else of the one with the most nearly as many.
    """
    steps = _steps(events, thread)
    within = sorted((start_us, end_us, line) for line in ran for start_us, end_us in [_us(line, base_ns)])
    sources = [
        steps[number]
        for number in sorted(steps)
        if number >= first + count and within and within[0][0] <= steps[number].begin_us
        and steps[number].end_us <= max(end_us for _, end_us, _ in within)
    ]  # fmt: skip
    found: list[tuple[RanLine, float, float]] = []
    for place, number in enumerate(range(first, first + count)):
        if number not in steps or not sources:
            continue
        step = steps[number]
        # The one at the same place first: what every third step does is in it too.
        turn = place % len(sources)
        source = min(sources[turn:] + sources[:turn], key=lambda other: _differs(step, other))
        here = [row for row in within if row[0] < source.end_us and row[1] > source.begin_us]
        anchors = _anchors(source, step)
        starts, ends = (np.interp([row[side] for row in here], *anchors) for side in (0, 1))
        found += [
            (line, start, end)
            for (_, _, line), start, end in zip(here, starts.tolist(), ends.tolist(), strict=True)
        ]  # fmt: skip
    return found


def _us(line: RanLine, base_ns: int) -> tuple[float, float]:
    return (line.start_ns - base_ns) / NS_PER_US, (line.end_ns - base_ns) / NS_PER_US


def _steps(events: Sequence[dict[str, Any]], thread: int) -> dict[int, _Step]:
    """The steps of a thread by their number."""
    mine = [event for event in events if event.get("tid") == thread and event.get("ph") == "X"]
    marks = {number: mark for mark in mine if (number := step_number(mark)) is not None}
    rows = sorted(
        (event for event in mine if event.get("cat") in _ANCHORS and step_number(event) is None),
        key=lambda event: (event["ts"], -event.get("dur", 0.0)),
    )
    starts = np.array([event["ts"] for event in rows], dtype=np.float64)
    found = {}
    for number, mark in marks.items():
        begin_us, end_us = mark["ts"], mark["ts"] + mark["dur"]
        low, high = np.searchsorted(starts, [begin_us, end_us]).tolist()
        found[number] = _Step(begin_us, end_us, rows[low:high])
    return found


def _differs(step: _Step, other: _Step) -> int:
    """By how much two steps differ: 0 where their events are equal, 1 where only the names differ."""
    return 0 if step.names == other.names else 1 + abs(len(step.names) - len(other.names))


def _anchors(source: _Step, step: _Step) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Times of `source` and the same moments of `step`, us, both in order: their ends, and those of equal events."""
    pairs = np.array(_matched(source.names, step.names), dtype=np.int64).reshape(-1, 2)
    one, other = pairs[:, 0], pairs[:, 1]
    before = np.concatenate([[source.begin_us, source.end_us], source.start_us[one], source.stop_us[one]])
    after = np.concatenate([[step.begin_us, step.end_us], step.start_us[other], step.stop_us[other]])
    order = np.lexsort((after, before))
    return before[order], np.maximum.accumulate(after[order])


def _matched(names: list[str], others: list[str]) -> list[tuple[int, int]]:
    """Places of equal events in two steps: all, or what begins and ends both, and what their middles share."""
    shorter = min(len(names), len(others))
    head = next((at for at in range(shorter) if names[at] != others[at]), shorter)
    tail = next((at for at in range(shorter - head) if names[-1 - at] != others[-1 - at]), shorter - head)
    pairs = [(at, at) for at in range(head)]
    middle, other = names[head : len(names) - tail], others[head : len(others) - tail]
    if middle and other and len(middle) + len(other) <= _MOST_COMPARED:
        for block in difflib.SequenceMatcher(None, middle, other, autojunk=False).get_matching_blocks():
            pairs += [(head + block.a + at, head + block.b + at) for at in range(block.size)]
    return pairs + [(len(names) - at, len(others) - at) for at in range(tail, 0, -1)]
