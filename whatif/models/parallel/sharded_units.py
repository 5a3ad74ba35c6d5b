"""Units of a sharded model: parts whose parameters are gathered together before their work and freed after it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Int64
from whatif.models.exchange.buckets import StepGradients
from whatif.models.layers.layer_facts import frozen_bytes
from whatif.models.layers.segments import are_classes, places_within, segments
from whatif.models.parallel.passes import Passes, Use, uses
from whatif.runtime.errors import WhatifError

# If nothing repeats: FSDP1's size_based_auto_wrap_policy wraps from 1e8 parameters on (torch.distributed.fsdp.wrap).
UNIT_BYTES = 400_000_000
# The maximum number of units.
_MOST_UNITS = 4096


class Units(NamedTuple):
    """The units of a model; the root has the rest and stays gathered from forward to backward pass."""

    names: tuple[str, ...]
    size_bytes: Int64  # of the parameters, shape (n_units,)
    gradient_bytes: Int64  # of those that are trained
    root_bytes: int
    root_gradient_bytes: int
    uses: list[Use]  # the uses of each, in order
    of_layer: Int64  # the unit of each layer, shape (n_layers,); -1 for the root


def units_of(
    graph: TaskGraph, name: str, gradients: StepGradients, found: Passes, unit: str | None, unit_bytes: int | None
) -> Units:
    """Return the units: the layers that ``unit`` matches, or layers grouped to ``unit_bytes``, or the repeated blocks.

    Frozen parameters have no gradients. In a recording that names no layers the passes are cut into equal times.
    Raises WhatifError if ``unit`` matches no layer.
    """
    first = gradients.step == gradients.step.min()
    size, layer = gradients.size_bytes[first], gradients.layer[first]
    if unit is not None and unit_bytes is not None:
        raise WhatifError(f"{name}: expected unit or unit_size, got both.")
    if (layer < 0).all() or (are_classes(graph) and unit is None):
        if unit is not None:
            raise WhatifError(f"{name}: expected a recording that names its layers for unit={unit!r}, got one without.")
        return _by_time(graph, int(size.sum()), found, unit_bytes or UNIT_BYTES)
    gradient_bytes = np.zeros(len(graph.layers), dtype=np.int64)
    np.add.at(gradient_bytes, layer[layer >= 0], size[layer >= 0])
    frozen = frozen_bytes(graph)
    layer_bytes = gradient_bytes + frozen
    chosen = [] if unit_bytes is not None else segments(graph, unit)
    if unit is not None and not chosen:
        raise WhatifError(f"{name}: no layer is called as unit={unit!r} says; `whatif info` lists the layers.")
    if chosen:
        table = places_within(graph.layers, chosen)
        names = tuple(chosen)
    else:
        table, names = _by_size(graph, layer_bytes, found, unit_bytes or UNIT_BYTES)
    sizes, trained = np.zeros((2, len(names)), dtype=np.int64)
    np.add.at(sizes, table[table >= 0], layer_bytes[table >= 0])
    np.add.at(trained, table[table >= 0], gradient_bytes[table >= 0])
    # A unit without parameters gathers nothing.
    kept = sizes > 0
    number = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1)
    names = tuple(text for text, has in zip(names, kept.tolist(), strict=True) if has)
    table = number[table]
    root_gradients = int(size.sum() - trained.sum())
    root = int(size.sum() + frozen.sum() - sizes.sum())
    in_order = uses(graph, found, table.take(graph.layer))
    return Units(names, sizes[kept], trained[kept], root, root_gradients, in_order, table)


def _by_size(graph: TaskGraph, layer_bytes: Int64, found: Passes, unit_bytes: int) -> tuple[Int64, tuple[str, ...]]:
    """Layers in the order of their first forward work, grouped until they hold ``unit_bytes``."""
    forward = found.task[~found.backward & (found.number == 0)]
    met, at = np.unique(graph.layer[forward], return_index=True)
    table = np.full(len(graph.layers), -1, dtype=np.int64)
    names: list[str] = []
    filled = 0
    for code in met[np.argsort(at)].tolist():
        if layer_bytes[code] <= 0 or code == 0:
            continue
        if filled == 0:
            names.append(graph.layers[code])
        table[code] = len(names) - 1
        filled = 0 if filled + layer_bytes[code] >= unit_bytes else filled + int(layer_bytes[code])
    return table, tuple(names)


def _by_time(graph: TaskGraph, total_bytes: int, found: Passes, unit_bytes: int) -> Units:
    """Equal units: the k-th of n works for the k-th 1 / n of the forward pass's time, and backward in reverse."""
    count = min(max(math.ceil(total_bytes / unit_bytes), 1), _MOST_UNITS)
    found_uses: list[Use] = []
    for number in range(len(found.step)):
        for backward in (False, True):
            tasks = found.task[(found.number == number) & (found.backward == backward)]
            if not len(tasks):
                continue
            over = np.cumsum(graph.duration_ns[tasks], dtype=np.float64)
            # Units within one long task share it.
            shares = over[-1] * np.arange(count + 1) / count
            first = np.minimum(np.searchsorted(over, shares[:-1], side="right"), len(tasks) - 1)
            last = np.minimum(np.searchsorted(over, shares[1:] - 0.5, side="left"), len(tasks) - 1)
            for at, (begin, end) in enumerate(zip(tasks[first].tolist(), tasks[last].tolist(), strict=True)):
                part = count - 1 - at if backward else at
                found_uses.append(Use(number, backward, part, begin, max(begin, end), (begin,)))
    size = np.full(count, total_bytes // count, dtype=np.int64)
    size[-1] += total_bytes - int(size.sum())
    names = tuple(f"part {k + 1} of {count}" for k in range(count))
    return Units(names, size, size, 0, 0, found_uses, np.full(len(graph.layers), -1, dtype=np.int64))
