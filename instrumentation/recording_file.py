"""Reads and writes a recording: events and what was measured beside them, in one file, whole or not at all."""

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

# They name the machine and the user's folders, and no reader needs them.
_PRIVATE_KEYS = ("host_name", "traceName")

# What `_encode` begins every recording with.
_FIRST_BYTES = b'{"whatif":'


def check_writable(path: Path) -> Path:
    """Return the file that `path` names, checked before the run to be one that can be written.

    Raises WhatifError where it cannot, or where something that is no recording would be lost.
    """
    return replaceable_file(path, "recording", lambda start: start.startswith(_FIRST_BYTES))


def of_this_rank(path: Path) -> Path:
    """Return the path with this process's rank in the name where there are several: each writes its own file.

    `run.json.gz` becomes `run.rank3.json.gz`; a name that holds the rank already stays as it is.
    """
    rank = this_rank()
    if rank is None:
        return path
    if re.search(rf"rank[ _.-]?0*{rank}(?!\d)", path.name, re.IGNORECASE):
        return path
    name, dot, suffix = path.name.partition(".")
    return path.with_name(f"{name}.rank{rank}{dot}{suffix}")


def write_recording(trace: dict[str, Any], path: Path, metadata: dict[str, Any]) -> None:
    """Write a chrome trace object and the metadata to `path`, compressed if it ends in `.gz`.

    Raises WhatifError when the recording cannot be written.
    """
    public = {key: value for key, value in trace.items() if key not in _PRIVATE_KEYS}
    rewrite_recording({"whatif": metadata, **public}, path, compress=path.suffix == ".gz")


def rewrite_recording(recording: dict[str, Any], path: Path, *, compress: bool) -> None:
    """Write a recording that was read and changed; raises WhatifError when it cannot be written."""
    data = _encode(recording, compress)
    with replacing(path) as part:
        part.write_bytes(data)


def read_json(path: Path, what: str) -> tuple[Any, bool]:
    """Return the content of a JSON file, and whether it is compressed; raises WhatifError where it is not ``what``."""
    try:
        data = path.read_bytes()
        compressed = data.startswith(GZIP_MAGIC)
        return json.loads(gzip.decompress(data) if compressed else data), compressed
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        said = getattr(error, "strerror", None) or type(error).__name__
        raise WhatifError(f"{path}: expected {what}, got '{said}'.") from error


def read_recording(path: Path) -> tuple[dict[str, Any], bool]:
    """Return a recording, and whether its file is compressed; raises WhatifError for what is none."""
    recording, compressed = read_json(path, "a recording to read")
    if not isinstance(recording, dict) or not isinstance(recording.get("whatif"), dict):
        raise WhatifError(f"{path}: expected a recording of whatif collect, got another file: record the run with it.")
    return recording, compressed


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
    # No time in the header: the same recording gives the same bytes.
    return gzip.compress(text, mtime=0) if compress else text
