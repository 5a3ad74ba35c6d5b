"""Processors and links: routes, shared and half links, fluctuations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dts.networks import clusters, equal, estimated, network
from whatif import WhatifError
from whatif.hardware.cluster.cluster_file import parse_cluster
from whatif.models.dts.built_in import BUILT_IN
from whatif.models.dts.check import equation_ns
from whatif.models.dts.machines import Machines, Processor, Wire
from whatif.models.dts.options import machines_of
from whatif.models.dts.plan import Training, run, spread_ns
from whatif.models.dts.ranking import rank

TEXT = """
[[processor]]
name = "a"
gflop_s = 20
power_fluctuation_pct = 10
memory_gbyte = 2
parallelization_factor = 4
[[processor]]
name = "b"
count = 2
[[link]]
between = ["a", "b"]
bandwidth = "1Gbps"
latency_us = 5
bandwidth_fluctuation_pct = 100
"""


def test_a_cluster_file() -> None:
    found = machines_of(parse_cluster(TEXT, "x.toml"), tcp=False)
    a, b1, b2 = found.processors
    assert (a.gflop_s, a.power_fluctuation, a.memory_bytes, a.parallelization_factor) == (20, 0.1, 2e9, 4)
    assert (b1.name, b2.name, b1.gflop_s, b2.memory_bytes) == ("b1", "b2", None, float("inf"))
    there, back = found.wire("a", "b1"), found.wire("b1", "a")
    assert there is not None
    assert back is not None
    assert (there.byte_s, there.latency_ns, there.fluctuation) == (1.25e8, 5_000, 0.99)  # it never stops altogether
    assert there.channel != back.channel
    way = found.wire("b1", "b2")  # over a
    assert way is not None
    assert (way.byte_s, way.latency_ns) == (1.25e8, 10_000)
    assert a.slowdown(40.0) == 0.5
    assert b1.slowdown(None) == 1.0
    with_headers = machines_of(parse_cluster(TEXT, "x.toml"), tcp=True).wire("a", "b1")
    assert with_headers is not None
    assert with_headers.byte_s == pytest.approx(0.95 * 1.25e8)


@pytest.mark.parametrize(
    ("more", "channels"),
    [
        ("", 4),  # a pair of directions for each of b1 and b2
        ("duplex = 'half'", 2),
        ("shared = true", 2),  # one link, both of its directions
        ("shared = true\nduplex = 'half'", 1),
    ],
)
def test_who_takes_turns(more: str, channels: int) -> None:
    found = machines_of(parse_cluster(TEXT + more, "x.toml"), tcp=False)
    assert len({wire.channel for wire in found.wires.values()}) == channels


def test_a_cluster_without_processors() -> None:
    text = '[[level]]\nworkers = 4\nbandwidth = "25Gbps"\n'
    with pytest.raises(WhatifError, match=r"x.toml: expected \[\[processor\]\] and \[\[link\]\] tables"):
        machines_of(parse_cluster(text, "x.toml"), tcp=False)


def test_names_are_distinct() -> None:
    with pytest.raises(WhatifError, match="expected processors of different names, got 'a' twice"):
        Machines((Processor("a"), Processor("a")))
    with pytest.raises(WhatifError, match="expected from 1 to 10,000 processors, got 0"):
        Machines(())


def test_a_way_over_others_takes_the_fast_links() -> None:
    rates = {("a", "b"): 1e6, ("a", "c"): 1e9, ("c", "b"): 5e8}
    wires = {}
    for (one, other), rate in rates.items():
        wires[one, other], wires[other, one] = Wire(f"{one}>{other}", rate, 7), Wire(f"{other}>{one}", rate, 7)
    machines = Machines(tuple(Processor(name) for name in "abcd"), wires)
    direct = machines.wire("a", "b")
    assert direct is not None
    assert direct.byte_s == 1e6  # a link of their own is the one that they use
    assert machines.wire("a", "d") is None


@pytest.mark.parametrize("name", BUILT_IN)
@given(machines=clusters(7, 7), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=10)
def test_without_fluctuations_every_draw_is_the_round(name: str, machines: Machines, seed: int) -> None:
    found = estimated(name, machines, max_paths=1)
    activities = found.plan(2).activities
    assert spread_ns(activities, 3, seed).tolist() == [run(activities).total_ns] * 3


def test_draws_stay_within_what_all_slow_and_all_fast_give() -> None:
    machines = equal(7, power_fluctuation=0.2)
    found = estimated("federated_split", machines)
    drawn = spread_ns(found.plan(3).activities, 500, 1)
    plain = found.spread(3).time_ns
    assert plain / 1.2 <= drawn.min() < plain < drawn.max() <= plain / 0.8
    assert found.spread(3, seed=1).low_ns < found.spread(3, seed=1).median_ns < found.spread(3, seed=1).high_ns
    assert found.spread(3, seed=1) == found.spread(3, seed=1)
    assert found.spread(3, seed=1) != found.spread(3, seed=2)


def test_clients_in_parallel_wait_for_the_slowest_draw() -> None:
    """The maximum of three draws lies above the mean of one: federated learning's median is longer than undisturbed."""
    found = estimated("federated", equal(4, power_fluctuation=0.3))
    assert found.spread().median_ns > 1.05 * found.batch_ns
    alone = estimated("pipeline_learning", equal(3, power_fluctuation=0.3))
    assert alone.spread().median_ns == pytest.approx(alone.batch_ns, rel=0.05)


def test_many_batches_even_out() -> None:
    found = estimated("split", equal(4, power_fluctuation=0.3))
    one, many = found.spread(1), found.spread(50)
    assert (many.high_ns - many.low_ns) / many.median_ns < 0.4 * (one.high_ns - one.low_ns) / one.median_ns


def test_the_ranking_is_of_the_same_data() -> None:
    found = rank(list(BUILT_IN.values()), network(), equal(7), Training(cuts=(2,)), epoch_batches=30)
    rows = {row.name: row for row in found.rows}
    assert rows["pipeline_learning"].batches == 30
    assert {row.batches for name, row in rows.items() if name != "pipeline_learning"} == {10}
    split = rows["split"]
    assert split.found is not None
    assert split.epoch is not None
    assert split.epoch.time_ns == split.found.spread(10).time_ns
    assert [equation_ns(row.found) is not None for row in found.possible if row.found] == [True] * 5
    assert np.all(np.diff([row.epoch.median_ns for row in found.possible if row.epoch]) >= 0)
