"""Several transforms, left to right: one graph, one schedule, and what each of them contributes to the gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from whatif.baseline import Baseline
from whatif.errors import WhatifError
from whatif.graph import TaskGraph
from whatif.sharing import USES
from whatif.simulator import Schedule, simulate
from whatif.steps import step_ns
from whatif.transform import Transform


def compose(graph: TaskGraph, transforms: Sequence[Transform]) -> TaskGraph:
    """Give the checked graph under all transforms. Raises WhatifError where one does not apply or breaks the graph."""
    for transform in transforms:
        graph = transform(graph).check()
    return graph


def single_schedule(transforms: Sequence[Transform]) -> Schedule | None:
    """Give the one schedule override of a composition, if any. Raises WhatifError where two transforms have one."""
    overriding = [t for t in transforms if t.schedule is not None]
    if len(overriding) > 1:
        names = " and ".join(repr(t.name) for t in overriding)
        raise WhatifError(f"{names} both override the schedule; apply one of them at a time.")
    return overriding[0].schedule if overriding else None


def new_notes(before: TaskGraph, after: TaskGraph) -> tuple[str, ...]:
    """Give what transforms said on the way from one graph to the other."""
    return tuple(note for note in after.notes if note not in before.notes)


def spelled(transform: Transform) -> str:
    """Give how a transform and its options are written on a command line: ``amp:target=bf16``."""
    options = ",".join(f"{key}={_text(value)}" for key, value in transform.options.items())
    return f"{transform.name}:{options}" if options else transform.name


def _text(value: object) -> str:
    """An option's value as one would type it: 2 for 2.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


# What of a graph may differ without any effect on its timeline.
_BESIDE_THE_TIMELINE = {"info", "attached", "notes"}


def is_unchanged(before: TaskGraph, after: TaskGraph) -> bool:
    """Whether a transform left the tasks and what they wait for as they were; notes and facts may differ."""
    columns = {field.name for field in fields(TaskGraph)} - _BESIDE_THE_TIMELINE
    same_queue = before.info.queue_depth == after.info.queue_depth
    same_uses = before.attached.get(USES) is after.attached.get(USES)  # tasks that share something slow one another
    return same_queue and same_uses and all(getattr(before, column) is getattr(after, column) for column in columns)


def is_without_effect(before: TaskGraph, after: TaskGraph, schedule: Schedule | None) -> bool:
    """Whether the timeline stays as it was: nothing changed, and no schedule to run the same tasks in another order.

    A script that says that nothing changes has attached nothing for its schedule either.
    """
    if not is_unchanged(before, after):
        return False
    new = after.notes[len(before.notes) :]
    return schedule is None or bool(new and new[-1].endswith("nothing changes"))


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one transform takes off the step, ms: above zero is faster."""

    alone_ms: float | None  # as the only one; None where it does not apply alone
    added_ms: float  # beside those before it
    reason: str = ""  # why it does not apply alone

    def to_dict(self) -> dict[str, float | str | None]:
        """Give the contribution as a JSON object."""
        return {"alone_ms": self.alone_ms, "added_ms": self.added_ms, "reason": self.reason or None}


@dataclass(frozen=True, slots=True)
class Composition:
    """What each transform of a composition contributes, in its order, and what all of them take off the step, ms."""

    contributions: tuple[Contribution, ...]
    together_ms: float

    @property
    def interaction_ms(self) -> float | None:
        """What the gains alone add up to beyond the gain together, ms; None where one does not apply alone.

        Above zero the transforms save the same time; below zero one of them opens the way for another.
        """
        alone_ms = [part.alone_ms for part in self.contributions if part.alone_ms is not None]
        return sum(alone_ms) - self.together_ms if len(alone_ms) == len(self.contributions) else None


def contributions(baseline: Baseline, transforms: Sequence[Transform], predicted_ns: float) -> Composition:
    """Give what each of ``transforms`` contributes to the ``predicted_ns`` of all of them.

    Simulates once each beginning of the list and each transform alone, as far as these are not known yet: two
    simulations for each transform beyond the first.
    """
    steps_ns = [baseline.step_ns]
    graph = baseline.graph
    for count in range(1, len(transforms)):
        changed = transforms[count - 1](graph).check()
        same = is_without_effect(graph, changed, transforms[count - 1].schedule)
        steps_ns.append(steps_ns[-1] if same else _step_ns(baseline, changed, transforms[:count]))
        graph = changed
    steps_ns.append(predicted_ns)
    parts = []
    for place, transform in enumerate(transforms):
        added_ms = (steps_ns[place] - steps_ns[place + 1]) / 1e6
        if place == 0:
            parts.append(Contribution(added_ms, added_ms))
            continue
        try:
            alone_ns = _step_ns(baseline, compose(baseline.graph, [transform]), [transform])
            parts.append(Contribution((baseline.step_ns - alone_ns) / 1e6, added_ms))
        except WhatifError as error:  # it may need what another one put there
            parts.append(Contribution(None, added_ms, str(error)))
    return Composition(tuple(parts), (baseline.step_ns - predicted_ns) / 1e6)


def _step_ns(baseline: Baseline, changed: TaskGraph, transforms: Sequence[Transform]) -> float:
    """The simulated step of a changed graph, ns."""
    schedule = single_schedule(transforms)
    if is_without_effect(baseline.graph, changed, schedule):
        return baseline.step_ns
    return step_ns(simulate(changed, schedule).step_times_ns(baseline.clock), changed, baseline.clock)
