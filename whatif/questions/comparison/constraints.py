"""The what-ifs that two recordings rule out or require, by the facts that both record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from whatif.graph.info import GraphInfo
from whatif.graph.recorded import Optimizer, Precision
from whatif.prediction.transform import AXES, built_in_names, load_transform


class WhatIfConstraints(Struct, frozen=True):
    """Names of ruled-out what-ifs, and groups of names; a description needs at least one what-if of each group.

    If a recording is a prediction, ``only`` its what-ifs are allowed: its error against the other is no change.
    """

    ruled_out: frozenset[str]
    required: tuple[frozenset[str], ...]
    only: frozenset[str] | None = None

    def allows(self, name: str) -> bool:
        """Whether a what-if of this name may explain the change."""
        return name not in self.ruled_out and (self.only is None or name in self.only)

    def satisfied_by(self, names: frozenset[str]) -> bool:
        """Whether what-ifs of these names account for all recorded differences."""
        return all(group & names for group in self.required)


def constraints_between(before: GraphInfo, after: GraphInfo) -> WhatIfConstraints:
    """Return the constraints implied by facts: equal ones rule what-ifs out, and different ones require some."""
    predicted = [what_ifs_of(info) for info in (before, after)]
    if any(predicted):
        # The facts of a prediction are those of its recording, before the what-ifs.
        return WhatIfConstraints(frozenset(), (), frozenset().union(*map(_names, predicted)))
    ruled_out: set[str] = set()
    required: list[frozenset[str]] = []

    def fact(names: tuple[str, ...], values: tuple[Any, Any], requires: bool) -> None:
        if None in values:
            return
        if values[0] == values[1]:
            ruled_out.update(names)
        elif requires:
            required.append(frozenset(names))

    sides = before, after
    fact(("batch_size",), (before.batch_size, after.batch_size), requires=True)
    precisions, optimizers = ([getattr(info.recorded, table) for info in sides] for table in ("precision", "optimizer"))
    fact(("amp",), _both(precisions, ("autocast", "parameters")), requires=True)
    fact(("compile", "cuda_graph"), (before.execution, after.execution), requires=True)
    # Defaults mean different things on a GPU and a CPU, so a difference need not be a change.
    fact(("tf32",), _both(precisions, ("matmul", "conv")), requires=False)
    fact(("fused_adam",), _both(optimizers, ("foreach", "fused")), requires=False)
    return WhatIfConstraints(frozenset(ruled_out), tuple(required))


def what_ifs_of(info: GraphInfo) -> str:
    """Return the what-ifs of a predicted graph; "" for any other."""
    simulated = info.recorded.simulated
    return "" if simulated is None else simulated.what_ifs


def adds_workers(info: GraphInfo) -> bool:
    """Whether the what-ifs of a predicted graph may have changed the number of workers.

    A script that is not built in may have, by assumption: it is not loaded to find out.
    """
    first = AXES.index("pipeline")  # may run in copies; the axes before it keep the number of copies
    names, built_in = _names(what_ifs_of(info)), built_in_names()
    return any(name not in built_in or load_transform(name).axis >= first for name in names)


def _names(what_ifs: str) -> frozenset[str]:
    return frozenset(filter(None, (part.partition(":")[0].strip() for part in what_ifs.split(" + "))))


def _both(tables: Sequence[Precision | Optimizer | None], keys: tuple[str, ...]) -> tuple[Any, Any]:
    """The settings ``keys`` of the two sides; None for a side that does not record all of them."""
    one, other = (
        None if table is None or not table.present.issuperset(keys) else [getattr(table, key) for key in keys]
        for table in tables
    )
    return one, other
