"""The composition of transforms: their order, the one schedule, and the contribution of each to the gain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from whatif.graph.task_graph import TaskGraph
from whatif.models.kernels.whole_graphs import check_kernels_known
from whatif.prediction.baseline import Baseline
from whatif.prediction.transform import AXES, LATE, PLACES, WHOLE, Transform, built_in_names, load_transform
from whatif.runtime.errors import WhatifError
from whatif.simulation.sharing import USES
from whatif.simulation.simulator import ByPriority, Schedule, simulate


class Applied(Struct, frozen=True):
    """An applied transform: whether it changed anything, and its notes."""

    transform: Transform
    changed: bool  # the tasks, their dependencies or order, the memory of a step or its samples
    notes: tuple[str, ...] = ()

    @staticmethod
    def between(before: TaskGraph, after: TaskGraph, transform: Transform) -> Applied:
        """Compare the graphs before and after ``transform``.

        Raises WhatifError if it found nothing to change because kernels are not recorded.
        """
        reorders = transform.schedule is not None and len(after.declined) == len(before.declined)
        memory_or_samples = (before.info.memory, before.info.samples) != (after.info.memory, after.info.samples)
        changed = not is_unchanged(before, after) or reorders or memory_or_samples
        if not changed:
            check_kernels_known(before, transform.name)
        return Applied(transform, changed, new_notes(before, after))


# Graphs under the first transforms of compositions, with the effect of each, by how these are spelled.
Kept: TypeAlias = dict[tuple[str, ...], tuple[TaskGraph, tuple[Applied, ...]]]
_MOST_KEPT = 4  # a graph may take hundreds of megabytes


def applied_in_turn(
    graph: TaskGraph, transforms: Sequence[Transform], kept: Kept | None = None
) -> tuple[TaskGraph, tuple[Applied, ...]]:
    """Return the checked graph under all transforms, and the effect of each, in the order of ``in_order``.

    ``kept``: of earlier compositions of this graph, for those that begin alike; the latest are added. Raises
    WhatifError if one does not apply or breaks the graph.
    """
    ordered = in_order(transforms)
    begun: tuple[str, ...] = ()
    parts: tuple[Applied, ...] = ()
    copied = copied_pipeline(ordered)
    for place in range(len(ordered)):
        if place == copied:
            ordered = with_copies(ordered, place, graph)
        transform = ordered[place]
        begun = (*begun, spelled(transform))
        if kept is not None and begun in kept:
            graph, parts = kept[begun]
            continue
        changed = transform(graph).check()
        graph, parts = changed, (*parts, Applied.between(graph, changed, transform))
        if kept is not None and len(begun) < len(ordered):
            kept[begun] = graph, parts
            if len(kept) > _MOST_KEPT:
                del kept[next(iter(kept))]
    for part in parts:
        by_priority = part.changed and isinstance(part.transform.schedule, ByPriority)
        if by_priority and all(thread.ordered for thread in graph.threads):
            graph = graph.note(
                f"{part.transform.name}: its priority changes nothing, because every thread runs in a fixed order; "
                "only a Thread with ordered=False runs by priority"
            )
    for sentence in _out_of_order(graph, transforms):
        graph = graph.note(sentence)
    return graph, parts


def _out_of_order(graph: TaskGraph, transforms: Sequence[Transform]) -> Iterator[str]:
    """Return notes on ``transforms`` that an exported prediction did not know, or has what-ifs that belong behind."""
    simulated = graph.info.recorded.simulated
    specs = simulated.what_ifs.split(" + ") if simulated else []
    names = [spec.partition(":")[0] for spec in specs]
    # Scripts named in a file are not run.
    saved = [load_transform(name) for name in names if name in built_in_names()]
    alone = any(spec.partition(":")[0] == "pipeline" and "copies=" not in spec for spec in specs)
    for transform in transforms:
        if alone and transform.axis == AXES.index("data"):
            yield (
                f"{transform.name}: {Path(graph.info.path).name} holds a pipeline without copies, whose stages are "
                "neighbours; apply both together to the recording, or name its copies=N"
            )
        late = [prior.name for prior in saved if transform.place and in_order([prior, transform])[-1] is not transform]
        if late:
            yield (
                f"{transform.name}: applied behind {' and '.join(late)}, which {Path(graph.info.path).name} already "
                "holds, though it belongs ahead; apply them together to the recording for the right order"
            )


def in_order(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """Return the transforms in the order of their ``PLACES``, those of one place in the given order.

    Device, formats and compiler decide a pass; blocks are split across workers, stages consist of these parts, and
    replicas of the stages exchange gradients. A transform without a place stays after all that are named before it.
    """
    order = list(PLACES)
    if any(transform.place == WHOLE for transform in transforms):
        order = [place for place in PLACES if place not in LATE]
        at = order.index(WHOLE)
        order[at:at] = LATE
    places: list[int] = []
    for transform in transforms:
        places.append(max(places, default=-1) if transform.place is None else order.index(transform.place))
    by_place = sorted(range(len(transforms)), key=places.__getitem__)
    return tuple(transforms[at] for at in by_place)


def copied_pipeline(transforms: Sequence[Transform]) -> int | None:
    """Return the place of the pipeline whose option ``copies`` follows from the data-parallel what-if, if any."""
    if not any(t.axis == AXES.index("data") and "cluster" in t.parameters for t in transforms):
        return None
    pipelines = (place for place, t in enumerate(transforms) if t.axis == AXES.index("pipeline"))
    return next((at for at in pipelines if "copies" in transforms[at].parameters.keys() - transforms[at].options), None)


def with_copies(transforms: Sequence[Transform], place: int, graph: TaskGraph) -> tuple[Transform, ...]:
    """Return the transforms; the pipeline at ``place`` has as many copies as the data-parallel what-if has workers.

    ``graph`` is that to which the pipeline is applied.
    """
    from whatif.models.exchange.network_options import network_of  # takes time to load, as pipelines do

    data = next(t for t in transforms if t.axis == AXES.index("data"))
    named: dict[str, Any] = {
        name: data.options.get(name) for name in ("workers", "bandwidth", "latency_us", "cluster", "table")
    }
    pipeline = transforms[place]
    copies = network_of(graph, data.name, **named).workers
    changed = replace(pipeline, options={**pipeline.options, "copies": copies})
    return (*transforms[:place], changed, *transforms[place + 1 :])


def compose(graph: TaskGraph, transforms: Sequence[Transform]) -> TaskGraph:
    """Return the checked graph under all transforms. Raises WhatifError if one does not apply or breaks the graph."""
    return applied_in_turn(graph, transforms)[0]


def single_schedule(transforms: Sequence[Transform]) -> Schedule | None:
    """Return the one schedule override of a composition, if any. Raises WhatifError if two transforms have one."""
    overriding = [t for t in transforms if t.schedule is not None]
    if len(overriding) > 1:
        names = " and ".join(repr(t.name) for t in overriding)
        raise WhatifError(f"{names} both override the schedule; apply one of them at a time.")
    return overriding[0].schedule if overriding else None


def new_notes(before: TaskGraph, after: TaskGraph) -> tuple[str, ...]:
    """Return the notes of transforms between two graphs."""
    return tuple(note for note in after.notes if note not in before.notes)


def spelled(transform: Transform) -> str:
    """Return a transform and its options in command line syntax: ``amp:target=bf16``."""
    options = ",".join(f"{key}={_text(value)}" for key, value in transform.options.items())
    return f"{transform.name}:{options}" if options else transform.name


def spelled_together(transforms: Iterable[Transform]) -> str:
    """Return what-ifs for use in a sentence, joined by plus signs."""
    return " + ".join(map(spelled, transforms))


def _text(value: object) -> str:
    """An option's value as typed: 2 for 2.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


