"""Two workers and a parameter server on a separate host: whole gradients in order, and slices by priority (P3).

The workers really compute, each on a core; the server, which only moves and adds, shares the core of the first.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .baseline import trace_name
from .ddp import rate_name
from .jobs import Job, Layout, Results, quartiles, slower_rank
from .models import MODELS, Training
from .push_pull import Client, Server, as_bytes, share_the_interpreter
from .rank import COMMUNICATION_PRIORITY, Rank, agreed, block_steps, median_ms, run, time_steps, undisturbed

BLOCK_S, FEWEST_STEPS, ROUNDS, WARMUP_STEPS = 0.35, 2, 6, 1
RATES_MBIT_S = (200.0, 1000.0)
WORKERS, SERVER = 2, 2  # ranks 0 and 1 train
SLICE_BYTES = 200_000  # the paper's 50,000 parameters
WAYS = (
    {"name": "whole gradients in order", "slice_bytes": None, "by_use": False},
    {"name": "slices by priority", "slice_bytes": SLICE_BYTES, "by_use": True},
)
WHAT_IFS = {
    "whole gradients in order": "parameter_server:workers=2,servers=1",
    "slices by priority": "p3:workers=2,servers=1,slice_size=200kB",
}


def jobs(out: Path, models: tuple[str, ...] = ()) -> list[Job]:
    """Every model at two rates."""
    return [_job(model, rate) for model in models or MODELS for rate in RATES_MBIT_S]


def _job(model: str, rate_mbit_s: float) -> Job:
    name = f"parameter_server-{model}-{rate_name(rate_mbit_s)}"
    return Job(
        name, __name__, Layout((WORKERS + 1,), rate_mbit_s), {"model": model, "rounds": ROUNDS}, (f"{name}.json",),
        lambda results: _record(model, rate_mbit_s, results),
    )  # fmt: skip


def _record(model: str, rate_mbit_s: float, results: Results) -> dict[str, Any]:
    first = results[0]
    local = slower_rank(results[:WORKERS], "local")
    runs = []
    for way in WAYS:
        name = str(way["name"])
        what_if = f"{WHAT_IFS[name]},bandwidth={rate_mbit_s:g}Mbps"
        rounds = first["rounds"][name]
        runs.append({**way, "compute": "real", "what_if": [what_if], **quartiles(rounds), "rounds": rounds})
    return {
        "experiment": "parameter_server", "model": model, "batch": first["samples"], "servers": 1,
        "gradient_bytes": first["gradient_bytes"],
        "weights_agree": len({result["weights"] for result in results}) == 1,
        "baseline": {"trace": trace_name(model), **quartiles(local), "rounds": local},
        "runs": runs,
    }  # fmt: skip


def work(rank: Rank) -> dict[str, Any]:
    """Train or serve; the request has `model` and `rounds`."""
    share_the_interpreter()
    group: Any = dist.new_group(list(range(WORKERS)))
    address = [""]
    if rank.number == SERVER:
        address = [rank.address]
    dist.broadcast_object_list(address, src=SERVER)
    training = Training(rank.request["model"])
    if rank.number == SERVER:
        server = Server(training.model, address[0], WORKERS)
        # Its threads inherit this: at equal priority on the worker's core, they would run only while it waits.
        with undisturbed(COMMUNICATION_PRIORITY):
            server.serve()
        return {"weights": _weights(training)}
    local = Training(rank.request["model"])
    client = Client(training.model, address[0])

    def step() -> None:
        training.optimizer.zero_grad(set_to_none=True)
        training.gradients()

    def block(way: dict[str, Any], count: int) -> tuple[list[float], list[float]]:
        """Time a block; the first step does not wait for weights, unlike those after it."""
        client.slice_bytes, client.by_use = way["slice_bytes"], way["by_use"]
        wall, cpu = time_steps(step, count + 1)
        client.drain()
        return wall[1:], cpu[1:]

    plain_steps = block_steps(median_ms(local.step, WARMUP_STEPS + 1), BLOCK_S, FEWEST_STEPS, group=group)
    counts = {}
    for way in WAYS:
        usual_ms = agreed(min(block(way, WARMUP_STEPS)[0]), group)
        counts[str(way["name"])] = block_steps(usual_ms, BLOCK_S, FEWEST_STEPS, group=group)
    rounds: dict[str, list[dict[str, Any]]] = {"local": [], **{name: [] for name in counts}}
    with undisturbed():
        for _ in range(rank.request["rounds"]):
            dist.barrier(group)
            wall, cpu = time_steps(local.step, plain_steps)
            rounds["local"].append({"samples_ms": [wall], "cpu_samples_ms": [cpu]})
            for way in WAYS:
                dist.barrier(group)
                wall, cpu = block(way, counts[str(way["name"])])
                rounds[str(way["name"])].append({"samples_ms": [wall], "cpu_samples_ms": [cpu]})
    dist.barrier(group)
    client.close()
    return {
        "rounds": rounds, "samples": training.samples, "gradient_bytes": training.gradient_bytes,
        "weights": _weights(training),
    }  # fmt: skip


def _weights(training: Training) -> str:
    """A checksum of the weights."""
    found = hashlib.sha256()
    for parameter in training.model.parameters():
        found.update(as_bytes(parameter).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    run(work)
