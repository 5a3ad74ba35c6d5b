"""Reads and writes a recording: events and metadata in one file, which is written completely or not at all."""

import gzip
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

from whatif.runtime.errors import WhatifError
from whatif.runtime.files import GZIP_MAGIC, output_file, replaceable_file, replacing

from .messages import this_rank

# These identify the machine and the user's folders, and no reader needs them.
_PRIVATE_KEYS = ("host_name", "traceName")

# The first bytes of every recording (`_encode`).
_FIRST_BYTES = b'{"whatif":'


def check_writable(path: Path) -> Path:
    """Return the file to write for `path`, checked before the run.

    Raises WhatifError if it cannot be written, or if it exists and is not a recording.
    """
    return replaceable_file(path, "recording", lambda start: start.startswith(_FIRST_BYTES))


def of_this_rank(path: Path) -> Path:
    """Return the path with this process's rank in the name if there are several: each writes its own file.

    `run.json.gz` becomes `run.rank3.json.gz`; a name that already contains the rank is kept.
    """
    rank = this_rank()
    if rank is None:
        return path
    if re.search(rf"rank[ _.-]?0*{rank}(?!\d)", path.name, re.IGNORECASE):
        return path
    name, dot, suffix = path.name.partition(".")
    return path.with_name(f"{name}.rank{rank}{dot}{suffix}")


def write_recording(trace: dict[str, Any], path: Path, metadata: dict[str, Any]) -> None:
    """Write a Chrome trace object and the metadata to `path`, compressed if it ends in `.gz`.

    Raises WhatifError if the recording cannot be written.
    """
    public = {key: value for key, value in trace.items() if key not in _PRIVATE_KEYS}
    rewrite_recording({"whatif": metadata, **public}, path, compress=path.suffix == ".gz")


def rewrite_recording(recording: dict[str, Any], path: Path, *, compress: bool) -> None:
    """Write a recording that was read and changed; raises WhatifError if it cannot be written."""
    data = _encode(recording, compress)
    with replacing(path) as part:
        part.write_bytes(data)


def read_json(path: Path, expected: str) -> tuple[Any, bool]:
    """Return the content of a JSON file, and whether it is compressed; raises WhatifError if it is not ``expected``."""
    try:
        data = path.read_bytes()
        compressed = data.startswith(GZIP_MAGIC)
        return json.loads(gzip.decompress(data) if compressed else data), compressed
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise WhatifError(f"{path}: expected {expected}, got '{reason}'.") from error


def read_recording(path: Path) -> tuple[dict[str, Any], bool]:
    """Return a recording, and whether its file is compressed; raises WhatifError for other files."""
    recording, compressed = read_json(path, "a readable recording")
    if not isinstance(recording, dict) or not isinstance(recording.get("whatif"), dict):
        raise WhatifError(
            f"{path}: expected a recording of whatif collect, got another file: record the run with that command."
        )
    return recording, compressed


def scratch_file(path: Path) -> Path:
    """Return the path of a tracer's temporary file: hidden, beside the recording."""
    target = output_file(path)
    return target.with_name(f".{target.name}.{os.getpid()}.raw.json")


def cannot_write(path: Path, error: OSError) -> WhatifError:
    """Return the WhatifError for a recording that could not be written."""
    return WhatifError(
        f"{path}: expected to write the recording, got {error.strerror}: free some space or choose another folder."
    )


def _encode(recording: dict[str, Any], compress: bool) -> bytes:
    text = json.dumps(recording, separators=(",", ":")).encode()
    # No time in the header: the same recording gives the same bytes.
    return gzip.compress(text, mtime=0) if compress else text
