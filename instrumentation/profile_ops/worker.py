"""The process in which operators are measured for the database: what crashes here, or asks for too much, ends no other.

Reads JSON lines from standard input, first how to measure and then one call each, and answers each with a JSON line.
"""

import gc
import itertools
import json
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..gpu_rates import fp32_products
from ..line_process import answering
from ..operators.calls import NotReplayable
from ..operators.replay import copies_of, make_replay
from ..operators.schema import resolve
from ..operators.timing import FEWEST_ROUNDS, LONG_NS, ROUNDS, Chain, Clock, cpu_clock, first_ns
from ..operators.worker import CPU_MEMORY_BYTES, GPU_MEMORY_SHARE, LONGEST_CALL_NS, limit_address_space
from .graph_replay import graph_rounds_ns
from .pace import Pace


class _Worker:
    """Measures one call after the other in the way that the first line tells."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._device = torch.device(setup["device"])
        self._graphs = setup["method"] == "graph_replay"
        self._hot = setup["cache"] == "hot"
        if self._device.type == "cuda":
            self._clock: Clock | None = None
            self._memory_bytes = int(GPU_MEMORY_SHARE * torch.cuda.mem_get_info()[0])
        else:
            torch.set_num_threads(setup["threads"])
            self._clock = cpu_clock(setup["threads"])
            self._memory_bytes = CPU_MEMORY_BYTES
            limit_address_space()
        # With several threads the time is that of the slowest one, and nothing that one thread runs tells its pace.
        self._pace = Pace(self._clock) if self._clock is not None and setup["threads"] == 1 else None

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Measure one call: its time in ns by each round, and the pace beside it; or why it was left out."""
        try:
            with self._precision(job["dtype"]):
                return self._measured(job)
        except NotReplayable as reason:
            return {"skipped": str(reason)}
        except (RuntimeError, TypeError, ValueError, IndexError, OverflowError, MemoryError) as error:
            return {"skipped": f"refused by torch ({type(error).__name__})"}
        finally:
            if self._device.type == "cuda":
                # A device that has failed stays so: then this process ends here, and another one goes on.
                torch.cuda.synchronize()

    def _measured(self, job: dict[str, Any]) -> dict[str, Any]:
        name, dims, types, concrete, strides, backward = job["call"]
        call = resolve(name, dims, types, concrete, strides, backward=backward)
        copies = 1 if self._hot else copies_of(call)
        # As much again for results.
        if 2 * copies * call.input_bytes > self._memory_bytes:
            raise NotReplayable("needs too much memory")
        replay = make_replay(call, self._device, copies)
        estimate_ns = first_ns(replay, self._device)
        if estimate_ns > LONGEST_CALL_NS:
            raise NotReplayable("takes too long")
        if self._graphs:
            return {"ns": graph_rounds_ns(replay, estimate_ns)}
        chain = Chain(replay, self._clock, estimate_ns)
        # The memory that results take is touched for the first time here.
        chain.by_difference()
        rounds = FEWEST_ROUNDS if estimate_ns > LONG_NS else ROUNDS
        if self._pace is None:
            return {"ns": [chain.by_difference() for _ in range(rounds)]}
        ns, paces = [], [self._pace.sample(estimate_ns)]
        for _ in range(rounds):
            ns.append(chain.by_difference())
            paces.append(self._pace.sample(estimate_ns))
        # The pace of a round is what was seen before and after it.
        return {"ns": ns, "pace_ns": [(before + after) / 2 for before, after in itertools.pairwise(paces)]}

    def _precision(self, dtype: str) -> AbstractContextManager[None]:
        """On CUDA fp32 means fp32; tf32 is asked for by its own name."""
        if self._device.type != "cuda" or dtype not in ("fp32", "tf32"):
            return nullcontext()
        return fp32_products("ieee" if dtype == "fp32" else "tf32")


def main() -> None:
    """Serve one parent until it closes the pipe."""
    # Ctrl-C reaches the whole group of processes; the parent decides, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell = answering()
    torch.manual_seed(0)
    gc.disable()  # Its pauses would fall into somebody's time.
    worker = _Worker(json.loads(sys.stdin.readline()))
    tell({"ready": True})
    for line in sys.stdin:
        tell(worker.answer(json.loads(line)))


if __name__ == "__main__":
    main()
