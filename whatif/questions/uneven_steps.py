"""Compare the recorded steps: the time of each, and the kinds of time that slow ones have more of.

All times are as recorded, ms. Each kind of time is compared with its median over the steady steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from whatif.graph.task_graph import TaskGraph, matching
from whatif.graph.types import GPU_KINDS, Array, Bool, Float64, TaskKind, among
from whatif.ingest.ranks.merge import COLLECTIVE
from whatif.prediction.baseline import Baseline
from whatif.questions.lines import waits_for_gpu
from whatif.simulation.steps import steady
from whatif.units import counted

# What the recorder writes around a full collection of Python's garbage collector.
GARBAGE = r"^whatif::gc"
# Calls of CUDA and HIP that allocate or free device memory; frequent ones after a warm-up are retries.
ALLOCATION = r"^(cuda|hip|cu)(Malloc|Free|MemAlloc|MemFree)(_|$|Async|Host)"
# A step is slow if it exceeds the median by this share: our choice.
SLOW_SHARE = 0.05
# A cause is named if it explains this share of a slow step's excess: our choice.
NAMED_SHARE = 0.25
# The GPU clock is named if the same kernels take longer by this share: more than they vary otherwise.
CLOCK_SHARE = 0.03
CLOCK = "slower kernels (GPU clock)"


class UnevenStep(Struct, frozen=True):
    """One recorded step; ``more_of`` has the excess of a slow step over the median by kind, ms, largest first."""

    step: int
    ms: float
    times_ms: dict[str, float]
    slow: bool
    more_of: dict[str, float]
    # As recorded: how often the allocator found no free block, released its cache and retried.
    allocator_retries: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the step as a JSON object."""
        return {
            "step": self.step,
            "step_ms": round(self.ms, 6),
            "slow": self.slow,
            "times_ms": {name: round(ms, 6) for name, ms in self.times_ms.items()},
            "more_of": {name: round(ms, 6) for name, ms in self.more_of.items()},
            "allocator_retries": self.allocator_retries,
        }


class UnevenSteps(Struct, frozen=True):
    """Every recorded step with a time by the clock, and their median and mean, ms."""

    baseline: Baseline
    clock: str
    steps: tuple[UnevenStep, ...]
    median_ms: float
    mean_ms: float

    @property
    def headline(self) -> str:
        """Say how much the steps differ and what the slow ones have more of."""
        slow = [step for step in self.steps if step.slow]
        if not self.steps:
            return "no steps to compare: the recording has no steps by this clock."
        spread = f"{counted(len(self.steps), 'step')}, median {self.median_ms:,.2f} ms, mean {self.mean_ms:,.2f} ms"
        if not slow:
            return f"{spread}: none takes {100 * SLOW_SHARE:.0f} % more than the median."
        totals: dict[str, float] = {}
        for step in slow:
            for name, ms in step.more_of.items():
                totals[name] = totals.get(name, 0.0) + ms
        excess_ms = sum(step.ms - self.median_ms for step in slow)
        named = sorted(totals, key=lambda name: -totals[name])
        why = ", ".join(f"{name} ({totals[name]:,.2f} ms)" for name in named[:3]) or "nothing that the recording shows"
        retries = sum(step.allocator_retries for step in slow)
        full = (
            f" In them the allocator ran out of memory and tried again {counted(retries, 'time')}." if retries else ""
        )
        return f"{spread}; {len(slow)} slow, {excess_ms:,.2f} ms above the median together, with more of: {why}.{full}"

    def to_dict(self) -> dict[str, Any]:
        """Return the steps as a JSON object."""
        return {
            "trace": self.baseline.graph.info.path,
            "step_clock": self.clock,
            "median_ms": round(self.median_ms, 6),
            "mean_ms": round(self.mean_ms, 6),
            "headline": self.headline,
            "steps": [step.to_dict() for step in self.steps],
        }


def uneven_steps(graph: TaskGraph, baseline: Baseline) -> UnevenSteps:
    """Compare the steps of a graph as it was read, by its baseline's clock; instead of a span, by single steps."""
    measured = graph.info.measured_step_ns
    clock = baseline.clock
    if clock == "span":  # too few steps to report a median, but enough to compare
        clock = next((each for each in ("mark", "gpu") if len(measured.get(each, ())) > 1), clock)
    times_ns = measured[clock] if clock != "span" else ()
    chosen = steady(times_ns, graph, clock)
    median_ms = float(np.median(chosen)) / 1e6 if chosen else 0.0
    # Entry i of the gpu clock is the time of step i + 1.
    first = 1 if clock == "gpu" else 0
    numbers = np.arange(first, first + len(times_ns))
    times = _times_ms(graph)
    low, high = graph.info.steady if len(chosen) < len(times_ns) else (0, graph.info.n_steps)
    rows = {name: column[numbers] for name, column in times.items() if column.any()}
    is_steady = (numbers >= low) & (numbers < high) if high > low else np.ones(len(numbers), dtype=np.bool_)
    usual = {name: float(np.median(column[is_steady])) for name, column in rows.items() if is_steady.any()}
    retries = dict(enumerate(graph.info.recorded.allocator_retries))
    found = []
    for at, (number, time_ns) in enumerate(zip(numbers.tolist(), times_ns, strict=True)):
        if not is_steady[at]:
            continue
        ms = time_ns / 1e6
        excess_ms = ms - median_ms
        slow = excess_ms > SLOW_SHARE * median_ms
        excess = {name: min(float(column[at]) - usual[name], excess_ms) for name, column in rows.items()}
        named = {name: part for name, part in excess.items() if slow and part >= NAMED_SHARE * excess_ms}
        step_times_ms = {name: float(column[at]) for name, column in rows.items()}
        named = dict(sorted(named.items(), key=lambda item: -item[1]))
        found.append(UnevenStep(number, ms, step_times_ms, slow, named, retries.get(number, 0)))
    mean_ms = float(np.mean([step.ms for step in found])) if found else 0.0
    return UnevenSteps(baseline, clock, tuple(found), median_ms, mean_ms)


