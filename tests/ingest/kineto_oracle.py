"""A slow, obvious reader of Kineto traces: json.loads and decimal.Decimal, one event at a time."""

from __future__ import annotations

import decimal
import gzip
import json
from pathlib import Path
from typing import Any

from whatif.ingest.events import EventCategory, Events
from whatif.ingest.operator_calls import with_layouts

CATEGORY = {
    "cpu_op": "CPU_OP",
    "user_annotation": "ANNOTATION",
    "cuda_runtime": "RUNTIME",
    "cuda_driver": "RUNTIME",
    "Runtime": "RUNTIME",
    "kernel": "KERNEL",
    "Kernel": "KERNEL",
    "gpu_memcpy": "MEMCPY",
    "Memcpy": "MEMCPY",
    "gpu_memset": "MEMSET",
    "Memset": "MEMSET",
    "cuda_sync": "SYNC",
    "overhead": "OVERHEAD",
}
ANNOTATIONS = ("ProfilerStep#", "Optimizer.step#", "Optimizer.zero_grad#", "enumerate(DataLoader)#")
NO_STREAM = 2**32 - 1  # how some versions write -1
DTYPE_BYTES = {"BFloat16": 2, "Float": 4, "Byte": 1, "Long": 8}


def expected_rows(text: bytes) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """Return every kept row as a tuple, in the order of Events, and the header."""
    document = json.loads(text, parse_float=decimal.Decimal)
    events = document if isinstance(document, list) else document.pop("traceEvents")
    header = {} if isinstance(document, list) else json.loads(text)
    header.pop("traceEvents", None)
    rows = [row for event in events if (row := expected_row(event)) is not None]
    rows.sort(key=lambda row: (row[2], -row[3]))
    return rows, header


def expected_row(event: dict[str, Any]) -> tuple[Any, ...] | None:
    if event.get("ph") != "X":
        return None
    raw_category, name = event.get("cat", ""), event.get("name", "")
    category = CATEGORY.get(raw_category)
    if raw_category == "Operator":
        category = "ANNOTATION" if name.startswith(ANNOTATIONS) else "CPU_OP"
    if category == "CPU_OP" and name.startswith("whatif::layer::"):
        category = "ANNOTATION"
    if raw_category == "python_function" and name.startswith("nn.Module: "):
        category = "MODULE"
    if category is None:
        return None
    args = event.get("args", {})
    is_gpu = category in ("KERNEL", "MEMCPY", "MEMSET", "SYNC")
    is_cpu = category in ("CPU_OP", "ANNOTATION")
    forward_thread = args.get("Fwd thread id", -1) if is_cpu else -1
    size_bytes = args.get("bytes", -1) if category in ("MEMCPY", "MEMSET") else -1
    if "Collective name" in args:
        size_bytes = args["In msg nelems"] * DTYPE_BYTES[args["dtype"]]
    dims = args.get("Input Dims", args.get("Input dims"))
    has_shape = is_cpu and (dims is not None or "Input type" in args)
    return (
        EventCategory[category],
        name,
        int((decimal.Decimal(event["ts"]) * 1000).to_integral_value()),
        int((decimal.Decimal(event["dur"]) * 1000).to_integral_value()),
        (str(event["pid"]), str(event["tid"])),
        args.get("correlation", -1),
        args.get("External id", args.get("external id", -1)),
        args.get("device", -1) if is_gpu else -1,
        -1 if not is_gpu or args.get("stream") == NO_STREAM else args.get("stream", -1),
        args.get("Sequence number", -1) if is_cpu else -1,
        -1 if forward_thread == 0 else forward_thread,
        size_bytes,
        _warps(args) if category == "KERNEL" else -1,
        args.get("registers per thread", -1) if category == "KERNEL" else -1,
        args.get("Group size", -1) if "Collective name" in args else -1,
        (dims, args.get("Input type"), with_layouts(dims, args.get("Concrete Inputs"), args.get("Input Strides")))
        if has_shape
        else None,
        args.get("Collective name", args.get("cuda_sync_kind")),
        -1 if args.get("wait_on_stream") == NO_STREAM else args.get("wait_on_stream", -1),
        args.get("wait_on_cuda_event_record_corr_id", -1),
    )


def _warps(args: dict[str, Any]) -> int:
    if "grid" not in args:
        return -1
    (a, b, c), (x, y, z) = args["grid"], args["block"]
    return int(a * b * c * ((x * y * z + 31) // 32))


def as_rows(events: Events) -> list[tuple[Any, ...]]:
    """Return the columns as tuples that compare with expected_rows."""

    def decoded(codes: Any, table: list[Any]) -> list[Any]:
        return [None if code < 0 else table[code] for code in codes.tolist()]

    return list(
        zip(
            events.category.tolist(),
            decoded(events.name, events.names),
            events.start_ns.tolist(),
            events.duration_ns.tolist(),
            decoded(events.track, events.tracks),
            events.correlation.tolist(),
            events.external_id.tolist(),
            events.device.tolist(),
            events.stream.tolist(),
            events.sequence.tolist(),
            events.forward_thread.tolist(),
            events.size_bytes.tolist(),
            events.warps.tolist(),
            events.registers.tolist(),
            events.group_size.tolist(),
            decoded(events.shape, events.shapes),
            decoded(events.detail, events.details),
            events.wait_stream.tolist(),
            events.wait_correlation.tolist(),
            strict=True,
        )
    )


def expected_flows(text: bytes) -> list[tuple[Any, ...]]:
    document = json.loads(text, parse_float=decimal.Decimal)
    events = document if isinstance(document, list) else document["traceEvents"]
    ends: dict[str, dict[Any, Any]] = {"s": {}, "f": {}}
    for event in events:
        if event.get("cat") == "fwdbwd":
            ns = int(decimal.Decimal(event["ts"]) * 1000)
            ends[event["ph"]][event["id"]] = (ns, (str(event["pid"]), str(event["tid"])))
    return sorted(ends["s"][key] + ends["f"][key] for key in ends["s"].keys() & ends["f"].keys())


def check_columns(events: Events) -> None:
    """Assert what holds for whatever was read: dtypes, lengths, order, codes within their tables."""
    n_events = len(events)
    for field, table in (
        ("category", list(EventCategory)),
        ("name", events.names),
        ("track", events.tracks),
        ("shape", events.shapes),
        ("detail", events.details),
    ):
        codes = getattr(events, field)
        assert codes.shape == (n_events,)
        assert not n_events or (codes.min() >= -1 and codes.max() < len(table))
        assert len({repr(entry) for entry in table}) == len(table)
    for field in (
        "start_ns",
        "duration_ns",
        "correlation",
        "external_id",
        "sequence",
        "size_bytes",
        "warps",
        "wait_correlation",
    ):
        column = getattr(events, field)
        assert column.shape == (n_events,)
        assert column.dtype == "int64"
    for field in (
        "name",
        "track",
        "device",
        "stream",
        "forward_thread",
        "registers",
        "group_size",
        "shape",
        "detail",
        "wait_stream",
    ):
        column = getattr(events, field)
        assert column.shape == (n_events,)
        assert column.dtype == "int32"
    assert not n_events or events.duration_ns.min() >= 0
    order = list(zip(events.start_ns.tolist(), (-events.duration_ns).tolist(), strict=True))
    assert order == sorted(order)
    flows = events.flows
    assert len(flows.source_ns) == len(flows.source_track) == len(flows.target_ns) == len(flows.target_track)


def read_bytes(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())
