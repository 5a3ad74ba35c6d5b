"""Which what-ifs two recordings rule out or require, by the facts that both record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from whatif.graph.info import GraphInfo
from whatif.graph.recorded import Optimizer, Precision
from whatif.prediction.transform import AXES, built_in_names, load_transform


class WhatIfConstraints(Struct, frozen=True):
    """Names of what-ifs that are ruled out, and groups of which a description needs at least one what-if each.

    If a side is a prediction, ``only`` its what-ifs are allowed: its error against a recording is no change.
    """

    ruled_out: frozenset[str]
    asked_for: tuple[frozenset[str], ...]
    only: frozenset[str] | None = None

    def allows(self, name: str) -> bool:
        """Whether a what-if of this name may have led from one to the other."""
        return name not in self.ruled_out and (self.only is None or name in self.only)

    def satisfied_by(self, names: frozenset[str]) -> bool:
        """Whether what-ifs of these names account for all recorded differences."""
        return all(group & names for group in self.asked_for)


def constraints_between(before: GraphInfo, after: GraphInfo) -> WhatIfConstraints:
    """Return what the facts of the two imply: equal facts rule what-ifs out, and differences ask for some."""
    predicted = [what_ifs_of(info) for info in (before, after)]
    if any(predicted):
        # The facts of a prediction are those of its recording, before the what-ifs.
        return WhatIfConstraints(frozenset(), (), frozenset().union(*map(_names, predicted)))
    ruled_out: set[str] = set()
    asked_for: list[frozenset[str]] = []

    def fact(names: tuple[str, ...], values: tuple[Any, Any], asks: bool) -> None:
        if None in values:
            return
        if values[0] == values[1]:
            ruled_out.update(names)
        elif asks:
            asked_for.append(frozenset(names))

    sides = before, after
    fact(("batch_size",), (before.batch_size, after.batch_size), asks=True)
    precisions, optimizers = ([getattr(info.recorded, table) for info in sides] for table in ("precision", "optimizer"))
    fact(("amp",), _both(precisions, ("autocast", "parameters")), asks=True)
    fact(("compile", "cuda_graph"), (before.execution, after.execution), asks=True)
    # A default means one thing on a GPU and another on a CPU, so what differs need not be a change.
    fact(("tf32",), _both(precisions, ("matmul", "conv")), asks=False)
    fact(("fused_adam",), _both(optimizers, ("foreach", "fused")), asks=False)
    return WhatIfConstraints(frozenset(ruled_out), tuple(asked_for))


def what_ifs_of(info: GraphInfo) -> str:
    """Return the what-ifs of a graph that is a prediction; "" of any other."""
    simulated = info.recorded.simulated
    return "" if simulated is None else simulated.what_ifs


def adds_workers(info: GraphInfo) -> bool:
    """Whether the what-ifs of a graph that is a prediction may have changed the number of workers.

    A script that is not built in counts as one that may; it is not loaded to find out.
    """
    first = AXES.index("pipeline")  # which may run in copies; what lies before it keeps the number of copies
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
