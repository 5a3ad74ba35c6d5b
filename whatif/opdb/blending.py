"""Who answers for an unmeasured device: sources weighted by how far each misses devices that were left out.

``source_errors.json`` gives the error of each source by operator, number format and device left out (`whatif opdb
evaluate --unseen-devices --errors FILE` writes it). The logs of the times are averaged, each by the inverse square of
its expected error; what lies outside of a model's data, or of the devices that it saw, counts for less.
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

# What a doubling beyond the devices that a model saw adds to the standard deviation of its error, log. Our estimate: an
# H100's SM does 1.5 doublings more than any that NeuSight's models saw, and its products were missed by a quarter.
_GROWTH_A_DOUBLING = 0.2
# The standard deviation of what the launch around one kernel takes: the expected errors are those of longer times. On
# NeuSight's five GPUs the shortest times are 24 to 46 us.
_LAUNCH_ERROR_S = 10e-6


class Candidate(Struct, frozen=True):
    """What one source says of n operators; ``extra`` (n,) adds to the standard deviation of its error, log.

    Answers under the mask ``sure`` (n,), which this device's own measurements correct, are weighted by their own range.
    """

    source: AnswerSource
    answers: Answers
    sure: Bool | None = None
    extra: Float64 | None = None


def blend(asked: Operators, answers: Answers, candidates: Sequence[Candidate], launched: Bool | None = None) -> None:
    """Fill in the operators that have no answer yet, from candidates in the order of preference.

    A source whose errors are not known answers alone, unless one that comes before it does. Times under the mask
    ``launched`` (n,) hold a launch; None: none does.
    """
    open_ = answers.answered_by == AnswerSource.NONE
    if not open_.any() or not candidates:
        return
    sigma = np.stack([_sigma(asked, one) for one in candidates])  # (sources, n); inf: it does not answer
    told = np.isfinite(sigma)
    unknown = told & (sigma == 0)
    # Of sources whose errors are unknown, the first that answers does, alone.
    first = np.argmax(told, axis=0)
    alone = unknown.any(axis=0)
    only = np.arange(len(candidates))[:, None] == np.where(alone, first, -1)
    with np.errstate(divide="ignore"):
        weight = np.where(alone, only, np.where(told, 1 / np.maximum(sigma, 1e-6) ** 2, 0.0))
    total = weight.sum(axis=0)
    rows = np.flatnonzero(open_ & (total > 0))
    share = weight[:, rows] / total[rows]
    best = np.argmax(share, axis=0)
    for place, one in enumerate(candidates):
        mine = rows[best == place]
        answers.put(mine, one.answers)
    # Alone, a source whose errors are not known keeps its own range, and so does one that measurements here correct.
    own = (share == 1).any(axis=0) & (alone[rows] | _corrected(candidates, best, rows))
    if own.all():
        return
    rows, share = rows[~own], share[:, ~own]
    counted = share > 0
    times = np.stack([one.answers.t_s[rows] for one in candidates])
    logs = np.log(np.where(counted, times, 1.0))
    t = np.exp((share * logs).sum(axis=0))
    # Sources err together more often than not: no narrower than their mean error.
    error = np.sqrt((share * np.where(counted, sigma[:, rows], 0.0) ** 2).sum(axis=0))
    if launched is not None:
        error = np.hypot(error, launched[rows] * _LAUNCH_ERROR_S / t)
    half = SIGMAS_OF_90 * error
    answers.t_s[rows], answers.low_s[rows], answers.high_s[rows] = t, t * np.exp(-half), t * np.exp(half)


def _corrected(candidates: Sequence[Candidate], best: Int64, rows: Int64) -> Bool:
    """Whether the best of the sources is one that this device's own measurements correct, shape (rows,)."""
    none = np.zeros(len(rows), dtype=np.bool_)
    sure = np.stack([none if one.sure is None else one.sure[rows] for one in candidates])
    return np.asarray(sure[best, np.arange(len(rows))], dtype=np.bool_)


def device_distance(facts: ModelFacts, gpu: Gpu) -> float:
    """Return what a device's distance from those that a model saw adds to its error, log standard deviation.

    Doublings by which its FLOPs and bytes a second of an SM, and their ratio, lie beyond the others'.
    """
    seen = [_kind(other, facts) for name in facts.devices if (other := devices.facts(name)) is not None]
    if not seen:
        return 0.0
    mine, low, high = _kind(gpu, facts), np.min(seen, axis=0), np.max(seen, axis=0)
    return float(_GROWTH_A_DOUBLING * np.maximum(np.maximum(low - mine, mine - high), 0.0).max())


def _kind(gpu: Gpu, facts: ModelFacts) -> Float64:
    sheet = sheet_of(gpu, facts.family)
    rate = sheet.tflops.get(facts.dtype, sheet.tflops["fp32"])
    bandwidth = sheet.memory_gbyte_s
    found = [bandwidth / sheet.sm_count]
    if facts.family in MATRIX_FAMILIES:
        found += [rate / sheet.sm_count, rate / bandwidth]
    return np.log2(found)


def _sigma(asked: Operators, one: Candidate) -> Float64:
    """The expected error of a source on each operator, log; 0 where it is unknown, infinite where it has no answer."""
    names, dtypes = asked.texts["name"], asked.texts["dtype"]
    known = [[_expected(one.source, asked.family, name, dtype) for dtype in dtypes.table] for name in names.table]
    sigma = np.array(known or [[0.0]])[names.codes, dtypes.codes]
    if one.extra is not None:
        sigma = np.where(sigma > 0, np.hypot(sigma, one.extra), 0.0)
    if one.sure is not None:
        with np.errstate(invalid="ignore", divide="ignore"):
            own = np.log(one.answers.high_s / one.answers.low_s) / 2 / SIGMAS_OF_90
        sigma = np.where(one.sure, own, sigma)
    return np.where(one.answers.answered_by == one.source, sigma, np.inf)


def _expected(source: AnswerSource, family: str, name: str, dtype: str) -> float:
    """The error of a source on an operator, or on the nearest one that the table knows; 0 where it knows none."""
    # What moves memory is known by its bytes, whatever the format.
    formats = (dtype, "fp32") if family in ("elementwise", "normalization") else (dtype,)
    names = (name, *STAND_INS.get(name, ()), family)
    found = (errors().get((source.name.lower(), word, kind)) for word in names for kind in formats)
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
