"""Keeps a recording within a size by keeping fewer of its steps."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

# Readers drop the first step, and a median needs two more.
FEWEST_STEPS = 3

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync"})


def trim(path: Path, limit_bytes: int) -> int:
    """Cut the recording's last steps until the file has at most `limit_bytes`; return how many steps it holds.

    At least three steps stay, even where they are larger than the limit.
    """
    recording = json.loads(gzip.decompress(path.read_bytes()))
    steps = len(_step_ends_us(recording["traceEvents"]))
    packed_bytes = path.stat().st_size
    while packed_bytes > limit_bytes and steps > FEWEST_STEPS:
        steps = max(FEWEST_STEPS, min(steps - 1, int(steps * limit_bytes / packed_bytes)))
        recording["traceEvents"] = first_steps(recording["traceEvents"], steps)
        packed_bytes = _write(path, recording)
    return steps


def first_steps(events: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """The events of the first `steps` steps: on the host by their start, on the device by what launched them."""
    end_us = _step_ends_us(events)[steps - 1]
    later = {
        _correlation(event)
        for event in events
        if event.get("cat") not in _ON_DEVICE and event.get("ph") == "X" and event["ts"] >= end_us
    }
    later.discard(None)
    kept, flows = [], set()
    for event in events:
        if event.get("ph") == "f" or not _belongs(event, end_us, later):
            continue
        kept.append(event)
        if event.get("ph") == "s":
            flows.add((event.get("cat"), event.get("id")))
    # An arrow's end follows its beginning, wherever that lies.
    kept += [event for event in events if event.get("ph") == "f" and (event.get("cat"), event.get("id")) in flows]
    return kept


def _belongs(event: dict[str, Any], end_us: float, later: set[Any]) -> bool:
    if event.get("ph") == "M" or "ts" not in event:
        return True
    if event.get("cat") in _ON_DEVICE and _correlation(event) is not None:
        return _correlation(event) not in later
    return bool(event["ts"] < end_us)


def _correlation(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _step_ends_us(events: list[dict[str, Any]]) -> list[float]:
    marks = (
        event
        for event in events
        if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith("ProfilerStep#")
    )
    return sorted(event["ts"] + event["dur"] for event in marks)


def _write(path: Path, recording: dict[str, Any]) -> int:
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as file:
        file.write(json.dumps(recording, separators=(",", ":")).encode())
    path.write_bytes(buffer.getvalue())
    return len(buffer.getvalue())
