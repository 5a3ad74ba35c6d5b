"""Which what-ifs two recordings themselves rule out or ask for, by what both tell of how they were made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whatif.graph import GraphInfo
from whatif.saved_graph import simulated


@dataclass(frozen=True, slots=True)
class ToldChanges:
    """Names of what-ifs: those that both recordings rule out, and groups of which a description has to have one.

    Where a side is a prediction ``only`` has its what-ifs: what it misses of a recording is no change.
    """

    ruled_out: frozenset[str]
    asked_for: tuple[frozenset[str], ...]
    only: frozenset[str] | None = None

    def allows(self, name: str) -> bool:
        """Whether a what-if of this name may have led from one to the other."""
        return name not in self.ruled_out and (self.only is None or name in self.only)

    def satisfied_by(self, names: frozenset[str]) -> bool:
        """Whether what-ifs of these names account for all that is told to differ."""
        return all(group & names for group in self.asked_for)


def told_changes(before: GraphInfo, after: GraphInfo) -> ToldChanges:
    """Give what the two tell: what is the same in both was not changed, and what differs has to be accounted for."""
    predicted = [str(simulated(info).get("what_ifs") or "") for info in (before, after)]
    if any(predicted):
        # What a prediction tells of itself is what its recording was, before the what-ifs.
        names = (part.partition(":")[0].strip() for text in predicted for part in text.split(" + "))
        return ToldChanges(frozenset(), (), frozenset(filter(None, names)))
    ruled_out: set[str] = set()
    asked_for: list[frozenset[str]] = []

    def fact(names: tuple[str, ...], told: tuple[Any, Any], asks: bool) -> None:
        if None in told:
            return
        if told[0] == told[1]:
            ruled_out.update(names)
        elif asks:
            asked_for.append(frozenset(names))

    sides = before, after
    fact(("batch_size",), (before.batch_size, after.batch_size), asks=True)
    fact(("amp",), _both(sides, "precision", ("autocast", "parameters")), asks=True)
    fact(("compile", "cuda_graph"), (before.execution, after.execution), asks=True)
    # A default means one thing on a GPU and another on a CPU, so what differs need not be a change.
    fact(("tf32",), _both(sides, "precision", ("matmul", "conv")), asks=False)
    fact(("fused_adam",), _both(sides, "optimizer", ("foreach", "fused")), asks=False)
    return ToldChanges(frozenset(ruled_out), tuple(asked_for))


def _both(sides: tuple[GraphInfo, GraphInfo], table: str, keys: tuple[str, ...]) -> tuple[Any, Any]:
    """What the recorder wrote under some keys of a table, for each side; None where it did not."""
    found: list[Any] = []
    for info in sides:
        told = info.metadata.get(table)
        tells_all = isinstance(told, dict) and all(key in told for key in keys)
        found.append([told[key] for key in keys] if told and tells_all else None)
    return found[0], found[1]
