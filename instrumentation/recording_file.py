"""Writes a recording: the profiler's events and what was measured beside them, in one file, whole or not at all."""

import gzip
import io
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

from whatif.errors import WhatifError
from whatif.output_file import output_file

# They name the machine and the user's folders, and no reader needs them.
_PRIVATE_KEYS = ("host_name", "traceName")

_STEP_MARK = re.compile(r"ProfilerStep#(\d+)")


# What `_encode` begins every recording with.
_FIRST_BYTES = b'{"whatif":'
_GZIP_MAGIC = b"\x1f\x8b"


def check_writable(path: Path) -> Path:
    """Return the file that `path` stands for: known before the run, not after it, to be one that can be written.

    Raises WhatifError where it cannot, or where something that is no recording would be lost.
    """
    target = output_file(path)
    if target.exists() and not _may_be_replaced(target):
        raise WhatifError(
            f"{path}: expected a new file or an older recording to replace, got another file: name another or remove it"
            " first."
        )
    return target


def _may_be_replaced(path: Path) -> bool:
    """Whether the file is empty or a recording by its first bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_FIRST_BYTES))
        if start.startswith(_GZIP_MAGIC):
            with gzip.open(path) as unpacked:
                start = unpacked.read(len(_FIRST_BYTES))
    except (OSError, EOFError, zlib.error):  # Unreadable or damaged: nobody can tell what would be lost.
        return False
    return start in (b"", _FIRST_BYTES)


def write_recording(profiler: Any, path: Path, metadata: dict[str, Any], whole_steps: int) -> None:
    """Write the stopped profiler's events and the metadata to `path`, compressed if it ends in `.gz`.

    Step marks after the first `whole_steps` are dropped: a run that ends early leaves the mark of a step cut short.
    Raises WhatifError when the profiler's own file cannot be read or the recording cannot be written.
    """
    target = output_file(path)
    raw = target.with_name(f".{target.name}.{os.getpid()}.raw.json")
    finished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        profiler.export_chrome_trace(str(raw))
        trace = _read_trace(raw)
        for key in _PRIVATE_KEYS:
            trace.pop(key, None)
        trace["traceEvents"] = _drop_partial_steps(trace["traceEvents"], whole_steps)
        finished.write_bytes(_encode({"whatif": metadata, **trace}, compress=path.suffix == ".gz"))
        os.replace(finished, target)
    except OSError as error:
        raise WhatifError(
            f"{path}: expected to write the recording, got {error.strerror}: free some space or choose another folder."
        ) from error
    finally:
        raw.unlink(missing_ok=True)
        finished.unlink(missing_ok=True)


def _read_trace(raw: Path) -> dict[str, Any]:
    try:
        # Names come from the user's program: they may hold bytes that are no text and control characters.
        trace = json.loads(raw.read_text(encoding="utf-8", errors="replace"), strict=False)
    except ValueError as error:
        raise WhatifError(
            f"expected valid JSON from torch.profiler, got {error}: record again with fewer steps, or another torch."
        ) from error
    assert isinstance(trace, dict)
    return trace


def _drop_partial_steps(events: list[dict[str, Any]], whole_steps: int) -> list[dict[str, Any]]:
    numbers = [_step_number(event) for event in events]
    whole = set(sorted({number for number in numbers if number is not None})[:whole_steps])
    return [event for event, number in zip(events, numbers, strict=True) if number is None or number in whole]


def _step_number(event: dict[str, Any]) -> int | None:
    match = _STEP_MARK.fullmatch(str(event.get("name", "")))
    return int(match[1]) if match else None


def _encode(recording: dict[str, Any], compress: bool) -> bytes:
    text = json.dumps(recording, separators=(",", ":")).encode()
    if not compress:
        return text
    buffer = io.BytesIO()
    # No name and no time in the header: the same recording gives the same bytes.
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as file:
        file.write(text)
    return buffer.getvalue()
