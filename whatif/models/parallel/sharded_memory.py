"""What sharded training makes of the memory of a step (ZeRO, figure 1): each worker keeps 1 / n of more and more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whatif.graph.memory import LayerMemory, Memory


def with_sharded_state(memory: Memory, workers: int) -> Memory:
    """Stage 1: the optimizer's state, and what the update computes with, of 1 / ``workers`` of the parameters."""
    return replace(
        memory,
        optimizer_state=_part(memory.optimizer_state, workers),
        update_workspace=_part(memory.update_workspace, workers),
    )


def with_sharded_gradients(memory: Memory, workers: int, bucket_bytes: int) -> Memory:
    """Stage 2: gradients leave for their owners bucket by bucket; a bucket's are there until it is sent.

    While a layer works its whole gradients and the bucket before them are there as well.
    """
    memory = with_sharded_state(memory, workers)
    bucket = min(bucket_bytes, memory.gradients)
    return memory.with_layers([
        _beside(row, _part(row.gradients, workers), 0, row.gradients - _part(row.gradients, workers) + bucket)
        for row in memory.layers
    ])  # fmt: skip


def with_sharded_parameters(
    memory: Memory, workers: int, unit_of: Mapping[str, int], sizes: Mapping[int, int], *, limit: int,
    resharded: bool, share: float,
) -> Memory:  # fmt: skip
    """Stage 3: parameters as well; units are gathered while they work, with the next ``limit`` - 1 beside them.

    ``unit_of``: the unit of each layer by name, the root's where it is in none; ``sizes``: bytes of each unit, the
    root's under -1, which stays gathered; ``share`` of them is gathered. Backward the whole gradients of a unit are
    there until they are sent, and the buffer that the unit before is sent from. ``resharded``: units go behind their
    forward work; else all are there from then on.
    """
    memory = with_sharded_state(memory, workers)
    rows = memory.layers
    units = [unit_of.get(row.name, -1) for row in rows]
    gathered = {unit: round(size * share) for unit, size in sizes.items()}
    if set(sizes) - {-1} and not any(unit >= 0 for unit in units):
        # Units without layers, of equal sizes: as many as may be are there all the time.
        at_once = limit if resharded else len(sizes) - 1
        gathered[-1] = gathered.get(-1, 0) + at_once * max(size for unit, size in gathered.items() if unit >= 0)
    root = gathered.get(-1, 0)
    order = list(dict.fromkeys(unit for unit in units if unit >= 0))
    place = {unit: number for number, unit in enumerate(order)}

    def ahead(unit: int, way: int) -> int:
        """Bytes of a unit and of those that are gathered ahead of it, in the direction ``way``."""
        at = place[unit]
        window = order[at : at + limit] if way > 0 else order[max(at - limit + 1, 0) : at + 1]
        return sum(gathered[other] for other in window)

    before = {unit: sum(gathered[other] for other in order[:at]) for unit, at in place.items()}
    whole = sum(gathered[unit] for unit in order)
    forward, near = [0] * len(rows), -1
    for at, unit in enumerate(units):
        near = unit if unit >= 0 else near
        there = ahead(unit, 1) if unit >= 0 else 0
        kept = 0 if resharded else before[unit] if unit >= 0 else before[near] + gathered[near] if near >= 0 else 0
        forward[at] = root + there + kept
    backward = [0] * len(rows)
    own: dict[int, int] = {}
    parts: dict[int, int] = {}
    now, sent = -1, 0
    for at in range(len(rows) - 1, -1, -1):
        unit = units[at]
        if unit >= 0 and unit != now:
            sent = round(own.get(now, 0) * share) if now >= 0 else 0
            now = unit
        own[unit] = own.get(unit, 0) + rows[at].gradients
        parts[unit] = parts.get(unit, 0) + _part(rows[at].gradients, workers)
        there = whole if not resharded else ahead(unit, -1) if unit >= 0 else 0
        # A unit's part of the gradients is made when they are sent, so that of its whole ones it is no more yet.
        full = sum(own.get(one, 0) for one in {-1, now}) - sum(parts.get(one, 0) for one in {-1, unit})
        backward[at] = root + there + full + sent
    layers: list[LayerMemory] = [
        _beside(row, _part(row.gradients, workers), forward[at], backward[at]) for at, row in enumerate(rows)
    ]
    return replace(memory, parameters=_part(memory.parameters, workers)).with_layers(layers)


def _beside(row: LayerMemory, gradients: int, forward: int, backward: int) -> LayerMemory:
    """The row with its part of the gradients, and with what is beside its work in either pass, whatever the batch."""
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
