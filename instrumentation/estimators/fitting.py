"""Fits tree models to measurements, with the width of their ranges and the operators where they beat interpolation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from whatif.graph.described import FAMILIES
from whatif.graph.types import Float64
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.features import FEATURES_VERSION, FLOOR_S
from whatif.opdb.index import index_of
from whatif.opdb.interpolate import FACTOR_A_DOUBLING, INNER_QUANTILE, LEAST_GROWTH, conformal
from whatif.opdb.keys import held_out
from whatif.opdb.learned import MODEL_VERSION, TREES, ModelFacts, Source
from whatif.opdb.linear_model import fit_linear_model
from whatif.opdb.rows import joined, measurements
from whatif.opdb.trees import Forest, forest_of
from whatif.opdb.work import work

from .boosting import Settings, fit_trees
from .samples import Kind, Sample

Arrays = dict[str, npt.NDArray[Any]]
Say = Callable[[str], None]

# The fewest measurements for a model of a device, and the fewest devices for a model across devices.
FEWEST_ROWS, FEWEST_DEVICES = 200, 4
# The held-out part of a device's operators: it gives the range, and shows if interpolation has smaller errors. The
# final model is then fitted to all of them.
TRIED_SHARE, TRIED_SEED = 0.15, 11
# Operators with fewer rows get the pooled range.
_FEWEST_FOR_RANGE = 30
UNKNOWN_GROWTH = float(np.log(FACTOR_A_DOUBLING))
# Not measured across devices: our estimate.
_GROWTH_ACROSS = float(np.log(1.25))
_MOST_A_DEVICE = 12_000

SAME_DEVICE = {
    "matmul": Settings(rounds=600, rate=0.08, leaves=48),
    "conv": Settings(rounds=300, rate=0.06, leaves=31, features=0.3),
    "elementwise": Settings(rounds=150, rate=0.1, leaves=31),
    "normalization": Settings(rounds=150, rate=0.1, leaves=31),
    "attention": Settings(rounds=300, rate=0.1, leaves=63),
}
ACROSS = Settings(rounds=150, rate=0.1, leaves=31, in_leaf=20, seeds=3)


@dataclass(frozen=True)
class Fitted:
    """A fitted model and its arrays, not yet written."""

    name: str
    facts: ModelFacts
    arrays: Arrays


def fit_devices(
    samples: Sequence[Sample], *, settings: Mapping[str, Settings] = SAME_DEVICE, say: Say | None = None
) -> Iterator[Fitted]:
    """Fit one model to each large enough sample of a device."""
    for sample in samples:
        sound = sample.take(sample.sound)
        if len(sound) >= FEWEST_ROWS:
            if say:
                say(f"{sample.device} {sample.kind.family} {sample.kind.dtype}")
            yield _fit_device(sample, settings[sample.kind.family])


def _fit_device(sample: Sample, settings: Settings) -> Fitted:
    names = tuple(sorted(set(sample.names.tolist())))
    tried = held_out(sample.ops.keys, TRIED_SEED, TRIED_SHARE)
    first = _forest([sample.take(sample.sound & ~tried)], names, settings, across=False)
    trial = sample.take(tried)
    miss = np.abs(_log_error(first, trial, names, across=False))
    arrays = _arrays([sample.take(sample.sound)], names, settings, across=False)
    wins, error = against_interpolation(sample, tried, miss)
    facts = facts_of(sample.kind, [sample], names, settings, across=False)
    facts = msgspec.structs.replace(
        facts, half=halves_of(miss, trial.names, names), growth=_growth(sample, names, settings),
        before_interpolation=wins, validation_pct=error, device=sample.device, sheet=sample.sheet,
    )  # fmt: skip
    return Fitted(name_of(sample.device, sample.kind), facts, arrays)


def fit_across(samples: Sequence[Sample], *, settings: Settings = ACROSS, say: Say | None = None) -> Iterator[Fitted]:
    """Fit one model across devices to each kind of sample that at least four devices have."""
    kinds: dict[Kind, list[Sample]] = {}
    for sample in samples:
        if sample.gpu is not None and sample.sound.sum() >= FEWEST_ROWS:
            kinds.setdefault(sample.kind, []).append(sample)
    for kind, found in kinds.items():
        if len(found) >= FEWEST_DEVICES:
            if say:
                say(f"{len(found)} devices {kind.family} {kind.dtype}")
            yield _fit_across(kind, [s.take(s.sound).drawn(_MOST_A_DEVICE, TRIED_SEED) for s in found], settings)


def _fit_across(kind: Kind, samples: list[Sample], settings: Settings) -> Fitted:
    names = tuple(sorted({name for s in samples for name in s.names.tolist()}))
    arrays = _arrays(samples, names, settings, across=True)
    # Leave each device out once, for the error of the others' model on it. Half of the rows suffice for that.
    halves: dict[str, list[float]] = {name: [] for name in names}
    misses: dict[str, list[float]] = {name: [] for name in names}
    halved = [s.drawn(len(s) // 2, TRIED_SEED + 1) for s in samples]
    for index, left_out in enumerate(halved):
        others = halved[:index] + halved[index + 1 :]
        forest = _forest(others, names, replace(settings, seeds=1), across=True)
        residuals = np.abs(_log_error(forest, left_out, names, across=True))
        for name in names:
            errors = residuals[left_out.names == name]
            if len(errors) >= _FEWEST_FOR_RANGE:
                halves[name].append(conformal(errors))
                misses[name].append(float(np.mean(np.expm1(errors))))
    widest = max((max(h) for h in halves.values() if h), default=1.0)
    facts = msgspec.structs.replace(
        facts_of(kind, samples, names, settings, across=True),
        half={name: max(halves[name], default=widest) for name in names}, growth=_GROWTH_ACROSS,
        validation_pct={name: 100 * float(np.mean(misses[name])) for name in names if misses[name]},
    )  # fmt: skip
    return Fitted(name_of("across", kind), facts, arrays)


def _arrays(samples: Sequence[Sample], names: Sequence[str], settings: Settings, *, across: bool) -> Arrays:
    x = np.concatenate([s.features(names, across=across)[0] for s in samples])
    return fit_trees(x, np.concatenate([s.target() for s in samples]), settings)


def _forest(samples: Sequence[Sample], names: Sequence[str], settings: Settings, *, across: bool) -> Forest:
    arrays = _arrays(samples, names, settings, across=across)
    return forest_of(arrays, len(arrays["edge_starts"]) - 1, "a model that was just fitted")


def _log_error(forest: Forest, sample: Sample, names: Sequence[str], *, across: bool) -> Float64:
    return sample.target() - forest.predict(sample.features(names, across=across)[0])


def halves_of(miss: Float64, row_names: npt.NDArray[np.str_], names: Sequence[str]) -> dict[str, float]:
    """Return the half-width of nine tenths by name, or that of all rows for a name with too few."""
    pooled = conformal(miss)
    counts = {name: int((row_names == name).sum()) for name in names}
    return {name: conformal(miss[row_names == name]) if counts[name] >= _FEWEST_FOR_RANGE else pooled for name in names}


def _growth(sample: Sample, names: Sequence[str], settings: Settings) -> float:
    """Return the growth of errors per doubling outside the range: on larger operators, after a fit to smaller ones."""
    sound = sample.take(sample.sound)
    sizes = np.stack(
        [np.log2(np.maximum(sound.ops.integers[s], 1)) for s in FAMILIES[sample.kind.family].sizes], axis=1
    )
    edge = np.quantile(sizes, INNER_QUANTILE, axis=0)
    inner = (sizes <= edge).all(axis=1)
    if min(inner.sum(), (~inner).sum()) < FEWEST_ROWS // 2:
        return UNKNOWN_GROWTH
    forest = _forest([sound.take(inner)], names, replace(settings, rounds=settings.rounds // 3, seeds=1), across=False)
    outside = np.maximum(sizes[~inner] - sizes[inner].max(axis=0), 0).max(axis=1)
    miss = np.abs(_log_error(forest, sound.take(~inner), names, across=False))
    return max(conformal(miss / np.maximum(outside, 0.5)), LEAST_GROWTH)


def against_interpolation(
    sample: Sample, tried: npt.NDArray[np.bool_], miss: Float64
) -> tuple[tuple[str, ...], dict[str, float]]:
    """Return the operators that the model predicts better than interpolation of the same rows; its mean errors, %."""
    known, trial = sample.take(~tried), sample.take(tried)
    rows = measurements(known.ops, known.t_s)
    index = index_of([(sample.provenances[0], rows)])
    answers = Estimator(index, sample.device, (AnswerSource.INTERPOLATED,)).estimate(trial.ops)
    interpolated = np.abs(np.log(answers.t_s / trial.t_s))
    wins, error = [], {}
    for name in sorted(set(trial.names.tolist())):
        of_name = trial.names == name
        error[name] = 100 * float(np.mean(np.expm1(miss[of_name])))
        both = of_name & np.isfinite(interpolated)
        if not both.any() or miss[both].mean() < interpolated[both].mean():
            wins.append(name)
    return tuple(wins), error


def facts_of(
    kind: Kind, samples: Sequence[Sample], names: tuple[str, ...], settings: Settings, *, across: bool
) -> ModelFacts:
    """Return the facts in a model's file about its samples; the widths of ranges are filled in later."""
    attributes = FAMILIES[kind.family].attributes
    ops = joined([s.ops for s in samples])
    digest = hashlib.sha256("".join(s.sha256() for s in samples).encode()).hexdigest()
    sources = {
        Source(name=o.tool or "unknown", licence=o.licence or "unknown", uri=o.uri or "", author=o.author or "")
        for s in samples
        for o in (provenance.origin.source for provenance in s.provenances)
    }
    feature_names = samples[0].features(names, across=across)[1]
    return ModelFacts(
        version=MODEL_VERSION, features_version=FEATURES_VERSION, kind=TREES, family=kind.family, device="",
        names=names, dtype=kind.dtype, phase=kind.phase, layouts=tuple(sorted(set(ops.texts["layout"].decoded()))),
        basis=kind.basis[:4], features=feature_names,
        low={a: int(ops.integers[a].min()) for a in attributes},
        high={a: int(ops.integers[a].max()) for a in attributes},
        half=dict.fromkeys(names, 0.0), growth=0.0, launch_s=_launch(samples, names),
        devices=tuple(sorted({s.device for s in samples})), rows=sum(map(len, samples)), data_sha256=digest,
        arrays_sha256="", sources=tuple(sorted(sources, key=lambda s: (s.name, s.uri))), settings=settings.as_floats(),
    )  # fmt: skip


def _launch(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, float]:
    """Return the launch part of times with a launch: the fitted floor less that of a kernel; median of the devices."""
    if not samples[0].launch:
        return {}
    launch_s: dict[str, float] = {}
    for name in names:
        floors = []
        for sample in samples:
            part = sample.take((sample.names == name) & sample.sound)
            if len(part) >= _FEWEST_FOR_RANGE:
                floor_s = min(fit_linear_model(*work(part.ops), part.t_s).floor_s, float(part.t_s.min()))
                floors.append(max(floor_s - FLOOR_S, 0.0))
        launch_s[name] = float(np.median(floors)) if floors else 0.0
    return launch_s


def name_of(device: str, kind: Kind) -> str:
    from whatif.opdb.devices import folder_name

    way = "_".join(part for part in (kind.basis.method, kind.basis.framework) if part != "unknown")
    return "-".join([folder_name(device), kind.family, kind.dtype, kind.phase, way]).replace(" ", "_")
