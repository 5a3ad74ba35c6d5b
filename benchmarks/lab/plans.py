"""Four ways to train one batch on two workers: DDP, ZeRO-1, FSDP and a pipeline of two stages, in turn.

Every step has the same samples: both workers' batches, or a pipeline's micro-batches of both together. ZeRO-1 is
ZeroRedundancyOptimizer under DistributedDataParallel, FSDP is fully_shard of the units that the what-if ``fsdp`` finds.
The question is which way is fastest: records name no what-ifs, as ``zero`` describes DeepSpeed's exchange.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from whatif import read
from whatif.models.exchange.buckets import step_gradients
from whatif.models.parallel.passes import passes
from whatif.models.parallel.sharded_units import units_of
from whatif.prediction.predict import Baseline

from .baseline import trace_name
from .jobs import Job, Layout, Results, quartiles, slower_rank
from .models import Training
from .pipeline import CHAINS, STAGES, Gloo, Stage, cut_of
from .rank import Rank, blocks_of, run, time_round, undisturbed

RATE_MBIT_S = 1000.0
SCHEDULE, MICRO_BATCHES = "1f1b", 4
WAYS = ("DDP", "ZeRO-1", "FSDP", "pipeline")
BLOCK_S, FEWEST_STEPS, ROUNDS, WARMUP_STEPS = 0.35, 2, 7, 2


def jobs(out: Path, models: tuple[str, ...] = ()) -> list[Job]:
    """Every model that is a chain of layers."""
    return [_job(out, model) for model in models or CHAINS if model in CHAINS]


def _job(out: Path, model: str) -> Job:
    name = f"plans-{model}-{RATE_MBIT_S:g}mbit"
    request = {"model": model, "trace": str((out / trace_name(model)).resolve()), "rounds": ROUNDS}
    return Job(
        name, __name__, Layout((STAGES,), RATE_MBIT_S), request, made=(f"{name}.json",),
        record=lambda results: _record(model, results),
    )  # fmt: skip


def _record(model: str, results: Results) -> dict[str, Any]:
    first, local = results[0], slower_rank(results, "local")
    ways = [
        {"name": name, "compute": "real", **quartiles(first["rounds"][name]), "rounds": first["rounds"][name]}
        for name in WAYS
    ]  # fmt: skip
    return {
        "experiment": "plans", "model": model, "batch": first["samples"], "units": first["units"], "cut": first["cut"],
        "baseline": {"trace": trace_name(model), **quartiles(local), "rounds": local},
        "ways": ways,
    }  # fmt: skip


def _copies(model: str, *, shared: bool) -> Training:
    """A training under DDP; ``shared``: its optimizer's state is sharded over the workers (ZeRO-1)."""
    training = Training(model)
    if shared:
        sharded: Any = ZeroRedundancyOptimizer(
            training.model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-5, foreach=False
        )
        training.optimizer = sharded
    training.forward = DistributedDataParallel(training.model)
    return training


def unit_names(trace: Path) -> tuple[str, ...]:
    """Return the units that ``fsdp`` shards by; none if it treats the model as one."""
    graph = Baseline.of(read(trace), "mark").graph
    found = units_of(graph, "plans", step_gradients(graph, None, "plans"), passes(graph), None, None)
    return found.names if len(found.names) > 1 else ()


def _sharded(model: str, names: tuple[str, ...]) -> Training:
    training = Training(model)
    mesh = init_device_mesh("cpu", (STAGES,))
    for name in names:
        fully_shard(training.model.get_submodule(name), mesh=mesh)
    # If the model is one unit, it is freed after its forward pass, like other units.
    fully_shard(training.model, mesh=mesh, reshard_after_forward=None if names else True)
    training.optimizer = torch.optim.Adam(training.model.parameters(), lr=1e-5, foreach=False)
    return training


def work(rank: Rank) -> dict[str, Any]:
    """Time all ways; the request has `model`, `trace` and `rounds`."""
    model, trace = rank.request["model"], Path(rank.request["trace"])
    names, cut = unit_names(trace), cut_of(trace, SCHEDULE, MICRO_BATCHES, RATE_MBIT_S, STAGES)
    local = Training(model)
    stage = Stage(model, rank.number, cut, SCHEDULE, MICRO_BATCHES, Gloo(1 - rank.number), STAGES)
    steps = {
        "local": local.step, "DDP": _copies(model, shared=False).step, "ZeRO-1": _copies(model, shared=True).step,
        "FSDP": _sharded(model, names).step, "pipeline": stage.step,
    }  # fmt: skip
    counts = blocks_of(steps, warmup_steps=WARMUP_STEPS, block_s=BLOCK_S, fewest=FEWEST_STEPS)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in steps}
    with undisturbed():
        for _ in range(rank.request["rounds"]):
            time_round(steps, counts, rounds)
    dist.barrier()
    return {"rounds": rounds, "samples": local.samples, "units": list(names), "cut": cut}


if __name__ == "__main__":
    run(work)
