"""The process in which operators are measured for the database: a crash or excessive memory use ends no other process.

Reads JSON lines from stdin, first how to measure and then one call per line, and answers each with a JSON line.
"""

import functools
import gc
import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..gpu_rates import fp32_products
from ..line_process import connect
from ..operators.calls import NotReplayable, RecordedCall
from ..operators.replay import copies_of
from ..operators.schema import resolve
from ..operators.timing import FEWEST_ROUNDS, LONG_NS, ROUNDS, Chain
from ..operators.worker import measure_or_skip, needed_bytes, prepare, timed_replay
from .graph_replay import graph_rounds_ns
from .pace import Pace


class _Worker:
    """Measures calls, one at a time, with the setup of the first line."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._device = torch.device(setup["device"])
        self._graphs = setup["method"] == "graph_replay"
        self._hot = setup["cache"] == "hot"
        self._clock, self._memory_bytes = prepare(self._device, setup["threads"])
        # With several threads the slowest one decides, whose pace a single thread cannot measure.
        self._pace = Pace(self._clock) if self._clock is not None and setup["threads"] == 1 else None

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Measure one call: its time in ns by round and the pace in each, or the reason why it was skipped."""
        return measure_or_skip(functools.partial(self._measured, job), self._device)

    def _measured(self, job: dict[str, Any]) -> dict[str, Any]:
        with self._precision(job["dtype"]):
            return self._rounds(job["call"])

    def _rounds(self, recorded: list[Any]) -> dict[str, Any]:
        call = resolve(RecordedCall(*recorded))
        copies = 1 if self._hot else copies_of(call)
        if needed_bytes(call, copies) > self._memory_bytes:
            raise NotReplayable("needs too much memory")
        replay, estimate_ns = timed_replay(call, self._device, copies)
        if self._graphs:
            return {"ns": graph_rounds_ns(replay, estimate_ns)}
        chain = Chain(replay, self._clock, estimate_ns)
        rounds = FEWEST_ROUNDS if estimate_ns > LONG_NS else ROUNDS
        if self._pace is None:
            return {"ns": [chain.by_difference() for _ in range(rounds)]}
        ns, paces = [], [self._pace.sample(estimate_ns)]
        for _ in range(rounds):
            ns.append(chain.by_difference())
            paces.append(self._pace.sample(estimate_ns))
        # The pace of a round is the mean of the samples before and after it.
        return {"ns": ns, "pace_ns": [(before + after) / 2 for before, after in itertools.pairwise(paces)]}

    def _precision(self, dtype: str) -> AbstractContextManager[None]:
        """Set the precision of fp32 products on CUDA: TF32 only for the dtype tf32."""
        if self._device.type != "cuda" or dtype not in ("fp32", "tf32"):
            return nullcontext()
        return fp32_products("ieee" if dtype == "fp32" else "tf32")


def main() -> None:
    """Serve one parent until it closes the pipe."""
    send, messages = connect()
    torch.manual_seed(0)
    gc.disable()  # Its pauses would be part of measured times.
    worker = _Worker(next(messages))
    send({"ready": True})
    for job in messages:
        send(worker.answer(job))


if __name__ == "__main__":
    main()
