"""Reader of a recording: operator times by shape, and those that `--measure-operators` measured alone.

On a GPU the time of an operator is that of its own kernels, launches left out; on a CPU the operator's own duration.
Each distinct operator becomes one row: the median of its calls, with their spread.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from whatif.graph.described import LONGEST_TEXT, Described
from whatif.graph.recorded import Recorded
from whatif.graph.types import Float64, Int64
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.gpu_side import find_calls, find_gpu_side
from whatif.ingest.graph_of_events import recorded_device
from whatif.ingest.kineto import read_kineto
from whatif.ingest.nest import Nest
from whatif.ingest.operator_calls import describe, describe_other
from whatif.ingest.recorded import recorded_of
from whatif.opdb.devices import cpu_called, device_called
from whatif.opdb.importers.described import Timed, rows_of
from whatif.opdb.importers.found import Found, file_sha256
from whatif.opdb.provenance import Device, Environment, Method, Origin, Source
from whatif.runtime.errors import WhatifError


def read_recording(path: Path, *, device: str | None = None, author: str | None = None) -> Found:
    """Read a Kineto trace or a recording with shapes. Raises WhatifError if it has no operator shapes.

    ``device`` names the device if the recording does not.
    """
    events = read_kineto(path)
    metadata = events.header.get("whatif")
    metadata = metadata if isinstance(metadata, dict) else {}
    recorded, _ = recorded_of(metadata)
    name, memory_bytes = recorded_device(events.header, metadata)
    on_gpu = bool((events.category == EventCategory.KERNEL).any())
    measured_device = (
        device_called(device, memory_bytes=memory_bytes) if device else _device(name, memory_bytes, recorded, on_gpu)
    )
    source = Source(author=author, tool="whatif", sha256=file_sha256(path), date=_text(recorded.date))
    environment = _environment(recorded)
    found = Found()
    calls = list(_gpu_operators(events) if on_gpu else _cpu_operators(events))
    in_step = Method(name="trace", includes_launch=False if on_gpu else None)
    for rows in rows_of(calls):
        found.keep(rows, Origin(device=measured_device, environment=environment, method=in_step, source=source))
    alone = Method(name="chain_difference", includes_launch=False if on_gpu else None)
    for rows in rows_of(list(_measured_alone(recorded))):
        found.keep(rows, Origin(device=measured_device, environment=environment, method=alone, source=source))
    if not found.contributions:
        raise WhatifError(f"{path}: expected operators with their shapes, got none; record with record_shapes=True.")
    return found


def _device(name: str | None, memory_bytes: int | None, recorded: Recorded, on_gpu: bool) -> Device:
    if on_gpu:
        return device_called(name or "", memory_bytes=memory_bytes)
    cpu = _text(recorded.cpu)
    if cpu is None:
        raise WhatifError(
            "opdb: expected a recording that names its CPU, got a profiler's without it; name it with --device."
        )
    return cpu_called(cpu, recorded.threads)


def _environment(recorded: Recorded) -> Environment:
    tf32 = recorded.precision.cudnn_allow_tf32 if recorded.precision is not None else None
    return Environment(
        framework="pytorch" if recorded.torch else None, framework_version=_text(recorded.torch),
        cuda=_text(recorded.cuda), cudnn=_text(recorded.cudnn), driver=_text(recorded.driver),
        cpu=_text(recorded.cpu), threads=recorded.threads,
        tf32_allowed=tf32 if isinstance(tf32, bool) else None,
    )  # fmt: skip


def _text(value: str | int | None) -> str | None:
    return None if value is None else str(value)[:120]


def _gpu_operators(events: Events) -> Iterator[Timed]:
    """The total kernel time of each operator call."""
    calls = find_calls(events)
    gpu = find_gpu_side(events, calls, is_amd=False)
    kernel = (gpu.call >= 0) & (events.category[gpu.event] == EventCategory.KERNEL) & (events.group_size[gpu.event] < 0)
    launch, task = gpu.call[kernel], gpu.event[kernel]
    caller = np.full(len(launch), -1, dtype=np.int64)
    for track in np.unique(calls.track[launch]):
        rows = np.flatnonzero((events.category == EventCategory.CPU_OP) & (events.track == track) & (events.shape >= 0))
        places = np.flatnonzero(calls.track[launch] == track)
        if len(rows):
            nest = Nest(events.start_ns[rows], events.start_ns[rows] + events.duration_ns[rows])
            inner = nest.innermost(calls.start_ns[launch[places]])
            caller[places] = np.where(inner >= 0, rows[np.maximum(inner, 0)], -1)
    task, caller = task[caller >= 0], caller[caller >= 0]
    order = np.argsort(caller, kind="stable")
    task, caller = task[order], caller[order]
    called, first = np.unique(caller, return_index=True)
    if not len(called):
        return
    total_ns = np.add.reduceat(events.duration_ns[task], first)
    last = np.append(first[1:], len(task))
    for operator, members in _distinct(events, called):
        call = int(members[0])
        kernels = ";".join(events.names[code] for code in events.name[task[first[call] : last[call]]].tolist())
        yield _timed(operator, total_ns[members].astype(np.float64), kernels[:LONGEST_TEXT])


def _cpu_operators(events: Events) -> Iterator[Timed]:
    """The innermost operators of a known family, including their calls to allocate memory."""
    rows = np.flatnonzero((events.category == EventCategory.CPU_OP) & (events.shape >= 0))
    known = np.zeros(len(rows), dtype=np.bool_)
    for operator, members in _distinct(events, rows):
        known[members] = operator.family != "other"
    rows = rows[known]
    inner = np.ones(len(rows), dtype=np.bool_)
    for track in np.unique(events.track[rows]):
        places = np.flatnonzero(events.track[rows] == track)
        start, end = events.start_ns[rows[places]], events.start_ns[rows[places]] + events.duration_ns[rows[places]]
        # Rows are sorted by (start, -duration): an operator that begins before the one above it ends lies inside it.
        inner[places[:-1]] = start[1:] >= end[:-1]
    rows = rows[inner]
    for operator, members in _distinct(events, rows):
        yield _timed(operator, events.duration_ns[rows[members]].astype(np.float64), "")


def _distinct(events: Events, rows: Int64) -> Iterator[tuple[Described, Int64]]:
    """Each distinct operator among ``rows``, described once, and the positions of its calls in ``rows``."""
    key = events.name[rows].astype(np.int64) * len(events.shapes) + events.shape[rows]
    order = np.argsort(key, kind="stable")
    codes, first = np.unique(key[order], return_index=True)
    by_operator: dict[Described, list[Int64]] = {}
    for code, start, end in zip(codes.tolist(), first.tolist(), [*first[1:].tolist(), len(order)], strict=True):
        name, shape = divmod(code, len(events.shapes))
        call = (events.names[name], *events.shapes[shape])
        operator = describe(*call) or describe_other(*call)
        if operator is not None:
            by_operator.setdefault(operator, []).append(order[start:end])
    for operator, members in by_operator.items():
        yield operator, np.concatenate(members)


def _timed(operator: Described, durations_ns: Float64, kernels: str) -> Timed:
    low, middle, high = (np.quantile(durations_ns, (0.1, 0.5, 0.9)) * 1e-9).tolist()
    count = len(durations_ns)
    if count < 2:
        low = high = float("nan")
    return Timed(operator, middle, low, high, count, kernels)


def _measured_alone(recorded: Recorded) -> Iterator[Timed]:
    """The table "operator_times": times as recorded, and in bf16 if the operator's family is known."""
    for row in recorded.operator_times:
        call = (row.op, row.dims, row.types, row.concrete)
        operator = describe(*call) or describe_other(*call)
        for form in ("recorded", "bf16"):
            ns = row.ns.get(form)
            if operator is None or ns is None or (form == "bf16" and operator.family == "other"):
                continue
            share = row.spread.get(form)
            # The recorder gives the quartile range: 10 to 90 % of a normal distribution is 1.9 times as wide.
            half = 0.95 * share if share is not None and share < 1 else float("nan")
            measured = operator if form == "recorded" else replace(operator, dtype="bf16")
            t = float(ns) * 1e-9
            yield Timed(measured, t, t * (1 - min(half, 0.99)), t * (1 + half))
