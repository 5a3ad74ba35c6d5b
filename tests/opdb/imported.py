"""Reads back what an importer found."""

from __future__ import annotations

from typing import Any

from whatif.opdb.importers.found import Found


def told(found: Found) -> list[dict[str, Any]]:
    """Every row of what was found, as a person reads it."""
    return [
        {**rows.ops.described(n), "t_us": round(float(rows.t_s[n]) * 1e6, 6), "device": where.device.name}
        for rows, where in found.contributions
        for n in range(len(rows))
    ]
