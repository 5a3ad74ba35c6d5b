"""The order in which a pipeline's stages run the forward and backward passes of their micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from whatif.runtime.errors import WhatifError

SCHEDULES = ("1f1b", "gpipe", "interleaved")


class Pass(NamedTuple):
    """The forward or backward pass of one micro-batch through one part of the model.

    ``part``: the number of the part of the model, in forward order; part j is on stage j modulo the stages.
    """

    backward: bool
    part: int
    micro_batch: int


def order(schedule: str, stages: int, micro_batches: int, chunks: int) -> list[list[Pass]]:
    """Return the passes of each stage in their order; each stage has ``chunks`` parts of the model.

    ``gpipe`` (Huang et al., GPipe, NeurIPS 2019, figure 2c): all forward passes, then all backward passes, the last
    micro-batch first. ``1f1b`` (Narayanan et al., PipeDream, SOSP 2019, with the flush of its SC 2021 paper, figure 4):
    as many forward passes as later stages, then alternating backward and forward passes. ``interleaved`` (Narayanan et
    al., Megatron-LM, SC 2021, §2.2.2): 1f1b with several parts per stage, micro-batches in groups as large as the
    number of stages. Raises WhatifError if a schedule cannot run.
    """
    if schedule not in SCHEDULES:
        raise WhatifError(f"pipeline: expected a schedule of {', '.join(SCHEDULES)}, got {schedule!r}.")
    if schedule != "interleaved":
        return [_of_stage(stage, stages, micro_batches, 1, schedule) for stage in range(stages)]
    if micro_batches % stages:
        raise WhatifError(
            f"pipeline: expected micro_batches to be a multiple of the {stages} stages for interleaved, got "
            f"{micro_batches}."
        )
    return [_of_stage(stage, stages, micro_batches, chunks, schedule) for stage in range(stages)]


def _of_stage(stage: int, stages: int, micro_batches: int, chunks: int, schedule: str) -> list[Pass]:
    count = chunks * micro_batches

    def unit(number: int, backward: bool) -> Pass:
        group, inside = divmod(number, stages * chunks)
        chunk, micro = divmod(inside, stages)
        chunk = chunks - 1 - chunk if backward else chunk
        return Pass(backward, chunk * stages + stage, group * stages + micro)

    forward, backward = ([unit(number, way) for number in range(count)] for way in (False, True))
    ahead = min(stages - 1 - stage, count)
    if schedule == "gpipe":
        ahead, backward = count, backward[::-1]
    elif schedule == "interleaved":
        # With one group there is nothing to alternate: all forward passes come first, as in Megatron-LM.
        ahead = count if micro_batches == stages else min(2 * (stages - 1 - stage) + (chunks - 1) * stages, count)
    # Warm-up forward passes, then one forward and one backward in turn, then the remaining backward passes.
    pairs = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *(one for pair in pairs for one in pair), *backward[count - ahead :]]


def most_in_flight(passes: list[Pass]) -> dict[int, int]:
    """Return the maximum number of micro-batches of each part between their forward and backward pass."""
    now = dict.fromkeys((one.part for one in passes), 0)
    most = dict(now)
    for one in passes:
        now[one.part] += -1 if one.backward else 1
        if sum(now.values()) > sum(most.values()):
            most = dict(now)
    return most


def in_flight_at_most(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int) -> Mapping[int, int]:
    """Return ``most_in_flight`` for a stage of an ``order``, without computing the whole order."""
    return _most_of_stage(stage, stages, min(micro_batches, _turns(stages, chunks)), chunks, schedule)


@cache
def _most_of_stage(stage: int, stages: int, micro_batches: int, chunks: int, schedule: str) -> dict[int, int]:
    return most_in_flight(_of_stage(stage, stages, micro_batches, chunks, schedule))


def _turns(stages: int, chunks: int) -> int:
    """Enough micro-batches for forward and backward passes to alternate, in whole groups of stages."""
    return (2 if chunks == 1 else 3) * stages


def in_possible_order(orders: list[list[Pass]]) -> list[Pass]:
    """Return the passes of all stages in one order, each after the passes whose results it needs.

    A forward pass needs that of the previous part, a backward pass that of the next part, the last part's its own
    forward pass. Raises WhatifError on a deadlock of the stages.
    """
    last = max(one.part for passes in orders for one in passes)
    found: dict[Pass | None, None] = {None: None}  # a pass that needs no other finds None
    waiting = [deque(passes) for passes in orders]
    while any(waiting):
        before = len(found)
        for passes in waiting:
            while passes and needed(passes[0], last) in found:
                found[passes.popleft()] = None
        if len(found) == before:
            raise WhatifError("pipeline: the stages of this schedule wait for one another for ever.")
    return [one for one in found if one is not None]


def needed(this: Pass, last: int) -> Pass | None:
    """Return the pass whose result ``this`` needs; None for the forward pass of the first part."""
    if this.backward:
        return Pass(True, this.part + 1, this.micro_batch) if this.part < last else Pass(False, last, this.micro_batch)
    return Pass(False, this.part - 1, this.micro_batch) if this.part else None
