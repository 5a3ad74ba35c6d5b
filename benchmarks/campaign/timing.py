"""Times steps without the profiler: warm-up, then blocks of steps, each step by itself."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from whatif.instrumentation.steptimer import StepTimer


@dataclass(frozen=True)
class Effort:
    """How long to time; a block lasts about `block_s`, within its bounds of steps, and there are `BLOCKS` of them."""

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


def time_steps(step: Callable[[], None], device: str) -> dict[str, Any]:
    """Return the wall time and the CPU time of the calling thread, in ms, of every timed step, by block.

    On a GPU a step's wall time is that between two CUDA events at its ends, and nothing waits within a block.
    """
    effort = EFFORT[device]
    first_ms = _block(step, 1, device)[0][0]
    warmup_ms = _block(step, effort.warmup_steps, device)[0]
    steps = int(effort.block_s * 1e3 / min(warmup_ms))
    steps = max(effort.fewest_steps, min(effort.most_steps, steps))
    blocks = [_block(step, steps, device) for _ in range(BLOCKS)]
    return {
        "samples_ms": [wall for wall, _ in blocks],
        "cpu_samples_ms": [cpu for _, cpu in blocks],
        "first_step_ms": first_ms,
        "load_average": os.getloadavg()[0],
    }


def _block(step: Callable[[], None], steps: int, device: str) -> tuple[list[float], list[float]]:
    if device == "cuda":
        torch.cuda.synchronize()
    timer = StepTimer(torch.device("cuda") if device == "cuda" else None)
    for _ in range(steps):
        step()
        timer.mark()
    wall_ms, cpu_ms = timer.times_ms()
    return [round(ms, 4) for ms in wall_ms], [round(ms, 4) for ms in cpu_ms]
