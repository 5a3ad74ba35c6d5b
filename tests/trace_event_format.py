"""The rules of Chrome's trace event format that Perfetto's importer relies on, as asserts."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

Event = dict[str, Any]
# Perfetto's importer knows these on the top level, and stops at any other.
KNOWN = ("displayTimeUnit", "otherData", "traceEvents", "metadata", "systemTraceEvents")


def check_trace_events(text: bytes) -> list[Event]:
    """Return the events of a file. Raises AssertionError where Perfetto would drop, join or refuse something."""
    found = json.loads(text, parse_constant=lambda name: math.nan)
    fields = list(found)
    unknown = [place for place, field in enumerate(fields) if field not in KNOWN]
    assert all(place > fields.index("traceEvents") for place in unknown), fields
    assert found["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = found["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "s", "f", "C"}
    for event in events:
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert math.isfinite(event["ts"])
            assert event["ts"] >= 0
    _check_names(events)
    rows = _check_slices(events)
    _check_flows(events, rows)
    _check_counters(events)
    return events


def _ns(us: float) -> int:
    return round(us * 1000)


def _check_names(events: list[Event]) -> None:
    """Every process and every row that holds something has one name."""
    named = Counter((e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M")
    assert set(named.values()) <= {1}
    for event in events:
        assert named[("process_name", event["pid"], 0)] == 1
        if event["ph"] in "Xsf":
            assert named[("thread_name", event["pid"], event["tid"])] == 1, event
            # It would be the process's main thread, and shown before the others.
            assert event["tid"] != event["pid"]


def _check_slices(events: list[Event]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Slices of one row follow one another. Gives them as (start, end), ns."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["args"], dict)
            rows[event["pid"], event["tid"]].append((_ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])))
    for row in rows.values():
        row.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(row))
        # Of two that begin at the same instant one would be drawn inside the other.
        assert all(before[0] < after[0] for before, after in pairwise(row))
    return rows


def _check_flows(events: list[Event], rows: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
    """Of each arrow one end and one head, not back in time, each inside a slice of its row."""
    ends: dict[Any, list[Event]] = defaultdict(list)
    covered = {key: _Row(row) for key, row in rows.items()}
    for event in events:
        if event["ph"] in "sf":
            assert type(event["id"]) is int
            ends[event["cat"], event["name"], event["id"]].append(event)
            assert covered[event["pid"], event["tid"]].holds(_ns(event["ts"])), event
    assert len({key[2] for key in ends}) == len(ends)
    for pair in ends.values():
        assert [event["ph"] for event in pair] == ["s", "f"]
        assert pair[0]["ts"] <= pair[1]["ts"]
        assert pair[1]["bp"] == "e"


class _Row:
    def __init__(self, row: list[tuple[int, int]]) -> None:
        self.starts = [start for start, _ in row]
        self.ends = [end for _, end in row]

    def holds(self, time_ns: int) -> bool:
        from bisect import bisect_left, bisect_right

        first, last = bisect_left(self.ends, time_ns), bisect_right(self.starts, time_ns)
        return first < last


def _check_counters(events: list[Event]) -> None:
    """Every value is a finite number, every counter has the same parts throughout and never goes back in time."""
    series: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            series[event["pid"], event["name"]].append(event)
            assert all(isinstance(v, int | float) and math.isfinite(v) for v in event["args"].values())
    for row in series.values():
        assert len({tuple(event["args"]) for event in row}) == 1
        assert all(before["ts"] <= after["ts"] for before, after in pairwise(row))
