"""Keeps a recording within a size by keeping fewer of its steps."""

from pathlib import Path

from whatif.instrumentation.recorder import FEWEST_STEPS
from whatif.instrumentation.recording_file import read_recording, rewrite_recording
from whatif.instrumentation.whole_steps import keep_whole_steps


def trim(path: Path, limit_bytes: int) -> int:
    """Cut the recording's last steps until the file has at most `limit_bytes`; return how many steps it holds.

    At least three steps stay, even where they are larger than the limit. Raises WhatifError for what is no recording.
    """
    recording, compressed = read_recording(path)
    steps: int = sum(
        event.get("cat") == "user_annotation" and str(event.get("name")).startswith("ProfilerStep#")
        for event in recording["traceEvents"]
    )
    packed_bytes = path.stat().st_size
    while packed_bytes > limit_bytes and steps > FEWEST_STEPS:
        steps = max(FEWEST_STEPS, min(steps - 1, int(steps * limit_bytes / packed_bytes)))
        recording["traceEvents"] = keep_whole_steps(recording["traceEvents"], 0, steps)
        rewrite_recording(recording, path, compress=compressed)
        packed_bytes = path.stat().st_size
    return steps
