"""Where a network can be cut: the narrowest places, and the parts that pipeline workers hold."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from whatif.models.dts.dnn import Dnn, Part
from whatif.models.dts.machines import Machines
from whatif.runtime.errors import WhatifError

# Cuts that carry more than this many others carry are not tried: they only send more.
MOST_CUTS = 16


def narrow_cuts(dnn: Dnn) -> list[tuple[int, ...]]:
    """Return the cuts in two through which least flows, each as how many layers lie ahead of it."""
    order = 1 + np.argsort(dnn.in_bytes[1:], kind="stable")
    return [(int(cut),) for cut in order[:MOST_CUTS]]


def parts_of(dnn: Dnn, cuts: tuple[int, ...]) -> list[Part]:
    """Return the parts between the cuts. Raises WhatifError where cuts do not ascend or leave nothing on one side."""
    bounds = (0, *cuts, len(dnn))
    if any(last <= first for first, last in pairwise(bounds)):
        raise WhatifError(
            f"dts: expected ascending cuts from 1 to {len(dnn) - 1}, a layer at least between them, got "
            f"{', '.join(map(str, cuts))}."
        )
    return [dnn.part(first, last) for first, last in pairwise(bounds)]


def halves(dnn: Dnn, cuts: tuple[int, ...]) -> tuple[Part, Part]:
    """Return the part of the client and that of the server. Raises WhatifError where there is not one cut."""
    if len(cuts) != 1:
        raise WhatifError(f"dts: expected one cut, between client and server, got {len(cuts)}.")
    client, server = parts_of(dnn, cuts)
    return client, server


def pipeline_cuts(dnn: Dnn, machines: Machines, workers: int) -> list[tuple[int, ...]]:
    """Return the cuts into ``workers`` parts, or as few as fit (0), through which least flows in all.

    No part is larger than the memory of the smallest of as many of the largest processors. Raises WhatifError where no
    number of parts fits.
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
    """The cuts into ``number`` parts through which least flows, no part above the memory; None where none fit."""
    n = len(dnn)
    weights = np.append(0, np.cumsum(dnn.weights_bytes * (2 + dnn.state_ratio) + dnn.kept_bytes))
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    came: list[list[int]] = []
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
        came.append(origin)
    if not np.isfinite(best[n]):
        return None
    cuts, at = [], n
    for origin in reversed(came):
        at = origin[at]
        cuts.append(at)
    return tuple(reversed(cuts[:-1]))
