"""DistributedDataParallel over gloo: steps with and without it, in turn, in the same processes.

A round has a block of steps of each way of exchanging the gradients, and before each a block of plain steps on every
rank at once, so that all of them see the same speed of the machine.
"""

import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from .baseline import trace_name
from .jobs import Job, Layout, Results, quartiles, slower_rank
from .models import MODELS, Training
from .rank import Rank, blocks_of, run, time_round, time_steps, undisturbed

# The machine's speed changes within seconds, which affects many short blocks equally.
BLOCK_S, FEWEST_STEPS = 0.35, 2
# Below 1 Gbit/s a step is long, and most of it is network time, which is stable.
ROUNDS, SLOW_ROUNDS, ALONE_ROUNDS = 7, 4, 2
# DDP makes its final buckets in the second step.
WARMUP_STEPS = 2

# Rates as in the paper's comparisons; None: the machine's own limit.
RATES_MBIT_S = (100.0, 1000.0, 200.0, None)
ONE_BUCKET_MB, SMALL_BUCKET_MB = 1000, 2
WAYS = (
    {"name": "one bucket", "bucket_mb": ONE_BUCKET_MB, "hook": ""},
    {"name": "buckets of 2 MiB", "bucket_mb": SMALL_BUCKET_MB, "hook": ""},
    {"name": "buckets of 2 MiB, fp16", "bucket_mb": SMALL_BUCKET_MB, "hook": "fp16"},
)


def jobs(out: Path, models: tuple[str, ...] = ()) -> list[Job]:
    """Every model at every rate, two workers."""
    return [_job(model, rate) for model in models or MODELS for rate in RATES_MBIT_S]


def rate_name(rate_mbit_s: float | None) -> str:
    """A rate as part of a file's name."""
    return "unlimited" if rate_mbit_s is None else f"{rate_mbit_s:g}mbit"


def _job(model: str, rate_mbit_s: float | None) -> Job:
    name = f"ddp-{model}-{rate_name(rate_mbit_s)}"
    request = {"model": model, "ways": WAYS, "rounds": SLOW_ROUNDS if (rate_mbit_s or 1e9) < 1000 else ROUNDS}
    return Job(
        name, __name__, Layout((2,), rate_mbit_s), request, made=(f"{name}.json",),
        record=lambda results: _record(model, rate_mbit_s, results),
    )  # fmt: skip


def _record(model: str, rate_mbit_s: float | None, results: Results) -> dict[str, Any]:
    first = results[0]
    local = slower_rank(results, "local")
    link = f"workers=2,bandwidth={rate_mbit_s or _measured_mbit_s(first):g}Mbps"
    runs = []
    for way in WAYS:
        name = str(way["name"])
        rounds = first["rounds"][name]
        hook = f",compress={way['hook']}" if way["hook"] else ""
        runs.append(
            {
                **way,
                "compute": "real",
                "what_if": [f"distributed:{link},bucket_mb={way['bucket_mb']}{hook}"],
                "bucket_bytes": first["bucket_bytes"][name],
                "alone_ms": first["alone_ms"][name],
                **quartiles(rounds),
                "rounds": rounds,
            }
        )
    return {
        "experiment": "ddp", "model": model, "batch": first["samples"],
        "gradient_bytes": first["gradient_bytes"], "buffer_bytes": first["buffer_bytes"],
        "baseline": {"trace": trace_name(model), **quartiles(local), "rounds": local},
        "runs": runs,
    }  # fmt: skip


def _measured_mbit_s(result: dict[str, Any]) -> float:
    """The rate of an unlimited link from the bare all-reduce of one bucket, rounded to 10 Mbit/s."""
    name = str(WAYS[0]["name"])
    bits = sum(result["bucket_bytes"][name]) * 8
    return float(round(bits / statistics.median(result["alone_ms"][name]) / 1e3, -1))


class _Exchange:
    """One way of exchanging the gradients: its training, and DDP's buckets."""

    def __init__(self, model: str, way: dict[str, Any]) -> None:
        self.name = str(way["name"])
        self.training = Training(model)
        self.ddp = DistributedDataParallel(self.training.model, bucket_cap_mb=way["bucket_mb"])
        if way.get("hook") == "fp16":
            self.ddp.register_comm_hook(None, fp16_compress_hook)
        self.training.forward = self.ddp
        self.scale = 2 if way.get("hook") == "fp16" else 1

    @property
    def bucket_bytes(self) -> list[int]:
        """Bucket sizes in the order of sending, known after some steps."""
        untyped: Any = self.ddp
        logged = untyped._get_ddp_logging_data()
        sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
        return [int(size) for size in str(sizes).replace(",", " ").split()]

    def all_reduces(self) -> None:
        """The exchange alone, bucket by bucket, without overlap."""
        dtype = torch.float16 if self.scale == 2 else torch.float32
        waiting = [dist.all_reduce(torch.zeros(size // 4, dtype=dtype), async_op=True) for size in self.bucket_bytes]
        for work in waiting:
            work.wait()


def work(rank: Rank) -> dict[str, Any]:
    """Time all ways; the request has `model`, `ways` (name, bucket_mb, hook) and `rounds`."""
    request = rank.request
    local = Training(request["model"])
    ways = [_Exchange(request["model"], way) for way in request["ways"]]
    steps = {"local": local.step, **{way.name: way.training.step for way in ways}}
    counts = blocks_of(steps, warmup_steps=WARMUP_STEPS, block_s=BLOCK_S, fewest=FEWEST_STEPS)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in counts}
    alone: dict[str, list[float]] = {way.name: [] for way in ways}
    with undisturbed():
        for number in range(request["rounds"]):
            time_round(steps, counts, rounds)
            for way in ways if number < ALONE_ROUNDS else ():
                dist.barrier()
                alone[way.name] += time_steps(way.all_reduces, 1)[0]
    return {
        "rounds": rounds,
        "alone_ms": alone,
        "bucket_bytes": {way.name: way.bucket_bytes for way in ways},
        "samples": local.samples,
        "gradient_bytes": local.gradient_bytes,
        "buffer_bytes": local.buffer_bytes,
    }


if __name__ == "__main__":
    run(work)
