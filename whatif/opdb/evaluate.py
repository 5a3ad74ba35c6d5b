"""Errors of the estimators on held-out operators, all of which count.

Two questions: unmeasured shapes, and unmeasured devices. For the first the split depends only on an
operator's key and a seed: a shape is held out on all devices or on none, in whatever order databases were merged. For
the second each device is held out in turn, and estimated from the others. The estimators see an index of the other
rows, its quarantine included; held-out rows are never set aside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import asdict, replace

from whatif.opdb.chain import ALL_SOURCES, Answers, AnswerSource, Estimator
from whatif.opdb.index import Index, index_of, read_contributions
from whatif.opdb.keys import held_out
from whatif.opdb.learned import LearnedModel
from whatif.opdb.provenance import Provenance
from whatif.opdb.published import UNSEEN_DEVICES, UNSEEN_SHAPES, Published
from whatif.opdb.rows import Rows
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import replacing
from whatif.runtime.progress import Progress

# Fits models to measurements; shipped models were fitted to what is held out here, so they never answer.
Fit = Callable[[list[tuple[Provenance, Rows]]], Sequence[LearnedModel]] | None

# Sources that use no measurements of the device itself.
_FROM_OTHERS = (AnswerSource.SAME_SHAPE, AnswerSource.LEARNED_ACROSS, AnswerSource.ANALYTIC)
# Shorter times are mostly launch if they include it; a tenth of this for kernels alone. Fewer rows give no error.
_LAUNCHES_S, _FEWEST_ROWS = 3e-4, 20

# The split of docs/opdb.md, which these two determine.
SEED, SHARE = 2026, 0.1


class Score(Struct, frozen=True):
    """Errors of one operator's held-out rows on one device ("": on all of them), in percent of the measured time."""

    name: str
    device: str
    rows: int
    answered: int
    mape_pct: float
    median_pct: float
    p90_pct: float
    bias_pct: float
    coverage_pct: float  # of the nominal 90 % ranges
    half_width_pct: float  # median distance of the ends from the estimate, by the geometric mean
    source: str = ""  # the one that answered; "": any


class SourceError(Struct, frozen=True):
    """The error of one source alone on a device left out; ``rms_log`` excludes rows that are mostly launch."""

    source: str
    family: str
    name: str
    dtype: str
    device: str
    rows: int
    bias_log: float
    rms_log: float


class ModelScore(Struct, frozen=True):
    """The mean errors of each kind of fitted model, and of the chain, on one operator's held-out rows of a device.

    Percent, on the rows that all kinds answer; ``chain_pct`` is the error of the chain with all of them.
    """

    name: str
    device: str
    rows: int
    mape_pct: dict[str, float]
    chain_pct: float


class Evaluation(Struct, frozen=True):
    """The held-out rows, and the scores of each operator: on all devices, on each, and by answering source."""

    seed: int | None  # None, as the share: whole devices were held out
    share: float | None
    rows: int
    held_out: int
    sources: dict[str, int]
    by_operator: tuple[Score, ...]
    by_device: tuple[Score, ...]
    by_source: tuple[Score, ...]
    total: Score
    errors: tuple[SourceError, ...] = ()  # of each source on each device left out
    by_model: tuple[ModelScore, ...] = ()  # where models of several kinds were fitted

    @property
    def published(self) -> Published:
        """Published errors for the same question."""
        return UNSEEN_DEVICES if self.seed is None else UNSEEN_SHAPES

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "published": {"source": self.published.source, "mape_pct": dict(self.published.mape_pct)},
            "seed": self.seed, "held_out_share": self.share, "rows": self.rows, "held_out": self.held_out,
            "answered_by": self.sources, "by_operator": [asdict(s) for s in self.by_operator],
            "by_operator_and_device": [asdict(s) for s in self.by_device],
            "by_operator_and_source": [asdict(s) for s in self.by_source], "total": asdict(self.total),
            "errors": [asdict(e) for e in self.errors], "by_model": [asdict(m) for m in self.by_model],
        }  # fmt: skip


