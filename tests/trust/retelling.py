"""The same trace written in other ways, and traces that lost something.

    python -m tests.trust.retelling [TRACE ...]

Prints the retellings that change an answer, and the damages that change it by more than 2 % without a new warning.
Seen today: nothing is silent; tests/trust/test_damage.py looks at what commands say.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trust.common import Read, Trace, halved, loaded, small_traces, written

Event = dict[str, Any]
# Categories of what runs on the host, as new and old profilers write them.
HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "python_function", "operator", "runtime"}
CALLS = {"cuda_runtime", "cuda_driver", "runtime"}
GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


def _category(event: Event) -> str:
    return str(event.get("cat", "")).lower()


def _has_time(event: Event) -> bool:
    return isinstance(event.get("ts"), int | float)


def _with(trace: Trace, events: list[Event]) -> Trace:
    return {**trace, "traceEvents": events}


def _each(trace: Trace, change: Callable[[Event], Event]) -> Trace:
    return _with(trace, [change(event) for event in trace["traceEvents"]])


def _shifted(trace: Trace, to_us: float) -> Trace:
    first = min(event["ts"] for event in trace["traceEvents"] if _has_time(event))
    return _each(trace, lambda e: {**e, "ts": round(e["ts"] - first + to_us, 3)} if _has_time(e) else e)


def _shuffled(trace: Trace) -> Trace:
    events = list(trace["traceEvents"])
    random.Random(7).shuffle(events)
    return _with(trace, events)


def _renumbered(trace: Trace) -> Trace:
    numbers: dict[Any, int] = {}

    def renumber(event: Event) -> Event:
        if _category(event) not in HOST:
            return event
        return {**event, "tid": numbers.setdefault(event.get("tid"), len(numbers) + 1_234_500)}

    return _each(trace, renumber)


RETELLINGS: dict[str, Callable[[Trace], bytes]] = {
    "shuffled": lambda t: written(_shuffled(t)),
    "reversed": lambda t: written(_with(t, t["traceEvents"][::-1])),
    "begins at 0": lambda t: written(_shifted(t, 0)),
    "begins at -1e9 us": lambda t: written(_shifted(t, -1e9)),
    "times as text": lambda t: written(
        _each(t, lambda e: {**e, **{k: repr(e[k]) for k in ("ts", "dur") if isinstance(e.get(k), int | float)}})
    ),
    "header behind": lambda t: written({"traceEvents": t["traceEvents"], **t}),
    "header before": lambda t: written(
        {**{k: v for k, v in t.items() if k != "traceEvents"}, "traceEvents": t["traceEvents"]}
    ),
    "indented": lambda t: written(t, indent=3),
    "escaped keys": lambda t: written(t).replace(b'"name"', b'"n\\u0061me"'),
    "byte order mark": lambda t: b"\xef\xbb\xbf" + written(t),
    "keys reversed": lambda t: written(_each(t, lambda e: dict(reversed(e.items())))),
    "threads renumbered": lambda t: written(_renumbered(t)),
    "process renamed": lambda t: written(
        _each(t, lambda e: {**e, "pid": f"{e['pid']}x"} if "pid" in e and _category(e) in HOST else e)
    ),
    "durations with a point": lambda t: written(_each(t, lambda e: {**e, "dur": float(e["dur"])} if "dur" in e else e)),
    "two gzip members": lambda t: gzip.compress(written(t)[:1000], 1) + gzip.compress(written(t)[1000:], 1),
}


def damages(trace: Trace, seed: int = 7) -> dict[str, Trace]:
    """Return the trace with something lost, doubled or shifted, by what it was."""
    dice, events = random.Random(seed), trace["traceEvents"]

    def kept(keep: Callable[[Event], bool]) -> Trace:
        return _with(trace, [event for event in events if keep(event)])

    def without_correlation(share: float) -> Trace:
        lost = {"correlation", "external id", "External id"}

        def lose(event: Event) -> Event:
            arguments = event.get("args")
            if _category(event) not in CALLS or not isinstance(arguments, dict) or dice.random() >= share:
                return event
            return {**event, "args": {k: v for k, v in arguments.items() if k not in lost}}

        return _each(trace, lose)

    def gpu_shifted(by_us: float) -> Trace:
        return _each(trace, lambda e: {**e, "ts": e["ts"] + by_us} if _category(e) in GPU and _has_time(e) else e)

    times = sorted(event["ts"] for event in events if _has_time(event) and event.get("ph") == "X")
    first_kernel = next((event for event in events if _category(event) == "kernel"), None)
    marks = sorted({name for event in events if (name := str(event.get("name", ""))).startswith("ProfilerStep#")})
    renamed = dict(zip(marks, dice.sample(marks, len(marks)), strict=True))
    last_thread = [event.get("tid") for event in events if _category(event) in HOST][-1] if events else None
    joined = [{**e, "pid": e["pid"] + 1} if isinstance(e.get("pid"), int) else e for e in events]
    return {
        "no runtime calls": kept(lambda e: _category(e) not in CALLS),
        "half of the runtime calls lost": kept(lambda e: _category(e) not in CALLS or dice.random() < 0.5),
        "half of the kernels lost": kept(lambda e: _category(e) != "kernel" or dice.random() < 0.5),
        "10 % of all events lost": kept(lambda e: dice.random() < 0.9),
        "half of all events lost": kept(lambda e: dice.random() < 0.5),
        "correlation lost on half of the calls": without_correlation(0.5),
        "correlation lost on all calls": without_correlation(1.0),
        "every event twice": _with(trace, events + events),
        "kernels twice": _with(trace, events + [e for e in events if _category(e) == "kernel"]),
        "GPU clock off by 50 ms": gpu_shifted(50_000),
        "GPU clock off by -50 ms": gpu_shifted(-50_000),
        "second half 5 s later": _each(
            trace, lambda e: {**e, "ts": e["ts"] + 5e6} if _has_time(e) and e["ts"] > times[len(times) // 2] else e
        ),
        "durations 0": _each(trace, lambda e: {**e, "dur": 0} if "dur" in e else e),
        "durations in ns": _each(
            trace, lambda e: {**e, "dur": e["dur"] * 1000} if isinstance(e.get("dur"), int | float) else e
        ),
        "streams merged into one": _each(
            trace,
            lambda e: (
                {**e, "tid": 7, "args": {**e["args"], "stream": 7}}
                if isinstance(e.get("args"), dict) and "stream" in e["args"]
                else e
            ),
        ),
        "marks lost": kept(lambda e: not str(e.get("name", "")).startswith("ProfilerStep")),
        "one kernel lasts 100 s": _with(trace, [{**e, "dur": 1e8} if e is first_kernel else e for e in events]),
        "two processes joined": _with(trace, events + joined),
        "one file with a second recording, 10 s later": _with(trace, events + _later(events)),
        "times of a stream shuffled": _times_shuffled(trace, dice),
        "half of the kernels in another process": _each(
            trace, lambda e: {**e, "pid": 77} if _category(e) in GPU and dice.random() < 0.5 else e
        ),
        "durations negative": _each(
            trace, lambda e: {**e, "dur": -e["dur"]} if isinstance(e.get("dur"), int | float) else e
        ),
        "a tenth of the times is NaN": _each(
            trace, lambda e: {**e, "ts": math.nan} if _has_time(e) and dice.random() < 0.1 else e
        ),
        "a tenth of the durations is NaN": _each(
            trace, lambda e: {**e, "dur": math.nan} if "dur" in e and dice.random() < 0.1 else e
        ),
        "one correlation for all": _each(
            trace,
            lambda e: (
                {**e, "args": {**e["args"], "correlation": 1}}
                if isinstance(e.get("args"), dict) and "correlation" in e["args"]
                else e
            ),
        ),
        "clock of a thread off by 1 s": _each(
            trace, lambda e: {**e, "ts": e["ts"] + 1e6} if _has_time(e) and e.get("tid") == last_thread else e
        ),
        "kernels twice, 1 us apart": _with(
            trace, events + [{**e, "ts": e["ts"] + 1} for e in events if _category(e) == "kernel" and _has_time(e)]
        ),
        "marks in another order": _each(trace, lambda e: {**e, "name": renamed.get(str(e.get("name")), e.get("name"))}),
        "marks inside one another": _each(
            trace, lambda e: {**e, "dur": 5 * e["dur"]} if str(e.get("name", "")).startswith("ProfilerStep") else e
        ),
        "times in ms": _units(trace, 1e-3, "ts", "dur"),
        "times in ns": _units(trace, 1e3, "ts", "dur"),
        "durations in ms": _units(trace, 1e-3, "dur"),
    }


def _later(events: list[Event]) -> list[Event]:
    """The events again, as another recording of the same program that began 10 s later."""
    return [{**event, "ts": event["ts"] + 1e7} if _has_time(event) else event for event in events]


def _times_shuffled(trace: Trace, dice: random.Random) -> Trace:
    """The start of each GPU event is that of another one."""
    times = [event["ts"] for event in trace["traceEvents"] if _category(event) in GPU and _has_time(event)]
    dice.shuffle(times)
    return _each(trace, lambda e: {**e, "ts": times.pop()} if _category(e) in GPU and _has_time(e) else e)


def _units(trace: Trace, factor: float, *fields: str) -> Trace:
    return _each(
        trace, lambda e: {**e, **{key: factor * e[key] for key in fields if isinstance(e.get(key), int | float)}}
    )


def same_answer(before: Read, after: Read) -> bool:
    """Whether two readings of one trace agree, within the rounding of its times."""
    if before.kind != "read" or after.kind != "read":
        return before.kind == after.kind
    pairs = ((before.baseline_ms, after.baseline_ms), (before.predicted_ms, after.predicted_ms))
    close = all(abs(now - was) <= 1e-4 * max(was, 1e-9) for was, now in pairs)
    return close and before.n_tasks == after.n_tasks and abs(after.low_ms - before.low_ms) <= 1e-3 * before.low_ms


def is_silent(before: Read, after: Read) -> bool:
    """Whether an answer moved by more than 2 % with nothing new said."""
    if before.kind != "read" or after.kind != "read" or set(after.warnings) - set(before.warnings):
        return False
    pairs = ((before.baseline_ms, after.baseline_ms), (before.predicted_ms, after.predicted_ms))
    return any(abs(now - was) > 0.02 * was for was, now in pairs)


def main(paths: list[str]) -> None:
    """Print what differs, and what changes in silence."""
    traces = {path: loaded(Path(path)) for path in paths} or small_traces()
    for name, trace in traces.items():
        trace = json.loads(json.dumps(trace))
        before = halved(written(trace))
        print(
            f"{name}: {before.kind}, {before.n_tasks} tasks, {before.baseline_ms:.4f} -> {before.predicted_ms:.4f} ms"
        )
        for what, retell in RETELLINGS.items():
            after = halved(retell(trace))
            if not same_answer(before, after):
                print(f"  DIFFERS {what}: {after}")
        for what, damaged in damages(trace).items():
            after = halved(written(damaged))
            if after.kind in ("crash", "hang", "unsound"):
                print(f"  {after.kind.upper()} {what}: {after.said}")
            elif is_silent(before, after):
                print(f"  SILENT {what}: {after.n_tasks} tasks, {after.baseline_ms:.4f} -> {after.predicted_ms:.4f} ms")


if __name__ == "__main__":
    main(sys.argv[1:])
