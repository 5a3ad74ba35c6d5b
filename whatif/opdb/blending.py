"""Blend the sources for an unmeasured device, weighted by the error of each on devices left out.

``source_errors.json`` gives the error of each source by operator, number format and device left out (`whatif opdb
evaluate --unseen-device --errors FILE` writes it). The logs of the times are averaged, weighted by the inverse square
of their expected errors, which are larger outside a model's training data and devices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources

import numpy as np
from msgspec import Struct

from whatif.graph.types import Bool, Float64, Int64
from whatif.hardware.gpu import Gpu
from whatif.opdb import devices
from whatif.opdb.answers import Answers, AnswerSource
from whatif.opdb.data_sheet import MATRIX_FAMILIES
from whatif.opdb.exact import SIGMAS_OF_90
from whatif.opdb.features import sheet_of
from whatif.opdb.learned import ModelFacts
from whatif.opdb.rows import Operators
from whatif.opdb.stand_ins import STAND_INS

# Added to the standard deviation of a model's error, log, for each doubling beyond its devices. Our estimate: an
# H100's SM is 1.5 doublings beyond any in NeuSight's models, and the error on its products was a quarter.
_GROWTH_A_DOUBLING = 0.2
# The standard deviation of the launch around one kernel: the expected errors are those of longer times. On
# NeuSight's five GPUs the shortest times are 24 to 46 us.
_LAUNCH_ERROR_S = 10e-6


class Candidate(Struct, frozen=True):
    """One source's answers for n operators; ``extra`` (n,) adds to the standard deviation of its error, log.

    Answers under the mask ``sure`` (n,), corrected by measurements of this device, are weighted by their own range.
    """

    source: AnswerSource
    answers: Answers
    sure: Bool | None = None
    extra: Float64 | None = None


def blend(asked: Operators, answers: Answers, candidates: Sequence[Candidate], launched: Bool | None = None) -> None:
    """Fill in the operators without an answer, from candidates in the order of preference.

    A source with unknown errors answers alone, unless a preferred one answers. Times under the mask
    ``launched`` (n,) include a launch; None: none does.
    """
    open_ = answers.answered_by == AnswerSource.NONE
    if not open_.any() or not candidates:
        return
    sigma = np.stack([_sigma(asked, candidate) for candidate in candidates])  # (sources, n); inf: no answer
    answers_it = np.isfinite(sigma)
    unknown = answers_it & (sigma == 0)
    # If a source with unknown errors answers, the first source that answers does so alone.
    first = np.argmax(answers_it, axis=0)
    alone = unknown.any(axis=0)
    only = np.arange(len(candidates))[:, None] == np.where(alone, first, -1)
    with np.errstate(divide="ignore"):
        weight = np.where(alone, only, np.where(answers_it, 1 / np.maximum(sigma, 1e-6) ** 2, 0.0))
    total = weight.sum(axis=0)
    rows = np.flatnonzero(open_ & (total > 0))
    share = weight[:, rows] / total[rows]
    best = np.argmax(share, axis=0)
    for place, candidate in enumerate(candidates):
        heaviest = rows[best == place]
        answers.put(heaviest, candidate.answers)
    # A source that answers alone keeps its range if its errors are unknown or this device's measurements correct it.
    keeps_range = (share == 1).any(axis=0) & (alone[rows] | _corrected(candidates, best, rows))
    if keeps_range.all():
        return
    rows, share = rows[~keeps_range], share[:, ~keeps_range]
    counted = share > 0
    times = np.stack([candidate.answers.t_s[rows] for candidate in candidates])
    logs = np.log(np.where(counted, times, 1.0))
    t = np.exp((share * logs).sum(axis=0))
    # Errors of sources are correlated: the range is no narrower than their mean error.
    error = np.sqrt((share * np.where(counted, sigma[:, rows], 0.0) ** 2).sum(axis=0))
    if launched is not None:
        error = np.hypot(error, launched[rows] * _LAUNCH_ERROR_S / t)
    half = SIGMAS_OF_90 * error
    answers.t_s[rows], answers.low_s[rows], answers.high_s[rows] = t, t * np.exp(-half), t * np.exp(half)


def _corrected(candidates: Sequence[Candidate], best: Int64, rows: Int64) -> Bool:
    """Whether measurements of this device correct the answer of the best source, shape (rows,)."""
    uncorrected = np.zeros(len(rows), dtype=np.bool_)
    sure = np.stack([uncorrected if candidate.sure is None else candidate.sure[rows] for candidate in candidates])
    return np.asarray(sure[best, np.arange(len(rows))], dtype=np.bool_)


def device_distance(facts: ModelFacts, gpu: Gpu) -> float:
    """Return the addition to a model's error for a device's distance from its devices, log standard deviation.

    Distance: doublings by which FLOP/s and bytes/s of an SM, and their ratio, lie beyond those of the others.
    """
    known = [_coordinates(other, facts) for name in facts.devices if (other := devices.facts(name)) is not None]
    if not known:
        return 0.0
    coordinates, low, high = _coordinates(gpu, facts), np.min(known, axis=0), np.max(known, axis=0)
    return float(_GROWTH_A_DOUBLING * np.maximum(np.maximum(low - coordinates, coordinates - high), 0.0).max())


def _coordinates(gpu: Gpu, facts: ModelFacts) -> Float64:
    sheet = sheet_of(gpu, facts.family)
    rate = sheet.tflops.get(facts.dtype, sheet.tflops["fp32"])
    bandwidth = sheet.memory_gbyte_s
    found = [bandwidth / sheet.sm_count]
    if facts.family in MATRIX_FAMILIES:
        found += [rate / sheet.sm_count, rate / bandwidth]
    return np.log2(found)


def _sigma(asked: Operators, candidate: Candidate) -> Float64:
    """The expected error of a source on each operator, log; 0 if unknown, infinite without an answer."""
    names, dtypes = asked.texts["name"], asked.texts["dtype"]
    known = [[_expected(candidate.source, asked.family, name, dtype) for dtype in dtypes.table] for name in names.table]
    sigma = np.array(known or [[0.0]])[names.codes, dtypes.codes]
    if candidate.extra is not None:
        sigma = np.where(sigma > 0, np.hypot(sigma, candidate.extra), 0.0)
    if candidate.sure is not None:
        with np.errstate(invalid="ignore", divide="ignore"):
            own_sigma = np.log(candidate.answers.high_s / candidate.answers.low_s) / 2 / SIGMAS_OF_90
        sigma = np.where(candidate.sure, own_sigma, sigma)
    return np.where(candidate.answers.answered_by == candidate.source, sigma, np.inf)


def _expected(source: AnswerSource, family: str, name: str, dtype: str) -> float:
    """The error of a source on an operator, or on the closest one in the table; 0 if there is none."""
    # The time of memory-bound operators depends on their bytes, whatever the format.
    formats = (dtype, "fp32") if family in ("elementwise", "normalization") else (dtype,)
    names = (name, *STAND_INS.get(name, ()), family)
    found = (errors().get((source.name.lower(), known_name, kind)) for known_name in names for kind in formats)
    return next((error for error in found if error is not None), 0.0)


@lru_cache(maxsize=1)
def errors() -> dict[tuple[str, str, str], float]:
    """The median over the devices left out of each source's error, log, by source, operator or family, and format."""
    text = (resources.files("whatif.opdb") / "source_errors.json").read_text(encoding="utf-8")
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in json.loads(text)["errors"]:
        for name in {row["name"], row["family"]}:
            found.setdefault((row["source"], name, row["dtype"]), []).append(float(row["rms_log"]))
    return {key: float(np.median(errors)) for key, errors in found.items()}
