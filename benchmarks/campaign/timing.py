"""Times steps without the profiler: warm-up, then blocks of steps, each step by itself."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from whatif.instrumentation.gpu import GPU
from whatif.instrumentation.gpu_clocks import describe_state
from whatif.instrumentation.steptimer import StepTimer

from .records import spread_pct


class Side(Protocol):
    """What is timed: training steps. Between `pause` and `resume` it leaves the machine alone."""

    @property
    def step(self) -> Callable[[], None]: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


@dataclass(frozen=True)
class Effort:
    """How long to time; a block lasts about `block_s`, within its bounds of steps."""

    warmup_steps: int
    block_s: float
    fewest_steps: int
    most_steps: int


BLOCKS = 3

# A GPU's libraries choose algorithms and its clock settles in the first steps.
EFFORT = {
    "cpu": Effort(warmup_steps=3, block_s=0.45, fewest_steps=3, most_steps=12),
    "cuda": Effort(warmup_steps=20, block_s=1.5, fewest_steps=10, most_steps=50),
}

# A round in turn. What changes evenly over one hits both sides alike.
BASELINE, CHANGED = 0, 1
TURNS = (BASELINE, CHANGED, CHANGED, BASELINE)
# Fewer rounds say little of how they spread.
FEWEST_ROUNDS = 12
# The goal is given up after this long.
MOST_S = 75.0

# A block in which the GPU was slowed down is timed again this often before it is kept with its reasons.
MOST_REPEATS = 2


class Block(NamedTuple):
    """Steps: wall time and the thread's CPU time of each, ms, the load, and what the GPU says at both ends."""

    wall_ms: list[float]
    cpu_ms: list[float]
    load: dict[str, float] | None
    clocks: dict[str, Any] | None  # None without a GPU


def time_steps(side: Side, device: str) -> dict[str, Any]:
    """Return a round: the wall time and the CPU time of the calling thread, in ms, of every timed step, by block.

    On a GPU a step's wall time is that between two CUDA events at its ends, and nothing waits within a block.
    """
    first_ms, steps = _warm_up(side, device)
    return {**_round([_block(side, steps, device) for _ in range(BLOCKS)]), "first_step_ms": first_ms}


def time_in_turn(
    baseline: Side, changed: Side, device: str, *, clock: str, goal_pct: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rounds of two sides that take turns, block by block, until their ratio is known within the goal.

    Its ± is that of `whatif validate`, by `clock` (samples_ms | cpu_samples_ms). Every round is kept.
    """
    sides = (baseline, changed)
    warm = [_warm_up(side, device) for side in sides]
    rounds: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    end_s = time.monotonic() + MOST_S
    for number in itertools.count():
        blocks = [(turn, _block(sides[turn], warm[turn][1], device)) for turn in TURNS]
        for which, (first_ms, _) in enumerate(warm):
            own = _round([block for turn, block in blocks if turn == which])
            rounds[which].append(own if number else {**own, "first_step_ms": first_ms})
        if number + 1 < FEWEST_ROUNDS:
            continue
        if spread_pct(*rounds, clock) < goal_pct or time.monotonic() >= end_s:
            break
    return rounds


def _warm_up(side: Side, device: str) -> tuple[float, int]:
    """The first step's wall time, ms, and how many steps a block has."""
    effort = EFFORT[device]
    first_ms = _timed(side, 1, device).wall_ms[0]
    warmup_ms = _timed(side, effort.warmup_steps, device).wall_ms
    steps = int(effort.block_s * 1e3 / min(warmup_ms))
    return first_ms, max(effort.fewest_steps, min(effort.most_steps, steps))


def _block(side: Side, steps: int, device: str) -> Block:
    """Time some steps; once more, and once more, where the GPU was slowed down meanwhile."""
    for _ in range(MOST_REPEATS):
        block = _timed(side, steps, device)
        if block.clocks is None or not block.clocks["throttled"]:
            return block
    return _timed(side, steps, device)


def _timed(side: Side, steps: int, device: str) -> Block:
    side.resume()
    before = describe_state() if device == "cuda" else None
    if device == "cuda":
        GPU.synchronize()
    timer = StepTimer(torch.device("cuda") if device == "cuda" else None)
    for _ in range(steps):
        side.step()
        timer.mark()
    # All steps are launched and the GPU still works on the last ones: once it rests, its clocks say little.
    after = describe_state() if device == "cuda" else None
    side.pause()
    wall_ms, cpu_ms = ([round(ms, 4) for ms in times] for times in timer.times_ms())
    clocks = None
    if before and after:
        reasons = dict.fromkeys([*before.pop("throttled"), *after.pop("throttled")])
        clocks = {"before": before, "after": after, "throttled": list(reasons)}
    return Block(wall_ms, cpu_ms, timer.load(), clocks)


def _round(blocks: list[Block]) -> dict[str, Any]:
    wall_ms, cpu_ms, loads, clocks = zip(*blocks, strict=True)
    found = {"samples_ms": list(wall_ms), "cpu_samples_ms": list(cpu_ms), "loads": list(loads)}
    return found | ({"clocks": list(clocks)} if all(clocks) else {})
