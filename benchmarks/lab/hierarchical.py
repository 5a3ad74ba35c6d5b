"""Two groups of two hosts with a slow link between them: one flat ring, and BlueConnect's reduction in stages.

Four workers on two cores: their computation is replayed, only the network is real. Stages of several buckets run
concurrently, each of the three stages on separate connections, as in the paper.
"""

import queue
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from whatif.runtime.errors import WhatifError

from .baseline import trace_name
from .ddp import SMALL_BUCKET_MB
from .jobs import Job, Layout, Results, quartiles, slower_rank
from .models import MODELS
from .rank import Rank, agreed, block_steps, median_ms, run, time_steps, undisturbed
from .replay import Plan, buckets_of, plan_of, sleep_until

GROUPS, INNER_MBIT_S = (2, 2), 1000.0
UPLINKS_MBIT_S = (100.0, 200.0)
BLOCK_S, FEWEST_STEPS, ROUNDS = 0.4, 2, 3
FLAT, STAGES = "flat ring", "in stages"


def jobs(out: Path, models: tuple[str, ...] = ()) -> list[Job]:
    """Every recorded model, at two rates between the groups."""
    return [_job(out, model, rate) for model in models or MODELS for rate in UPLINKS_MBIT_S]


def _job(out: Path, model: str, uplink_mbit_s: float) -> Job:
    name = f"hierarchical-{model}-{uplink_mbit_s:g}mbit"
    return Job(
        name, __name__, Layout(GROUPS, INNER_MBIT_S, uplink_mbit_s),
        {"trace": str((out / trace_name(model)).resolve()), "rounds": ROUNDS}, (f"{name}.json",),
        lambda results: _record(model, uplink_mbit_s, results),
    )  # fmt: skip


def _record(model: str, uplink_mbit_s: float, results: Results) -> dict[str, Any]:
    flat = f"distributed:workers=4,bandwidth={uplink_mbit_s:g}Mbps,bucket_mb={SMALL_BUCKET_MB}"
    stages = f"blueconnect:factors=2x2,inner_bandwidth={INNER_MBIT_S:g}Mbps"
    local = slower_rank(results, "local")
    runs = []
    for name, what_ifs in ((FLAT, [flat]), (STAGES, [flat, stages])):
        rounds = results[0]["rounds"][name]
        runs.append({"name": name, "compute": "replayed", "what_if": what_ifs, "bucket_mb": SMALL_BUCKET_MB,
                     "bucket_bytes": results[0]["bucket_bytes"], **quartiles(rounds), "rounds": rounds})  # fmt: skip
    return {
        "experiment": "hierarchical", "model": model,
        "baseline": {"trace": trace_name(model), **quartiles(local), "rounds": local},
        "runs": runs,
    }  # fmt: skip


class _Stages:
    """The three stages, one thread each: a bucket moves from one to the next."""

    def __init__(self, rank: int) -> None:
        inner = [(0, 1), (2, 3)]
        outer = [(0, 2), (1, 3)]
        # All ranks must create all groups, in the same order.
        self._scatter, self._across, self._gather = (
            self._own([dist.new_group(list(pair)) for pair in pairs], pairs, rank) for pairs in (inner, outer, inner)
        )
        self._place = rank % 2
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(3)]
        for place, stage in enumerate((self._reduce_scatter, self._all_reduce, self._all_gather)):
            threading.Thread(target=self._work, args=(place, stage), daemon=True).start()

    @staticmethod
    def _own(groups: list[Any], pairs: list[tuple[int, int]], rank: int) -> Any:
        return next(group for group, pair in zip(groups, pairs, strict=True) if rank in pair)

    def start(self, buffer: torch.Tensor) -> threading.Event:
        """Start with a bucket; the event is set when its sum is ready."""
        done = threading.Event()
        self._queues[0].put((buffer, done))
        return done

    def _work(self, place: int, stage: Any) -> None:
        while True:
            buffer, done = self._queues[place].get()
            stage(buffer)
            if place == 2:
                done.set()
            else:
                self._queues[place + 1].put((buffer, done))

    def _halves(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's half, and its neighbour's."""
        own_half, other_half = buffer.chunk(2)
        return (own_half, other_half) if self._place == 0 else (other_half, own_half)

    def _reduce_scatter(self, buffer: torch.Tensor) -> None:
        own_half, other_half = self._halves(buffer)
        received = torch.empty_like(own_half)
        self._swap(other_half, received, self._scatter)
        own_half += received

    def _all_reduce(self, buffer: torch.Tensor) -> None:
        dist.all_reduce(self._halves(buffer)[0], group=self._across)

    def _all_gather(self, buffer: torch.Tensor) -> None:
        own_half, other_half = self._halves(buffer)
        self._swap(own_half, other_half, self._gather)

    def _swap(self, sent: torch.Tensor, received: torch.Tensor, group: Any) -> None:
        """The exchange of a reduce-scatter or all-gather between two: each sends a half to the other."""
        neighbour = 1 - self._place
        works = [
            dist.isend(sent, group=group, group_dst=neighbour),
            dist.irecv(received, group=group, group_src=neighbour),
        ]
        for work in works:
            work.wait()  # type: ignore[union-attr]


def work(rank: Rank) -> dict[str, Any]:
    """Replay the steps with both ways of reducing; the request has `trace` and `rounds`."""
    plan = plan_of(Path(rank.request["trace"]))
    buckets = buckets_of(list(plan.gradients), SMALL_BUCKET_MB << 20)
    # A whole number of values for each of four ranks.
    buffers = [torch.ones(-(-size // 16) * 4) for _, size in buckets]
    stages = _Stages(rank.number)
    checked = torch.full((8,), float(rank.number + 1))
    stages.start(checked).wait()
    if not bool((checked == 10.0).all()):
        raise WhatifError(f"lab: expected the stages to sum 1, 2, 3 and 4 to 10, got {checked.tolist()}.")

    def local() -> None:
        sleep_until(time.perf_counter() + plan.step_ms / 1e3)

    def flat() -> None:
        _step(plan, buckets, buffers, lambda buffer: dist.all_reduce(buffer, async_op=True))

    def staged() -> None:
        _step(plan, buckets, buffers, stages.start)

    steps = {"local": local, FLAT: flat, STAGES: staged}
    counts = {}
    for name, step in steps.items():
        dist.barrier()
        counts[name] = block_steps(agreed(median_ms(step, FEWEST_STEPS)), BLOCK_S, FEWEST_STEPS)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in steps}
    with undisturbed():
        for _ in range(rank.request["rounds"]):
            for name, step in steps.items():
                dist.barrier()
                wall, _cpu = time_steps(step, counts[name])
                rounds[name].append({"samples_ms": [wall]})
    return {"rounds": rounds, "plan": asdict(plan), "bucket_bytes": [size for _, size in buckets]}


def _step(plan: Plan, buckets: list[tuple[float, int]], buffers: list[torch.Tensor], reduce: Any) -> None:
    begin_s = time.perf_counter()
    waiting = []
    for (ready_ms, _), buffer in zip(buckets, buffers, strict=True):
        sleep_until(begin_s + ready_ms / 1e3)
        waiting.append(reduce(buffer))
    sleep_until(begin_s + plan.backward_ms / 1e3)
    for sum_ in waiting:
        sum_.wait()
    sleep_until(time.perf_counter() + (plan.step_ms - plan.backward_ms) / 1e3)


if __name__ == "__main__":
    run(work)
