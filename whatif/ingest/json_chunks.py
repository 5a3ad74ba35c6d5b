"""The traceEvents array of a JSON file, decoded chunk by chunk; damage costs the events that it touches."""

from __future__ import annotations

import re
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from functools import lru_cache, wraps
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from whatif.ingest.file_bytes import FileBytes, ends_early
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import GZIP_MAGIC

CHUNK_BYTES = 1 << 20
# A longer event is dropped. It bounds the memory that unbalanced brackets can take.
MAX_EVENT_BYTES = 8 << 20
# Header fields beyond this on either side of the array are left out.
_MAX_HEADER_BYTES = 16 << 20
# Of a text that the scanner cannot read, this much is decoded at first.
_WINDOW_BYTES = 32 << 10
# The last boundary is searched first in these last bytes of a chunk, not in all of it.
_CUT_WINDOW_BYTES = 64 << 10
# Texts that are worth keeping decoded; longer ones are rare.
_SHORT_BYTES = 1 << 10

INVALID_JSON = "invalid JSON"
TOO_LONG = "event too long"

_WS = rb"[ \t\r\n]*+"
# The gap between two events. In valid JSON this is never inside a string: the quote would end that string, and no
# letter may follow. It may lie between two objects nested in one event, which decoding the chunk finds out. The comma
# is optional because some writers have lost it. Possessive, so that long runs of spaces cost linear time.
_BOUNDARY = re.compile(
    rb"\}" + _WS + rb",?+" + _WS + rb'(?=\{' + _WS + rb'"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp|cname|tts|tdur)"'
    + _WS + rb":)"
)  # fmt: skip
_ARRAY_START = re.compile(rb'"traceEvents"' + _WS + rb":" + _WS + rb"\[")
_ARRAY_START_MAX_BYTES = 4 << 10  # including spaces
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_TOP_LEVEL_TOKEN = re.compile(rb"[^ \t\r\n,{}\[\]\"]++|[{\[]|[}\]]++|" + _STRING + rb'|"', re.DOTALL)
_NEXT_BRACKETS = re.compile(rb'(?:[^"{}\[\]]++|' + _STRING + rb")*+([{\[]++|[}\]]++)?", re.DOTALL)
_AFTER_ARRAY = re.compile(_WS + rb"(?:\}|\Z|," + _WS + rb'(?:"|\Z))')
_SEPARATORS = b" \t\r\n,"


class HasPhase(Protocol):
    ph: Any


E = TypeVar("E", bound=HasPhase)
T = TypeVar("T")


class _Tolerated(NamedTuple, Generic[E]):
    events: list[E]
    consumed_bytes: int
    closed: bool  # the array ended at consumed_bytes


