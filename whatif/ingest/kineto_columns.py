"""From decoded Kineto events to columns, one chunk at a time."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from whatif.graph.types import Int64
from whatif.ingest.decimal_ns import TimeStatus, parse_us_as_ns
from whatif.ingest.events import (
    COLUMN_DTYPES,
    COPY_CATEGORIES,
    DEVICE_CATEGORIES,
    HOST_CATEGORIES,
    MISSING,
    Allocations,
    EventCategory,
    Events,
    Flows,
    Stamps,
    put_in_order,
)
from whatif.ingest.json_chunks import decoded, of_short_texts
from whatif.ingest.kineto_fields import (
    ALLOCATION,
    CATEGORIES,
    LAYER_ANNOTATION,
    MODULE_PREFIX,
    NO_ARGS,
    NOTHING,
    OLD_ANNOTATION,
    THREADS_PER_WARP,
    Args,
    RawEvent,
    Special,
    as_int,
    as_text,
    dtype_bytes,
)
from whatif.ingest.operator_calls import with_layouts

DROPPED_TIMESTAMP = {
    TimeStatus.ABSENT: "no timestamp",
    TimeStatus.UNREADABLE: "unreadable timestamp",
    TimeStatus.OUT_OF_RANGE: "timestamp out of range",
}
DROPPED_DURATION = {
    TimeStatus.ABSENT: "no duration",
    TimeStatus.UNREADABLE: "unreadable duration",
    TimeStatus.OUT_OF_RANGE: "duration out of range",
}
DROPPED_NEGATIVE = "negative duration"
DROPPED_ALLOCATION = "allocation with an unreadable time or size"
DROPPED_BEGIN = "begin without duration"  # ph "B", whose end is another event

_CPU, _GPU, _COPY = (np.array(some, np.int8) for some in (HOST_CATEGORIES, DEVICE_CATEGORIES, COPY_CATEGORIES))


class ColumnBuilder:
    """Takes chunks of decoded events and keeps their columns and tables."""

    def __init__(self, dropped: Counter[str]) -> None:
        self._dropped = dropped
        self._categories = _CategoryCodes()
        self.foreign: Counter[str] = Counter()
        self.names = _Codes()
        self.tracks = _TrackCodes()
        self.shapes = _ShapeCodes()
        self._details = _Codes()
        self.warps = _Warps()
        self._chunks: dict[str, list[npt.NDArray[Any]]] = {}
        self._flow_ends: dict[str, dict[Hashable, tuple[int, int]]] = {"s": {}, "f": {}}
        self._flow_tracks: dict[int, None] = {}
        self._allocations: list[npt.NDArray[Any]] = []
        # They grow in place: a trace with stacks has more of these than of all others.
        self._python_ns, self._python_track = array("q"), array("i")

    def add(self, events: list[RawEvent]) -> None:
        """Keep the duration events of known categories and the ends of forward-to-backward flows."""
        python: list[RawEvent] = []
        rows, codes, flow_ends, allocations = self._select(events, python)
        if python:
            self._add_python(python)
        self._add_flows(flow_ends)
        if allocations:
            self._add_allocations(allocations)
        if not rows:
            return
        category = np.array(codes, np.int8)
        start_ns, start_status = parse_us_as_ns(list(map(attrgetter("ts"), rows)))
        duration_ns, duration_status = parse_us_as_ns(list(map(attrgetter("dur"), rows)))
        if start_status.any() or duration_status.any() or (duration_ns < 0).any():
            kept = self._count_dropped(start_status, duration_status, duration_ns)
            rows = [rows[i] for i in kept.tolist()]
            category, start_ns, duration_ns = category[kept], start_ns[kept], duration_ns[kept]
        self._keep(rows, category, start_ns, duration_ns)

    def _select(
        self, events: list[RawEvent], python: list[RawEvent]
    ) -> tuple[list[RawEvent], list[int], list[RawEvent], list[RawEvent]]:
        categories = self._categories
        rows: list[RawEvent] = []
        codes: list[int] = []
        flow_ends: list[RawEvent] = []
        allocations: list[RawEvent] = []
        for event in events:
            phase = event.ph
            if phase == "X":
                code: int = categories[event.cat]
                if code < 0:
                    name = event.name if isinstance(event.name, str) else ""
                    if code == Special.OLD_OPERATOR:
                        code = EventCategory.ANNOTATION if OLD_ANNOTATION.match(name) else EventCategory.CPU_OP
                    elif code == Special.PYTHON:
                        python.append(event)
                        if not name.startswith(MODULE_PREFIX):
                            continue
                        code = EventCategory.MODULE
                    else:
                        if code == Special.FOREIGN:
                            self.foreign[as_text(event.cat)] += 1
                        continue
                rows.append(event)
                codes.append(code)
            elif phase == "s" or phase == "f":
                if event.cat == "fwdbwd":
                    flow_ends.append(event)
            elif phase == "i":
                if event.name == ALLOCATION:
                    allocations.append(event)
            elif phase == "B" and categories[event.cat] > Special.IGNORED:
                self._dropped[DROPPED_BEGIN] += 1
        return rows, codes, flow_ends, allocations

    def _count_dropped(
        self, start_status: npt.NDArray[np.int8], duration_status: npt.NDArray[np.int8], duration_ns: Int64
    ) -> npt.NDArray[np.intp]:
        """Count each bad row under its first reason; return the indices of the others."""
        kept = np.ones(len(start_status), np.bool_)
        reasons = [(start_status == status, reason) for status, reason in DROPPED_TIMESTAMP.items()]
        reasons += [(duration_status == status, reason) for status, reason in DROPPED_DURATION.items()]
        reasons += [(duration_ns < 0, DROPPED_NEGATIVE)]
        for is_bad, reason in reasons:
            if n_bad := int(np.count_nonzero(is_bad & kept)):
                self._dropped[reason] += n_bad
            kept &= ~is_bad
        return np.flatnonzero(kept)

    def _keep(self, rows: list[RawEvent], category: npt.NDArray[np.int8], start_ns: Int64, duration_ns: Int64) -> None:
        n_rows = len(rows)
        args = [row.args if type(row.args) is Args else NO_ARGS for row in rows]
        names = list(map(attrgetter("name"), rows))
        if set(map(type, names)) != {str}:
            names = list(map(as_text, names))
        columns: dict[str, npt.NDArray[Any]] = {
            "category": category,
            "name": np.fromiter(map(self.names.__getitem__, names), np.int32, n_rows),
            "start_ns": start_ns,
            "duration_ns": duration_ns,
            "track": np.fromiter(map(self.tracks.__getitem__, map(attrgetter("pid", "tid"), rows)), np.int32, n_rows),
            "correlation": _first_known(args, "correlation", "correlation_2"),
            "external_id": _first_known(args, "external_id", "external_id_2"),
        }
        cpu = np.flatnonzero(np.isin(category, _CPU))
        cpu_args = [args[i] for i in cpu.tolist()]
        columns["sequence"] = _scatter(n_rows, cpu, _integers(map(attrgetter("sequence"), cpu_args)))
        # Kineto writes 0 for a forward op; the threads themselves are counted from 1.
        forward_thread = _integers(map(attrgetter("forward_thread"), cpu_args))
        columns["forward_thread"] = _scatter(
            n_rows, cpu, np.where(forward_thread == 0, MISSING, forward_thread), np.int32
        )
        columns["shape"] = _scatter(n_rows, cpu, self._shape_codes(cpu_args), np.int32)
        frames = np.array([_frames(a.call_stack) for a in cpu_args], np.int32)
        columns["frames"] = np.zeros(n_rows, np.int32)
        columns["frames"][cpu] = frames

        gpu = np.flatnonzero(np.isin(category, _GPU))
        gpu_rows = [rows[i] for i in gpu.tolist()]
        for field, fallback in (("device", "pid"), ("stream", "tid")):
            numbers = [getattr(args[i], field) for i in gpu.tolist()]
            if None in numbers:
                numbers = [
                    getattr(row, fallback) if number is None else number
                    for row, number in zip(gpu_rows, numbers, strict=True)
                ]
            columns[field] = _scatter(n_rows, gpu, _integers(numbers), np.int32)

        kernels = np.flatnonzero(category == EventCategory.KERNEL)
        kernel_args = [args[i] for i in kernels.tolist()]
        warps = [self.warps[bytes(a.grid), bytes(a.block)] for a in kernel_args]
        columns["warps"] = _scatter(n_rows, kernels, np.array(warps, np.int64))
        registers = _integers(map(attrgetter("registers"), kernel_args))
        columns["registers"] = _scatter(n_rows, kernels, registers, np.int32)

        size_bytes = np.full(n_rows, MISSING, np.int64)
        copies = np.flatnonzero(np.isin(category, _COPY))
        size_bytes[copies] = _first_known([args[i] for i in copies.tolist()], "bytes", "bytes_2")
        rare = [(i, a) for i, a in enumerate(args) if a.collective is not None or a.sync_kind is not None]
        self.append(columns | self.rare_columns(rare, category, size_bytes))

    def append(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Keep the next rows of every column."""
        for field, column in columns.items():
            self._chunks.setdefault(field, []).append(column)

    def _shape_codes(self, args: list[Args]) -> Int64:
        shapes = self.shapes
        codes = []
        for a in args:
            dims = a.input_dims if a.input_dims is not NOTHING else a.input_dims_2
            if dims is NOTHING and a.input_type is NOTHING:
                codes.append(MISSING)
            else:
                key = bytes(dims), bytes(a.input_type), bytes(a.concrete_inputs), bytes(a.input_strides)
                codes.append(shapes[key])
        return np.array(codes, np.int64)

    def rare_columns(
        self, args: list[tuple[int, Args]], category: npt.NDArray[np.int8], size_bytes: Int64
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the columns that only collectives and synchronisations have, from the args of such rows."""
        group_size, wait_stream, detail, group = (np.full(len(category), MISSING, np.int32) for _ in range(4))
        wait_correlation = np.full(len(category), MISSING, np.int64)
        for i, a in args:
            if a.collective is not None:
                detail[i] = self._details[as_text(a.collective)]
                n_elements, element_bytes = as_int(a.n_elements), dtype_bytes(a.dtype)
                if n_elements >= 0 and element_bytes > 0:
                    size_bytes[i] = _int64_or_missing(n_elements * element_bytes)
                group_size[i] = _int32_or_missing(a.group_size)
                if a.group_name is not None or a.group_ranks is not None:
                    group[i] = self._details[f"{as_text(a.group_name)} {as_text(a.group_ranks)}"]
            elif a.sync_kind is not None and category[i] == EventCategory.SYNC:
                detail[i] = self._details[as_text(a.sync_kind)]
                wait_stream[i] = _int32_or_missing(a.wait_stream)
                wait_correlation[i] = _int64_or_missing(a.wait_correlation)
        return {
            "size_bytes": size_bytes,
            "group_size": group_size,
            "group": group,
            "detail": detail,
            "wait_stream": wait_stream,
            "wait_correlation": wait_correlation,
        }

    def _add_flows(self, flow_ends: list[RawEvent]) -> None:
        times_ns, status = parse_us_as_ns([event.ts for event in flow_ends])
        for event, time_ns, bad in zip(flow_ends, times_ns.tolist(), status.tolist(), strict=True):
            if not bad and event.id is not None:
                self.add_flow_end(str(event.ph), event.id, time_ns, self.tracks[event.pid, event.tid])

    def add_flow_end(self, phase: str, number: Hashable, time_ns: int, track: int) -> None:
        """Keep an end of a flow, the first one of each number."""
        self._flow_ends[phase].setdefault(number, (time_ns, track))
        self._flow_tracks.setdefault(track)

    def _add_python(self, events: list[RawEvent]) -> None:
        time_ns, status = parse_us_as_ns([event.ts for event in events])
        track = np.fromiter((self.tracks[event.pid, event.tid] for event in events), np.int32, len(events))
        self.keep_python(time_ns[status == 0], track[status == 0])

    def keep_python(self, time_ns: Int64, track: npt.NDArray[Any]) -> None:
        """Keep the starts and tracks of Python functions."""
        self._python_ns.frombytes(time_ns.tobytes())
        self._python_track.frombytes(track.astype(np.int32).tobytes())

    def _add_allocations(self, events: list[RawEvent]) -> None:
        """Keep allocations and frees; without addresses, as of old profilers, it is unknown which blocks are live."""
        args = [event.args if type(event.args) is Args else NO_ARGS for event in events]
        time_ns, status = parse_us_as_ns([event.ts for event in events])
        columns = [time_ns, _first_known(args, "bytes_2", "bytes")]
        columns += [_integers([getattr(a, name) for a in args]) for name in ("address", "total")]
        columns += [_integers([getattr(a, name) for a in args]) for name in ("device_type", "device_id")]
        table = np.stack(columns)
        sound = (status == 0) & (np.abs(table[1]) < 2**44)
        if lost := int(np.count_nonzero(~sound)):
            self._dropped[DROPPED_ALLOCATION] += lost
        self.keep_allocations(table[:, sound])

    def keep_allocations(self, table: npt.NDArray[Any]) -> None:
        """Keep allocations as columns of time, bytes, address, total, type and number of the device."""
        self._allocations.append(table[:, table[2] != MISSING])

    def build(self, header: dict[str, Any], ends_early_at: int | None) -> Events:
        """Return the columns sorted by (start_ns, -duration_ns), stable; ``ends_early_at`` is passed on."""
        columns: dict[str, npt.NDArray[Any]] = {
            field: np.concatenate(self._chunks.pop(field)) if field in self._chunks else np.zeros(0, dtype)
            for field, dtype in COLUMN_DTYPES.items()
        }
        python = Stamps(np.frombuffer(self._python_ns, np.int64), np.frombuffer(self._python_track, np.int32))
        flows = self._build_flows()
        tracks = self._order_tracks(columns, python, flows)
        put_in_order(columns, self._dropped)
        layer = np.array([name.startswith(LAYER_ANNOTATION) for name in self.names], dtype=np.bool_)
        if layer.any():
            columns["category"][layer[columns["name"]]] = EventCategory.ANNOTATION
        return Events(
            **columns,
            ends_early_at=ends_early_at,
            names=list(self.names),
            tracks=tracks,
            shapes=self.shapes.table,
            details=list(self._details),
            flows=flows,
            header=header,
            dropped=self._dropped,
            allocations=self._build_allocations(),
            python=python.in_order(),
            by_torch=True,
        )

    def _order_tracks(
        self, columns: dict[str, npt.NDArray[Any]], python: Stamps, flows: Flows
    ) -> list[tuple[str, str]]:
        """Number the tracks by first occurrence, in stamps, then in flows, then in rows; return those in use."""
        used = [columns["track"], python.track, flows.source_track, flows.target_track]
        table = list(self.tracks.table)
        every = np.concatenate([python.track, np.array(list(self._flow_tracks), np.int32), columns["track"]])
        every = every[np.append(True, every[1:] != every[:-1])[: len(every)]]
        first = np.full(len(table), len(every))
        first[every[::-1]] = np.arange(len(every))[::-1]
        order = np.argsort(first, kind="stable")
        order = order[first[order] < len(every)]
        place = np.zeros(len(table), np.int32)
        place[order] = np.arange(len(order))
        for track in used:
            track[:] = place[track]
        return [table[track] for track in order.tolist()]

    def _build_allocations(self) -> Allocations | None:
        if not self._allocations:
            return None
        table = np.concatenate(self._allocations, axis=1)
        if not table.shape[1]:
            return None
        table = table[:, np.argsort(table[0], kind="stable")]
        device_type, device = np.clip(table[4:], MISSING, 2**31 - 1).astype(np.int32)
        return Allocations(table[0], table[1], table[2], table[3], device_type, device)

    def _build_flows(self) -> Flows:
        sources, targets = self._flow_ends["s"], self._flow_ends["f"]
        arrows = sorted(sources[key] + targets[key] for key in sources.keys() & targets.keys())
        table = np.array(arrows, np.int64).reshape(-1, 4)
        return Flows(table[:, 0].copy(), table[:, 1].astype(np.int32), table[:, 2].copy(), table[:, 3].astype(np.int32))


def _frames(call_stack: msgspec.Raw) -> int:
    """The frames of a call stack, "train.py(7): main;model.py(3): forward"; 0 if none was written."""
    text = bytes(call_stack)
    return text.count(b";") + 1 if len(text) > 2 else 0


class _Codes(dict[str, int]):
    """Numbers its keys in the order of their first use."""

    def __missing__(self, key: str) -> int:
        code = self[key] = len(self)
        return code


class _CategoryCodes(dict[Any, int]):
    def __missing__(self, key: Any) -> int:
        code = self[key] = CATEGORIES.get(as_text(key).lower(), Special.FOREIGN)
        return code


class _TrackCodes(dict[tuple[Any, Any], int]):
    """Codes of (pid, tid); 7 and "7" are one track."""

    def __init__(self) -> None:
        self.table: dict[tuple[str, str], int] = {}

    def __missing__(self, key: tuple[Any, Any]) -> int:
        code = self[key] = self.table.setdefault((as_text(key[0]), as_text(key[1])), len(self.table))
        return code


class _ShapeCodes(dict[tuple[bytes, bytes, bytes, bytes], int]):
    """Codes of raw (dims, types, concrete inputs, strides), each decoded once; different texts of a value share a code.

    Of the strides only the layout is kept, in the places of the concrete inputs that tensors leave empty.
    """

    def __init__(self) -> None:
        self.table: list[tuple[Any, Any, Any]] = []
        self._canonical = _Codes()

    def __missing__(self, key: tuple[bytes, bytes, bytes, bytes]) -> int:
        shape, text = _shape_of(*key)
        code = self[key] = self._canonical[text]
        if code == len(self.table):
            self.table.append(shape)
        return code


class _Warps(dict[tuple[bytes, bytes], int]):
    """Warps of a launch, from its raw (grid, block); MISSING if these are not three counts each."""

    def __missing__(self, key: tuple[bytes, bytes]) -> int:
        warps = self[key] = _warps_of(*key)
        return warps


@of_short_texts(1 << 12)
def _shape_of(dims: bytes, types: bytes, concrete: bytes, strides: bytes) -> tuple[tuple[Any, Any, Any], str]:
    """Return a shape from raw texts, and the text that equal shapes have in common."""
    decoded_dims = _decode_or_none(dims)
    layouts = with_layouts(decoded_dims, _decode_or_none(concrete), _decode_or_none(strides))
    shape = decoded_dims, _decode_or_none(types), layouts
    return shape, repr(shape)


@of_short_texts(1 << 12)
def _warps_of(grid: bytes, block: bytes) -> int:
    blocks, threads = (_product(_decode_or_none(raw)) for raw in (grid, block))
    return MISSING if MISSING in (blocks, threads) else _int64_or_missing(blocks * -(-threads // THREADS_PER_WARP))


def _product(dimensions: Any) -> int:
    counts = [as_int(count) for count in dimensions] if isinstance(dimensions, list) else []
    return math.prod(counts) if len(counts) == 3 and min(counts) > 0 else MISSING


_ANYTHING = msgspec.json.Decoder()


def _decode_or_none(raw: bytes) -> Any:
    return decoded(_ANYTHING, raw) if raw else None  # a skipped value was checked less strictly than here


def _int64_or_missing(value: Any) -> int:
    number = as_int(value)
    return number if -(2**63) <= number < 2**63 else MISSING


def _int32_or_missing(value: Any) -> int:
    number = as_int(value)
    return number if -(2**31) <= number < 2**31 else MISSING


def _integers(values: Iterable[Any]) -> Int64:
    numbers = list(values)
    if not set(map(type, numbers)) - {int}:
        try:
            return np.array(numbers, np.int64)
        except OverflowError:
            pass
    return np.array([_int64_or_missing(number) for number in numbers], np.int64)


def _first_known(args: list[Args], field: str, other_spelling: str) -> Int64:
    values = _integers(map(attrgetter(field), args))
    unknown = np.flatnonzero(values == MISSING)
    if len(unknown):
        values[unknown] = _integers([getattr(args[i], other_spelling) for i in unknown.tolist()])
    return values


def _scatter(
    n_rows: int, rows: npt.NDArray[np.intp], values: Int64, dtype: type[np.signedinteger[Any]] = np.int64
) -> npt.NDArray[Any]:
    """Return a column of MISSING with the values at the rows; what does not fit in the type is MISSING too."""
    limits = np.iinfo(dtype)
    column = np.full(n_rows, MISSING, dtype)
    column[rows] = np.where((values >= limits.min) & (values <= limits.max), values, MISSING)
    return column
