"""Times calls alone: by the difference of a long and a short chain, in interleaved rounds."""

import collections
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..gpu import GPU

# Length of the short chain; the long one takes three times as long. The clock's overhead is then negligible.
# A call that takes this long itself needs no chain: N is 0 and M is 1.
CHAIN_NS = 2e6
MOST_CALLS = 200
ROUNDS = 7
# Longer calls get fewer rounds: their noise is smaller too.
LONG_NS = 20e6
FEWEST_ROUNDS = 5

# `torch.cuda._sleep` counts cycles: enough, at the clock rate of any GPU, for launches to queue up.
CYCLES_PER_NS = 3.0


class Clock(Protocol):
    """Times a piece of work in ns."""

    def __call__(self, work: Callable[[], None]) -> float:
        """Run the work once and return how long it took."""


def cpu_clock(threads: int) -> Clock:
    """Return the CPU clock of this thread; with several threads the wall clock, to include the work of all."""
    now = time.thread_time_ns if threads == 1 else time.perf_counter_ns

    def clock(work: Callable[[], None]) -> float:
        begin = now()
        work()
        return now() - begin

    return clock


def cuda_clock(work: Callable[[], None], *, ahead_ns: float = 0.0) -> float:
    """Run the work once and return its time in ns between two CUDA events.

    With `ahead_ns` the GPU first spins for that long, so that launches queue up and GPU time is measured, not CPU time.
    """
    GPU.synchronize()
    if ahead_ns:
        GPU.hold(int(ahead_ns * CYCLES_PER_NS))
    begin = GPU.mark()
    work()
    end = GPU.mark()
    GPU.synchronize()
    return GPU.between_ms(begin, end) * 1e6


def first_ns(replay: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Return the wall time in ns of a call after the first one, which may select and compile kernels."""
    for warm in (True, False):
        begin = time.perf_counter_ns()
        replay[-1 if warm else 0]()
        if device.type == "cuda":
            GPU.synchronize()
    return max(1.0, time.perf_counter_ns() - begin)


def measure_alone(
    replays: Mapping[str, Sequence[Callable[[], Any]]], clock: Clock | None, estimates_ns: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the time of one call in ns, and its relative quartile range, of each replay by its name.

    The difference of chains of M and N calls cancels constant overhead: T = (T_M - T_N) / (M - N) (Tianshu, section
    3.1, equation 1). The chains of all replays alternate, so that a slow moment affects all; the median round counts.
    `clock` None: a CUDA device, timed without launch overhead. `estimates_ns` are rough times of a call.
    """
    longest_ns = max(estimates_ns.values())
    rounds = FEWEST_ROUNDS if longest_ns > LONG_NS else ROUNDS
    times: dict[str, list[float]] = {name: [] for name in replays}
    chains = {name: Chain(replay, clock, estimates_ns[name]) for name, replay in replays.items()}
    for _ in range(rounds):
        for name, chain in chains.items():
            times[name].append(chain.by_difference())
    ns, spread = {}, {}
    for name, samples in times.items():
        q25, median, q75 = statistics.quantiles(samples, n=4, method="inclusive")
        if median > 0:
            ns[name] = round(median, 1)
            spread[name] = round((q75 - q25) / median, 4)
    return ns, spread


class Chain:
    """Runs one replay in chains; each continues with the inputs after those of the last chain."""

    def __init__(self, replay: Sequence[Callable[[], Any]], clock: Clock | None, estimate_ns: float) -> None:
        self._calls = itertools.cycle(replay)
        # Keep the results, as a step does, so that each call writes to other memory than the last. One round and one
        # more call, so that no timed call touches memory for the first time: that took half of the time of a call with
        # a result of 16 MiB.
        self._results: collections.deque[Any] = collections.deque(maxlen=len(replay))
        for call in itertools.islice(self._calls, len(replay) + 1):
            self._results.append(call())
        self._clock = clock
        self._estimate_ns = estimate_ns

    def by_difference(self) -> float:
        """Return the time of one call in ns: Tianshu's equation 1."""
        short = min(MOST_CALLS, int(CHAIN_NS / self._estimate_ns))
        long = 3 * short or 1
        short_ns, long_ns = self._time_ns(short), self._time_ns(long)
        return (long_ns - short_ns) / (long - short)

    def _time_ns(self, count: int) -> float:
        def work() -> None:
            for call in itertools.islice(self._calls, count):
                self._results.append(call())

        if self._clock is not None:
            return self._clock(work)
        return cuda_clock(work, ahead_ns=count * self._estimate_ns)
