"""Writes a recording: the tracer's events and what was measured beside them, in one file, whole or not at all."""

import gzip
import io
import json
import os
import zlib
from pathlib import Path
from typing import Any

from whatif.errors import WhatifError
from whatif.output_file import output_file

# They name the machine and the user's folders, and no reader needs them.
_PRIVATE_KEYS = ("host_name", "traceName")

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


def write_recording(trace: dict[str, Any], path: Path, metadata: dict[str, Any]) -> None:
    """Write a chrome trace object and the metadata to `path`, compressed if it ends in `.gz`.

    Raises WhatifError when the recording cannot be written.
    """
    target = output_file(path)
    finished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    public = {key: value for key, value in trace.items() if key not in _PRIVATE_KEYS}
    try:
        finished.write_bytes(_encode({"whatif": metadata, **public}, compress=path.suffix == ".gz"))
        os.replace(finished, target)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        finished.unlink(missing_ok=True)


def scratch_file(path: Path) -> Path:
    """Return where a tracer may put its own file while a recording is made: beside the recording, and hidden."""
    target = output_file(path)
    return target.with_name(f".{target.name}.{os.getpid()}.raw.json")


def cannot_write(path: Path, error: OSError) -> WhatifError:
    """Return the error that says why there is no recording."""
    return WhatifError(
        f"{path}: expected to write the recording, got {error.strerror}: free some space or choose another folder."
    )


def _encode(recording: dict[str, Any], compress: bool) -> bytes:
    text = json.dumps(recording, separators=(",", ":")).encode()
    if not compress:
        return text
    buffer = io.BytesIO()
    # No name and no time in the header: the same recording gives the same bytes.
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as file:
        file.write(text)
    return buffer.getvalue()