class EventArray(Generic[E]):
    """Lists of decoded events from one file; once they are exhausted, ``header`` holds every other top-level field.

    Raises WhatifError while iterating if the file holds no array of trace events.
    """

    def __init__(
        self,
        file: FileBytes,
        event_type: type[E],
        dropped: Counter[str],
        take: Callable[[bytes], tuple[int, bool]] | None = None,
    ) -> None:
        """``take`` removes events from the front of a text: see ``ScannedColumns.take``."""
        self._take = take
        self.header: dict[str, Any] = {}
        self._file = file
        self._dropped = dropped
        self.ends_early_at: int | None = None  # bytes on the disk, where the file was cut; known at the end
        self._pieces = iter(file)
        self._decode_one = msgspec.json.Decoder(event_type)
        self._decode_list = msgspec.json.Decoder(list[event_type])  # type: ignore[valid-type]

    def __iter__(self) -> Iterator[list[E]]:
        head, buffer = self._find_array()
        tail = yield from self._chunks(buffer)
        if head is not None:
            self.header = self._decode_header(head, tail)
        if self._file.is_cut:
            self.ends_early_at = self._file.size_bytes

    # --- before the array

    def _find_array(self) -> tuple[bytes | None, bytes]:
        """Read up to the array: returns what precedes it (None for a bare array) and what has been read of it."""
        path = self._file.path
        text = b""
        for piece in self._pieces:
            text = (text + piece).removeprefix(b"\xef\xbb\xbf").lstrip()
            if text[1:].strip():
                break
            text = text[:1]  # so that a file of blanks takes no memory
        size_bytes = self._file.size_bytes
        if not size_bytes or (text == GZIP_MAGIC[:1] and size_bytes == 1):
            self._file.is_cut = True
            self._refuse_a_cut_file()
        if not text:
            self._refuse_a_cut_file()
            got = "only blanks" if self._file.damage is None else self._file.damage
            raise WhatifError(f"{path}: expected a JSON trace, got {got}; record or copy the trace again")
        if text.startswith(b"["):
            inside = text[1:].lstrip()
            if inside and inside[:1] not in b"{]":
                raise WhatifError(
                    f"{path}: expected a JSON array of trace events, got '[{_excerpt(inside)}'; "
                    "give the .json or .json.gz file that the PyTorch profiler wrote"
                )
            return None, text[1:]
        if not text.startswith(b"{"):
            raise WhatifError(
                f"{path}: expected JSON (beginning with '{{' or '['), got '{_excerpt(text)}'; "
                "give the .json or .json.gz file that the PyTorch profiler wrote"
            )
        return self._find_array_in_object(text)

    def _find_array_in_object(self, text: bytes) -> tuple[bytes, bytes]:
        searched_bytes = 0
        while (start := _ARRAY_START.search(text, max(0, searched_bytes - _ARRAY_START_MAX_BYTES))) is None:
            searched_bytes = len(text)
            if searched_bytes > _MAX_HEADER_BYTES:
                text = text[-_ARRAY_START_MAX_BYTES:]
            piece = next(self._pieces, None)
            if piece is None:
                if searched_bytes <= _MAX_HEADER_BYTES and _is_cut(text):
                    self._file.is_cut = True
                self._refuse_a_cut_file()
                raise WhatifError(
                    f"{self._file.path}: expected a 'traceEvents' array, got a JSON object without one"
                    f"{'' if self._file.damage is None else f' ({self._file.damage})'}; "
                    "give the .json or .json.gz file that the PyTorch profiler wrote"
                )
            text += piece
        return text[: start.start()], text[start.end() :]

    def _refuse_a_cut_file(self) -> None:
        size_bytes = self._file.size_bytes
        if self._file.is_cut:
            got = "before its first event" if size_bytes else "got an empty file"
            raise WhatifError(
                f"{self._file.path}: {ends_early(size_bytes)}, {got}; expected a JSON trace: record or copy it again."
            )

    # --- the array

    def _note_end(self) -> None:
        """Count the event at which the file ended, inside the array."""
        if self._file.damage is None:
            self._file.is_cut = True
        self._dropped[self._file.damage or ends_early(self._file.size_bytes)] += 1

    def _chunks(self, buffer: bytes) -> Generator[list[E], None, bytes]:
        """Yield the events chunk by chunk; return what follows the array."""
        wanted_bytes, window_bytes = CHUNK_BYTES, _WINDOW_BYTES
        while True:
            buffer, exhausted = self._fill(buffer, wanted_bytes)
            if self._take is not None:
                taken_bytes, is_odd = self._take(buffer)
                buffer = buffer[taken_bytes:]
                if taken_bytes and not is_odd and not exhausted:
                    wanted_bytes = CHUNK_BYTES
                    continue
                # Decode what the scanner cannot read, a little at first: it may read the events after it.
                window_bytes = _WINDOW_BYTES if taken_bytes > window_bytes else 2 * window_bytes
                window = buffer[:window_bytes]
                cut = _last_boundary(window) if len(window) < len(buffer) else None
                events = decoded(self._decode_list, b"[" + window[: cut.start() + 1] + b"]") if cut else None
                if cut is not None and events is not None:
                    yield events
                    buffer = buffer[cut.end() :]
                    continue
            cut = _last_boundary(buffer)
            chunk = b"[" + buffer[: cut.start() + 1] + b"]" if cut else b""
            if cut is not None and (events := decoded(self._decode_list, chunk)) is not None:
                yield events
                buffer = buffer[cut.end() :]
                wanted_bytes = CHUNK_BYTES
                continue
            result = self._tolerate(buffer, exhausted)
            yield result.events
            buffer = buffer[result.consumed_bytes :]
            if result.closed:
                tail = self._tail(buffer)  # which may end early as well
                if self._file.damage is not None:
                    self._dropped[self._file.damage] += 1
                return tail
            if exhausted:
                self._note_end()
                return b""
            if len(buffer) > MAX_EVENT_BYTES:
                self._dropped[TOO_LONG] += 1
                buffer = self._skip_to_boundary(buffer)
            # Twice as much each time, so that scanning a long event again and again stays linear.
            wanted_bytes = max(CHUNK_BYTES, 2 * len(buffer))

    def _fill(self, buffer: bytes, wanted_bytes: int) -> tuple[bytes, bool]:
        """Append pieces up to the wanted size, without leading separators; return it and whether the file ended."""
        parts = [buffer.lstrip(_SEPARATORS)]
        size_bytes = len(parts[0])
        while size_bytes < wanted_bytes:
            piece = next(self._pieces, None)
            if piece is None:
                return b"".join(parts), True
            if size_bytes == 0:
                piece = piece.lstrip(_SEPARATORS)
            parts.append(piece)
            size_bytes += len(piece)
        return b"".join(parts), False

    def _tolerate(self, buffer: bytes, final: bool) -> _Tolerated[E]:
        """Decode event by event what does not decode as a whole, in linear time.

        The buffer is cut at every boundary. A piece that is not an event by itself is taken together with the pieces
        up to the next one that is an object with a phase: either they are one event with nested objects, or damage.
        """
        events: list[E] = []
        starts, ends = array("q", [0]), array("q")
        for boundary in _BOUNDARY.finditer(buffer):
            ends.append(boundary.start() + 1)
            starts.append(boundary.end())
        ends.append(len(buffer))
        index = 0
        while index < len(starts):
            event = decoded(self._decode_one, buffer[starts[index] : ends[index]])
            if event is not None:
                events.append(event)
                index += 1
                continue
            after = index + 1
            while after < len(starts):
                event = decoded(self._decode_one, buffer[starts[after] : ends[after]])
                if event is not None and isinstance(event.ph, str):
                    break
                after += 1
            is_last = after == len(starts)
            region = self._split(buffer[starts[index] : ends[after - 1]], may_close=is_last)
            events += region.events
            consumed_bytes = starts[index] + region.consumed_bytes
            if region.closed:
                return _Tolerated(events, consumed_bytes, True)
            lost = buffer[consumed_bytes : ends[after - 1]].strip(_SEPARATORS)
            if is_last and lost and not final:
                return _Tolerated(events, consumed_bytes, False)
            if lost:
                n_lost = sum(
                    b'"ph"' in buffer[starts[i] : ends[i]] for i in range(index, after) if ends[i] > consumed_bytes
                )
                n_lost = n_lost - 1 if is_last else max(n_lost, 1)  # the last one in the file is counted as truncated
                if n_lost > 0:
                    self._dropped[INVALID_JSON] += n_lost
            index = after
        return _Tolerated(events, len(buffer), False)

    def _split(self, region: bytes, may_close: bool) -> _Tolerated[E]:
        """Split what should be events and separators at brackets of depth 0 that are not in strings, and decode each.

        Stops before an element that does not end in the region, or after the bracket that ends the array.
        """
        events: list[E] = []
        position = 0
        in_junk = False
        while (token := _TOP_LEVEL_TOKEN.search(region, position)) is not None:
            opener = token.group()
            if opener == b'"':
                return _Tolerated(events, token.start(), False)
            if opener[:1] == b"]" and may_close and _AFTER_ARRAY.match(region, token.start() + 1):
                return _Tolerated(events, token.start() + 1, True)
            position = token.end()
            if opener in (b"{", b"["):
                end = _end_of_element(region, token.start())
                if end is None:
                    return _Tolerated(events, token.start(), False)
                position = end
                event = decoded(self._decode_one, region[token.start() : end])
                if event is not None:
                    events.append(event)
                    in_junk = in_junk and not isinstance(event.ph, str)
                    continue
            if not in_junk:  # what lies between two events is likely to have been one
                self._dropped[INVALID_JSON] += 1
                in_junk = True
        return _Tolerated(events, len(region), False)

    def _skip_to_boundary(self, buffer: bytes) -> bytes:
        """Drop a buffer in which no further event begins, and what follows up to the next boundary."""
        while True:
            boundary = _last_boundary(buffer)
            if boundary is not None:
                return buffer[boundary.end() :]
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            buffer = buffer[-_ARRAY_START_MAX_BYTES:] + piece

    # --- after the array

    def _tail(self, buffer: bytes) -> bytes:
        parts = [buffer]
        size_bytes = len(buffer)
        for piece in self._pieces:  # read to the end, where the gzip checksum is, even if it is not kept
            if size_bytes <= _MAX_HEADER_BYTES:
                parts.append(piece)
                size_bytes += len(piece)
        return b"".join(parts) if size_bytes <= _MAX_HEADER_BYTES else b""

    def _decode_header(self, head: bytes, tail: bytes) -> dict[str, Any]:
        header = decoded(_OBJECT, head + b'"traceEvents":0' + tail)
        if header is None:
            # Truncated or damaged: either half may still be sound.
            if self._file.damage is None and not self._file.is_cut and _is_cut(head + b'"traceEvents":0' + tail):
                self._file.is_cut = True
            before = decoded(_OBJECT, head.rstrip(_SEPARATORS) + b"}")
            after = decoded(_OBJECT, b"{" + tail.lstrip(_SEPARATORS)) if tail else {}
            if before is None or after is None:
                self._dropped["damaged header"] += 1
            header = (before or {}) | (after or {})
        header.pop("traceEvents", None)
        return header


