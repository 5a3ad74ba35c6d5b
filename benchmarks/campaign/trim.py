"""Trim a recording to a size by removing its last steps."""

from pathlib import Path

from whatif.instrumentation.recorder import FEWEST_STEPS
from whatif.instrumentation.recording_file import read_recording, rewrite_recording
from whatif.instrumentation.whole_steps import keep_whole_steps


def trim(path: Path, limit_bytes: int) -> int:
    """Remove the recording's last steps until the file has at most `limit_bytes`; return the number of remaining steps.

    At least three steps stay, even if they exceed the limit. Raises WhatifError if the file is not a recording.
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