# The fields of a graph that decide its timeline.
_DECISIVE = [f.name for f in fields(TaskGraph) if f.name not in ("info", "attached", "notes", "declined")]


def is_unchanged(before: TaskGraph, after: TaskGraph) -> bool:
    """Whether a transform kept the tasks and their dependencies; notes and metadata may differ."""
    same_queue = before.info.queue_depth == after.info.queue_depth
    same_uses = before.attached.get(USES) is after.attached.get(USES)  # tasks that share a resource slow each other
    return same_queue and same_uses and all(getattr(before, column) is getattr(after, column) for column in _DECISIVE)


def is_without_effect(before: TaskGraph, after: TaskGraph, applied: Sequence[Applied]) -> bool:
    """Whether the timeline stays the same: nothing changed, and no schedule reorders the tasks.

    The schedule of a transform that changes nothing has nothing to decide.
    """
    return is_unchanged(before, after) and not any(part.changed and part.transform.schedule for part in applied)


class Contribution(Struct, frozen=True):
    """The gain of one transform, ms: above zero is faster."""

    alone_ms: float | None  # alone; None if it does not apply alone
    added_ms: float  # after those before it
    reason: str = ""  # why it does not apply alone

    def to_dict(self) -> dict[str, float | str | None]:
        """Return the contribution as a JSON object."""
        return {"alone_ms": self.alone_ms, "added_ms": self.added_ms, "reason": self.reason or None}


class Composition(Struct, frozen=True):
    """The contribution of each transform of a composition, in order, and the total gain, ms."""

    contributions: tuple[Contribution, ...]
    together_ms: float

    @property
    def interaction_ms(self) -> float | None:
        """The sum of the gains alone minus the gain together, ms; None if one does not apply alone.

        Above zero the transforms save the same time; below zero one of them makes another more effective.
        """
        alone_ms = [part.alone_ms for part in self.contributions if part.alone_ms is not None]
        return sum(alone_ms) - self.together_ms if len(alone_ms) == len(self.contributions) else None


def contributions(baseline: Baseline, transforms: Sequence[Transform], predicted_ns: float) -> Composition:
    """Return the contribution of each of ``transforms`` to the ``predicted_ns`` of all of them.

    Simulates each prefix of the list and each transform alone, unless known: two simulations for each transform beyond
    the first.
    """
    steps_ns = [baseline.step_ns]
    graph = baseline.graph
    applied: tuple[Applied, ...] = ()
    for transform in transforms[:-1]:
        changed, added = applied_in_turn(graph, [transform])
        applied += added
        same = is_without_effect(graph, changed, added)
        steps_ns.append(steps_ns[-1] if same else _step_ns(baseline, changed, applied))
        graph = changed
    steps_ns.append(predicted_ns)
    parts = []
    for place, transform in enumerate(transforms):
        added_ms = (steps_ns[place] - steps_ns[place + 1]) / 1e6
        if place == 0:
            parts.append(Contribution(added_ms, added_ms))
            continue
        try:
            alone_ns = _step_ns(baseline, *applied_in_turn(baseline.graph, [transform]))
            parts.append(Contribution((baseline.step_ns - alone_ns) / 1e6, added_ms))
        except WhatifError as error:  # it may need what another one inserts
            parts.append(Contribution(None, added_ms, str(error)))
    return Composition(tuple(parts), (baseline.step_ns - predicted_ns) / 1e6)


def _step_ns(baseline: Baseline, changed: TaskGraph, applied: Sequence[Applied]) -> float:
    """The simulated step of a changed graph, ns."""
    if is_without_effect(baseline.graph, changed, applied):
        return baseline.step_ns
    schedule = single_schedule([part.transform for part in applied])
    return simulate(changed, schedule).step_ns_by(baseline.clock)
