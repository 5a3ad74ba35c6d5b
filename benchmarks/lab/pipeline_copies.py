"""Two copies of a two-stage pipeline on four hosts: equal stages all-reduce their gradients, then update.

Four workers on two cores: each stage's passes and update are timed alone, on their own core, and then replayed by
both copies of the stage. Messages between stages and all-reduces of gradients are real.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whatif.models.parallel.pipeline_schedule import Pass

from .baseline import trace_name
from .ddp import rate_name
from .jobs import Job, Layout, Results, quartiles, slower_rank
from .models import Training
from .pipeline import CHAINS, PACKET_BYTES, RATES_MBIT_S, STAGES, WAYS, Gloo, Stage, cut_of, name_of, what_if_of
from .rank import Rank, agreed, block_steps, run, time_steps, undisturbed
from .replay import sleep_until

COPIES = 2
BLOCK_S, FEWEST_STEPS, ROUNDS, ALONE_STEPS = 0.35, 2, 4, 3
# The parts that a replayed step sleeps for: a forward pass, a backward pass, the update.
TIMED = ("forward", "backward", "update")


def jobs(out: Path, models: tuple[str, ...] = ()) -> list[Job]:
    """Every model that is a chain of layers, at two rates."""
    return [_job(out, model, rate) for model in models or CHAINS if model in CHAINS for rate in RATES_MBIT_S]


def _job(out: Path, model: str, rate_mbit_s: float) -> Job:
    name = f"pipeline_copies-{model}-{rate_name(rate_mbit_s)}"
    return Job(
        name, __name__, Layout((STAGES * COPIES,), rate_mbit_s, packet_bytes=PACKET_BYTES),
        {"model": model, "trace": str((out / trace_name(model)).resolve()), "rate_mbit_s": rate_mbit_s},
        made=(f"{name}.json",), record=lambda results: _record(model, rate_mbit_s, results),
    )  # fmt: skip


def _record(model: str, rate_mbit_s: float, results: Results) -> dict[str, Any]:
    first, local = results[0], slower_rank(results[:STAGES], "local")
    runs = []
    for schedule, micro_batches in WAYS:
        name = name_of(schedule, micro_batches)
        rounds = first["rounds"][name]
        copies = f"distributed:workers={COPIES},bandwidth={rate_mbit_s:g}Mbps"
        what_ifs = [what_if_of(rate_mbit_s, schedule, micro_batches), copies]
        runs.append({"name": name, "compute": "replayed", "what_if": what_ifs,
                     **first["cuts"][name], "stages_ms": [result["alone_ms"][name] for result in results[:STAGES]],
                     **quartiles(rounds), "rounds": rounds})  # fmt: skip
    return {
        "experiment": "pipeline_copies", "model": model, "batch": first["samples"],
        "baseline": {"trace": trace_name(model), **quartiles(local), "rounds": local},
        "runs": runs,
    }  # fmt: skip


class _Nothing:
    """A link whose messages have always arrived."""

    def send(self, tensor: Tensor, tag: int) -> Any:
        return self

    def receive(self, tensor: Tensor, tag: int) -> Any:
        return self

    def wait(self) -> None:
        pass


class Timed(Stage):
    """A stage alone, with the times of its passes and its update, ms."""

    def __init__(self, model: str, number: int, cut: str, schedule: str, micro_batches: int) -> None:
        super().__init__(model, number, cut, schedule, micro_batches, _Nothing())
        # Uninitialized memory may hold denormal numbers, which a CPU multiplies thirty times slower.
        for buffer in self.buffers:
            buffer.copy_(self.message)
        self.samples_ms: dict[str, list[float]] = {name: [] for name in TIMED}
        for name in TIMED:
            setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*words: Any) -> Any:
            begin = time.perf_counter()
            result = work(*words)
            self.samples_ms[name].append((time.perf_counter() - begin) * 1e3)
            return result

        return timed

    def medians_ms(self) -> list[float]:
        """Return the median of each, in the order of `TIMED`, over the steps since the last call."""
        found = [statistics.median(self.samples_ms[name]) for name in TIMED]
        for samples in self.samples_ms.values():
            samples.clear()
        return found


class Replayed(Stage):
    """A stage that sleeps for `times_ms`, and sends the same messages and all-reduces as the real one."""

    def __init__(self, *words: Any, group: Any) -> None:
        super().__init__(*words)
        self._group = group
        self._gradients = torch.ones(sum(parameter.numel() for parameter in self.model.parameters()))
        self.times_ms = torch.zeros(len(TIMED), dtype=torch.float64)

    def _sleep(self, part: str) -> None:
        sleep_until(time.perf_counter() + float(self.times_ms[TIMED.index(part)]) / 1e3)

    def forward(self, one: Pass, coming: list[Any], ends: dict[int, tuple[Tensor, Tensor]]) -> Tensor | None:
        """Sleep instead of computing."""
        if self.number:
            coming[one.micro_batch].wait()
        self._sleep("forward")
        return None if self.number else self.message

    def backward(self, one: Pass, coming: list[Any], ends: dict[int, tuple[Tensor, Tensor]]) -> Tensor | None:
        """Sleep instead of computing."""
        if not self.number:
            coming[one.micro_batch].wait()
        self._sleep("backward")
        return self.message if self.number else None

    def update(self) -> None:
        """Reduce the gradients, and sleep instead of updating."""
        dist.all_reduce(self._gradients, group=self._group)
        self._sleep("update")


def work(rank: Rank) -> dict[str, Any]:
    """Time each stage alone and all four together, in turn; the request has `model`, `trace` and `rate_mbit_s`."""
    request, number = rank.request, rank.number % STAGES
    # Rank 2 c + s is stage s of copy c. All ranks must create all groups, in the same order.
    groups = [dist.new_group([stage + STAGES * copy for copy in range(COPIES)]) for stage in range(STAGES)]
    local, real = Training(request["model"]), rank.number < STAGES
    cuts: dict[str, dict[str, Any]] = {}
    alone: dict[str, Timed] = {}
    replayed: dict[str, Replayed] = {}
    for schedule, micro_batches in WAYS:
        name = name_of(schedule, micro_batches)
        cut = cut_of(Path(request["trace"]), schedule, micro_batches, request["rate_mbit_s"])
        words = (request["model"], number, cut, schedule, micro_batches)
        alone[name] = Timed(*words)
        peer = rank.number + (1 if number == 0 else -1)
        replayed[name] = stage = Replayed(*words, Gloo(peer), group=groups[number])
        cuts[name] = {"cut": cut, "message_bytes": stage.message.numel() * stage.message.element_size()}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ("local", *replayed)}
    times_ms: dict[str, list[list[float]]] = {name: [] for name in replayed}
    for _ in range(2 if real else 0):
        local.step()
        for timed in alone.values():
            timed.step()
            timed.medians_ms()
    with undisturbed():
        for _ in range(ROUNDS):
            for name, stage in replayed.items():
                dist.barrier()
                if real:
                    rounds["local"].append({"samples_ms": [time_steps(local.step, ALONE_STEPS)[0]]})
                    time_steps(alone[name].step, ALONE_STEPS)
                    stage.times_ms[:] = torch.tensor(alone[name].medians_ms(), dtype=torch.float64)
                dist.broadcast(stage.times_ms, number, group=groups[number])
                times_ms[name].append([round(value, 4) for value in stage.times_ms.tolist()])
                dist.barrier()
                step_ms = time_steps(stage.step, 1)[0][0]
                count = block_steps(agreed(step_ms), BLOCK_S, FEWEST_STEPS)
                # The first stage's first step ends before the second's: later ones run at the speed of the slower one.
                rounds[name].append({"samples_ms": [time_steps(stage.step, count + 1)[0][1:]]})
    return {"rounds": rounds, "cuts": cuts, "samples": local.samples, "alone_ms": times_ms}


if __name__ == "__main__":
    run(work)