_OBJECT = msgspec.json.Decoder(dict[str, Any])


def _is_cut(text: bytes) -> bool:
    """Whether a JSON object is valid up to its end, and stops before its last bracket."""
    try:
        _OBJECT.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return "truncated" in str(error)
    return False


def decoded(decoder: msgspec.json.Decoder[T], text: bytes) -> T | None:
    """Return the decoded text, or None if it is damaged."""
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def of_short_texts(most: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a function of texts: the results of the ``most`` latest short ones are kept.

    The ranks of a run repeat the same texts: what they mean is kept for the next recording.
    """

    def decorated(compute: Callable[..., T]) -> Callable[..., T]:
        cached = lru_cache(most)(compute)

        @wraps(compute)
        def kept(*texts: bytes) -> T:
            return cached(*texts) if sum(map(len, texts)) < _SHORT_BYTES else compute(*texts)

        return kept

    return decorated


def _last_boundary(buffer: bytes) -> re.Match[bytes] | None:
    # A deque of one keeps the last.
    near_end = deque(_BOUNDARY.finditer(buffer, max(0, len(buffer) - _CUT_WINDOW_BYTES)), 1)
    last = near_end or deque(_BOUNDARY.finditer(buffer), 1)
    return last[0] if last else None


def _end_of_element(region: bytes, start: int) -> int | None:
    """Find the end of the object or array that begins at ``start``; None if it does not end in the region."""
    depth = 0
    position = start
    while (brackets := _NEXT_BRACKETS.match(region, position)) is not None and (run := brackets.group(1)):
        if run[:1] in b"{[":
            depth += len(run)
        elif len(run) >= depth:
            return brackets.start(1) + depth
        else:
            depth -= len(run)
        position = brackets.end()
    return None


def _excerpt(text: bytes) -> str:
    return text[:16].decode("utf-8", "replace").encode("unicode_escape").decode("ascii")
