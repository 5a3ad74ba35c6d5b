"""The process in which operators are measured: what crashes here, or asks for too much, ends no one else.

Reads one JSON request from standard input and writes one JSON line for each thing that it begins and finishes.
"""

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..line_process import answering
from ..metadata import describe_environment
from .calls import Call, NotReplayable
from .measure import UPDATES
from .replay import copies_of, make_replay
from .schema import resolve
from .timing import Clock, cpu_clock, first_ns, measure_alone
from .update_times import measure_updates, wall_of_gpu
from .variants import RECORDED, describe_run, named_parameter_shapes, variants

# Inputs and results of one operator's variants together may not take more than this on a CPU.
CPU_MEMORY_BYTES = 2 << 30
# What the process may map beyond what torch itself has mapped: the rest is for what operators need inside.
CPU_ADDRESS_BYTES = 6 << 30
# Of a GPU's free memory; the allocator keeps what other operators used.
GPU_MEMORY_SHARE = 0.4
# One call may not take longer: with its variants and rounds it would use up any budget.
LONGEST_CALL_NS = 3e9


class _Worker:
    """Measures what it is asked for and tells each result."""

    def __init__(self, request: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
        self._request = request
        self._tell = tell
        self._metadata: dict[str, Any] = request["metadata"]
        self._end_s = time.monotonic() + request["budget_s"]
        threads = self._metadata.get("threads")
        self._device = torch.device("cuda" if request["cuda"] else "cpu")
        if self._device.type == "cuda":
            self._clock: Clock | None = None
            free_bytes, _ = torch.cuda.mem_get_info()
            self._memory_bytes = int(GPU_MEMORY_SHARE * free_bytes)
            _restore_precision(self._metadata.get("precision"))
        else:
            if type(threads) is int and 0 < threads <= (os.cpu_count() or 1):
                torch.set_num_threads(threads)
            self._clock = cpu_clock(torch.get_num_threads())
            self._memory_bytes = CPU_MEMORY_BYTES
            limit_address_space()
        self._calls = [_resolved(operator) for operator in request["operators"]]
        self._run = describe_run((call for call in self._calls if isinstance(call, Call)), self._metadata)

    def work(self) -> None:
        """Do all jobs of the request, in order, while there is time."""
        for job in self._request["jobs"]:
            if job != UPDATES and time.monotonic() > self._end_s:
                self._tell({"job": job, "skipped": "no time left"})
                continue
            self._tell({"begin": job})
            try:
                found = self._updates() if job == UPDATES else self._operator(self._calls[job])
            except NotReplayable as reason:
                found = {"skipped": str(reason)}
            except (RuntimeError, TypeError, ValueError, IndexError, OverflowError, MemoryError) as error:
                found = {"skipped": f"refused by torch ({type(error).__name__})"}
            self._tell({"job": job, **found})
            if self._device.type == "cuda":
                # A device that has failed stays so: then this process ends here, and another one goes on.
                torch.cuda.synchronize()

    def _updates(self) -> dict[str, Any]:
        optimizer = self._metadata.get("optimizer")
        shapes = [shape for _, shape in named_parameter_shapes(self._metadata)]
        clock = self._clock or wall_of_gpu
        described = optimizer if isinstance(optimizer, dict) else {}
        return {"ns": measure_updates(described, shapes, self._device, clock, self._memory_bytes)}

    def _operator(self, call: "Call | NotReplayable") -> dict[str, Any]:
        if isinstance(call, NotReplayable):
            raise call
        replays, estimates = {}, {}
        room_bytes = self._memory_bytes
        for name, variant in variants(call, self._run, self._request["variants"]).items():
            try:
                room_bytes -= _needed_bytes(variant)
                if room_bytes < 0:
                    raise NotReplayable("needs too much memory")
                replay = make_replay(variant, self._device)
                estimates[name] = first_ns(replay, self._device)
                if estimates[name] > LONGEST_CALL_NS:
                    raise NotReplayable("takes too long")
                replays[name] = replay
            except (NotReplayable, RuntimeError, TypeError, ValueError, IndexError, OverflowError, MemoryError):
                if name == RECORDED:
                    raise
                # A variant that this operator does not have; the others are still worth measuring.
                estimates.pop(name, None)
        ns, spread = measure_alone(replays, self._clock, estimates)
        if RECORDED not in ns:
            raise NotReplayable("too short to be timed")
        return {"ns": ns, "spread": spread}


def _resolved(operator: list[Any]) -> Call | NotReplayable:
    name, dims, types, concrete, strides, backward = operator
    try:
        return resolve(name, dims, types, concrete, strides, backward=backward)
    except NotReplayable as reason:
        return reason


def _needed_bytes(call: Call) -> int:
    """Inputs of all copies, and as much again for results."""
    return 2 * copies_of(call) * call.input_bytes


def _restore_precision(precision: Any) -> None:
    """Choose the GPU's kernels by the switches of the recorded run (see `describe_precision`)."""
    if not isinstance(precision, dict):
        return
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    backends: dict[str, Any] = {key: getattr(cudnn, key, None) for key in ("conv", "rnn")}
    for key, backend in {"matmul": matmul, **backends}.items():
        # "none" as well: for convolutions it is not torch's default, but what switching TF32 off leaves.
        if precision.get(key) in ("ieee", "tf32", "none") and hasattr(backend, "fp32_precision"):
            backend.fp32_precision = precision[key]
    if not hasattr(matmul, "fp32_precision"):  # Before torch 2.9.
        for key, backend in (("matmul_allow_tf32", matmul), ("cudnn_allow_tf32", cudnn)):
            if isinstance(precision.get(key), bool):
                backend.allow_tf32 = precision[key]
    for key in ("benchmark", "deterministic"):
        if isinstance(precision.get(f"cudnn_{key}"), bool):
            setattr(cudnn, key, precision[f"cudnn_{key}"])


def limit_address_space() -> None:
    """Let an operator whose result is absurdly large fail to get its memory instead of taking the machine's."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):  # Not Linux: the limit on inputs is all there is.
        return
    mapped_bytes = pages * resource.getpagesize()
    with contextlib.suppress(ValueError):  # A lower limit is in force already.
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + CPU_ADDRESS_BYTES, resource.RLIM_INFINITY))


def main() -> None:
    """Serve one request."""
    tell = answering()
    request = json.loads(sys.stdin.readline())
    if request["cuda"] and not torch.cuda.is_available():
        tell({"machine": {"gpu": None}})
        return
    environment = describe_environment(request["cuda"])
    tell({"machine": {"gpu": environment["gpu"], "cpu": environment["cpu"]}})
    torch.manual_seed(0)
    gc.disable()  # Its pauses would fall into somebody's time.
    _Worker(request, tell).work()
    tell({"end": True})


if __name__ == "__main__":
    main()
