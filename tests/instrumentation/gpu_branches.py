"""A training for each branch of the recorder that a GPU takes; `whatif collect` runs it with the branch's name.

Without a GPU it trains on the CPU, which a test that stands in for a GPU uses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import nn

# Enough for 20 untraced, 5 warm-up and 5 recorded steps, and the profiler's own.
STEPS = 45
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def layers() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a convolution, a product and what lies between, and its loss."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(512, 10),
    )  # fmt: skip
    images, target = torch.randn(16, 3, 32, 32, device=DEVICE), torch.randint(10, (16,), device=DEVICE)
    return model, lambda model: nn.functional.cross_entropy(model(images), target)


def campaigns(name: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a model of the campaign in its small size, and its loss."""
    from benchmarks.campaign.models import TWINS

    found = TWINS[name]
    inputs, target = found.make_batch(found.samples)
    inputs, target = tuple(each.to(DEVICE) for each in inputs), target.to(DEVICE)
    return found.build(), lambda model: found.loss(model(*inputs), target)


def train(branch: str) -> None:
    """Train as the branch wants."""
    torch.manual_seed(0)
    model, loss_of = campaigns(branch) if branch in ("gnmt", "bert-base") else layers()
    model = model.to(DEVICE)
    if branch == "nccl":
        store = torch.distributed.HashStore()
        backend = "nccl" if DEVICE == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, rank=0, world_size=1, store=store)
        model = nn.parallel.DistributedDataParallel(model)
    forward = torch.compile(model) if branch == "compile" and DEVICE == "cuda" else model
    optimizer = torch.optim.Adam(
        model.parameters(), foreach=False, capturable=branch == "capturable" and DEVICE == "cuda"
    )
    precision = torch.autocast(DEVICE, torch.bfloat16, enabled=branch == "amp")
    try:
        for _ in range(STEPS):
            optimizer.zero_grad()
            with precision:
                loss = loss_of(forward)
            loss.backward()
            optimizer.step()
    finally:  # `collect --stop` ends the loop by an exception
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def replay(path: str) -> None:
    """Record a whole step, Adam included, that is a captured CUDA graph."""
    from whatif.instrumentation import record
    from whatif.instrumentation.gpu import GPU

    model, loss_of = layers()
    model = model.to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False, capturable=DEVICE == "cuda")

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    def warm() -> None:
        for _ in range(3):
            step()

    GPU.aside(warm)
    run = GPU.capture(step)
    with record(model, None, path) as recording:
        while not recording.done:
            run()
            recording.step()


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # benchmarks
    replay(sys.argv[2]) if sys.argv[1] == "captured" else train(sys.argv[1])
