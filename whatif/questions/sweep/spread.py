"""Work spread over processes, or over a Dask or Ray cluster that runs already: by joblib, not by our own machinery."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from whatif.errors import WhatifError
from whatif.prediction.baseline import Baseline
from whatif.prediction.composition import new_notes
from whatif.prediction.predict import Prediction, apply
from whatif.prediction.transform import Transform, load_transform

# A what-if as another process loads it: functions of a script cannot be sent to it.
Named: TypeAlias = tuple[str, dict[str, Any]]
BACKENDS = ("dask", "ray")
_INSTALL = "run `pip install 'whatif-profiler[cluster]'`"


def spread(
    work: Callable[[Baseline, Sequence[Transform]], Any],
    baseline: Baseline,
    compositions: Sequence[tuple[Transform, ...]],
    *,
    jobs: int = 1,
    backend: str | None = None,
) -> Iterator[Any]:
    """Yield ``work(baseline, composition)`` for each composition, in their order.

    With one job and no back end it runs here. ``dask`` takes the cluster that its configuration or
    ``DASK_SCHEDULER_ADDRESS`` names, ``ray`` the one of ``RAY_ADDRESS``; without, either starts one on this machine.
    Raises WhatifError where a package is missing, or where a what-if is a function that no other process can load.
    """
    if jobs < 1:
        raise WhatifError(f"--jobs: expected 1 or more, got {jobs}.")
    if backend is not None and backend not in BACKENDS:
        raise WhatifError(f"--backend: expected {' or '.join(BACKENDS)}, got {backend!r}.")
    if backend is None and (jobs == 1 or len(compositions) < 2):
        yield from (work(baseline, composition) for composition in compositions)
        return
    named = [tuple(_named(transform) for transform in composition) for composition in compositions]
    try:
        joblib = importlib.import_module("joblib")
    except ImportError:
        raise WhatifError(f"--jobs and --backend need joblib, which is not installed; {_INSTALL}.") from None
    with _configured(joblib, backend, jobs):
        run = joblib.Parallel(n_jobs=jobs if backend is None else -1, return_as="generator")
        yield from run(joblib.delayed(_elsewhere)(work, baseline, composition) for composition in named)


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


def _configured(joblib: Any, backend: str | None, jobs: int) -> Any:
    try:
        if backend == "dask":
            importlib.import_module("distributed").Client()  # joblib's back end takes the one that was made last
        if backend == "ray":
            importlib.import_module("ray.util.joblib").register_ray()
    except ImportError:
        raise WhatifError(
            f"--backend {backend} needs a package that is not installed; {_INSTALL} and {backend}."
        ) from None
    return joblib.parallel_config(backend=backend or "loky", n_jobs=jobs if backend is None else -1)


def _named(transform: Transform) -> Named:
    module = str(getattr(transform.function, "__module__", ""))
    if not transform.source:
        raise WhatifError(
            f"--jobs: expected what-ifs of scripts, which other processes can load, got {transform.name!r}."
        )
    return transform.source if module.startswith("whatif_user_transform_") else transform.name, transform.options


def _elsewhere(
    work: Callable[[Baseline, Sequence[Transform]], Any],
    baseline: Baseline,
    named: Sequence[Named],
) -> Any:
    return work(baseline, [load_transform(spec, **options) for spec, options in named])
