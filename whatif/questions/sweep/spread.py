"""Evaluate compositions on several processes and machines, which load the what-ifs by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from whatif.prediction.baseline import Baseline
from whatif.prediction.composition import new_notes
from whatif.prediction.predict import Prediction, apply
from whatif.prediction.transform import Transform, load_transform
from whatif.runtime.errors import WhatifError
from whatif.runtime.jobs import Jobs, each

# A what-if as another process loads it: functions of a script cannot be sent to it.
Named: TypeAlias = tuple[str, dict[str, Any]]


def spread(
    work: Callable[[Baseline, Sequence[Transform]], Any],
    baseline: Baseline,
    compositions: Sequence[tuple[Transform, ...]],
    *,
    jobs: str | int = 1,
) -> Iterator[Any]:
    """Yield ``work(baseline, composition)`` for each composition, in order, on the processes that ``jobs`` names.

    Raises WhatifError as ``whatif.runtime.jobs.each``, or if a what-if is a function that no other process can load.
    """
    target = Jobs.of(jobs)
    if target.here or (target.engine is None and len(compositions) < 2):
        yield from (work(baseline, composition) for composition in compositions)
        return
    named = [tuple(_named(transform) for transform in composition) for composition in compositions]
    yield from each(_remotely, named, work, baseline, jobs=target)


def predicted(
    facts: Callable[[Prediction], dict[str, Any]], baseline: Baseline, transforms: Sequence[Transform]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the step under the what-ifs with range and ``facts``, or why there is none, and the what-ifs' notes."""
    try:
        prediction = apply(baseline, *transforms)
    except WhatifError as error:
        return {"step_ms": None, "reason": str(error)}, ()
    step = {"step_ms": prediction.predicted_ms, "low_ms": prediction.low_ms, "high_ms": prediction.high_ms}
    return step | facts(prediction), new_notes(baseline.graph, prediction.graph)


def _named(transform: Transform) -> Named:
    module = str(getattr(transform.function, "__module__", ""))
    if not transform.source:
        raise WhatifError(
            f"--jobs: expected what-ifs of scripts, which other processes can load, got {transform.name!r}."
        )
    return transform.source if module.startswith("whatif_user_transform_") else transform.name, transform.options


def _remotely(named: Sequence[Named], work: Callable[[Baseline, Sequence[Transform]], Any], baseline: Baseline) -> Any:
    return work(baseline, [load_transform(spec, **options) for spec, options in named])
