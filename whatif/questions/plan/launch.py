"""Launch flags of a plan, as text: torchrun, FSDP2, Megatron-LM, DeepSpeed.

Names: torch.distributed.run of torch 2.13; torch.distributed.fsdp.fully_shard; Megatron-LM, megatron/training/
arguments.py; DeepSpeed's configuration JSON.
"""

from __future__ import annotations

import json

from whatif.hardware.cluster.cluster_file import load_cluster
from whatif.questions.plan.space import DDP, FSDP, HYBRID, ZERO_1, Plan
from whatif.runtime.errors import WhatifError

SCRIPT = "train.py"
# Placeholder for a batch size that a trace lacks: a shell and a parser of numbers fail on it.
BATCH = "$BATCH"


def launch_flags(plan: Plan, cluster: str, in_samples: bool = True, blocks: int = 0) -> dict[str, str]:
    """Return the flags by launcher or library; those that cannot run the plan are left out.

    Megatron-LM gives each part of a pipeline equally many of the model's ``blocks``, if these are known (not 0).
    Without ``in_samples`` the plan counts recorded batches, and each size is a multiple of ``BATCH``.
    """
    unit = "" if in_samples else BATCH
    found = {"torchrun": torchrun(plan, cluster)}
    if plan.tensor == plan.pipeline == 1:
        if plan.level in (FSDP, HYBRID):
            # A mesh of two dimensions replicates along the first one and shards along the second.
            node = _node(plan, cluster)
            mesh = f"({plan.data},)" if plan.level == FSDP else f"({plan.data // node}, {node})"
            found["FSDP2"] = (
                f'mesh = init_device_mesh("cuda", {mesh}); for each block: fully_shard(block, mesh=mesh); '
                "fully_shard(model, mesh=mesh)"
            )
        if plan.data > 1 and plan.level != HYBRID:
            found["DeepSpeed"] = json.dumps(_deepspeed(plan, unit))
    if plan.level in (DDP, ZERO_1) and blocks % (plan.pipeline * plan.chunks) == 0:
        found["Megatron-LM"] = " ".join(_megatron(plan, unit))
    return found


def torchrun(plan: Plan, cluster: str) -> str:
    """Return the command that starts one process for each device of a node."""
    node = _node(plan, cluster)
    nodes = plan.devices // node
    rendezvous = "--standalone" if nodes == 1 else "--rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:29500"
    return f"torchrun --nnodes={nodes} --nproc-per-node={node} {rendezvous} {SCRIPT}"


def _node(plan: Plan, cluster: str) -> int:
    """The number of the plan's devices in one node."""
    try:
        levels = load_cluster(cluster).levels
    except WhatifError:
        levels = ()
    node = min((levels[0].workers or 1) if levels else 1, plan.devices)
    return node if plan.devices % node == 0 else 1


def _megatron(plan: Plan, unit: str) -> list[str]:
    micro, total = (str(_sized(count, unit)) for count in (plan.micro_batch, plan.samples))
    flags = [
        f"--tensor-model-parallel-size {plan.tensor}", f"--pipeline-model-parallel-size {plan.pipeline}",
        f"--micro-batch-size {micro}", f"--global-batch-size {total}",
    ]  # fmt: skip
    if plan.tensor > 1:
        flags.append("--sequence-parallel")
    if plan.chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {plan.chunks}")
    if plan.level == ZERO_1:
        flags.append("--use-distributed-optimizer")
    if plan.recompute:
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    return flags


def _deepspeed(plan: Plan, unit: str) -> dict[str, object]:
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": _sized(plan.micro_batch, unit),
        "gradient_accumulation_steps": plan.passes,
        "zero_optimization": {"stage": plan.level},
    }
    return config


def _sized(count: int, unit: str) -> int | str:
    """A batch of ``count`` samples, or of ``count`` times the ``unit``, in shell syntax."""
    return count if not unit else unit if count == 1 else f"$(({count} * {unit}))"
