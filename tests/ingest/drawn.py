"""Tiny traces, drawn in us, and what tests ask of the graphs that they become."""

from __future__ import annotations

from typing import Any

from tests.helpers import (
    Event,
    call,
    copy,
    end_of,
    launched,
    mark,
    names,
    op,
)
from whatif import DependencyKind, TaskGraph, simulate

US = 1_000


def of_name(graph: TaskGraph, name: str) -> list[int]:
    return [task for task, found in enumerate(names(graph)) if found == name]


def only(graph: TaskGraph, name: str) -> int:
    (task,) = of_name(graph, name)
    return task


def start_us(graph: TaskGraph, name: str) -> float:
    return float(simulate(graph).start_ns[only(graph, name)]) / US


def end_us(graph: TaskGraph, name: str) -> float:
    return end_of(simulate(graph), name) / US


def times(graph: TaskGraph, name: str, factor: float) -> TaskGraph:
    return graph.scale(graph.select(name=f"^{name}$"), factor).check()


def assert_replays(graph: TaskGraph) -> None:
    """Every task of the simulation starts when it was measured."""
    simulated = simulate(graph).start_ns
    late = {names(graph)[i]: (int(s), int(m)) for i, (s, m) in enumerate(zip(simulated, graph.start_ns)) if s != m}  # noqa: B905
    assert not late, f"(simulated, measured) of {late}"


def pairs(graph: TaskGraph, kind: DependencyKind) -> set[tuple[str, str]]:
    d, n = graph.dependencies, names(graph)
    rows = zip(d.source.tolist(), d.target.tolist(), d.kind.tolist(), strict=True)
    return {(n[source], n[target]) for source, target, k in rows if k == kind}


def backward(name: str, ts: float, dur: float, sequence: int) -> Event:
    """An operator of autograd's thread, with the number of the forward operator that it belongs to."""
    numbers = {"Sequence number": sequence, "Fwd thread id": 1}
    return op(f"autograd::engine::evaluate_function: {name}", ts, dur, tid=2, **numbers)


def synchronised() -> list[Event]:
    """A synchronisation waits for a kernel and returns 5 us behind its end::

    us      0   3     10                   35   40
    CPU     |L-|gap--|cudaDeviceSynchronize----|gap-|
    stream       ..|K----------------------|
                   5                       35
    """
    return [op("aten::add", 0, 10), *launched("K", 0, 3, 5, 30, 1), call("cudaDeviceSynchronize", 10, 30, 2),
            op("aten::mul", 40, 10)]  # fmt: skip


def copied(direction: str, size: int = 1_000_000, call_us: float = 40) -> list[Event]:
    """A kernel, then a copy behind it, whose call returns 5 us behind the copy's end where it blocks::

    us      0   3 5        14                    45 50
    CPU     |L-|gap|cudaMemcpyAsync---------------|op|
    stream       |K--------------|.|copy------|
                 5              30 31        45
    """
    return [
        op("aten::add", 0, 10),
        *launched("K", 0, 3, 5, 25, 1),
        call("cudaMemcpyAsync", 10, call_us, 2),
        copy(direction, 31, 14, 2, size),
        op("aten::mul", 50, 10),
    ]


def handed_over() -> list[Event]:
    """The main thread stands still while autograd's thread works::

    us        0      20                              120    140
    main      |fwd--|. . . . . . . . . . . . . . . . .|opt--|
    autograd          |bwd--------------------------|
                      22                            118
    """
    return [
        op("aten::linear", 0, 20, tid=1, **{"Sequence number": 7}),
        backward("AddmmBackward0", 22, 96, 7),
        op("aten::add_", 120, 20, tid=1),
        *launched("F", 5, 3, 10, 10, 1),
        *launched("B", 50, 3, 55, 10, 2, tid=2),
        *launched("U", 125, 3, 130, 10, 3),
    ]  # fmt: skip


def steps(n: int, marks: list[Event], period: float = 100) -> list[Event]:
    """n steps of ten different kernels each."""
    events = [op("aten::step", period * i + 1, period - 2) for i in range(n)]
    for i in range(n):
        for k in range(10):
            at = period * i + 2 + 8 * k
            events += launched(f"K{k}", at, 3, at + 5, 2, 100 * i + k + 1)
    return [*events, *marks]


def training(layer: Any) -> list[Event]:
    """A step of two layers with backward and update; ``layer`` makes a layer's mark.

    ::

        us     0     10      20       30            60            90      100
        main   |load|net: fc1------|relu--|. . . . . . . . . . . . |opt--|
        grad                              |relu'------|fc1'-------|
    """
    return [
        mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 8),
        op("aten::stack", 0, 6),
        layer("Net_0", 8, 24),
        layer("Linear_0", 10, 10),
        op("aten::linear", 11, 8, **{"Sequence number": 3}),
        *launched("F1", 12, 3, 17, 4, 1),
        layer("ReLU_0", 21, 9),
        op("aten::relu", 22, 7, **{"Sequence number": 4}),
        *launched("F2", 23, 3, 28, 4, 2),
        backward("ReluBackward0", 34, 20, 4),
        *launched("B2", 40, 3, 45, 4, 3, tid=2),
        backward("AddmmBackward0", 56, 30, 3),
        *launched("B1", 60, 3, 65, 4, 4, tid=2),
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 86, 2, tid=2),
        mark("Optimizer.step#SGD.step", 90, 10),
        op("aten::_foreach_add_", 91, 8),
        *launched("U", 92, 3, 97, 4, 5),
    ]  # fmt: skip


def two_passes(between: list[Event], update_us: float = 80) -> list[Event]:
    """A step of two passes on a CPU, of one parameter::

    us      0    10        30        40    50        70       80     100
    main    |F1--|B1-------|between--|F2---|B2-------|        |opt----|
    """
    events = [mark("ProfilerStep#0", 0, 110), *between, mark("Optimizer.step#SGD.step", update_us, 100 - update_us)]
    for at, number in ((0, 1), (40, 2)):
        events += [
            op("aten::linear", at, 10, **{"Sequence number": number}),
            op("AddmmBackward0", at + 10, 12, **{"Sequence number": number, "Fwd thread id": 1}),
            op("torch::autograd::AccumulateGrad", at + 24, 6),
        ]
    return [*events, op("aten::add_", 85, 10)]


def nested() -> list[Event]:
    """Operators one inside the other::

    us   0      10     20     30     40     50     60
    a    |------------------------------------|
    b           |-------------|
    c                  |------|
    d                                              |------|
    """
    return [op("a", 0, 50), op("b", 10, 20), op("c", 20, 10), op("d", 55, 10)]
