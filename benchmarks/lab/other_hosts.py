"""One replayed step on two and on four equal hosts, timed and then recorded: ground truth for `scaling` from ranks.

Its computation sleeps, as for `hierarchical`; every bucket is really reduced, without DDP's overhead.
"""

import gzip
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .baseline import trace_name
from .ddp import SMALL_BUCKET_MB
from .jobs import Job, Layout, Results, quartiles
from .rank import Rank, agreed, block_steps, median_ms, run, time_steps, undisturbed
from .replay import Plan, buckets_of, plan_of, sleep_until

HOSTS, RATES_MBIT_S, MODELS = (2, 4), (200.0, 1000.0), ("gpt2", "vgg")
BLOCK_S, FEWEST_STEPS, ROUNDS, RECORDED_STEPS = 0.6, 2, 3, 6


def jobs(out: Path, models: tuple[str, ...] = ()) -> list[Job]:
    """Some models at two rates, each on two and on four hosts."""
    return [_job(out, model, rate, hosts) for model in models or MODELS for rate in RATES_MBIT_S for hosts in HOSTS]


def _job(out: Path, model: str, rate: float, hosts: int) -> Job:
    name = f"ranks-{model}-{rate:g}mbit-{hosts}"
    return Job(
        name, __name__, Layout((hosts,), rate),
        {"trace": str((out / trace_name(model)).resolve()), "ranks": str((out / name).resolve())}, (f"{name}.json",),
        lambda results: _record(model, results),
    )  # fmt: skip


def _record(model: str, results: Results) -> dict[str, Any]:
    rounds = results[0]["rounds"]
    return {"experiment": "other_hosts", "model": model, "compute": "replayed", **quartiles(rounds), "rounds": rounds}


class Replay(torch.autograd.Function):
    """Computation until a given time, as an operator, so that the profiler records work and not a wait."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, end_s: float) -> torch.Tensor:
        """Sleep."""
        sleep_until(end_s)
        return tensor


def _replay(tensor: torch.Tensor, end_s: float) -> None:
    Replay.apply(tensor, end_s)  # type: ignore[no-untyped-call]


def work(rank: Rank) -> dict[str, Any]:
    """Time the step, then record it; the request has `trace` and `ranks`, the folder of the recordings."""
    plan = plan_of(Path(rank.request["trace"]))
    buckets = buckets_of(list(plan.gradients), SMALL_BUCKET_MB << 20)
    buffers = [torch.ones(-(-size // 16) * 4) for _, size in buckets]

    def step() -> None:
        _step(plan, buckets, buffers)

    dist.barrier()
    count = block_steps(agreed(median_ms(step, FEWEST_STEPS)), BLOCK_S, FEWEST_STEPS)
    rounds = []
    with undisturbed():
        for _ in range(ROUNDS):
            dist.barrier()
            rounds.append({"samples_ms": [time_steps(step, count)[0]]})
        dist.barrier()
        schedule = torch.profiler.schedule(wait=0, warmup=2, active=RECORDED_STEPS, repeat=1)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, schedule=schedule, record_shapes=True) as profiler:
            for _ in range(2 + RECORDED_STEPS):
                step()
                profiler.step()
    folder = Path(rank.request["ranks"])
    folder.mkdir(exist_ok=True)
    _write(profiler, folder / f"rank{rank.number}.json.gz")
    return {"rounds": rounds, "plan": asdict(plan), "bucket_bytes": [size for _, size in buckets]}


def _write(profiler: torch.profiler.profile, path: Path) -> None:
    """Write the trace without the names of the machine and of its file."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        trace = json.loads(Path(file.name).read_text(encoding="utf-8"))
    kept = {key: value for key, value in trace.items() if key not in ("host_name", "traceName")}
    path.write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))


def _step(plan: Plan, buckets: list[tuple[float, int]], buffers: list[torch.Tensor]) -> None:
    begin_s, some = time.perf_counter(), torch.ones(1)
    waiting = []
    for (ready_ms, _), buffer in zip(buckets, buffers, strict=True):
        _replay(some, begin_s + ready_ms / 1e3)
        waiting.append(dist.all_reduce(buffer, async_op=True))
    _replay(some, begin_s + plan.backward_ms / 1e3)
    for reduced in waiting:
        reduced.wait()
    _replay(some, time.perf_counter() + (plan.step_ms - plan.backward_ms) / 1e3)


if __name__ == "__main__":
    run(work)