def evaluate(
    store: Store,
    *,
    seed: int = SEED,
    share: float = SHARE,
    sources: Sequence[AnswerSource] = ALL_SOURCES,
    device: str | None = None,
    family: str | None = None,
    progress: Progress | None = None,
    fit: Fit = None,
) -> Evaluation:
    """Hold out ``share`` of the operators and estimate their times from the rest, on which ``fit`` may train models.

    Raises WhatifError if nothing is held out, or nothing is left.
    """
    contributions, _ = read_contributions(store, progress)
    contributions = [
        (c, r) for c, r in contributions if device in (None, c.origin.device.name) and family in (None, r.family)
    ]
    kept, tested = split(contributions, seed, share)
    if not kept or not tested:
        raise WhatifError(
            f"{store.folder}: expected enough rows to hold out {share:.0%} and estimate from the rest, got too few."
        )
    index, models = index_of(kept), fit(kept) if fit else ()
    outcomes = [(c, rows, estimate_rows(index, c, rows, sources, models)) for c, rows in tested]
    found = _evaluation(outcomes, seed, share, sum(len(r) for _, r in contributions))
    return replace(found, by_model=tuple(_side_by_side(index, outcomes, models)))


def _side_by_side(
    index: Index, outcomes: list[tuple[Provenance, Rows, Answers]], models: Sequence[LearnedModel]
) -> Iterator[ModelScore]:
    """Score each kind of model alone, by device and operator, if there are several kinds."""
    kinds = sorted({model.facts.kind for model in models})
    for provenance, rows, chain in outcomes if len(kinds) > 1 else ():
        alone = {
            kind: estimate_rows(
                index, provenance, rows, (AnswerSource.LEARNED,), [m for m in models if m.facts.kind == kind]
            ).t_s
            for kind in kinds
        }
        names = np.array(_names(rows, several=False))
        answered = np.isfinite(np.stack([*alone.values(), chain.t_s])).all(axis=0)
        for name in sorted(set(names[answered].tolist())):
            of_name = answered & (names == name)
            missed = {
                kind: round(float(100 * np.mean(np.abs(t_s[of_name] / rows.t_s[of_name] - 1))), 2)
                for kind, t_s in (alone | {"": chain.t_s}).items()
            }
            chain_pct = missed.pop("")
            yield ModelScore(name, provenance.origin.device.name, int(of_name.sum()), missed, chain_pct)


def evaluate_unseen_devices(
    store: Store,
    *,
    sources: Sequence[AnswerSource] = ALL_SOURCES,
    device: str | None = None,
    progress: Progress | None = None,
    fit: Fit = None,
) -> Evaluation:
    """Hold out each device in turn, or only ``device``, and estimate its times from those of the others.

    Raises WhatifError if there are fewer than two devices.
    """
    contributions, _ = read_contributions(store, progress)
    names = sorted({c.origin.device.name for c, _ in contributions})
    tested = [name for name in names if device in (None, name)]
    if len(names) < 2 or not tested:
        raise WhatifError(
            f"{store.folder}: expected measurements of a device to hold out and of others to estimate from, got too "
            "few."
        )
    outcomes = []
    errors: list[SourceError] = []
    for name in tested:
        training = [(c, r) for c, r in contributions if c.origin.device.name != name]
        index, models = index_of(training), fit(training) if fit else ()
        for c, r in contributions:
            if c.origin.device.name == name:
                outcomes.append((c, r, estimate_rows(index, c, r, sources, models)))
                errors += [
                    e for s in _FROM_OTHERS for e in _errors_of(s, c, r, estimate_rows(index, c, r, (s,), models))
                ]
    found = _evaluation(outcomes, None, None, sum(len(r) for _, r in contributions))
    return replace(found, errors=tuple(errors))


