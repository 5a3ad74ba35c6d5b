"""Measured rates of this GPU for what-ifs: matrix products, copies and launches, in about a second.

torch measures products and copies. Device attributes and the empty kernel need cupy, as torch has no counterpart;
without cupy they are left out. cupy has no bindings of CUPTI.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from whatif.runtime.errors import WhatifError

from .gpu import GPU
from .operators.timing import CYCLES_PER_NS, cuda_clock

# A product of this size fills every GPU and takes 60 MB an operand in fp32.
PRODUCT = 4096
# From a size dominated by the launch to one of which no L2 cache holds two.
COPY_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
TRANSFER_BYTES = 64 << 20
ROUNDS = 7
# Work of one timed batch, well above the resolution of events (0.5 us, CUDA runtime documentation).
BATCH_BYTES = 64 << 20
MOST_REPEATS = 200
# Below the 1,021 launches at which the queue blocks (docs/design.md).
LAUNCHES = 200
# Holds the GPU for 2 to 3 ms, in which the launches of a measurement queue up, so that their pace is not measured.
HOLD_CYCLES = 5_000_000
HOLD_NS = HOLD_CYCLES / CYCLES_PER_NS

_EMPTY_KERNEL = 'extern "C" __global__ void whatif_empty() {}'


def measure_gpu_rates() -> dict[str, Any]:
    """Return the rates of the current CUDA device; rates are the best of 7, latencies medians.

    `fp32_tflops`, `tf32_tflops`, `fp16_tflops`, `bf16_tflops`: a product of 4096 x 4096 matrices. `copy_gbyte_s`: a
    copy of 256 MiB on the device, bytes read plus written; `copy_by_bytes_gbyte_s`: the same by the size of the copy.
    `h2d_pinned_gbyte_s` and so on for `d2h` and `pageable`: transfers of 64 MiB. With cupy: `launch_us`, CPU time of a
    launch from Python; `empty_kernel_us`, from one empty kernel to the next on a busy stream; `round_trip_us`, a launch
    and its synchronization; `device`, the attributes. Leaves out rates whose tensors do not fit in free memory. Keeps
    torch's precision settings and random state. Raises WhatifError without a CUDA device.
    """
    if not GPU.available():
        raise WhatifError("expected a CUDA device to measure, got none: run this on a machine with an NVIDIA GPU.")
    cupy = _cupy()
    rates: dict[str, Any] = {}
    for measure in (_product_rates, _copy_rates, _transfer_rates):
        # The recorded program has priority: a rate that does not fit beside it is left out. A failed allocation of a
        # library's workspace or of pinned memory is not an OutOfMemoryError.
        with _range(cupy, f"whatif: {measure.__name__}"), suppress(RuntimeError):
            rates |= measure()
    if cupy is not None:
        # cupy looks for its own compiler and raises various errors without one: no recording may fail on that.
        with _range(cupy, "whatif: launches"), suppress(Exception):
            rates |= _launch_times(cupy)
        with suppress(Exception):
            rates["device"] = _device_attributes(cupy)
    return rates


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except Exception:  # Not installed, or not for this CUDA.
        return None


@contextmanager
def _range(cupy: Any, name: str) -> Iterator[None]:
    """Mark a measurement as an NVTX range."""
    nvtx = None if cupy is None else getattr(cupy.cuda, "nvtx", None)  # Optional in builds of cupy.
    if nvtx is None:
        yield
        return
    nvtx.RangePush(name)
    try:
        yield
    finally:
        nvtx.RangePop()


def _product_rates() -> dict[str, float]:
    flops = 2.0 * PRODUCT**3
    rates = {}
    for name, dtype, precision in (
        ("fp32_tflops", torch.float32, "ieee"),
        ("tf32_tflops", torch.float32, "tf32"),
        ("fp16_tflops", torch.float16, "ieee"),
        ("bf16_tflops", torch.bfloat16, "ieee"),
    ):
        # Varied values: a product of equal values draws less power and runs at a higher clock.
        a, b = (torch.linspace(-1, 1, PRODUCT**2, device="cuda").to(dtype).view(PRODUCT, PRODUCT) for _ in range(2))
        out = torch.empty_like(a)
        with fp32_products(precision):
            seconds = _best_s(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
        rates[name] = round(flops / seconds / 1e12, 2)
    return rates


@contextmanager
def fp32_products(precision: str) -> Iterator[None]:
    """Compute float32 products on CUDA as `ieee` or as `tf32` inside the block."""
    matmul: Any = torch.backends.cuda.matmul
    # Since torch 2.9; setting the older one as well would make later reads of it raise.
    setting, value = (
        ("fp32_precision", precision) if hasattr(matmul, "fp32_precision") else ("allow_tf32", precision == "tf32")
    )
    before = getattr(matmul, setting)
    setattr(matmul, setting, value)
    try:
        yield
    finally:
        setattr(matmul, setting, before)


def _copy_rates() -> dict[str, Any]:
    by_bytes = {}
    for size_bytes in COPY_BYTES:
        source = torch.ones(size_bytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        seconds = _best_s(lambda s=source, t=target: t.copy_(s), _repeats(size_bytes))  # type: ignore[misc]
        by_bytes[str(size_bytes)] = round(2 * size_bytes / seconds / 1e9, 2)
    return {"copy_gbyte_s": by_bytes[str(COPY_BYTES[-1])], "copy_by_bytes_gbyte_s": by_bytes}


def _transfer_rates() -> dict[str, float]:
    rates = {}
    device = torch.ones(TRANSFER_BYTES, dtype=torch.uint8, device="cuda")
    for kind in ("pinned", "pageable"):
        host = torch.ones(TRANSFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=kind == "pinned")
        for direction, target, source in (("h2d", device, host), ("d2h", host, device)):
            seconds = _best_s(lambda t=target, s=source: t.copy_(s, non_blocking=True))  # type: ignore[misc]
            rates[f"{direction}_{kind}_gbyte_s"] = round(TRANSFER_BYTES / seconds / 1e9, 2)
    return rates


def _repeats(size_bytes: int) -> int:
    return max(1, min(MOST_REPEATS, BATCH_BYTES // size_bytes))


def _best_s(work: Callable[[], Any], repeats: int = 1) -> float:
    """Return the shortest time of one run of `work` on the GPU, s, by CUDA events."""

    def batch() -> None:
        for _ in range(repeats):
            work()

    work()
    return min(cuda_clock(batch, ahead_ns=HOLD_NS) for _ in range(ROUNDS)) / 1e9 / repeats


def _launch_times(cupy: Any) -> dict[str, float]:
    kernel = cupy.RawKernel(_EMPTY_KERNEL, "whatif_empty")

    def launch() -> None:
        kernel((1,), (1,), ())

    # On torch's stream, which the events are recorded on.
    with cupy.cuda.ExternalStream(GPU.current_stream().cuda_stream):
        empty_s = _best_s(launch, LAUNCHES)
        launch_s, round_trip_s = [], []
        for _ in range(ROUNDS):
            GPU.hold(HOLD_CYCLES)
            begin_s = time.perf_counter()
            for _ in range(LAUNCHES):
                launch()
            launch_s.append((time.perf_counter() - begin_s) / LAUNCHES)
            GPU.synchronize()
            for _ in range(LAUNCHES):
                begin_s = time.perf_counter()
                launch()
                GPU.synchronize()
                round_trip_s.append(time.perf_counter() - begin_s)
    return {
        "launch_us": round(statistics.median(launch_s) * 1e6, 3),
        "empty_kernel_us": round(empty_s * 1e6, 3),
        "round_trip_us": round(statistics.median(round_trip_s) * 1e6, 3),
    }


def _device_attributes(cupy: Any) -> dict[str, Any]:
    """Return the driver's attributes of the device; CUDA 13 no longer reports clocks."""
    properties = cupy.cuda.runtime.getDeviceProperties(GPU.current())
    clock_khz, memory_khz = properties.get("clockRate"), properties.get("memoryClockRate")
    return {
        "multiprocessors": properties.get("multiProcessorCount"),
        "sm_mhz": clock_khz / 1e3 if clock_khz else None,
        "memory_mhz": memory_khz / 1e3 if memory_khz else None,
        "memory_bus_bits": properties.get("memoryBusWidth"),
        "memory_bytes": properties.get("totalGlobalMem"),
        "l2_cache_bytes": properties.get("l2CacheSize"),
        "shared_memory_bytes_per_multiprocessor": properties.get("sharedMemPerMultiprocessor"),
    }
