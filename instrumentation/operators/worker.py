"""The process in which operators are measured: a crash or excessive memory use here ends no other process.

Reads JSON lines from stdin, first the recording's operators and then one job per line, and answers each with one line.
"""

import contextlib
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..gpu import GPU
from ..line_process import connect
from ..metadata import describe_environment
from .calls import Call, NotReplayable, RecordedCall
from .measure import UPDATES
from .replay import copies_of, make_replay
from .schema import resolve
from .timing import Clock, cpu_clock, cuda_clock, first_ns, measure_alone
from .update_times import measure_updates
from .variants import RECORDED, describe_run, named_parameter_shapes, variants

# Limit for inputs and results of all variants of one operator on a CPU.
CPU_MEMORY_BYTES = 2 << 30
# Address space beyond what torch has mapped: includes the operators' internal memory.
CPU_ADDRESS_BYTES = 6 << 30
# Share of a GPU's free memory; the allocator keeps the memory of earlier operators.
GPU_MEMORY_SHARE = 0.4
# Limit of one call: with its variants and rounds a longer one would use up any budget.
LONGEST_CALL_NS = 3e9


# Exceptions of torch for a call that it refuses.
REFUSED = (RuntimeError, TypeError, ValueError, IndexError, OverflowError, MemoryError)


class _Worker:
    """Measures the jobs of the recording that the first line describes, one at a time."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._metadata: dict[str, Any] = setup["metadata"]
        self._variants: list[str] = setup["variants"]
        self._device = torch.device("cuda" if setup["cuda"] else "cpu")
        self._clock, self._memory_bytes = prepare(self._device, setup["threads"])
        if self._device.type == "cuda":
            _restore_precision(self._metadata.get("precision"))
        self._calls = [_resolved(operator) for operator in setup["operators"]]
        self._run = describe_run((call for call in self._calls if isinstance(call, Call)), self._metadata)

    def answer(self, job: int) -> dict[str, Any]:
        """Measure the update or one operator, or return the reason why it was skipped."""
        measure = self._updates if job == UPDATES else functools.partial(self._operator, self._calls[job])
        return measure_or_skip(measure, self._device)

    def _updates(self) -> dict[str, Any]:
        optimizer = self._metadata.get("optimizer")
        shapes = [shape for _, shape in named_parameter_shapes(self._metadata)]
        clock = self._clock or cuda_clock  # on a GPU including launches, as in a step
        metadata = optimizer if isinstance(optimizer, dict) else {}
        return {"ns": measure_updates(metadata, shapes, self._device, clock, self._memory_bytes)}

    def _operator(self, call: "Call | NotReplayable") -> dict[str, Any]:
        if isinstance(call, NotReplayable):
            raise call
        replays, estimates = {}, {}
        left_bytes = self._memory_bytes
        for name, variant in variants(call, self._run, self._variants).items():
            try:
                copies = copies_of(variant)
                left_bytes -= needed_bytes(variant, copies)
                if left_bytes < 0:
                    raise NotReplayable("needs too much memory")
                replays[name], estimates[name] = timed_replay(variant, self._device, copies)
            except (NotReplayable, *REFUSED):
                if name == RECORDED:
                    raise
                # Else the operator does not have this variant; measure the others.
        ns, spread = measure_alone(replays, self._clock, estimates)
        if RECORDED not in ns:
            raise NotReplayable("too short to be timed")
        return {"ns": ns, "spread": spread}


def prepare(device: torch.device, threads: int | None) -> tuple[Clock | None, int]:
    """Set this process up for measuring; return its clock (None: GPU events) and the memory limit of a call."""
    if device.type == "cuda":
        return None, int(GPU_MEMORY_SHARE * GPU.free_bytes())
    if threads is not None:
        torch.set_num_threads(threads)
    limit_address_space()
    return cpu_clock(torch.get_num_threads()), CPU_MEMORY_BYTES


def measure_or_skip(measure: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Return the result of `measure`, or the reason for none as "skipped"."""
    try:
        return measure()
    except NotReplayable as reason:
        return {"skipped": str(reason)}
    except REFUSED as error:
        return {"skipped": f"refused by torch ({type(error).__name__})"}
    finally:
        if device.type == "cuda":
            # A failed device stays unusable: then this raises and ends the process, and another one continues.
            GPU.synchronize()


def _resolved(recorded: list[Any]) -> Call | NotReplayable:
    try:
        return resolve(RecordedCall(*recorded))
    except NotReplayable as reason:
        return reason


def needed_bytes(call: Call, copies: int) -> int:
    """Return the bytes of all copies of the inputs, twice to include results."""
    return 2 * copies * call.input_bytes


def timed_replay(call: Call, device: torch.device, copies: int) -> tuple[list[Callable[[], Any]], float]:
    """Return the call on several sets of inputs, and its rough time in ns; raises as `make_replay` does."""
    replay = make_replay(call, device, copies)
    estimate_ns = first_ns(replay, device)
    if estimate_ns > LONGEST_CALL_NS:
        raise NotReplayable("takes too long")
    return replay, estimate_ns


def _restore_precision(precision: Any) -> None:
    """Set the precision switches of the recorded run, which select the GPU's kernels (see `describe_precision`)."""
    if not isinstance(precision, dict):
        return
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    backends: dict[str, Any] = {key: getattr(cudnn, key, None) for key in ("conv", "rnn")}
    for key, backend in {"matmul": matmul, **backends}.items():
        # "none" as well: for convolutions it is not torch's default, but the state after TF32 is switched off.
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
    """Make allocations of absurdly large results fail instead of exhausting the machine's memory."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):  # Not Linux: only the limit on inputs applies.
        return
    mapped_bytes = pages * resource.getpagesize()
    with contextlib.suppress(ValueError):  # A lower limit is already set.
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + CPU_ADDRESS_BYTES, resource.RLIM_INFINITY))


def main() -> None:
    """Serve one parent until it closes the pipe."""
    send, messages = connect()
    setup = next(messages)
    if setup["cuda"] and not GPU.available():
        send({"gpu": None})
        return
    torch.manual_seed(0)
    gc.disable()  # Its pauses would be part of measured times.
    environment = describe_environment(setup["cuda"])
    worker = _Worker(setup)
    send({"gpu": environment["gpu"], "cpu": environment["cpu"]})
    for job in messages:
        send(worker.answer(job["job"]))


if __name__ == "__main__":
    main()