def _times_ms(graph: TaskGraph) -> dict[str, Float64]:
    """The recorded time of each step by kind, ms, shape (n_steps,), for the first rank."""
    main = (graph.thread == 0) & graph.of_clock.mask
    garbage = matching(graph.names, GARBAGE).take(graph.name)
    calls = graph.kind == TaskKind.RUNTIME
    allocating = calls & matching(graph.names, ALLOCATION).take(graph.name)
    waiting_ms = _blocked_ns(graph) / 1e6
    on_gpu = among(graph.kind, GPU_KINDS) & graph.of_clock.mask
    transfer = graph.kind == TaskKind.COMMUNICATION
    duration_ms = graph.duration_ns / 1e6
    python = main & ~garbage & ~allocating & (graph.kind != TaskKind.DATA_LOADING) & graph.on_cpu.mask

    def by_step(chosen: Bool, ms: Array) -> Float64:
        in_step = chosen & (graph.step >= 0)
        return np.bincount(graph.step[in_step], weights=ms[in_step], minlength=graph.info.n_steps).astype(np.float64)

    found = {
        "data loading": by_step(main & (graph.kind == TaskKind.DATA_LOADING) & ~garbage, duration_ms),
        "garbage collection": by_step(garbage, duration_ms),
        "waiting for the GPU": by_step(main & calls, waiting_ms),
        "allocation": by_step(allocating & main, duration_ms),
        "communication": by_step(transfer & graph.of_clock.mask, duration_ms),
        "waiting for other ranks": by_step(transfer & graph.of_clock.mask, _peers_ms(graph)),
        "kernels and copies": by_step(on_gpu & ~transfer, duration_ms),
        "operators and Python" if not graph.has_gpu else "CPU work": by_step(python, duration_ms),
    }
    if graph.has_gpu:
        found[CLOCK] = by_step(on_gpu & ~transfer, _slower_ms(graph, on_gpu & ~transfer))
        # Kernel time that the GPU clock explains is not reported twice; a slower step also waits longer for its GPU.
        paced = found[CLOCK] > CLOCK_SHARE * np.maximum(found["kernels and copies"], 1e-9)
        found[CLOCK] = np.where(paced, found[CLOCK], 0.0)
        found["kernels and copies"] = found["kernels and copies"] - found[CLOCK]
    return found


def _peers_ms(graph: TaskGraph) -> Float64:
    """How long each transfer of several ranks waited for the last of them, as recorded, ms, shape (n_tasks,).

    In the recording of one rank waiting is a part of its communication.
    """
    waits_ms = np.zeros(len(graph))
    part_of = graph.attached.get(COLLECTIVE)
    if part_of is None:
        return waits_ms
    tasks = np.flatnonzero((graph.kind == TaskKind.COMMUNICATION) & (part_of != 0))
    number, start_ns = np.abs(part_of[tasks]), graph.start_ns[tasks]
    latest_ns = np.zeros(int(number.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(latest_ns, number, start_ns)
    waits_ms[tasks] = np.where(part_of[tasks] > 0, latest_ns[number] - start_ns, 0) / 1e6
    return waits_ms


def _slower_ms(graph: TaskGraph, chosen: Bool) -> Float64:
    """The excess of each chosen task over the median of the same call in all steps, ms, shape (n_tasks,)."""
    extra_ns = np.zeros(len(graph))
    rows = np.flatnonzero(chosen)
    order = rows[np.argsort(graph.name[rows], kind="stable")]
    for group in np.split(order, np.flatnonzero(np.diff(graph.name[order])) + 1) if len(order) else []:
        # One name can cover different work: its calls are matched by their position in the step.
        steps, counts = np.unique(graph.step[group], return_counts=True)
        if len(steps) < 2 or len(set(counts.tolist())) > 1:
            continue
        by_place = graph.duration_ns[group].reshape(len(steps), -1)
        extra_ns[group] = (by_place - np.median(by_place, axis=0)).ravel()
    return extra_ns / 1e6


def _blocked_ns(graph: TaskGraph) -> Float64:
    """The recorded wait of each call for the GPU, ns, shape (n_tasks,): the time until it returns less its own work."""
    blocked = np.zeros(len(graph))
    waits = waits_for_gpu(graph)
    call = graph.neighbours[0][waits]
    known = call >= 0
    waits, call = waits[known], call[known]
    returned_ns = graph.start_ns[waits]
    blocked[call] = np.maximum(returned_ns - graph.start_ns[call] - graph.duration_ns[call], 0)
    return blocked
