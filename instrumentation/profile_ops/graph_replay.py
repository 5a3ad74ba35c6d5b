"""Times CUDA operators by graph replay: a long and a short chain as CUDA graphs, without launch overhead."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..gpu import GPU
from ..operators.timing import FEWEST_ROUNDS, LONG_NS, ROUNDS, cuda_clock

# A graph has no launches to wait for: a chain only has to be long against an event's resolution of 0.5 us (CUDA
# runtime documentation), and capturing a graph of many nodes is slow.
CHAIN_NS = 1e6
MOST_CALLS = 100
# PyTorch's notes on CUDA graphs: warm up on a side stream before a capture.
WARM_CALLS = 3


def graph_rounds_ns(replay: Sequence[Callable[[], Any]], estimate_ns: float) -> list[float]:
    """Return the time of one call in ns by round: T = (T_M - T_N) / (M - N), Tianshu, equation 1.

    Both chains are captured once and replayed alternately. Raises RuntimeError if a call cannot be captured, because it
    synchronizes or its result's size depends on values.
    """
    short = min(MOST_CALLS, int(CHAIN_NS / estimate_ns)) or 1
    long = 3 * short
    _warm(replay)
    graphs = {count: _captured(replay, count) for count in (short, long)}
    times: dict[int, float] = {}
    found = []
    for _ in range(FEWEST_ROUNDS if estimate_ns > LONG_NS else ROUNDS):
        for count, graph in graphs.items():
            times[count] = cuda_clock(graph)
        found.append((times[long] - times[short]) / (long - short))
    return found


def _warm(replay: Sequence[Callable[[], Any]]) -> None:
    def warm() -> None:
        for call in itertools.islice(itertools.cycle(replay), WARM_CALLS):
            call()

    GPU.aside(warm)


def _captured(replay: Sequence[Callable[[], Any]], count: int) -> Any:
    # Keep the results of one round of copies, as in a chain, so that each call writes to other memory than the last.
    results: deque[Any] = deque(maxlen=len(replay))

    def work() -> None:
        for call in itertools.islice(itertools.cycle(replay), count):
            results.append(call())

    graph = GPU.capture(work)
    graph()
    GPU.synchronize()
    return graph
