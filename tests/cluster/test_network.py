"""Networks in levels and what exchanges cost on them: by hand, against nccl-tests' factors, and as properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whatif import WhatifError
from whatif.hardware.cluster.collectives import MODELS, OPERATIONS, bus_factor
from whatif.hardware.cluster.links import Link
from whatif.hardware.cluster.network import ALGORITHMS, Level, Network

PAIRS = [(operation, algorithm) for algorithm, able in MODELS.items() for operation in able]


def two_nodes(*, shared: bool = True, full_duplex: bool = True) -> Network:
    """Two nodes of four workers: 10 bytes/ns and 1 us inside, 1 byte/ns and 10 us between the nodes.

    node 0: w0 = w1 = w2 = w3          node 1: w4 = w5 = w6 = w7
                          └─── 1 byte/ns, 10 us ───┘
    """
    outer = Link(1e9, 10_000, full_duplex)
    return Network((Level(4, Link(10e9, 1_000)), Level(2, outer, shared)))


@pytest.mark.parametrize(
    ("operation", "algorithm", "latency_ns", "transfer_ns"),
    [
        # Around the ring: 6 hops inside and 1 between, twice; 14/8 of 8,000 bytes at the slower rate.
        ("all_reduce", "ring", 2 * (6 * 1_000 + 10_000), 14_000),
        ("reduce_scatter", "ring", 16_000, 7_000),
        ("all_gather", "ring", 16_000, 7_000),
        ("broadcast", "ring", 16_000, 8_000),
        # Trees of depth 2 inside and 1 between, up and down.
        ("all_reduce", "tree", 2 * (2 * 1_000 + 10_000), 16_000),
        ("broadcast", "tree", 12_000, 8_000),
        # 3 steps inside with a quarter of the buffer each, 1 between with an eighth by each of four workers; twice.
        ("all_reduce", "hierarchical", 2 * (3_000 + 10_000), 2 * (600 + 4_000)),
        ("all_gather", "hierarchical", 13_000, 4_600),
        ("broadcast", "hierarchical", 13_000, 800 + 8_000),
        # 4 of 8 parts of each of 4 workers leave the node: 16,000 bytes.
        ("all_reduce", "direct", 20_000, 32_000),
        ("reduce_scatter", "direct", 10_000, 16_000),
        ("all_to_all", "direct", 10_000, 16_000),
        ("all_to_all", "hierarchical", 11_000, 600 + 16_000),
        ("broadcast", "direct", 10_000, 32_000),
        ("send", "direct", 10_000, 8_000),
    ],
)
def test_two_nodes_by_hand(operation: str, algorithm: str, latency_ns: int, transfer_ns: int) -> None:
    cost = two_nodes().cost(operation, [8_000, 0], algorithm)
    assert cost.latency_ns.tolist() == pytest.approx([latency_ns] * 2)
    assert cost.transfer_ns.tolist() == pytest.approx([transfer_ns, 0])


@pytest.mark.parametrize(
    ("operation", "algorithm", "transfer_ns"),
    [("all_reduce", "ring", 3_500), ("all_reduce", "hierarchical", 2 * (600 + 1_000)), ("all_to_all", "direct", 4_000),
     ("all_reduce", "tree", 4_000), ("broadcast", "ring", 2_000)],
)  # fmt: skip
def test_a_link_for_each_worker_of_a_node_by_hand(operation: str, algorithm: str, transfer_ns: int) -> None:
    """Four links of 1 byte/ns between the nodes: four rings, and parts that do not wait for one another."""
    assert two_nodes(shared=False).cost(operation, 8_000, algorithm).transfer_ns.tolist() == pytest.approx(
        [transfer_ns]
    )


def test_a_link_that_is_not_full_duplex_halves_what_goes_both_ways() -> None:
    half, full = two_nodes(full_duplex=False), two_nodes()
    assert half.cost("all_reduce", 8_000, "ring").transfer_ns == 2 * full.cost("all_reduce", 8_000, "ring").transfer_ns
    assert half.cost("send", 8_000).transfer_ns == full.cost("send", 8_000).transfer_ns


@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_one_worker_has_nobody_to_send_to(operation: str, algorithm: str) -> None:
    alone = Network((Level(1, Link(1e9, 5_000)), Level(1, Link(1e9, 5_000))))
    assert alone.cost(operation, [1_000, 10**9], algorithm).total_ns.tolist() == [0, 0]


def test_two_workers_exchange_halves_whatever_the_algorithm() -> None:
    pair = Network.of(2, Link(1e9, 1_000))
    for algorithm in ("ring", "tree", "hierarchical", "direct"):
        cost = pair.cost("all_reduce", 8_000, algorithm)
        assert (cost.latency_ns.tolist(), cost.transfer_ns.tolist()) == ([2_000], [8_000]), algorithm


@pytest.mark.parametrize("workers", [2, 3, 8, 1024])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_bus_factors_of_nccl_tests(operation: str, workers: int) -> None:
    """Size / time × factor is the rate of the link: doc/PERFORMANCE.md of nccl-tests."""
    size = 1 << 30
    seconds = Network.of(workers, Link(12.5e9)).cost(operation, size, "ring").total_ns[0] * 1e-9
    assert size / seconds * bus_factor(operation, workers) == pytest.approx(12.5e9)
    factors = {"all_reduce": 2 * (workers - 1) / workers, "all_to_all": (workers - 1) / workers, "send": 1.0}
    assert {name: bus_factor(name, workers) for name in factors} == pytest.approx(factors)


def test_auto_is_the_fastest_of_what_nccl_chooses_from() -> None:
    """A tree for few bytes, the ring for many; the others have no choice."""
    network, sizes = Network.of(16, Link(1e9, 14_000)), [1_000, 100_000_000]
    auto = network.cost("all_reduce", sizes).total_ns
    assert auto[0] == network.cost("all_reduce", sizes, "tree").total_ns[0]
    assert auto[1] == network.cost("all_reduce", sizes, "ring").total_ns[1]
    assert network.cost("all_to_all", 8_000).total_ns == network.cost("all_to_all", 8_000, "direct").total_ns
    assert network.cost("all_gather", 8_000).total_ns == network.cost("all_gather", 8_000, "ring").total_ns


def test_a_networks_own_algorithm_is_that_of_the_operations_that_have_it() -> None:
    network = Network.of(8, Link(1e9, 1_000), "tree")
    assert network.cost("all_reduce", 8_000).total_ns == network.cost("all_reduce", 8_000, "tree").total_ns
    assert network.cost("all_gather", 8_000).total_ns == network.cost("all_gather", 8_000, "ring").total_ns


levels = st.lists(
    st.builds(Level, st.integers(1, 8), st.builds(Link, st.floats(1e6, 1e12), st.floats(0, 1e6), st.booleans()),
              st.booleans()),
    min_size=1, max_size=3,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(levels, st.sampled_from(PAIRS), st.integers(0, 10**10), st.floats(1, 100), st.integers(0, 2))
def test_more_bandwidth_and_less_latency_are_never_slower(
    made: list[Level], pair: tuple[str, str], size: int, faster: float, which: int
) -> None:
    operation, algorithm = pair
    which %= len(made)
    old = made[which]
    better = Level(old.workers, Link(old.link.byte_s * faster, old.link.latency_ns / faster, True), False)
    before = Network(tuple(made)).cost(operation, size, algorithm)
    after = Network((*made[:which], better, *made[which + 1 :])).cost(operation, size, algorithm)
    assert after.transfer_ns <= before.transfer_ns * (1 + 1e-12)
    assert after.latency_ns <= before.latency_ns * (1 + 1e-12)
    assert np.isfinite(before.total_ns).all()
    assert (before.total_ns >= 0).all()


@settings(max_examples=50, deadline=None)
@given(levels, st.integers(1, 10**10))
def test_no_algorithm_sends_less_than_the_slowest_members_need(made: list[Level], size: int) -> None:
    """Whatever the algorithm, (n - 1) / n of the buffer enters and leaves each worker to all-reduce it, twice."""
    network = Network(tuple(made))
    if network.workers > 1 and made[0].workers > 1:
        least_ns = 2 * (made[0].workers - 1) / made[0].workers * size / made[0].link.byte_s * 1e9
        for algorithm in ("ring", "hierarchical", "direct"):
            assert network.cost("all_reduce", size, algorithm).transfer_ns >= least_ns * (1 - 1e-9)


@settings(max_examples=50, deadline=None)
@given(levels, st.integers(1, 10**10))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(made: list[Level], size: int) -> None:
    network = Network(tuple(made))
    for algorithm in ("ring", "hierarchical", "direct"):
        whole = network.cost("all_reduce", size, algorithm).total_ns
        halves = (network.cost(part, size, algorithm).total_ns for part in ("reduce_scatter", "all_gather"))
        np.testing.assert_allclose(whole, sum(halves), rtol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 6), min_size=1, max_size=4), st.floats(1e6, 1e12), st.integers(1, 10**10))
def test_a_hierarchy_of_equal_links_passes_as_many_bytes_as_a_ring(parts: list[int], rate: float, size: int) -> None:
    """BlueConnect §3: the factors of n workers add up to (n - 1) / n, with fewer steps."""
    network = Network(tuple(Level(part, Link(rate, 1_000), False) for part in parts))
    flat = Network.of(math.prod(parts), Link(rate, 1_000))
    staged, ring = network.cost("all_reduce", size, "hierarchical"), flat.cost("all_reduce", size, "ring")
    assert staged.transfer_ns == pytest.approx(ring.transfer_ns)
    assert staged.latency_ns <= ring.latency_ns


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 1_000), st.floats(1e6, 1e12), st.floats(0, 1e6), st.integers(0, 10**10))
def test_one_level_is_the_plain_ring(workers: int, rate: float, latency: float, size: int) -> None:
    network = Network.of(workers, Link(rate, latency))
    for operation, rounds in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
        steps = rounds * (workers - 1)
        for algorithm in ("ring", "hierarchical"):
            cost = network.cost(operation, size, algorithm)
            np.testing.assert_allclose(cost.latency_ns, steps * latency, rtol=1e-12)
            np.testing.assert_allclose(cost.transfer_ns, steps * (size / workers) / rate * 1e9, rtol=1e-12)


@settings(max_examples=50, deadline=None)
@given(levels, st.integers(0, 2), st.sampled_from(OPERATIONS), st.integers(0, 10**9))
def test_a_level_of_one_member_changes_nothing(made: list[Level], place: int, operation: str, size: int) -> None:
    place %= len(made) + 1
    more = Network((*made[:place], Level(1, Link(1.0, 1e9)), *made[place:]))
    assert more.cost(operation, size).total_ns == Network(tuple(made)).cost(operation, size).total_ns


@settings(max_examples=50, deadline=None)
@given(levels, st.sampled_from(OPERATIONS), st.integers(0, 10**9))
def test_auto_is_no_slower_than_any_that_nccl_has(made: list[Level], operation: str, size: int) -> None:
    network = Network(tuple(made))
    nccl = {"all_reduce": ("ring", "tree"), "all_to_all": ("direct",), "send": ("direct",)}.get(operation, ("ring",))
    times = [network.cost(operation, size, name).total_ns for name in nccl if operation in MODELS[name]]
    assert network.cost(operation, size, "auto").total_ns <= min(times, default=[np.inf])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Network(()), "expected from 1 to 1,000,000 workers, got none"),
        (lambda: Network.of(0, Link(1e9)), "expected from 1 to 1,000,000 workers, got 0"),
        (lambda: Network((Level(8, Link(1e9)), Level(-1, Link(1e9)))), "got 8 x -1"),
        (lambda: Network.of(10**7, Link(1e9)), "got 10000000"),
        (lambda: Network.of(8, Link(1e9), "star"), "expected an algorithm of auto, ring, tree.*got 'star'"),
        (lambda: two_nodes().cost("gather", 1), "expected one of all_reduce.*got 'gather'"),
        (lambda: two_nodes().cost("all_gather", 1, "tree"), "for all_gather of auto, ring, hierarchical, direct"),
        (lambda: two_nodes().cost("all_to_all", 1, "ring"), "for all_to_all of auto, hierarchical, direct"),
        (lambda: bus_factor("gather", 8), "expected one of all_reduce"),
    ],
)
def test_nonsense_is_one_sentence(make, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WhatifError, match=said) as error:
        make()
    assert "\n" not in str(error.value)


def test_every_algorithm_is_listed() -> None:
    assert {"auto", "nccl", *MODELS} == set(ALGORITHMS)
