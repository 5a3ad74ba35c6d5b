"""The report of ``whatif opdb profile``, as text or as one JSON object."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from whatif.report.layout import report
from whatif.units import counted


def profiled_dict(done: Any, device: str, folder: Path) -> dict[str, Any]:
    """Return the measurements as a JSON object; ``done`` is the result of ``whatif.instrumentation.profile_ops``."""
    return {
        "database": str(folder), "device": device, "measured": done.measured, "known": done.present,
        "left_out": dict(sorted(done.left_out.items())), "half_width_pct": _half_width_pct(done),
        "interrupted": done.interrupted, **done.merged.to_dict(),
    }  # fmt: skip


def print_profiled(done: Any, device: str, folder: Path) -> None:
    """Print the measurements."""
    half_width_pct = _half_width_pct(done)
    with report() as out:
        known = f", {done.present:,} known" if done.present else ""
        out.say(f"{folder}: {counted(done.measured, 'operator')} measured on {device}{known}", "bold")
        if half_width_pct is not None:
            out.say(f"Median half-width of the 90 % intervals: {half_width_pct:.1f} %.")
        if done.interrupted:
            out.say("Interrupted: measurements are kept; run the same command to continue.")


def _half_width_pct(done: Any) -> float | None:
    narrow = [100 * width for width in done.half_widths if math.isfinite(width)]
    return statistics.median(narrow) if narrow else None
