"""From the scanner's numbers to the columns of ``ColumnBuilder``, the same as from decoded events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from whatif.graph.types import Array, Bool, Int64
from whatif.ingest.events import COPY_CATEGORIES, DEVICE_CATEGORIES, HOST_CATEGORIES, MISSING, EventCategory
from whatif.ingest.kineto_fields import (
    CATEGORIES,
    MODULE_PREFIX,
    NO_ARGS,
    OLD_ANNOTATION,
    Args,
    Special,
    as_int,
    as_text,
)
from whatif.ingest.scanned import (
    ABSENT,
    BYTES,
    CATEGORY,
    CORRELATION,
    DEVICE,
    DURATION,
    EXTERNAL_ID,
    FORWARD_THREAD,
    FRAMES,
    LAUNCH,
    NAME,
    NO_ROOM,
    ODD,
    PYTHON_FUNCTION,
    REGISTERS,
    SEQUENCE,
    SHAPE,
    START,
    STREAM,
    TRACK,
    Scan,
    Scanner,
)  # fmt: skip

if TYPE_CHECKING:
    from whatif.ingest.kineto_columns import ColumnBuilder

# Masks over the categories of duration events: of the CPU, of the GPU, copies.
_IS_CPU, _IS_GPU, _IS_COPY = (np.zeros(len(EventCategory), np.bool_) for _ in range(3))
for _mask, _some in ((_IS_CPU, HOST_CATEGORIES), (_IS_GPU, DEVICE_CATEGORIES), (_IS_COPY, COPY_CATEGORIES)):
    _mask[list(_some)] = True

_UNKNOWN = -(2**62)


class _Table:
    """The meaning of each of the scanner's codes: computed by ``meaning`` at its first use, in order."""

    def __init__(self, meaning: Callable[[int], int]) -> None:
        self._meaning = meaning
        self._known = np.full(1 << 12, _UNKNOWN, np.int64)

    def __getitem__(self, codes: Int64) -> Int64:
        if len(codes) and (most := int(codes.max())) >= len(self._known):
            self._known = np.concatenate([self._known, np.full(2 * most, _UNKNOWN, np.int64)])
        found: Int64 = self._known.take(codes)
        unknown = found == _UNKNOWN
        if unknown.any():
            new_codes, first = np.unique(codes[unknown], return_index=True)
            for code in new_codes[np.argsort(first)].tolist():
                self._known[code] = self._meaning(code)
            found = self._known.take(codes)
        return found


