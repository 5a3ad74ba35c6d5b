"""A Kineto recording as what CUPTI would have delivered of it: its kernels, calls and waits become CUPTI's own records.

What Kineto writes of the CPU (operators, annotations) become stamped spans, so that a trace can be built of both.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from whatif.instrumentation.cupti.layers import Span
from whatif.instrumentation.cupti.names import SYNC_KINDS, api_name

from tests.instrumentation import cupti_machine as machine
from tests.instrumentation.cupti_machine import DRIVER, RUNTIME, cupti

_COPY = re.compile(r"Memcpy (\w)to(\w) \((\w+) -> (\w+)\)")
_SPANS = ("user_annotation", "cpu_op")


class Replayed(NamedTuple):
    """The records in the order of the file, the spans, and the span of time of all of them, ns since 1970."""

    records: list[Any]
    spans: list[Span]
    begin_ns: int
    end_ns: int
    process: int


def events_of(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the complete events of a Kineto file and its zero of time, ns."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return [e for e in trace["traceEvents"] if e.get("ph") == "X"], int(trace.get("baseTimeNanoseconds", 0))


def replayed(events: list[dict[str, Any]], base_ns: int, clock_offset_ns: int = 0) -> Replayed:
    """Return what CUPTI would have delivered; its clock is ``clock_offset_ns`` ahead of the file's."""
    makers: dict[str, Callable[..., Iterator[Any]]] = {
        "kernel": _kernel, "gpu_memcpy": _copy, "gpu_memset": _memset, "cuda_runtime": _call, "cuda_driver": _call,
        "cuda_sync": _wait,
    }  # fmt: skip
    records: list[Any] = []
    spans: list[Span] = []
    processes = [e["pid"] for e in events if e.get("cat") == "cuda_runtime"]
    first, last = 1 << 63, 0
    for event in events:
        category = str(event.get("cat", "")).lower().replace("operator", "cpu_op")
        start_ns = base_ns + clock_offset_ns + round(event["ts"] * 1000)
        end_ns = start_ns + round(event["dur"] * 1000)
        if category in makers:
            records += makers[category](event, start_ns, end_ns)
        elif category in _SPANS and event["pid"] == processes[0]:
            identifier = int(event.get("args", {}).get("External id", 0))
            spans.append(Span(category, event["name"], int(event["tid"]), start_ns, end_ns, identifier, None))
        else:
            continue
        first, last = min(first, start_ns), max(last, end_ns)
    return Replayed(records, spans, first, last + 1, int(processes[0]))


def _kernel(event: dict[str, Any], start_ns: int, end_ns: int) -> Iterator[Any]:
    args = event["args"]
    grid, block = args.get("grid", [1, 1, 1]), args.get("block", [1, 1, 1])
    sizes = {f"{what}_{axis}": value for what, of in (("grid", grid), ("block", block))
             for axis, value in zip("xyz", of, strict=True)}  # fmt: skip
    record = machine.kernel(
        event["name"], start_ns, end_ns, args["correlation"], args["stream"],
        registers_per_thread=int(args.get("registers per thread", 0)),
        dynamic_shared_memory=int(args.get("shared memory", 0)), **sizes,
    )  # fmt: skip
    yield machine.fill(record, device_id=args["device"], context_id=args["context"])
    yield from _external(args)


def _copy(event: dict[str, Any], start_ns: int, end_ns: int) -> Iterator[Any]:
    args, found = event["args"], _COPY.fullmatch(event["name"])
    assert found is not None, event["name"]
    kind = cupti.ActivityMemcpyKind[f"{found[1]}TO{found[2]}"]
    source, target = (cupti.ActivityMemoryKind[word.upper()] for word in found.groups()[2:])
    record = machine.memcpy(kind, source, target, start_ns, end_ns, args["correlation"], int(args.get("bytes", 0)))
    yield machine.fill(record, device_id=args["device"], context_id=args["context"], stream_id=args["stream"])
    yield from _external(args)


def _memset(event: dict[str, Any], start_ns: int, end_ns: int) -> Iterator[Any]:
    args = event["args"]
    record = machine.memset(start_ns, end_ns, args["correlation"], int(args.get("bytes", 0)))
    yield machine.fill(record, device_id=args["device"], context_id=args["context"], stream_id=args["stream"])
    yield from _external(args)


def _call(event: dict[str, Any], start_ns: int, end_ns: int) -> Iterator[Any]:
    args, driver = event["args"], event["cat"].lower() == "cuda_driver"
    number = callback_of(event["name"], driver)
    yield machine.call(number, start_ns, end_ns, args["correlation"], int(event["tid"]), driver=driver)
    yield from _external(args)


def _wait(event: dict[str, Any], start_ns: int, end_ns: int) -> Iterator[Any]:
    args = event["args"]
    kinds = {name: kind for kind, name in SYNC_KINDS.items()}
    kind = cupti.ActivitySynchronizationType[kinds[args["cuda_sync_kind"]]]
    stream = args["stream"] if args["stream"] >= 0 else machine.NO_STREAM
    awaited = args.get("wait_on_cuda_event_id", machine.NO_STREAM)
    if args.get("wait_on_cuda_event_record_corr_id", -1) >= 0 and awaited != machine.NO_STREAM:
        record = machine.event_record(awaited, args["wait_on_cuda_event_record_corr_id"], args["wait_on_stream"])
        yield machine.fill(record, context_id=args["context"])
    record = machine.sync(kind, start_ns, end_ns, args["correlation"], stream=stream, event=awaited)
    yield machine.fill(record, context_id=args["context"])


def _external(args: dict[str, Any]) -> Iterator[Any]:
    if args.get("External id"):
        yield machine.external(args["correlation"], int(args["External id"]))


@cache
def _callbacks(driver: bool) -> dict[str, int]:
    return {api_name(str(member.name)): int(member) for member in (DRIVER if driver else RUNTIME)}


def callback_of(name: str, driver: bool) -> int:
    """Return the number of a CUDA call in the binding's tables; 0 for one that it does not know."""
    return _callbacks(driver).get(name, 0)
