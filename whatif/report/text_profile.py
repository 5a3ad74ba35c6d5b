"""The report of ``whatif opdb profile``, as text or as one JSON object."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from whatif.report.as_json import print_json
from whatif.report.layout import plain, report


def print_profiled(done: Any, device: str, folder: Path, *, as_json: bool) -> None:
    """Print what was measured; ``done`` is what ``whatif.instrumentation.profile_ops`` says of it."""
    narrow = sorted(100 * width for width in done.half_widths if math.isfinite(width))
    median = statistics.median(narrow) if narrow else None
    if as_json:
        print_json(
            {
                "database": str(folder), "device": device, "measured": done.measured, "known": done.present,
                "left_out": dict(sorted(done.left_out.items())), "half_width_pct": median,
                "interrupted": done.interrupted, **done.merged.to_dict(),
            }
        )  # fmt: skip
        return
    with report() as out:
        there = f", {done.present:,} were there" if done.present else ""
        out.print(plain(f"{folder}: {done.measured:,} operators measured on {device}{there}", "bold"))
        if median is not None:
            out.print(plain(f"Half of the 90 % interval of a time: {median:.1f} % in the median."))
        if done.interrupted:
            out.print("Interrupted: what was measured is kept, and the same command goes on.")
