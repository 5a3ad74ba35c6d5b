"""Measures operators missing from a database, if the hardware is available, and inserts them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from whatif.graph.described import Described
from whatif.opdb.rows import Operators, Rows
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError

from ..gpu import GPU
from .machine import Way, origin_of
from .profile import known_rows, profile, questions_of
from .visits import Question

_BUDGET_S = 60.0


@dataclass(frozen=True)
class Measured:
    """Rows measured or already present, counts of operators left out by reason, and names of missing operators."""

    rows: Rows
    left_out: Counter[str]
    missing: tuple[str, ...] = ()


def at_hand() -> dict[str, Way]:
    """Return the devices of this machine by their names in the database, each with the way it is measured.

    Inputs rotate over more memory than fits in caches, as in a step.
    """
    ways = [Way("cpu", threads, "cold", "chain_difference") for threads in sorted({1, torch.get_num_threads()})]
    if GPU.available():
        ways.append(Way("cuda", 1, "cold", "chain_difference"))
    return {origin_of(way).device.name: way for way in ways}


def measure(
    ops: Operators,
    device: str,
    *,
    database: str | Path | None = None,
    budget_s: float = _BUDGET_S,
    progress: Callable[[int, int], None] | None = None,
) -> Measured:
    """Measure operators of one family on a device of this machine, and insert them into ``database`` if given.

    Operators that the database has from the same environment are not measured again. Raises WhatifError if ``device``
    is not in ``at_hand()``.
    """
    ways = at_hand()
    if device not in ways:
        raise WhatifError(f"opdb: expected a device of this machine ({', '.join(ways)}), got {device!r}.")
    questions, left_out = questions_of(_described(ops))
    if database is None:
        with tempfile.TemporaryDirectory(prefix="whatif-opdb-") as folder:
            return _measure(Store.open(folder, create=True), ops, questions, ways[device], budget_s, left_out, progress)
    store = Store.open(database, create=True)
    return _measure(store, ops, questions, ways[device], budget_s, left_out, progress)


def _measure(
    store: Store, ops: Operators, questions: list[Question], way: Way, budget_s: float, left_out: Counter[str],
    progress: Callable[[int, int], None] | None,
) -> Measured:  # fmt: skip
    origin = origin_of(way)
    done = profile(store, questions, way, budget_s=budget_s, progress=progress)
    if done.interrupted:  # The measured times are kept; stop the caller too.
        raise KeyboardInterrupt
    rows = known_rows(store, origin, ops)
    present = set(rows.ops.keys.tolist())
    named = zip(_described(ops), ops.keys.tolist(), strict=True)
    missing = dict.fromkeys(operator.name.removeprefix("aten::") for operator, key in named if key not in present)
    return Measured(rows, left_out + done.left_out, tuple(missing))


def _described(ops: Operators) -> list[Described]:
    found = []
    for row in range(len(ops)):
        texts = {name: column.table[column.codes[row]] for name, column in ops.texts.items()}
        integers = tuple((name, int(column[row])) for name, column in ops.integers.items())
        found.append(Described(ops.family, texts["name"], texts["dtype"], integers, texts["phase"], texts["layout"]))
    return found
