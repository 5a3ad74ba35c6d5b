"""The record of a run, which a campaign writes beside its recordings as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from whatif.runtime.errors import WhatifError
from whatif.runtime.files import read_at_most

# A record holds times, a table of layers and no events; what is larger is another file.
MAX_RECORD_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file that may be a record; None if it cannot be one (damaged, too large, a trace)."""
    try:
        found = msgspec.json.decode(read_at_most(path, MAX_RECORD_BYTES))
    except (WhatifError, OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) and "traceEvents" not in found else None


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the record of a run in a JSON file, unchanged; None if the file is no record."""
    found = read_json(path)
    return None if found is None else as_record(found)


def as_record(found: dict[str, Any]) -> dict[str, Any] | None:
    """Return the JSON object if it is the record of a run, else None."""
    named = all(isinstance(found.get(key), str) for key in ("model", "variant"))
    return found if named and ("status" in found or "median_ms" in found) else None
