"""Check a database: read and verify every shard, and count the rows that are set aside."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from whatif.opdb.index import Index, index_of, read_contributions
from whatif.opdb.quarantine import Aside
from whatif.opdb.store import Store
from whatif.runtime.progress import Progress


class SetAside(Struct, frozen=True):
    """The rows of an operator on a device, and how many of them are set aside."""

    device: str
    operator: str
    rows: int
    impossible: int
    stray: int


class Check(Struct, frozen=True):
    """The state of a database: sound contributions, a message for each that is not, and the rows set aside."""

    contributions: int
    rows: int
    problems: tuple[str, ...]
    set_aside: tuple[SetAside, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def check(store: Store, *, progress: Progress | None = None) -> Check:
    """Read and verify every contribution, without using an index."""
    contributions, problems = read_contributions(store, progress)
    index = index_of(contributions, problems)
    return Check(len(index.contributions), len(index), index.warnings, tuple(_set_aside(index)))


def _set_aside(index: Index) -> list[SetAside]:
    counted: dict[tuple[str, str], np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    for family, rows in index.families.items():
        for group in index.groups[family]:
            counts = np.bincount(rows.aside[rows.rows_of(group.number)], minlength=len(Aside))
            place = (group.device, group.name)
            counted[place] = counted.get(place, np.zeros(len(Aside), dtype=np.int64)) + counts
    return [
        SetAside(device, name, int(c.sum()), int(c[Aside.IMPOSSIBLE]), int(c[Aside.STRAY]))
        for (device, name), c in sorted(counted.items())
        if c[1:].any()
    ]
