"""Time steps without the profiler: warm-up, then blocks of individually timed steps."""

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
    """Training steps to time. Between `pause` and `resume` they do not use the machine."""

    @property
    def step(self) -> Callable[[], None]: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


@dataclass(frozen=True)
class Effort:
    """How long to time; a block takes about `block_s`, within its bounds on steps."""

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

# Blocks of a round. Steady drift within a round affects both sides equally.
BASELINE, CHANGED = 0, 1
TURNS = (BASELINE, CHANGED, CHANGED, BASELINE)
# Fewer rounds do not determine their spread.
FEWEST_ROUNDS = 12
# The goal is abandoned after this time.
MOST_S = 75.0

# Retries of a block in which the GPU throttled, before it is kept with the reasons.
MOST_REPEATS = 2


class Block(NamedTuple):
    """Wall time and the thread's CPU time of each step, ms, the load, and the GPU's state at both ends."""

    wall_ms: list[float]
    cpu_ms: list[float]
    load: dict[str, float] | None
    clocks: dict[str, Any] | None  # None without a GPU


def time_steps(side: Side, device: str) -> dict[str, Any]:
    """Return a round: the wall time and the CPU time of the calling thread, in ms, of every timed step, by block.

    On a GPU a step's wall time is between two CUDA events at its ends, without synchronization within a block.
    """
    first_ms, steps = _warm_up(side, device)
    return {**_round([_block(side, steps, device) for _ in range(BLOCKS)]), "first_step_ms": first_ms}


def time_in_turn(
    baseline: Side, changed: Side, device: str, *, clock: str, goal_pct: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Time two sides in turn, block by block, until the ± of their ratio reaches the goal; return their rounds.

    The ± is computed as in `whatif validate`, from `clock` (samples_ms | cpu_samples_ms). Every round is kept.
    """
    sides = (baseline, changed)
    warm = [_warm_up(chosen, device) for chosen in sides]
    rounds: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    end_s = time.monotonic() + MOST_S
    for number in itertools.count():
        blocks = [(turn, _block(sides[turn], warm[turn][1], device)) for turn in TURNS]
        for side, (first_ms, _) in enumerate(warm):
            own_round = _round([block for turn, block in blocks if turn == side])
            rounds[side].append(own_round if number else {**own_round, "first_step_ms": first_ms})
        if number + 1 < FEWEST_ROUNDS:
            continue
        if spread_pct(*rounds, clock) < goal_pct or time.monotonic() >= end_s:
            break
    return rounds


def _warm_up(side: Side, device: str) -> tuple[float, int]:
    """Return the first step's wall time, ms, and the number of steps of a block."""
    effort = EFFORT[device]
    first_ms = _timed(side, 1, device).wall_ms[0]
    warmup_ms = _timed(side, effort.warmup_steps, device).wall_ms
    steps = int(effort.block_s * 1e3 / min(warmup_ms))
    return first_ms, max(effort.fewest_steps, min(effort.most_steps, steps))


def _block(side: Side, steps: int, device: str) -> Block:
    """Time some steps, with retries if the GPU throttles."""
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
    # Read the clocks while the GPU still runs the last steps: those of an idle GPU are meaningless.
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
