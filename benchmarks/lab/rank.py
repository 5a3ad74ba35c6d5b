"""Common parts of the lab's workers: their core, rank, undisturbed timing, and result."""

import ctypes
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from whatif.instrumentation.metadata import describe_environment

from whatif.runtime.files import replacing

# Memory that the process touches before timing: the first touch of a page costs more than its use.
TOUCHED_BYTES = 384 << 20
# Real-time priorities, above every ordinary process; threads that communicate come before the one that computes, like
# the kernel's network processing.
COMPUTE_PRIORITY, COMMUNICATION_PRIORITY = 10, 20
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Rank:
    """One worker's rank in its job, and its request."""

    number: int
    workers: int
    address: str  # of its host
    request: dict[str, Any]


def run(work: Callable[[Rank], dict[str, Any]], *, join: bool = True) -> None:
    """Run this process: read the request, pin to a core, do the work, and write the result.

    `join` first connects the workers over gloo.
    """
    # A lab that is killed cannot end its workers.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, {int(os.environ["LAB_CORE"])})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    touched = [b"\1" * (16 << 20) for _ in range(TOUCHED_BYTES >> 24)]
    del touched
    request = json.loads(sys.argv[1])
    rank = Rank(request["rank"], request["workers"], os.environ["LAB_ADDRESS"], request)
    if join:
        dist.init_process_group("gloo")
    result = {**work(rank), "machine": {"device": "cpu", **describe_environment(False)}}
    result["load_average"] = os.getloadavg()[0]
    with replacing(Path(request["result"])) as part:
        part.write_text(json.dumps(result))
    if join:
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def undisturbed(main_priority: int = COMPUTE_PRIORITY) -> Iterator[None]:
    """Keep ordinary processes off this process's core during timing.

    All its threads get real-time priority, and lose it right afterwards: a process with it can block
    its own core when it destroys a process group.
    """
    main = threading.main_thread().native_id
    for thread in _threads():
        priority = main_priority if thread == main else COMMUNICATION_PRIORITY
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))
    try:
        yield
    finally:
        for thread in _threads():
            with suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def agreed(value: float, group: Any = None) -> float:
    """The value of rank 0, on all ranks (of a group that it is in)."""
    shared_value = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(shared_value, 0, group=group)
    return float(shared_value.item())


def time_steps(step: Callable[[], Any], count: int) -> tuple[list[float], list[float]]:
    """Wall time and this thread's CPU time of each of `count` steps, ms."""
    wall, cpu = [], []
    for _ in range(count):
        begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
        step()
        cpu.append(round((time.thread_time_ns() - begin_cpu) / 1e6, 4))
        wall.append(round((time.perf_counter_ns() - begin) / 1e6, 4))
    return wall, cpu


def block_steps(step_ms: float, block_s: float, fewest: int, group: Any = None) -> int:
    """The number of steps of a block, equal on all ranks."""
    return int(agreed(max(fewest, int(block_s * 1e3 / step_ms)), group))


def blocks_of(
    steps: Mapping[str, Callable[[], Any]], *, warmup_steps: int, block_s: float, fewest: int
) -> dict[str, int]:
    """Warm up each way of training on all ranks at once; return the number of steps of its blocks, by name."""
    counts = {}
    for name, step in steps.items():
        dist.barrier()
        median_ms(step, warmup_steps)
        counts[name] = block_steps(median_ms(step, 1), block_s, fewest)
    return counts


def time_round(
    steps: Mapping[str, Callable[[], Any]], counts: Mapping[str, int], rounds: dict[str, list[dict[str, Any]]]
) -> None:
    """Time a block of each way and add it to `rounds`; a block of plain steps (`local`) comes before each.

    The machine's speed changes: plain steps see about the same speed as the way timed after them.
    """
    for way in steps:
        for name in ("local", way) if way != "local" else ():
            dist.barrier()
            wall, cpu = time_steps(steps[name], counts[name])
            rounds[name].append({"samples_ms": [wall], "cpu_samples_ms": [cpu]})


def median_ms(step: Callable[[], Any], count: int) -> float:
    """The median of some steps, ms."""
    return statistics.median(time_steps(step, count)[0])
