"""The parts of two steps side by side: matched by name, with those that are new, gone, renamed or changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from whatif.questions.explain import Part


class PartChange(Struct, frozen=True):
    """A layer, phase, kernel family or operation in two steps; None if a step does not have it. Times are ms."""

    before: Part | None
    after: Part | None

    @property
    def name(self) -> str:
        """Its name, that of A if the two differ."""
        part = self.before or self.after
        return part.name if part is not None else ""

    @property
    def renamed(self) -> str | None:
        """Its name in B if that is another one."""
        known = self.before is not None and self.after is not None
        return self.after.name if known and self.after and self.after.name != self.name else None

    @property
    def status(self) -> str:
        """``new`` (only in B), ``gone`` (only in A), ``renamed``, or ``both``."""
        if self.before is None or self.after is None:
            return "new" if self.before is None else "gone"
        return "renamed" if self.renamed else "both"

    def change(self, value: Callable[[Part], float]) -> float:
        """Return the growth of a value of the part, which is 0 in a step without it."""
        return (value(self.after) if self.after else 0.0) - (value(self.before) if self.before else 0.0)

    @property
    def work_change_ms(self) -> float:
        """The growth of CPU and GPU work together, ms."""
        return self.change(work_ms)

    def to_dict(self, key: str) -> dict[str, Any]:
        """Return the change as a JSON object, the part's name under ``key``."""

        def side(part: Part | None) -> dict[str, Any] | None:
            return {k: v for k, v in part.to_dict(key).items() if k != key} if part else None

        return {
            key: self.name,
            "status": self.status,
            **({"renamed": self.renamed} if self.renamed else {}),
            "a": side(self.before),
            "b": side(self.after),
            "change_gpu_ms": round(self.change(lambda part: part.gpu_ms), 6),
            "change_cpu_ms": round(self.change(lambda part: part.cpu_ms), 6),
            "change_tasks": round(self.change(lambda part: part.tasks), 3),
        }


def work_ms(part: Part) -> float:
    """Return the CPU and GPU time of a part, ms; overlapping work counts twice."""
    return part.gpu_ms + part.cpu_ms


def part_changes(
    before: Sequence[Part], after: Sequence[Part], same_name: Callable[[str], str] | None = None
) -> tuple[PartChange, ...]:
    """Match the parts of two steps by name, the largest change of work first.

    Parts without a match are matched by ``same_name`` of their names, if just one part on each side has it.
    """
    others = {part.name: part for part in after}
    found = [PartChange(part, others.pop(part.name)) for part in before if part.name in others]
    matched = {change.name for change in found}
    left = [part for part in before if part.name not in matched]
    if same_name is not None:
        by_name: dict[str, list[Part]] = {}
        for part in others.values():
            by_name.setdefault(same_name(part.name), []).append(part)
        keys = [same_name(part.name) for part in left]
        for part, key in zip(tuple(left), keys, strict=True):
            candidates = by_name.get(key, [])
            if len(candidates) == 1 and keys.count(key) == 1:
                found.append(PartChange(part, others.pop(candidates[0].name)))
                left.remove(part)
    found += [PartChange(part, None) for part in left] + [PartChange(None, part) for part in others.values()]
    return tuple(sorted(found, key=lambda change: (-abs(change.work_change_ms), change.name)))
