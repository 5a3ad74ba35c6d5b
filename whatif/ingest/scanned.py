"""Drives the scanner of trace events: allocates its arrays, and names the columns of its numbers."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whatif.graph.types import Array, Int64
from whatif.ingest.json_chunks import decoded, of_short_texts
from whatif.ingest.kineto_fields import RawEvent, Scalar
from whatif.runtime.loops import PLAIN, Loops

# The compiled scanner assumes little-endian words.
LOOPS = Loops("whatif.ingest._scan", plain=PLAIN or sys.byteorder == "big")

# The keys that the scanner knows, by number: 0 to 8 of an event, the others of its args. An event with one from 32 on
# is decoded as well.
_KEYS = (
    b"ph", b"cat", b"name", b"pid", b"tid", b"ts", b"dur", b"id", b"args",
    b"correlation", b"Correlation ID", b"External id", b"external id", b"stream", b"device",
    b"Sequence number", b"Fwd thread id", b"Input Dims", b"Input dims", b"Input type", b"Concrete Inputs", b"grid",
    b"block", b"registers per thread", b"bytes", b"Bytes", b"Call stack",
    b"Addr", b"Total Allocated", b"Device Type", b"Device Id", b"Input Strides",
    b"Collective name", b"In msg nelems", b"dtype", b"Group size", b"Process Group Name", b"Process Group Ranks",
    b"cuda_sync_kind", b"wait_on_stream", b"wait_on_cuda_event_record_corr_id",
)  # fmt: skip
# With these no two keys of a level share a place in its table (a test holds it).
_FACTORS = (1, 5, 37, 43)
_LONGEST_KEY = 64

# The rows of the scanner's output, which has a column for each duration event.
(
    CATEGORY, NAME, TRACK, START, DURATION, CORRELATION, EXTERNAL_ID, BYTES, STREAM, DEVICE, SEQUENCE, FORWARD_THREAD,
    REGISTERS, SHAPE, LAUNCH, FRAMES,
) = range(16)  # fmt: skip
# Texts that are numbered in advance.
_FIRST_TEXTS = (b"null", b'"[memory]"', b'"fwdbwd"', b'"python_function"')
PYTHON_FUNCTION = 3
# A stream or device that is absent, which the event's tid or pid replaces.
ABSENT = -(2**63) + 2

# Why the scanner stopped, and which of its arrays was full.
ENDS, NO_ROOM, ODD = 0, 1, 2
ROOM_ROWS, ROOM_TEXTS, ROOM_PAIRS, ROOM_BYTES = 0, 1, 2, 3
_MOST_ROWS = 1 << 14

_SEPARATORS = (b",", b" ", b"\n", b"\r", b"\t")

_SCALAR: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Scalar)
_EVENT = msgspec.json.Decoder(RawEvent)


class Scan(NamedTuple):
    """Events scanned from a text, in their order. Codes are those of ``Scanner.text`` and ``Scanner.pair``."""

    rows: Int64  # (16, n)
    flows: Int64  # (4, n): phase as a byte, time, id, track
    rare: list[tuple[int, RawEvent]]  # rows of which the args are needed
    allocations: Int64  # (6, n): time, bytes, address, total, type and number of the device
    python: Int64  # (2, n): time and track of Python functions, of which only modules are rows as well
    taken_bytes: int
    status: int


class Scanner:
    """Scans events in the profilers' format from the front of buffers; its codes of texts are valid for all buffers."""

    def __init__(self, loops: Loops = LOOPS) -> None:
        self._loops = loops
        self._keys = _key_tables()
        self._scratch = tuple(np.zeros(64, np.int64) for _ in range(3))
        self._rows = np.empty(16 * _MOST_ROWS, np.int64)
        self._flows = np.empty(4 * _MOST_ROWS, np.int64)
        self._allocations = np.empty(6 * _MOST_ROWS, np.int64)
        self._python = np.empty(2 * _MOST_ROWS, np.int64)
        self._ranges = np.empty(3 * _MOST_ROWS, np.int64)
        self._texts, self._table = np.zeros(1 << 12, np.int64), np.zeros(1 << 13, np.int32)
        self._pairs, self._pair_table = np.zeros(1 << 12, np.int64), np.zeros(1 << 12, np.int32)
        self._arena = np.empty(1 << 18, np.uint8)
        self._state = np.zeros(10, np.int64)
        for text in _FIRST_TEXTS:
            begin, code = self._texts[self._state[3]], self._state[3]
            self._arena[begin : begin + len(text)] = np.frombuffer(text, np.uint8)
            self._texts[code + 1], self._state[3] = begin + len(text), code + 1
        self._fill_text_table()

    def text(self, code: int) -> bytes:
        """Return a text by its number."""
        return self._arena[self._texts[code] : self._texts[code + 1]].tobytes()

    def value(self, code: int) -> Any:
        """Return the number, string, boolean or None of a text."""
        return _scalar(self.text(code))

    def pair(self, code: int) -> tuple[int, int]:
        """Return the two codes of a pair."""
        return int(self._pairs[2 * code]), int(self._pairs[2 * code + 1])

    def scan(self, text: bytes, start: int) -> Scan | None:
        """Scan events of a text from ``start`` on; None if there are none, or if one of them is damaged."""
        state, before = self._state, start
        while text[start : start + 1] in _SEPARATORS:
            start += 1
        state[0] = state[6] = start
        state[1] = state[2] = state[5] = state[8] = state[9] = 0
        while True:
            status = self._loops.scan(
                text, len(text), *self._keys, *self._scratch, self._rows, self._flows, self._allocations,
                self._python, self._ranges, self._table, self._texts, self._arena, self._pair_table, self._pairs, state,
            )  # fmt: skip
            if status != NO_ROOM or not self._make_room():
                break
        end = int(state[0])
        if end == start:
            return None
        rare: list[tuple[int, RawEvent]] = []
        for first, last, row in self._ranges.reshape(3, -1)[:, : state[2]].T.tolist():
            event = decoded(_EVENT, text[first:last])
            if event is None:
                return None
            rare.append((row, event))
        written = ((self._rows, 16, 1), (self._flows, 4, 5), (self._allocations, 6, 8), (self._python, 2, 9))
        rows, flows, allocations, python = (
            array.reshape(width, -1)[:, : state[place]] for array, width, place in written
        )
        return Scan(rows, flows, rare, allocations, python, end - before, status)

    def _make_room(self) -> bool:
        """Make four times as much room for texts and pairs; False if the rows are full."""
        state = self._state
        if state[7] == ROOM_ROWS:
            return False
        if state[7] == ROOM_PAIRS:
            self._pairs = _grown(self._pairs)
            self._pair_table = np.zeros(len(self._pairs), np.int32)
            self._loops.number_pairs(self._pair_table, self._pairs, int(state[4]))
        elif state[7] == ROOM_BYTES:
            self._arena = _grown(self._arena)
        else:
            self._texts = _grown(self._texts)
            self._fill_text_table()
        return True

    def _fill_text_table(self) -> None:
        self._table = np.zeros(2 * len(self._texts), np.int32)
        self._loops.number_texts(self._table, self._texts, self._arena, int(self._state[3]))


def _grown(array: Array) -> Array:
    return np.concatenate([array, np.zeros(3 * len(array), array.dtype)])


@of_short_texts(1 << 13)
def _scalar(text: bytes) -> Any:
    """Decode a scalar."""
    return _SCALAR.decode(text)


@cache
def _key_tables() -> tuple[Array, ...]:
    """The tables by which the scanner finds a key: slots by level, spellings, lengths, and the factors of its hash."""
    slot = np.full(2 * 256, -1, np.int8)
    spellings = np.zeros((len(_KEYS), _LONGEST_KEY), np.uint8)
    for number, key in enumerate(_KEYS):
        n, level = len(key), int(number > 8)
        mixed = key[0] * _FACTORS[0] + key[-1] * _FACTORS[1] + key[n * 5 >> 3] * _FACTORS[2] + n * _FACTORS[3]
        place = level * 256 + (mixed & 255)
        assert slot[place] < 0, key
        slot[place] = number
        spellings[number, :n] = np.frombuffer(key, np.uint8)
    lengths = np.array([len(key) for key in _KEYS], np.int32)
    return slot, spellings.reshape(-1), lengths, np.array(_FACTORS, np.int32)
