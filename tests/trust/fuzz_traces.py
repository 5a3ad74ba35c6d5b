"""Damage Kineto traces at random: cut them, change bytes, fields, arguments and the header.

    python -m tests.trust.fuzz_traces [TRACE ...] [--seed N] [--cases N]

Prints what crashes, hangs or gives unsound numbers, and at the end how many of each kind there were.
"""

from __future__ import annotations

import argparse
import collections
import copy
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.trust.common import Trace, halved, loaded, small_traces, written

VALUES: list[Any] = [
    0, -1, 1e300, 2**63, -(2**63), 2**64, 10**400, 1e-9, float("nan"), float("inf"), -float("inf"), "NaN", "Infinity",
    "1e400", "7", "stream 7", None, True, [], {}, [1], "x" * 5000, "\x00", "\ud800", 2**53 + 1, -0.0, "-5", "0x10",
    "1_000",
]  # fmt: skip
FIELDS = ["ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "args"]
ARGUMENTS = [
    "correlation", "External id", "stream", "device", "bytes", "Sequence number", "Fwd thread id", "wait_on_stream",
    "wait_on_cuda_event_record_corr_id", "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype",
    "Input Dims", "Input type", "Input Strides", "Concrete Inputs", "grid", "block", "registers per thread", "Addr",
    "Bytes", "Total Allocated", "Device Type", "Device Id", "Ev Idx", "Process Group Name", "Process Group Ranks",
    "queued", "context", "est. achieved occupancy %",
]  # fmt: skip
HEADER = ["whatif", "deviceProperties", "distributedInfo", "baseTimeNanoseconds", "displayTimeUnit", "schemaVersion"]
# Under the key "whatif" of a recording.
RECORDED = [
    "untraced_step_ms", "untraced_cpu_ms", "parts_ms", "traced_step_ms", "profiler_cost_ns", "batch_size",
    "layers", "modules",
    "gpu", "parameters", "buckets", "grad_ready_order", "optimizer", "operators", "memory", "peak_memory", "rates",
    "loaders", "first_input", "n_steps", "steps",
]  # fmt: skip
CATEGORIES = [None, "kernel", "cpu_op", "cuda_runtime", "user_annotation", "python_function", "gpu_memcpy"]
PIECES = [
    b"\xff", b'"', b"{", b"[", b"]}", b"\\", b"\x00" * 50, b"nan", b",,", b"\xed\xa0\x80", b'{"ph":"X",', b"1e999",
]  # fmt: skip


def cut(trace: Trace, dice: random.Random) -> tuple[str, bytes, str]:
    """Return the trace cut off somewhere, compressed at times."""
    suffix = dice.choice([".json", ".json.gz"])
    data = written(trace) if suffix == ".json" else gzip.compress(written(trace), 6)
    place = dice.randrange(len(data))
    return f"cut at {place} of {len(data)}", data[:place], suffix


def changed_bytes(trace: Trace, dice: random.Random) -> tuple[str, bytes, str]:
    """Return the trace with bytes flipped, lost, inserted, repeated or zeroed."""
    suffix = dice.choice([".json", ".json", ".json.gz"])
    data = bytearray(written(trace) if suffix == ".json" else gzip.compress(written(trace), 6))
    for _ in range(dice.choice([1, 1, 1, 3, 20])):
        place, kind = dice.randrange(len(data)), dice.choice(["flip", "lose", "insert", "repeat", "zero"])
        if kind == "flip":
            data[place] ^= 1 << dice.randrange(8)
        elif kind == "lose":
            del data[place : place + dice.choice([1, 5, 100, 5000])]
        elif kind == "insert":
            data[place:place] = dice.choice(PIECES)
        elif kind == "repeat":
            start = dice.randrange(len(data))
            data[place:place] = data[start : start + dice.choice([10, 1000])]
        else:
            end = min(place + dice.choice([1, 50, 2000]), len(data))
            data[place:end] = bytes(end - place)
        if not data:
            break
    return "bytes", bytes(data), suffix


def changed_header(trace: Trace, dice: random.Random) -> tuple[str, bytes, str]:
    """Return the trace with another value in its header, or in what the recorder wrote."""
    head = copy.deepcopy({key: value for key, value in trace.items() if key != "traceEvents"})
    key, value = dice.choice([*head, *HEADER]), dice.choice(VALUES)
    if key == "whatif":
        recorded = head.setdefault("whatif", {})
        key = dice.choice([*recorded, *RECORDED])
        recorded[key] = value if dice.random() < 0.6 else dict.fromkeys(("median", "min", "q1", "q3"), value)
    else:
        head[key] = value
    return f"header {key}={str(value)[:20]}", written({**head, "traceEvents": trace["traceEvents"]}), ".json"


def changed_events(trace: Trace, dice: random.Random) -> tuple[str, bytes, str]:
    """Return the trace with a field or an argument of some events changed or lost, or some events lost or doubled."""
    kind = dice.choice(["field", "argument", "argument", "time", "drop", "double", "lose"])
    share, category = dice.choice([1e-3, 0.01, 0.3, 1.0]), dice.choice(CATEGORIES)
    field, argument, value = dice.choice(FIELDS), dice.choice(ARGUMENTS), dice.choice(VALUES)
    events = []
    for event in trace["traceEvents"]:
        if dice.random() > share or (category and event.get("cat") != category):
            events.append(event)
        elif kind == "field":
            events.append({**event, field: value})
        elif kind == "argument":
            events.append({**event, "args": {**event.get("args", {}), argument: value}})
        elif kind == "time":
            time = dice.choice([value, dice.uniform(-1e6, 1e9), dice.randrange(-(2**63), 2**64)])
            events.append({**event, dice.choice(["ts", "dur"]): time})
        elif kind == "double":
            events += [event, event]
        elif kind == "lose":
            events.append({name: entry for name, entry in event.items() if name != field})
    what = {"field": field, "lose": field, "argument": argument}.get(kind, "")
    return f"{kind} {what}={str(value)[:20]} of {category}", written({**trace, "traceEvents": events}), ".json"


def cases(trace: Trace, seed: int, count: int) -> Iterator[tuple[str, bytes, str]]:
    """Return (what was done, the bytes, the suffix of the file)."""
    dice = random.Random(seed)
    for _ in range(count):
        yield dice.choice([cut, changed_bytes, changed_header, changed_events, changed_events])(trace, dice)


def main() -> None:
    """Print what is neither read nor refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=500, help="of each trace")
    args = parser.parse_args()
    count: collections.Counter[str] = collections.Counter()
    traces = {str(path): loaded(path) for path in args.traces} or small_traces()
    for name, trace in traces.items():
        for what, data, suffix in cases(json.loads(json.dumps(trace)), args.seed, args.cases):
            outcome = halved(data, suffix)
            count[outcome.kind] += 1
            if outcome.kind not in ("read", "refused"):
                print(f"{outcome.kind.upper()} {name}: {what}: {outcome.said}")
    print(dict(count))


if __name__ == "__main__":
    main()
