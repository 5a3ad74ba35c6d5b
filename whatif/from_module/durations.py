"""Durations of kernels from the op database's chain, with their ranges and sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from whatif.from_module.gpu_work import kernels_of
from whatif.from_module.kernel import Kernel
from whatif.from_module.operations import Operation, OperatorGraph
from whatif.graph.described import Described
from whatif.graph.types import Float64
from whatif.ingest.operator_calls import describe, describe_other
from whatif.opdb.answers import Answers, AnswerSource
from whatif.opdb.importers.described import operators_of
from whatif.opdb.rows import Operators
from whatif.runtime.errors import WhatifError

# Error of the time of a kernel without a rule, which is estimated from its bytes. Our estimate.
UNKNOWN_FACTOR = 3.0


class Asked(Protocol):
    """An estimator of operator times: the op database's chain for one device."""

    device: str

    def estimate(self, ops: Operators) -> Answers:
        """Estimate each of n operators of one family."""


class Durations(Struct, frozen=True):
    """Durations of n kernels with a nominal 90 % range, ns, shape (n,), and the number of kernels by source.

    ``unknown`` counts, by operator name, the kernels that were estimated only from the bytes that they move.
    """

    duration_ns: Float64
    low_ns: Float64
    high_ns: Float64
    sources: dict[str, int]
    unknown: dict[str, int]


def ask(estimator: Asked, kernels: Sequence[Kernel]) -> Durations:
    """Estimate every kernel. Raises WhatifError naming the operators that no source can answer for."""
    t, low, high = (np.full(len(kernels), np.nan) for _ in range(3))
    sources: Counter[str] = Counter()
    distinct: dict[Described, list[int]] = {}
    alternatives: dict[Described, list[int]] = {}
    for place, kernel in enumerate(kernels):
        distinct.setdefault(kernel.what, []).append(place)
        if kernel.also is not None:
            alternatives.setdefault(kernel.also, []).append(place)
    asked = list(distinct)
    by = np.full(len(kernels), AnswerSource.NONE, dtype=np.int8)
    for at, ops in operators_of(asked):
        answers = estimator.estimate(ops)
        for row, place in enumerate(at.tolist()):
            places = distinct[asked[place]]
            t[places], low[places], high[places] = answers.t_s[row], answers.low_s[row], answers.high_s[row]
            by[places] = answers.answered_by[row]
    for at, ops in operators_of(list(alternatives)):
        answers = estimator.estimate(ops)
        for row, place in enumerate(at.tolist()):
            # A measured operator needs no alternative; only models of one device are compared.
            faster = [
                p for p in alternatives[list(alternatives)[place]]
                if by[p] == answers.answered_by[row] == AnswerSource.LEARNED and answers.t_s[row] < t[p]
            ]  # fmt: skip
            t[faster], low[faster], high[faster] = answers.t_s[row], answers.low_s[row], answers.high_s[row]
    sources.update(
        "published" if kernel.published_ns is not None else AnswerSource(int(code)).name.lower()
        for kernel, code in zip(kernels, by.tolist(), strict=True)
    )
    _refuse_unanswered(estimator.device, kernels, t)
    share = np.array([kernel.share for kernel in kernels])
    known = np.array([kernel.known for kernel in kernels], dtype=np.bool_)
    low = np.where(known, low, np.minimum(low, t / UNKNOWN_FACTOR))
    high = np.where(known, high, np.maximum(high, t * UNKNOWN_FACTOR))
    # Approximation: a share below 1 also shortens kernels that are at the launch floor.
    factor = 1e9 * share
    t, low, high = t * factor, low * factor, high * factor
    published = [place for place, kernel in enumerate(kernels) if kernel.published_ns is not None]
    t[published] = low[published] = high[published] = [kernels[place].published_ns for place in published]
    low *= [kernel.low for kernel in kernels]
    high *= [kernel.high for kernel in kernels]
    return Durations(
        t, low, high, dict(sources.most_common()),
        dict(Counter(kernel.name for kernel in kernels if not kernel.known).most_common()),
    )  # fmt: skip


def _refuse_unanswered(device: str, kernels: Sequence[Kernel], t: Float64) -> None:
    missing = Counter(kernels[place].what.name for place in np.flatnonzero(~np.isfinite(t)).tolist())
    if not missing:
        return
    listed = ", ".join(f"{name} ({count})" for name, count in missing.most_common(5))
    raise WhatifError(
        f"predict: no source has the times of {sum(missing.values())} operators on {device}: {listed}; name a GPU of "
        "whatif/hardware/gpus or of the op database, or measure them on this machine with --measure."
    )


def families_of(graph: OperatorGraph, *, on_host: bool) -> list[Operators]:
    """Return the distinct database operators that represent a graph's work, one table per family."""
    found: dict[Described, None] = {}
    for operation in graph.operations:
        kernels = kernels_of(operation)
        whole_operator = itself(operation) if on_host and kernels else None
        found |= dict.fromkeys([whole_operator] if whole_operator is not None else [kernel.what for kernel in kernels])
    return [ops for _, ops in operators_of(list(found))]


def unanswered(estimator: Asked, graph: OperatorGraph) -> list[Operators]:
    """Return the operators of a CPU's work that no source answers for, one table per family."""
    wanted = dict.fromkeys(kernel.what for kernels in work_on_host(estimator, graph) for kernel in kernels)
    distinct, found = list(wanted), []
    for places, ops in operators_of(distinct):
        found += [distinct[place] for place in places[~np.isfinite(estimator.estimate(ops).t_s)].tolist()]
    return [ops for _, ops in operators_of(found)]


def work_on_host(estimator: Asked, graph: OperatorGraph) -> list[list[Kernel]]:
    """Return the work of a CPU in each operation: the operator itself if it was measured, else a GPU's kernels.

    Operators with few bytes and many comparisons are not elementwise on a CPU: pooling takes twenty times as long.
    """
    kernels = [kernels_of(operation) for operation in graph.operations]
    described = [itself(operation) if work else None for operation, work in zip(graph.operations, kernels, strict=True)]
    distinct = list(dict.fromkeys(operator for operator in described if operator is not None))
    answered: set[Described] = set()
    for places, ops in operators_of(distinct):
        answered |= {distinct[place] for place in places[np.isfinite(estimator.estimate(ops).t_s)].tolist()}
    return [
        [Kernel(operation.name, operator)] if operator in answered and operator is not None else work
        for operation, operator, work in zip(graph.operations, described, kernels, strict=True)
    ]


def itself(operation: Operation) -> Described | None:
    """Return an operation as a database operator: of its family, else described by all of its inputs."""
    call = operation.name, operation.dims, operation.recorded_types, operation.concrete
    return describe(*call) or describe_other(*call)
