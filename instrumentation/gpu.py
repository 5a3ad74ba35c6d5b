"""The GPU of this process: the only place that asks torch.cuda or nvidia-smi, so that tests can replace it.

CUPTI is reached through `cupti.session.load_cupti`, torch.profiler through `kineto_tracer.KinetoTracer`.
"""

import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, supported_activities

_SMI_TIMEOUT_S = 10


class Gpu:
    """The GPU functions that recording and measuring use; methods without a device use the current one."""

    # Device queries

    def available(self) -> bool:
        """Whether there is a device that this torch can use."""
        return torch.cuda.is_available()

    def is_nvidia(self) -> bool:
        """Whether this torch was built for CUDA, and not for ROCm or CPUs alone."""
        return torch.version.cuda is not None

    def traced_by_torch(self) -> bool:
        """Whether torch.profiler was built to trace GPUs."""
        activities: Any = supported_activities  # Untyped.
        return ProfilerActivity.CUDA in activities()

    def count(self) -> int:
        """Number of visible devices."""
        return torch.cuda.device_count()

    def current(self) -> int:
        """Return the index of the current device among the visible ones."""
        return torch.cuda.current_device()

    def of_model(self, model: nn.Module) -> torch.device | None:
        """Return the model's GPU; for a model without parameters the current one, if the program uses any."""
        parameter = next(model.parameters(), None)
        if parameter is not None:
            return parameter.device if parameter.is_cuda else None
        return torch.device("cuda", self.current()) if self.in_use() else None

    def in_use(self) -> bool:
        """Whether the program has used a device so far."""
        return bool(_cuda().is_initialized())

    def properties(self, index: int | None = None) -> Any:
        """Return torch's properties of a device: name, total_memory, major, minor, multi_processor_count, uuid ..."""
        return torch.cuda.get_device_properties(self.current() if index is None else index)

    def on(self, device: torch.device | None) -> AbstractContextManager[Any]:
        """Make the device the current one inside a `with` block; None changes nothing."""
        return nullcontext() if device is None else torch.cuda.device(device)

    # Memory

    def free_bytes(self) -> int:
        """Return the free memory that the driver reports."""
        return int(torch.cuda.mem_get_info()[0])

    def reset_peak(self, device: torch.device | None = None) -> None:
        """Reset the peaks of the caching allocator."""
        torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self) -> tuple[int, int]:
        """Return the caching allocator's peaks of allocated and of reserved bytes since the last `reset_peak`."""
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def retries(self) -> int:
        """Return how often the caching allocator has run out of memory, emptied its cache and retried."""
        return int(torch.cuda.memory_stats_as_nested_dict().get("num_alloc_retries", 0))

    def empty_cache(self) -> None:
        """Return unused memory of the caching allocator to the driver."""
        torch.cuda.empty_cache()

    # Time

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(device)

    def mark(self, device: torch.device | None = None) -> Any:
        """Record an event on the device's current stream; on another, idle device it would time the CPU."""
        event = _cuda().Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def between_ms(self, begin: Any, end: Any) -> float:
        """Return the time between two marks, after their device was synchronized."""
        return float(begin.elapsed_time(end))

    def hold(self, cycles: int) -> None:
        """Keep the current stream busy for the given number of cycles, so that launches queue up behind."""
        _cuda()._sleep(cycles)

    # Streams and graphs

    def stream(self) -> Any:
        """Return a new stream."""
        return _cuda().Stream()

    def current_stream(self) -> Any:
        """Return the stream that operators run on."""
        return torch.cuda.current_stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Run operators on the stream inside a `with` block."""
        return torch.cuda.stream(stream)

    def aside(self, work: Callable[[], Any]) -> None:
        """Run the work on a separate stream, after the work of the current one, which then waits for it."""
        side = self.stream()
        side.wait_stream(self.current_stream())
        with self.on_stream(side):
            work()
        self.current_stream().wait_stream(side)

    def capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Capture the work into a CUDA graph and return its replay; RuntimeError if the work synchronizes."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    # What the driver reports

    def smi(self, *fields: str) -> str:
        """Return nvidia-smi's output for the current device, without units; "" if it cannot be run."""
        uuid = getattr(self.properties(), "uuid", None)
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        # torch numbers the visible GPUs only, nvidia-smi all of them.
        command += [f"--id=GPU-{uuid}"] if uuid is not None else []
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SMI_TIMEOUT_S).stdout
        except (OSError, subprocess.SubprocessError):
            return ""


def _cuda() -> Any:
    return torch.cuda  # Partly untyped.


GPU = Gpu()
