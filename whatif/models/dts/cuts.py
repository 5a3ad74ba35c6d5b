"""Cuts of a network: those that transfer the least, and the parts of pipeline workers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from whatif.models.dts.dnn import Dnn, Part
from whatif.models.dts.machines import Machines
from whatif.runtime.errors import WhatifError

# The number of cuts tried, those with the smallest transfers first: others only send more.
MOST_CUTS = 16


def narrow_cuts(dnn: Dnn) -> list[tuple[int, ...]]:
    """Return the cuts in two with the smallest transfers, each as the number of layers before it."""
    order = 1 + np.argsort(dnn.in_bytes[1:], kind="stable")
    return [(int(cut),) for cut in order[:MOST_CUTS]]


def parts_of(dnn: Dnn, cuts: tuple[int, ...]) -> list[Part]:
    """Return the parts between the cuts. Raises WhatifError if cuts do not ascend or leave no layer on one side."""
    bounds = (0, *cuts, len(dnn))
    if any(last <= first for first, last in pairwise(bounds)):
        raise WhatifError(
            f"dts: expected ascending cuts from 1 to {len(dnn) - 1}, a layer at least between them, got "
            f"{', '.join(map(str, cuts))}."
        )
    return [dnn.part(first, last) for first, last in pairwise(bounds)]


def halves(dnn: Dnn, cuts: tuple[int, ...]) -> tuple[Part, Part]:
    """Return the client's part and the server's. Raises WhatifError unless there is exactly one cut."""
    if len(cuts) != 1:
        raise WhatifError(f"dts: expected one cut, between client and server, got {len(cuts)}.")
    client, server = parts_of(dnn, cuts)
    return client, server


def pipeline_cuts(dnn: Dnn, machines: Machines, workers: int) -> list[tuple[int, ...]]:
    """Return the cuts into ``workers`` parts (0: as few as fit) with the smallest total transfer.

    With n parts, each fits the memory of the n-th largest processor. Raises WhatifError if no number of parts fits.
    """
    sizes = sorted((processor.memory_bytes for processor in machines.processors), reverse=True)
    if workers > len(dnn):
        raise WhatifError(f"dts: expected no more workers than the {len(dnn)} layers, got {workers}.")
    numbers = [workers] if workers else range(2, min(len(sizes), len(dnn)) + 1)
    for number in numbers:
        if number > len(sizes):
            break
        found = _narrowest(dnn, number, sizes[number - 1])
        if found is not None:
            return [found]
    raise WhatifError(
        f"dts: expected processors whose memory holds the network in {workers or 'any number of'} parts, got "
        f"{len(sizes)} processors with {sum(min(size, 1e15) for size in sizes) / 1e9:.3g} GB in all, the largest with "
        f"{sizes[0] / 1e9:.3g} GB; it needs {dnn.whole.memory_bytes / 1e9:.3g} GB."
    )


def _narrowest(dnn: Dnn, number: int, memory_bytes: float) -> tuple[int, ...] | None:
    """The cuts into ``number`` parts with the smallest total transfer, each within the memory; None if none fit."""
    n = len(dnn)
    weights = np.append(0, np.cumsum(dnn.weights_bytes * (2 + dnn.state_ratio) + dnn.kept_bytes))
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    origins: list[list[int]] = []
    for _ in range(number):
        reached, origin = np.full(n + 1, np.inf), [0] * (n + 1)
        for last in range(1, n + 1):
            first = np.arange(last)
            fits = weights[last] - weights[first] + dnn.in_bytes[first] <= memory_bytes
            carried = best[first] + np.where(first > 0, dnn.in_bytes[first], 0)
            carried[~fits] = np.inf
            origin[last] = int(carried.argmin())
            reached[last] = carried[origin[last]]
        best = reached
        origins.append(origin)
    if not np.isfinite(best[n]):
        return None
    cuts, at = [], n
    for origin in reversed(origins):
        at = origin[at]
        cuts.append(at)
    return tuple(reversed(cuts[:-1]))
