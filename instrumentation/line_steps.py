"""Places traced source lines in steps that ran without line tracing, by matching steps with equal operators."""

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .line_marks import NS_PER_US, RanLine
from .whole_steps import step_number

# Events that traced and untraced steps share: operators, calls and annotations of the thread.
_ANCHORS = frozenset({"cpu_op", "cuda_runtime", "cuda_driver", "user_annotation"})
# Our choice: above this many events the differing middles of two steps are not aligned.
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
    """Return lines with their start and end, us, in the `count` steps starting with number `first`.

    `ran` were traced in later steps. Line tracing slows these, so that only the order of lines among the operators
    counts: starts and ends of matched events map times of a step with lines to one without, linearly in between.
    Each step takes the lines of one with equal operators, else of the one with the closest number of events.
    """
    steps = _steps(events, thread)
    lines = sorted((start_us, end_us, line) for line in ran for start_us, end_us in [_us(line, base_ns)])
    sources = [
        steps[number]
        for number in sorted(steps)
        if number >= first + count and lines and lines[0][0] <= steps[number].begin_us
        and steps[number].end_us <= max(end_us for _, end_us, _ in lines)
    ]  # fmt: skip
    found: list[tuple[RanLine, float, float]] = []
    for index, number in enumerate(range(first, first + count)):
        if number not in steps or not sources:
            continue
        step = steps[number]
        # Prefer the step at the same index: then both have, for example, the work of every third step.
        offset = index % len(sources)
        source = min(sources[offset:] + sources[:offset], key=lambda other: _difference(step, other))
        overlapping = [row for row in lines if row[0] < source.end_us and row[1] > source.begin_us]
        anchors = _anchors(source, step)
        starts, ends = (np.interp([row[side] for row in overlapping], *anchors) for side in (0, 1))
        found += [
            (line, start, end)
            for (_, _, line), start, end in zip(overlapping, starts.tolist(), ends.tolist(), strict=True)
        ]  # fmt: skip
    return found


def _us(line: RanLine, base_ns: int) -> tuple[float, float]:
    return (line.start_ns - base_ns) / NS_PER_US, (line.end_ns - base_ns) / NS_PER_US


def _steps(events: Sequence[dict[str, Any]], thread: int) -> dict[int, _Step]:
    """Return the steps of a thread by their number."""
    spans = [event for event in events if event.get("tid") == thread and event.get("ph") == "X"]
    marks = {number: mark for mark in spans if (number := step_number(mark)) is not None}
    rows = sorted(
        (event for event in spans if event.get("cat") in _ANCHORS and step_number(event) is None),
        key=lambda event: (event["ts"], -event.get("dur", 0.0)),
    )
    starts = np.array([event["ts"] for event in rows], dtype=np.float64)
    found = {}
    for number, mark in marks.items():
        begin_us, end_us = mark["ts"], mark["ts"] + mark["dur"]
        low, high = np.searchsorted(starts, [begin_us, end_us]).tolist()
        found[number] = _Step(begin_us, end_us, rows[low:high])
    return found


def _difference(step: _Step, other: _Step) -> int:
    """Return 0 if the events of two steps are equal, 1 if only names differ, more by the difference of their counts."""
    return 0 if step.names == other.names else 1 + abs(len(step.names) - len(other.names))


def _anchors(source: _Step, step: _Step) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return times in `source` and the same points in `step`, us, sorted: bounds of the steps and of equal events."""
    pairs = np.array(_matched(source.names, step.names), dtype=np.int64).reshape(-1, 2)
    i, j = pairs[:, 0], pairs[:, 1]
    source_us = np.concatenate([[source.begin_us, source.end_us], source.start_us[i], source.stop_us[i]])
    step_us = np.concatenate([[step.begin_us, step.end_us], step.start_us[j], step.stop_us[j]])
    order = np.lexsort((step_us, source_us))
    return source_us[order], np.maximum.accumulate(step_us[order])


def _matched(names: list[str], others: list[str]) -> list[tuple[int, int]]:
    """Return indices of equal events in two steps: the common head and tail, and the matches of the middles."""
    shorter = min(len(names), len(others))
    head = next((at for at in range(shorter) if names[at] != others[at]), shorter)
    tail = next((at for at in range(shorter - head) if names[-1 - at] != others[-1 - at]), shorter - head)
    pairs = [(at, at) for at in range(head)]
    middle, other_middle = names[head : len(names) - tail], others[head : len(others) - tail]
    if middle and other_middle and len(middle) + len(other_middle) <= _MOST_COMPARED:
        for block in difflib.SequenceMatcher(None, middle, other_middle, autojunk=False).get_matching_blocks():
            pairs += [(head + block.a + at, head + block.b + at) for at in range(block.size)]
    return pairs + [(len(names) - at, len(others) - at) for at in range(tail, 0, -1)]
