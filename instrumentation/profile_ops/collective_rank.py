"""One rank of a group that measures collectives: gloo between processes of a CPU, NCCL between GPUs.

Reads JSON lines from stdin, first its rank and group and then one job per line, and answers each with a JSON line.
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..line_process import connect
from ..operators.timing import cpu_clock, cuda_clock
from ..operators.worker import measure_or_skip
from ..trace_module.spelling import DTYPES_BY_NAME

# A rank gives up after waiting this long for the others.
TIMEOUT = timedelta(seconds=60)


def _call(name: str, elements: int, dtype: torch.dtype, device: torch.device, ranks: int) -> Callable[[], Any]:
    """Return a function that runs the collective once; ``elements`` is the size of the full buffer."""
    full = torch.zeros(elements, dtype=dtype, device=device)
    part = torch.zeros(elements // ranks, dtype=dtype, device=device)
    received = torch.zeros_like(full) if name == "all_to_all" else full
    # Looked up now, so that an unknown name fails before anything runs.
    return {
        "all_reduce": lambda: dist.all_reduce(full),
        "broadcast": lambda: dist.broadcast(full, 0),
        "reduce": lambda: dist.reduce(full, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
        "all_to_all": lambda: dist.all_to_all_single(received, full),
    }[name]


def _times(job: dict[str, Any], device: torch.device, ranks: int) -> dict[str, Any]:
    """Return the time in ns of a chain of each length, by round; all ranks start a chain together."""
    # The wall clock: gloo works in other threads.
    clock = cuda_clock if device.type == "cuda" else cpu_clock(0)
    call = _call(job["name"], job["elements"], DTYPES_BY_NAME[job["type"]], device, ranks)

    def chain(length: int) -> None:
        for _ in range(length):
            call()

    def timed(length: int) -> float:
        dist.barrier()
        return clock(functools.partial(chain, length))

    chain(job["lengths"][0])
    return {"ns": [[timed(length) for length in job["lengths"]] for _ in range(job["rounds"])]}


def main() -> None:
    """Serve one parent until it closes the pipe."""
    send, messages = connect()
    setup = next(messages)
    torch.set_num_threads(1)
    # Before the group is created, which waits for all ranks: the parent starts them one by one.
    send({"ready": True})
    is_cuda = setup["device"] == "cuda"
    device = torch.device("cuda", setup["rank"]) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    # A file of the parent instead of a port or host name of this machine.
    store: Any = dist
    meeting = store.FileStore(setup["meeting"], setup["ranks"])
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", store=meeting, rank=setup["rank"], world_size=setup["ranks"], timeout=TIMEOUT
    )
    for job in messages:
        send(measure_or_skip(functools.partial(_times, job, device, setup["ranks"]), device))


if __name__ == "__main__":
    main()
