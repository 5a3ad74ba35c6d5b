"""Durations of kernels from the op database's chain, with their ranges and sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from whatif.from_module.gpu_work import Kernel, kernels_of
from whatif.from_module.operations import Operation, OperatorGraph
from whatif.graph.described import Described
from whatif.graph.types import Float64
from whatif.ingest.operator_calls import describe, describe_other
from whatif.opdb.answers import Answers, AnswerSource
from whatif.opdb.importers.described import operators_of
from whatif.opdb.rows import Operators
from whatif.runtime.errors import WhatifError

# What a kernel that no rule knows takes, estimated from its bytes, may be wrong by. Our estimate.
UNKNOWN_FACTOR = 3.0


class Asked(Protocol):
    """What answers: the chain of the op database for one device."""

    device: str

    def estimate(self, ops: Operators) -> Answers:
        """Estimate each of n operators of one family."""


class Durations(Struct, frozen=True):
    """Durations of n kernels with a nominal 90 % range, ns, shape (n,); how many each source answered for, by its name.

    ``unknown`` counts the kernels, by their operators' names, that were estimated from the bytes that they move alone.
    """

    duration_ns: Float64
    low_ns: Float64
    high_ns: Float64
    sources: dict[str, int]
    unknown: dict[str, int]


def ask(estimator: Asked, kernels: Sequence[Kernel]) -> Durations:
    """Ask for every kernel. Raises WhatifError naming the operators that no source can answer for."""
    t, low, high = (np.full(len(kernels), np.nan) for _ in range(3))
    sources: Counter[str] = Counter()
    distinct: dict[Described, list[int]] = {}
    others: dict[Described, list[int]] = {}
    for place, kernel in enumerate(kernels):
        distinct.setdefault(kernel.what, []).append(place)
        if kernel.also is not None:
            others.setdefault(kernel.also, []).append(place)
    asked = list(distinct)
    by = np.full(len(kernels), AnswerSource.NONE, dtype=np.int8)
    for at, ops in operators_of(asked):
        answers = estimator.estimate(ops)
        for row, place in enumerate(at.tolist()):
            places = distinct[asked[place]]
            t[places], low[places], high[places] = answers.t_s[row], answers.low_s[row], answers.high_s[row]
            by[places] = answers.answered_by[row]
    for at, ops in operators_of(list(others)):
        answers = estimator.estimate(ops)
        for row, place in enumerate(at.tolist()):
            # What was measured itself needs no other; models of one device alone are compared.
            faster = [
                p for p in others[list(others)[place]]
                if by[p] == answers.answered_by[row] == AnswerSource.LEARNED and answers.t_s[row] < t[p]
            ]  # fmt: skip
            t[faster], low[faster], high[faster] = answers.t_s[row], answers.low_s[row], answers.high_s[row]
    sources.update(AnswerSource(int(code)).name.lower() for code in by.tolist())
    _refuse_unanswered(estimator.device, kernels, t)
    share = np.array([kernel.share for kernel in kernels])
    known = np.array([kernel.known for kernel in kernels], dtype=np.bool_)
    low = np.where(known, low, np.minimum(low, t / UNKNOWN_FACTOR))
    high = np.where(known, high, np.maximum(high, t * UNKNOWN_FACTOR))
    # A part that is two thirds of an operator has no shorter launch: the shortest kernels are left as they are.
    factor = 1e9 * share
    return Durations(
        t * factor, low * factor, high * factor, dict(sources.most_common()),
        dict(Counter(kernel.name for kernel in kernels if not kernel.known).most_common()),
    )  # fmt: skip


def _refuse_unanswered(device: str, kernels: Sequence[Kernel], t: Float64) -> None:
    missing = Counter(kernels[place].what.name for place in np.flatnonzero(~np.isfinite(t)).tolist())
    if not missing:
        return
    listed = ", ".join(f"{name} ({count})" for name, count in missing.most_common(5))
    raise WhatifError(
        f"predict: no source has the time of {sum(missing.values())} operators on {device}: {listed}; is it a known "
        "GPU (whatif/hardware/gpus), or one that the op database has rows of? --measure measures them on this machine."
    )


def families_of(graph: OperatorGraph, *, on_host: bool) -> list[Operators]:
    """Return the distinct operators that a graph's work is asked for as, one table a family."""
    found: dict[Described, None] = {}
    for operation in graph.operations:
        kernels = kernels_of(operation)
        own = itself(operation) if on_host and kernels else None
        found |= dict.fromkeys([own] if own is not None else [kernel.what for kernel in kernels])
    return [ops for _, ops in operators_of(list(found))]


def unanswered(estimator: Asked, graph: OperatorGraph) -> list[Operators]:
    """Return what a CPU's work needs and no source answers, one table a family: stand-ins for whole operators."""
    wanted = dict.fromkeys(kernel.what for kernels in work_on_host(estimator, graph) for kernel in kernels)
    asked, found = list(wanted), []
    for places, ops in operators_of(asked):
        found += [asked[place] for place in places[~np.isfinite(estimator.estimate(ops).t_s)].tolist()]
    return [ops for _, ops in operators_of(found)]


def work_on_host(estimator: Asked, graph: OperatorGraph) -> list[list[Kernel]]:
    """Return what a CPU computes in each operation: the operator itself where it was measured, else what a GPU would.

    What moves few bytes and compares many is no elementwise operator on a CPU: pooling takes twenty times as long.
    """
    kernels = [kernels_of(operation) for operation in graph.operations]
    own = [itself(operation) if mine else None for operation, mine in zip(graph.operations, kernels, strict=True)]
    distinct = list(dict.fromkeys(what for what in own if what is not None))
    answered: set[Described] = set()
    for places, ops in operators_of(distinct):
        answered |= {distinct[place] for place in places[np.isfinite(estimator.estimate(ops).t_s)].tolist()}
    return [
        [Kernel(operation.name, what)] if what in answered and what is not None else mine
        for operation, what, mine in zip(graph.operations, own, kernels, strict=True)
    ]


def itself(operation: Operation) -> Described | None:
    """Return an operation in the database's words: of its family, else as all that is said of its inputs."""
    types = ["TensorList" if kind.startswith("TensorList") else kind for kind in operation.types]
    said = operation.name, operation.dims, types, operation.concrete
    return describe(*said) or describe_other(*said)
