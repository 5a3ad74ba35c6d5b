"""Contention as two papers print it: Tianshu's virtual operations (§3.3, §4.4) and equation 31 of Pei et al."""

from __future__ import annotations

import pytest

import whatif
from tests.helpers import STREAM, Build, ends
from whatif import TaskGraph, TaskKind, Thread, ThreadKind, simulate
from whatif.models.exchange.contention import (
    SMS,
    occupy,
    sm_share,
    virtual_operations,
)

NETWORK = Thread("network", ThreadKind.CHANNEL)
V100, P40 = "Tesla V100-SXM2-16GB", "Tesla P40"


def backward(kernels_ns: list[int], reduce_ns: list[int], gpu: str) -> TaskGraph:
    """A backward pass: each kernel's all-reduce (0: none) runs beside those behind it, one after the other."""
    build = Build(STREAM, NETWORK, gpu=gpu)
    for i, (kernel_ns, ns) in enumerate(zip(kernels_ns, reduce_ns, strict=True)):
        kernel = build.task(0, kernel_ns, f"b{i}")
        if ns:
            build.edge(kernel, build.task(1, ns, f"r{i}", TaskKind.COMMUNICATION, start_ns=-1))
    return build.graph()


def makespan_ns(graph: TaskGraph) -> int:
    return simulate(graph).makespan_ns


def test_an_all_reduce_occupies_a_fifth_of_a_v100() -> None:
    """§3.3: 16 of 80 multiprocessors, so that a virtual operation lasts 20 % of its all-reduce."""
    graph = backward([100, 1_000], [1_000, 0], V100)
    assert sm_share(graph, SMS) == 0.2
    changed = virtual_operations(graph, graph.kind == TaskKind.COMMUNICATION)
    assert changed.duration_ns[changed.select(name="virtual")].tolist() == [200]
    assert (makespan_ns(graph), makespan_ns(changed)) == (1_100, 1_300)


@pytest.mark.parametrize("reduce_ns", [200, 500, 1_000])
def test_virtual_operations_and_rates_cost_the_computation_the_same(reduce_ns: int) -> None:
    """Where kernels hide an all-reduce of t both ways take 0.2 t from them: one at its start, the other throughout."""
    graph = backward([100, 2_000, 500], [reduce_ns, 0, 0], V100)
    reduces = graph.kind == TaskKind.COMMUNICATION
    virtual, rates = virtual_operations(graph, reduces), occupy(graph, reduces, gamma=1.0)
    assert makespan_ns(virtual) == makespan_ns(rates) == 2_600 + reduce_ns // 5


def test_ignoring_contention_costs_a_cnn_on_eight_gpus_what_section_4_4_says_only_with_slower_all_reduces() -> None:
    """A pass of ten kernels that hides the all-reduces of the nine ahead: the most that contention can do.

    Tianshu: without the interaction the accuracy of CNNs on 8 GPUs falls by over 20 %. Of its own mechanism at most
    20 % of the computation beside an all-reduce come, a step 16.7 % too short, whatever the network: 0.2 t for t. With
    all-reduces that also take 34 % longer beside kernels (Daydream §6.5) it is 27 % of the computation.
    """
    graph = backward([1_000] * 10, [1_000] * 9 + [0], V100)
    reduces = graph.kind == TaskKind.COMMUNICATION
    alone = makespan_ns(graph)
    assert alone == 10_000
    virtual = makespan_ns(virtual_operations(graph, reduces))
    assert virtual == 10_000 + 9 * 200
    assert 1 - alone / virtual == pytest.approx(0.153, abs=0.001)
    both = makespan_ns(occupy(graph, reduces))
    assert both / alone > 1.2


@pytest.mark.parametrize(
    ("reduce_ns", "kernel_ns", "hidden"), [(30_000, 29_000, True), (30_000, 300_000, False), (5_900, 6_000, False)]
)
def test_equation_31_of_pei_et_al(reduce_ns: int, kernel_ns: int, hidden: bool) -> None:
    """A P40 has 30 multiprocessors, of which an all-reduce takes one.

    Beside an all-reduce that is not over first a layer takes t_b sm / (sm - 1). Else it does t_ar (sm - 1) / sm of its
    work beside it and the rest alone: t_b - t_ar (sm - 1) / sm + t_ar, as which the garbled second line must be read,
    since it is the one that meets the first where both end at one time.
    """
    graph = backward([1_000, kernel_ns], [reduce_ns, 0], P40)
    changed = occupy(graph, graph.kind == TaskKind.COMMUNICATION, sms=1, gamma=1.0)
    sm = 30
    expected = kernel_ns * sm / (sm - 1) if hidden else kernel_ns - reduce_ns * (sm - 1) / sm + reduce_ns
    assert hidden == (kernel_ns * sm / (sm - 1) <= reduce_ns)
    assert ends(simulate(changed))["b1"] == pytest.approx(1_000 + expected, abs=1)


def test_daydreams_nccl_is_a_third_slower_beside_kernels_and_not_alone() -> None:
    """§6.5, figure 9: 34 % above theory beside kernels, next to it when NCCL runs exclusively."""
    reduces = whatif.TaskKind.COMMUNICATION
    beside, alone = backward([100, 5_000], [1_000, 0], V100), backward([100], [1_000], V100)
    assert ends(simulate(occupy(beside, beside.kind == reduces)))["r0"] == 100 + 1_340
    assert ends(simulate(occupy(alone, alone.kind == reduces)))["r0"] == 100 + 1_000
