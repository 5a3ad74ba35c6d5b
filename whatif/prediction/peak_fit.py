"""Whether a step fits into a device's memory: its predicted peak decides, and the end of its range is a doubt."""

from __future__ import annotations

from collections.abc import Sequence

from whatif.graph.info import GraphInfo
from whatif.prediction.transform import AXES, Transform
from whatif.units import size

# Shapes miss copies that libraries make in other layouts. In 79 of the 81 runs in docs/memory.md the measured peak is
# at most this many times that from shapes, and in none clearly less. Chosen on these; two recordings of GPUs agree.
SHAPES_MISS = 1.06
# The same for steps shared by several devices: twelve published peaks of two sources (docs/published.md) lie within
# these times the predicted one. Chosen on them.
SHARED_MISS = (0.95, 1.08)


def peak_range_bytes(predicted_bytes: int, transforms: Sequence[Transform] = ()) -> tuple[int, int]:
    """Return the ends of the range of a peak that was predicted under ``transforms``, bytes."""
    shared = any(transform.axis >= 0 and AXES[transform.axis] != "passes" for transform in transforms)
    low, high = SHARED_MISS if shared else (1.0, SHAPES_MISS)
    return round(low * predicted_bytes), round(high * predicted_bytes)


def high_peak_bytes(recorded: GraphInfo, peak_bytes: int, transforms: Sequence[Transform] = ()) -> int:
    """Return the upper end of the range of a peak under ``transforms``: itself, if it is that of recorded allocations.

    ``recorded`` are the facts of the step before them.
    """
    allocated = recorded.memory is not None and recorded.memory.source == "allocations" and recorded.is_recorded
    if allocated and peak_bytes == recorded.peak_bytes:
        return peak_bytes
    return peak_range_bytes(peak_bytes, transforms)[1]


def fits(peak_bytes: int | None, high_bytes: int | None, capacity_bytes: int | None) -> bool | None:
    """Return whether a step fits, which its predicted peak decides; all sizes are in bytes.

    None if the peak fits but ``high_bytes``, the upper end of its range, does not (see ``doubt``), or if the peak or
    the capacity is unknown.
    """
    if peak_bytes is None or capacity_bytes is None:
        return None
    if peak_bytes > capacity_bytes:
        return False
    return None if high_bytes is not None and high_bytes > capacity_bytes else True


def doubt(high_bytes: int) -> str:
    """Return what to know of a peak that fits but has a range: its upper end, as a sentence without its period."""
    return f"The predicted peak fits; a run may need up to {size(high_bytes)} for tensors"


def doubt_of(label: str, peak_bytes: int | None, high_bytes: int | None, capacity_bytes: int | None) -> str:
    """Return the same of the step that ``label`` names, if the end of its range does not fit; else ""."""
    known = peak_bytes is not None and high_bytes is not None and capacity_bytes is not None
    if not known or fits(peak_bytes, high_bytes, capacity_bytes) is not None:
        return ""
    found = f"{doubt(high_bytes or 0)}, more than the device's {size(capacity_bytes or 0)}"
    return f"{label}: {found[:1].lower()}{found[1:]}"