class ScannedColumns:
    """Scans events of texts for a builder, which is given the other events decoded."""

    def __init__(self, builder: ColumnBuilder, scanner: Scanner | None = None) -> None:
        self._builder = builder
        self._scanner = scanner = scanner or Scanner()
        value, pair = scanner.value, scanner.pair
        self._category = _Table(lambda text: CATEGORIES.get(as_text(value(text)).lower(), Special.FOREIGN))
        self._name = _Table(lambda text: builder.names[as_text(value(text))])
        self._is_mark = _Table(lambda text: OLD_ANNOTATION.match(_name(value(text))) is not None)
        self._is_module = _Table(lambda text: _name(value(text)).startswith(MODULE_PREFIX))
        self._track = _Table(lambda code: builder.tracks[value(pair(code)[0]), value(pair(code)[1])])
        self._pid = _Table(lambda code: _in_int32(as_int(value(pair(code)[0]))))
        self._tid = _Table(lambda code: _in_int32(as_int(value(pair(code)[1]))))
        self._shape = _Table(self._shape_of)
        self._warps = _Table(lambda code: builder.warps[self._raw(pair(code)[0]), self._raw(pair(code)[1])])

    def take(self, text: bytes) -> tuple[int, bool]:
        """Take the events at the front of a text; return their number of bytes, and whether something odd follows.

        If nothing odd follows, the text ends within the next event.
        """
        taken_bytes = 0
        while True:
            scan = self._scanner.scan(text, taken_bytes)
            if scan is None:
                return taken_bytes, True
            self._keep(scan)
            taken_bytes += scan.taken_bytes
            if scan.status != NO_ROOM:
                return taken_bytes, scan.status == ODD

    def _raw(self, code: int) -> bytes:
        """The text of a code that counts from one; 0 is none."""
        return self._scanner.text(code - 1) if code else b""

    def _shape_of(self, code: int) -> int:
        inputs, strides = self._scanner.pair(code)
        dims_and_types, concrete = self._scanner.pair(inputs)
        dims, types = self._scanner.pair(dims_and_types)
        return self._builder.shapes[self._raw(dims), self._raw(types), self._raw(concrete), self._raw(strides)]

    def _keep(self, scan: Scan) -> None:
        builder = self._builder
        ends = zip(scan.flows[0].tolist(), scan.flows[2].tolist(), scan.flows[1].tolist(),
                   self._track[scan.flows[3]].tolist(), strict=True)  # fmt: skip
        for phase, number, time_ns, track in ends:
            builder.add_flow_end(chr(phase), number, time_ns, track)
        if scan.allocations.shape[1]:
            builder.keep_allocations(scan.allocations)
        if scan.python.shape[1]:
            builder.keep_python(scan.python[0], self._track[scan.python[1]])
        rows, category = scan.rows, self._category[scan.rows[CATEGORY]]
        rare = scan.rare
        if len(category) and category.min() < 0:
            kept = self._sort_out(rows, category)
            if rare:
                place = np.cumsum(kept) - 1
                rare = [(int(place[row]), event) for row, event in rare if kept[row]]
            rows, category = rows[:, kept], category[kept]
        if rows.shape[1]:
            args = [(row, event.args if type(event.args) is Args else NO_ARGS) for row, event in rare]
            self._keep_rows(rows, category.astype(np.int8), args)

    def _sort_out(self, rows: Int64, category: Int64) -> Bool:
        """Find the categories of old operators, count unknown ones; return the mask of the rows that are kept."""
        builder = self._builder
        old = category == Special.OLD_OPERATOR
        if old.any():
            marks = self._is_mark[rows[NAME][old]]
            category[old] = np.where(marks, EventCategory.ANNOTATION, EventCategory.CPU_OP)
        python = np.flatnonzero(category == Special.PYTHON)
        if len(python):
            rest = python[rows[CATEGORY][python] != PYTHON_FUNCTION]  # another spelling of it
            builder.keep_python(rows[START][rest], self._track[rows[TRACK][rest]])
            category[python[self._is_module[rows[NAME][python]] == 1]] = EventCategory.MODULE
        foreign = rows[CATEGORY][category == Special.FOREIGN]
        for text, count in zip(*np.unique(foreign, return_counts=True), strict=True):
            builder.foreign[as_text(self._scanner.value(int(text)))] += int(count)
        return category >= 0

    def _keep_rows(self, rows: Int64, category: Array, args: list[tuple[int, Args]]) -> None:
        cpu, gpu = _IS_CPU[category], _IS_GPU[category]
        kernel = category == EventCategory.KERNEL
        shape = np.full(len(category), MISSING, np.int32)
        shaped = np.flatnonzero(cpu & (rows[SHAPE] > 0))
        shape[shaped] = self._shape[rows[SHAPE][shaped] - 1]
        warps = np.full(len(category), MISSING, np.int64)
        warps[kernel] = self._warps[rows[LAUNCH][kernel]]
        size_bytes = np.where(_IS_COPY[category], rows[BYTES], MISSING)
        forward = rows[FORWARD_THREAD]
        columns = {
            "category": category,
            "name": self._name[rows[NAME]].astype(np.int32),
            "start_ns": rows[START].copy(),
            "duration_ns": rows[DURATION].copy(),
            "track": self._track[rows[TRACK]].astype(np.int32),
            "correlation": rows[CORRELATION].copy(),
            "external_id": rows[EXTERNAL_ID].copy(),
            "sequence": np.where(cpu, rows[SEQUENCE], MISSING),
            "forward_thread": _narrow(np.where(cpu & (forward != 0), forward, MISSING)),
            "shape": shape,
            "frames": np.where(cpu, rows[FRAMES], 0).astype(np.int32),
            "device": self._of_gpu(gpu, rows[DEVICE], rows[TRACK], self._pid),
            "stream": self._of_gpu(gpu, rows[STREAM], rows[TRACK], self._tid),
            "warps": warps,
            "registers": _narrow(np.where(kernel, rows[REGISTERS], MISSING)),
        }
        self._builder.append(columns | self._builder.rare_columns(args, category, size_bytes))

    @staticmethod
    def _of_gpu(gpu: Bool, numbers: Int64, track: Int64, fallback: _Table) -> Array:
        """The device or the stream of GPU work; its pid or tid if its args lack it."""
        absent = np.flatnonzero(gpu & (numbers == ABSENT))
        column = np.where(gpu, numbers, MISSING)
        column[absent] = fallback[track[absent]]
        return _narrow(column)


def _narrow(column: Int64) -> Array:
    """The column in 32 bits; what does not fit is MISSING."""
    narrow = column.astype(np.int32)
    narrow[narrow != column] = MISSING
    return narrow


def _in_int32(number: int) -> int:
    return number if -(2**31) <= number < 2**31 else MISSING


def _name(value: Any) -> str:
    return value if isinstance(value, str) else ""
