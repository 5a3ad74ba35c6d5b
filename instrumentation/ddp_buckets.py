"""The buckets in which data parallelism sends the gradients: as DDP reports them, or by its rule without DDP."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .layers import named_parameters

# Defaults of DistributedDataParallel(bucket_cap_mb=None): its documentation, and dist._DEFAULT_FIRST_BUCKET_BYTES.
BUCKET_CAP_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20


def describe_buckets(model: nn.Module, grad_ready_order: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the buckets in sending order, and the two limits in bytes; None without gradients.

    `source` is "ddp" if they were read from a DistributedDataParallel, which must have run two iterations: the buckets
    of the first differ from those of all later ones. Else it is "rule": what DDP would do with its default limits (or
    with those of a DDP that has not yet made its final buckets).
    """
    ddp = next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)
    cap_bytes, first_bytes = BUCKET_CAP_BYTES, FIRST_BUCKET_BYTES
    if ddp is not None:
        cap_bytes, first_bytes = _limits(ddp)
    limits = {"bucket_cap_bytes": cap_bytes, "first_bucket_bytes": first_bytes}
    buckets = _buckets_of(ddp, model) if ddp is not None else None
    if ddp is not None and buckets is not None:
        world_size = ddp.process_group.size()
        return {"source": "ddp", **limits, "world_size": world_size, "buckets": buckets}
    if not grad_ready_order:
        return None
    return {"source": "rule", **limits, "buckets": fill_buckets(grad_ready_order, cap_bytes, first_bytes)}


def fill_buckets(rows: Iterable[dict[str, Any]], cap_bytes: int, first_bytes: int) -> list[dict[str, Any]]:
    """Fill buckets with gradients (`name`, `bytes`, `dtype`) in the order in which they become ready.

    A bucket is sent as soon as it reaches its limit; it keeps what exceeds the limit. The first bucket of
    each dtype has its own limit. A sparse gradient is sent by itself. Source: compute_bucket_assignment_by_size in
    reducer.cpp of PyTorch.
    """
    sent: list[dict[str, Any]] = []
    filling: dict[str, dict[str, Any]] = {}
    limit_bytes: dict[str, int] = {}
    for row in rows:
        if row.get("sparse"):
            sent.append({"bytes": row["bytes"], "parameters": [row["name"]]})
            continue
        dtype = row["dtype"]
        bucket = filling.setdefault(dtype, {"bytes": 0, "parameters": []})
        bucket["bytes"] += row["bytes"]
        bucket["parameters"].append(row["name"])
        if bucket["bytes"] >= limit_bytes.get(dtype, first_bytes):
            sent.append(filling.pop(dtype))
            limit_bytes[dtype] = cap_bytes
    return sent + list(filling.values())


def _limits(ddp: DistributedDataParallel) -> tuple[int, int]:
    """Return the limit of a bucket and of the first one, which is smaller only if the user set no limit."""
    cap_bytes = int(ddp.bucket_bytes_cap)
    distributed: Any = torch.distributed
    first_bytes = int(getattr(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", FIRST_BUCKET_BYTES))
    default = getattr(ddp, "bucket_bytes_cap_default", cap_bytes == BUCKET_CAP_BYTES)
    return cap_bytes, first_bytes if default else cap_bytes


def _buckets_of(ddp: DistributedDataParallel, model: nn.Module) -> list[dict[str, Any]] | None:
    """Return the buckets that DDP uses; None if it has none yet or does not report their parameters."""
    untyped: Any = ddp
    logged = untyped._get_ddp_logging_data()
    parameters = _reduced_parameters(ddp, model)
    if logged.get("has_rebuilt_buckets"):
        buckets = [
            [parameters[int(index)] for index in indices.split()]
            for indices in logged["rebuilt_per_bucket_param_indices"].split(",")
        ]
    elif logged.get("find_unused_parameters"):  # Such buckets are never rebuilt.
        buckets = _split(parameters, [int(size) for size in logged["bucket_sizes"].replace(",", " ").split()])
    else:
        return None
    return [{"bytes": sum(size for _, size in bucket), "parameters": [n for n, _ in bucket]} for bucket in buckets]


def _reduced_parameters(ddp: DistributedDataParallel, model: nn.Module) -> list[tuple[str, int]]:
    """Return name and gradient bytes of the parameters that DDP reduces, in the order of its indices."""
    full_names = {id(parameter): name for name, _, parameter in named_parameters(model)}
    return [
        (full_names[id(parameter)], parameter.nbytes)
        for name, _, parameter in named_parameters(ddp)
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    ]


def _split(parameters: list[tuple[str, int]], sizes: list[int]) -> list[list[tuple[str, int]]]:
    """Split the parameters into buckets of the given sizes; the sizes start with the model's last bucket."""
    ends = set(accumulate(reversed(sizes)))
    buckets: list[list[tuple[str, int]]] = [[]]
    filled = 0
    for name, size in parameters:
        buckets[-1].append((name, size))
        filled += size
        if filled in ends:
            buckets.append([])
    return [bucket for bucket in reversed(buckets) if bucket]
