"""One rank of a group that measures collectives: gloo between processes of a CPU, NCCL between GPUs.

Reads JSON lines from standard input, first who it is and then what to run, and answers each with a JSON line.
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..line_process import connect
from ..operators.timing import cpu_clock, cuda_clock
from ..operators.worker import answered
from ..trace_module.spelling import DTYPES_BY_NAME

# A rank that waits longer for the others has lost them.
TIMEOUT = timedelta(seconds=60)


def _call(name: str, elements: int, dtype: torch.dtype, device: torch.device, ranks: int) -> Callable[[], Any]:
    """One call of the collective on buffers of its own; ``elements`` is the whole buffer."""
    whole = torch.zeros(elements, dtype=dtype, device=device)
    part = torch.zeros(elements // ranks, dtype=dtype, device=device)
    other = torch.zeros_like(whole) if name == "all_to_all" else whole
    # Looked up now: a name that is not known is refused before anything runs.
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }[name]


def _times(job: dict[str, Any], device: torch.device, ranks: int) -> dict[str, Any]:
    """The time in ns of a chain of each length, by round; all ranks begin a chain together."""
    # Threads of gloo work beside the caller: the wall clock.
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
    tell, asked = connect()
    setup = next(asked)
    torch.set_num_threads(1)
    # Before the group is made: that takes all ranks, and the parent starts one after the other.
    tell({"ready": True})
    is_cuda = setup["device"] == "cuda"
    device = torch.device("cuda", setup["rank"]) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    # The parent's file: no port of this machine, and no name of it, takes part.
    store: Any = dist
    meeting = store.FileStore(setup["meeting"], setup["ranks"])
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", store=meeting, rank=setup["rank"], world_size=setup["ranks"], timeout=TIMEOUT
    )
    for job in asked:
        tell(answered(functools.partial(_times, job, device, setup["ranks"]), device))


if __name__ == "__main__":
    main()
