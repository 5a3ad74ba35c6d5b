"""Tables of operators by family, from descriptions of single operators, and their times as rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from whatif.graph.described import FAMILIES, Described
from whatif.graph.types import Int64
from whatif.opdb.rows import Operators, Rows, measurements, operators


class Timed(Struct, frozen=True):
    """An operator and its time, seconds; the range holds 10 to 90 % of the repeats, NaN if unknown."""

    operator: Described
    t_s: float
    t_low_s: float = float("nan")
    t_high_s: float = float("nan")
    repeats: int = 0
    kernels: str = ""


def operators_of(table: Sequence[Described]) -> list[tuple[Int64, Operators]]:
    """Return the operators of each family that occurs: positions in ``table``, and operators, shape (n,) both."""
    by_family: dict[str, list[int]] = {}
    for place, operator in enumerate(table):
        by_family.setdefault(operator.family, []).append(place)
    found = []
    for family in sorted(by_family, key=list(FAMILIES).index):
        rows = [table[place] for place in by_family[family]]
        integers_by_row = [dict(row.integers) for row in rows]
        ops = operators(
            family, {name: [integers[name] for integers in integers_by_row] for name in FAMILIES[family].attributes},
            name=[row.name for row in rows], dtype=[row.dtype for row in rows], phase=[row.phase for row in rows],
            layout=[row.layout for row in rows],
        )  # fmt: skip
        found.append((np.array(by_family[family], dtype=np.int64), ops))
    return found


def rows_of(timed: Sequence[Timed]) -> list[Rows]:
    """Return the rows of each family that occurs."""
    found = []
    for places, ops in operators_of([t.operator for t in timed]):
        part = [timed[place] for place in places.tolist()]
        found.append(
            measurements(
                ops, [t.t_s for t in part], t_low_s=[t.t_low_s for t in part], t_high_s=[t.t_high_s for t in part],
                repeats=[t.repeats for t in part], kernels=[t.kernels for t in part],
            )
        )  # fmt: skip
    return found
