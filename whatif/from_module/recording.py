"""Write predicted steps as a recording, which readers treat like any other, so every command works."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec

from whatif.from_module.operations import OperatorGraph
from whatif.from_module.schedule import (
    COPY_NAME,
    Schedule,
    Span,
    memory_events,
)
from whatif.graph.types import Phase
from whatif.hardware.gpu import Gpu
from whatif.ingest.kineto_fields import LAYER_ANNOTATION
from whatif.ingest.marks import BACKWARD_PREFIX
from whatif.runtime.files import replacing

_PROCESS, _STREAM = 1, 7


class _Event(msgspec.Struct, gc=False):
    """An event of the file. A step of a large model has 100,000: dicts would be several times slower."""

    ph: str
    cat: str
    name: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: dict[str, Any]


class _MemoryEvent(msgspec.Struct, gc=False):
    """An allocation or a free, in the format of PyTorch's profiler."""

    ts: float
    args: dict[str, Any]
    ph: str = "i"
    cat: str = "cpu_instant_event"
    s: str = "t"
    name: str = "[memory]"
    pid: int = _PROCESS
    tid: int = _PROCESS


def trace_of(graph: OperatorGraph, schedule: Schedule, gpu: Gpu | None, extra_fields: dict[str, Any]) -> dict[str, Any]:
    """Return a recording in the format of PyTorch's profiler and our recorder, as a JSON object.

    ``extra_fields`` are the recorder's fields in addition to ``graph.metadata``.
    """
    events: list[_Event | _MemoryEvent] = [_annotation(span) for span in (*schedule.steps, *schedule.marks)]
    events += [_annotation(span, LAYER_ANNOTATION) for span in schedule.layers]
    # Autograd keeps counting from step to step.
    steps = len(schedule.steps)
    a_step = 1 + max((max(o.sequence, o.recomputes) for o in graph.operations), default=0)
    events += [
        make(graph, span, place * steps // len(spans) * a_step)
        for make, spans in ((_node, schedule.nodes), (_operator, schedule.operations))
        for place, span in enumerate(spans)
    ]
    events += [_event(span, "cuda_runtime", span.name, {"correlation": span.correlation}) for span in schedule.calls]
    events += [_gpu_task(span) for span in schedule.kernels]
    events += [
        _MemoryEvent(
            time_ns / 1e3,
            {"Device Type": 0 if gpu is None else 1, "Device Id": -1 if gpu is None else 0, "Addr": address,
             "Bytes": size, "Total Allocated": held},
        )
        for time_ns, address, size, held in memory_events(graph, schedule)
    ]  # fmt: skip
    devices = []
    if gpu is not None:
        devices = [{"id": 0, "name": gpu.name, "totalGlobalMem": gpu.memory_bytes, "numSms": gpu.sm_count}]
    return {
        "schemaVersion": 1,
        "deviceProperties": devices,
        "whatif": {**graph.metadata, **extra_fields},
        "traceEvents": events,
    }


def is_predicted(start: bytes) -> bool:
    """Whether a file begins like these recordings: a profiler's have spaces, or other keys first."""
    return start.startswith(b'{"schemaVersion":1,"deviceProperties":') and b',"whatif":{' in start


def write_trace(trace: dict[str, Any], path: Path, *, user_named: bool) -> None:
    """Write a recording, compressed if the path ends in .gz. Raises WhatifError if it cannot be written."""
    data = msgspec.json.encode(trace)
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    if not user_named:
        path.write_bytes(data)
        return
    with replacing(path) as part:
        part.write_bytes(data)


def _event(span: Span, category: str, name: str, args: dict[str, Any], *, thread: int = _PROCESS) -> _Event:
    # Whole nanoseconds: the reader parses decimals exactly, and a double holds three of them for years of microseconds.
    process = _PROCESS if thread == _PROCESS else 0
    start_us, took_us = span.start_ns / 1e3, (span.end_ns - span.start_ns) / 1e3
    return _Event("X", category, name, process, thread, start_us, took_us, args)


def _annotation(span: Span, prefix: str = "") -> _Event:
    return _event(span, "user_annotation", prefix + span.name, {})


def _node(graph: OperatorGraph, span: Span, counted: int) -> _Event:
    sequence = graph.operations[span.operation].sequence
    args = {"Fwd thread id": 1} | ({"Sequence number": sequence + counted} if sequence >= 0 else {})
    return _event(span, "cpu_op", BACKWARD_PREFIX + span.name, args)


def _operator(graph: OperatorGraph, span: Span, counted: int) -> _Event:
    operation = graph.operations[span.operation]
    args: dict[str, Any] = {
        "Input Dims": operation.dims, "Input type": operation.recorded_types, "Concrete Inputs": operation.concrete,
    }  # fmt: skip
    forward = not operation.node and operation.phase == Phase.FORWARD
    sequence = operation.sequence if forward else operation.recomputes
    if sequence >= 0:
        args["Sequence number"] = sequence + counted
    return _event(span, "cpu_op", operation.name, args)


def _gpu_task(span: Span) -> _Event:
    args = {"device": 0, "stream": _STREAM, "correlation": span.correlation}
    category = "gpu_memcpy" if span.name == COPY_NAME else "kernel"
    return _event(span, category, span.name, args | ({"bytes": 8} if category == "gpu_memcpy" else {}), thread=_STREAM)
