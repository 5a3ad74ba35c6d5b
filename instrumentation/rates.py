"""Measured rates of matrix products and copies on this machine, for what-ifs about precision."""

import timeit
from collections.abc import Callable
from typing import Any

import torch

# A product of this size fits in an L2 cache, like the blocks into which convolutions are split.
PRODUCT = 256
COPY_ELEMENTS = 16 << 20
ROUNDS = 15


def measure_rates(cuda: bool) -> dict[str, Any] | None:
    """Return the rates of the device that trains; None if the training leaves no GPU memory to measure in."""
    if not cuda:
        return dict(measure_cpu_rates())
    from .gpu_rates import measure_gpu_rates

    return measure_gpu_rates() or None


def measure_cpu_rates() -> dict[str, float]:
    """Return GFLOP/s of an fp32 and a bf16 product and GB/s of a copy (bytes written), best of 15, in about 0.2 s."""
    flops = 2.0 * PRODUCT**3
    rates = {}
    cpu = torch.device("cpu")  # The program may have another default device, and autocast on.
    with torch.autocast("cpu", enabled=False):
        for name, dtype in (("fp32_gflops", torch.float32), ("bf16_gflops", torch.bfloat16)):
            a, b = (torch.ones(PRODUCT, PRODUCT, dtype=dtype, device=cpu) for _ in range(2))
            rates[name] = round(flops / _best_s(lambda a=a, b=b: a @ b) / 1e9, 1)  # type: ignore[misc]
    source = torch.ones(COPY_ELEMENTS, dtype=torch.float32, device=cpu)
    target = torch.empty_like(source)
    rates["copy_gbyte_s"] = round(source.numel() * 4 / _best_s(lambda: target.copy_(source)) / 1e9, 2)
    return rates


def _best_s(work: Callable[[], Any]) -> float:
    work()
    return min(timeit.repeat(work, repeat=ROUNDS, number=1))
