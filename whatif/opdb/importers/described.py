"""Rows from operators that were described one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whatif.opdb.importers.torch_operators import Described
from whatif.opdb.rows import Rows, measurements, operators
from whatif.opdb.schema import FAMILIES


@dataclass(frozen=True)
class Timed:
    """An operator and its time, seconds; the range is that of 10 to 90 % of the repeats, NaN where unknown."""

    what: Described
    t_s: float
    t_low_s: float = float("nan")
    t_high_s: float = float("nan")
    repeats: int = 0
    kernels: str = ""


def rows_of(timed: Sequence[Timed]) -> list[Rows]:
    """Give the rows of each family that occurs."""
    found = []
    for family in FAMILIES:
        part = [t for t in timed if t.what.family == family]
        if not part:
            continue
        integers = {a: [dict(t.what.integers)[a] for t in part] for a in FAMILIES[family].attributes}
        ops = operators(
            family, integers, name=[t.what.name for t in part], dtype=[t.what.dtype for t in part],
            phase=[t.what.phase for t in part], layout=[t.what.layout for t in part],
        )  # fmt: skip
        found.append(
            measurements(
                ops, [t.t_s for t in part], t_low_s=[t.t_low_s for t in part], t_high_s=[t.t_high_s for t in part],
                repeats=[t.repeats for t in part], kernels=[t.kernels for t in part],
            )
        )  # fmt: skip
    return found
