"""Reads back what an importer found."""

from __future__ import annotations

from typing import Any

from whatif.opdb.importers.found import Found


def rows_of(found: Found) -> list[dict[str, Any]]:
    """Every imported row in readable form."""
    return [
        {**rows.ops.described(n), "t_us": round(float(rows.t_s[n]) * 1e6, 6), "device": where.device.name}
        for rows, where in found.contributions
        for n in range(len(rows))
    ]
