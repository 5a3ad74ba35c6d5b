"""The memory of a step under sharded training (ZeRO, figure 1): each stage shards more of it by 1 / n."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whatif.graph.memory import LayerMemory, Memory


def with_sharded_state(memory: Memory, workers: int) -> Memory:
    """Stage 1: optimizer state and workspace for 1 / ``workers`` of the parameters."""
    return replace(
        memory,
        optimizer_state=_part(memory.optimizer_state, workers),
        update_workspace=_part(memory.update_workspace, workers),
    )


def with_sharded_gradients(memory: Memory, workers: int, bucket_bytes: int) -> Memory:
    """Stage 2: gradients are sent to their owners by bucket; a bucket's gradients exist until it is sent.

    While a layer works, its full gradients and the bucket before them exist as well.
    """
    memory = with_sharded_state(memory, workers)
    layers: list[LayerMemory] = []
    ready = 0  # what the layers behind leave for the bucket
    for row in reversed(memory.layers):
        part = _part(row.gradients, workers)
        layers.append(_beside(row, part, 0, row.gradients - part + min(bucket_bytes, ready)))
        ready += row.gradients - part
    return memory.with_layers(layers[::-1])


def with_sharded_parameters(
    memory: Memory, workers: int, unit_of: Mapping[str, int], sizes: Mapping[int, int], *, limit: int,
    resharded: bool, share: float,
) -> Memory:  # fmt: skip
    """Stage 3: parameters as well; units are gathered while they work, together with the next ``limit`` - 1.

    ``unit_of``: the unit of each layer by name, absent for the root's; ``sizes``: bytes of each unit, the root's under
    -1, which stays gathered; ``share`` of them is gathered. Backward a unit's full gradients exist until they are sent,
    with the send buffer of the unit before. ``resharded``: units are freed after their forward work; else they stay.
    """
    memory = with_sharded_state(memory, workers)
    rows = memory.layers
    units = [unit_of.get(row.name, -1) for row in rows]
    gathered = {unit: round(size * share) for unit, size in sizes.items()}
    if set(sizes) - {-1} and not any(unit >= 0 for unit in units):
        # Units without layers, of equal sizes: the maximum number is always gathered.
        at_once = limit if resharded else len(sizes) - 1
        gathered[-1] = gathered.get(-1, 0) + at_once * max(size for unit, size in gathered.items() if unit >= 0)
    root = gathered.get(-1, 0)
    order = list(dict.fromkeys(unit for unit in units if unit >= 0))
    place = {unit: number for number, unit in enumerate(order)}

    def ahead(unit: int, way: int) -> int:
        """Bytes of a unit and of those prefetched with it, in the direction ``way``."""
        at = place[unit]
        window = order[at : at + limit] if way > 0 else order[max(at - limit + 1, 0) : at + 1]
        return sum(gathered[other] for other in window)

    before = {unit: sum(gathered[other] for other in order[:at]) for unit, at in place.items()}
    all_units = sum(gathered[unit] for unit in order)
    forward, near = [0] * len(rows), -1
    for at, unit in enumerate(units):
        near = unit if unit >= 0 else near
        in_use = ahead(unit, 1) if unit >= 0 else 0
        kept = 0 if resharded else before[unit] if unit >= 0 else before[near] + gathered[near] if near >= 0 else 0
        forward[at] = root + in_use + kept
    backward = [0] * len(rows)
    unsharded: dict[int, int] = {}
    parts: dict[int, int] = {}
    now, sent = -1, 0
    for at in range(len(rows) - 1, -1, -1):
        unit = units[at]
        if unit >= 0 and unit != now:
            sent = round(unsharded.get(now, 0) * share) if now >= 0 else 0
            now = unit
        unsharded[unit] = unsharded.get(unit, 0) + rows[at].gradients
        parts[unit] = parts.get(unit, 0) + _part(rows[at].gradients, workers)
        in_use = all_units if not resharded else ahead(unit, -1) if unit >= 0 else 0
        # The row already counts the sharded part of each gradient, so only the rest of the full ones is added.
        full = sum(unsharded.get(unit_, 0) for unit_ in {-1, now}) - sum(parts.get(unit_, 0) for unit_ in {-1, unit})
        backward[at] = root + in_use + full + sent
    layers: list[LayerMemory] = [
        _beside(row, _part(row.gradients, workers), forward[at], backward[at]) for at, row in enumerate(rows)
    ]
    return replace(memory, parameters=_part(memory.parameters, workers)).with_layers(layers)


def _beside(row: LayerMemory, gradients: int, forward: int, backward: int) -> LayerMemory:
    """The row with its part of the gradients, and with the batch-independent bytes beside its work in either pass."""
    return row._replace(
        gradients=gradients,
        forward_workspace=row.forward_workspace + forward,
        fixed_forward=row.fixed_forward + forward,
        backward_workspace=row.backward_workspace + backward,
        fixed_workspace=row.fixed_workspace + backward,
    )


def _part(size_bytes: int, workers: int) -> int:
    """The largest of equal parts."""
    return -(-size_bytes // workers)