def write_errors(found: Evaluation, file: Path) -> None:
    """Write the errors of each source to the file from which the chain takes its weights."""
    table = {"made_by": "whatif opdb evaluate --unseen-device", "errors": [asdict(e) for e in found.errors]}
    with replacing(file) as part:
        part.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _errors_of(source: AnswerSource, provenance: Provenance, rows: Rows, answers: Answers) -> list[SourceError]:
    least_s = _LAUNCHES_S if provenance.origin.method.includes_launch else _LAUNCHES_S / 10
    names, dtypes = np.array(rows.ops.texts["name"].decoded()), np.array(rows.ops.dtypes)
    counted = np.isfinite(answers.t_s) & (rows.t_s > least_s)
    found = []
    for name, dtype in sorted(set(zip(names[counted].tolist(), dtypes[counted].tolist(), strict=True))):
        chosen = counted & (names == name) & (dtypes == dtype)
        if chosen.sum() >= _FEWEST_ROWS:
            miss = np.log(answers.t_s[chosen] / rows.t_s[chosen])
            rms = float(np.sqrt(np.mean(np.minimum(np.abs(miss), 1.0) ** 2)))
            found.append(
                SourceError(
                    source.name.lower(), rows.family, name, dtype, provenance.origin.device.name, int(chosen.sum()),
                    round(float(np.median(miss)), 3), round(rms, 3),
                )
            )  # fmt: skip
    return found


def split(
    contributions: list[tuple[Provenance, Rows]], seed: int, share: float
) -> tuple[list[tuple[Provenance, Rows]], list[tuple[Provenance, Rows]]]:
    """Split contributions into those without the held-out operators, and those of just these."""
    kept, tested = [], []
    for provenance, rows in contributions:
        out = held_out(rows.ops.keys, seed, share)
        if not out.all():
            kept.append((provenance, rows.take(~out)))
        if out.any():
            tested.append((provenance, rows.take(out)))
    return kept, tested


def estimate_rows(
    index: Index, measured: Provenance, rows: Rows, sources: Sequence[AnswerSource], models: Sequence[LearnedModel] = ()
) -> Answers:
    """Estimate rows for the device and method with which they were measured."""
    basis, launch = measured.origin.basis, bool(measured.origin.method.includes_launch)
    estimator = Estimator(index, measured.origin.device.name, sources, basis.method, basis.framework, launch, models)
    return estimator.estimate(rows.ops)


def score(rows: pd.DataFrame, name: str, device: str = "", source: str = "") -> Score:
    """Return the score of rows with the columns ``measured``, ``estimated``, ``low`` and ``high``, seconds."""
    answered = rows[np.isfinite(rows["estimated"])]
    if not len(answered):
        nan = float("nan")
        return Score(name, device, len(rows), 0, nan, nan, nan, nan, nan, nan, source)
    t, estimated, low, high = (answered[c].to_numpy() for c in ("measured", "estimated", "low", "high"))
    error = 100 * (estimated / t - 1)
    inside = (low <= t) & (t <= high)
    half = 100 * (np.sqrt(high / np.maximum(low, 1e-12)) - 1)
    miss = np.abs(error)
    return Score(
        name, device, len(rows), len(t), float(miss.mean()), float(np.median(miss)), float(np.quantile(miss, 0.9)),
        float(error.mean()), float(100 * inside.mean()), float(np.median(half)), source,
    )  # fmt: skip


def _evaluation(
    outcomes: list[tuple[Provenance, Rows, Answers]], seed: int | None, share: float | None, rows: int
) -> Evaluation:
    several = len({dtype for _, r, _ in outcomes for dtype in r.ops.dtypes}) > 1
    columns = [
        pd.DataFrame({
            "name": _names(r, several), "device": c.origin.device.name, "measured": r.t_s, "estimated": a.t_s,
            "low": a.low_s, "high": a.high_s, "source": a.answered_by,
        })
        for c, r, a in outcomes
    ]  # fmt: skip
    table = pd.concat(columns, ignore_index=True)
    counts = table["source"].value_counts().sort_index()
    return Evaluation(
        seed, share, rows, len(table), {_source(s): int(n) for s, n in counts.items()},
        tuple(score(part, str(name)) for name, part in table.groupby("name")),
        tuple(score(part, *map(str, place)) for place, part in table.groupby(["name", "device"])),
        tuple(score(part, str(name), "", _source(s)) for (name, s), part in table.groupby(["name", "source"])),
        score(table, "all"),
    )  # fmt: skip


def _source(number: Any) -> str:
    return AnswerSource(number).name.lower()


def _names(rows: Rows, several: bool) -> list[str]:
    """Names of operators in the tables, with the number format if there are several."""
    names = rows.ops.texts["name"].decoded()
    return [f"{n} {d}" for n, d in zip(names, rows.ops.dtypes, strict=True)] if several else names
