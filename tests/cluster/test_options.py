"""The network that the options of a transform describe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import CPU, STREAM, Build
from whatif import TaskGraph, WhatifError
from whatif.hardware.cluster.links import LATENCY_US, TCP_SHARE, Link
from whatif.hardware.cluster.network import Level
from whatif.models.exchange.network_options import network_of
from whatif.units import Bandwidth


def recording(thread: object) -> TaskGraph:
    build = Build(thread)
    build.task(0, 1)
    return build.graph()


GPU = recording(STREAM)


def test_short_options_are_equal_links() -> None:
    network = network_of(GPU, "mine", workers=16, bandwidth=Bandwidth("8Gbps"), latency_us=3)
    assert network.levels == (Level(16, Link(1e9, 3_000)),)
    default = network_of(GPU, "mine")
    assert default.levels == (Level(8, Link(25e9 / 8, LATENCY_US * 1e3)),)
    assert default.algorithm == "auto"


def test_the_network_is_the_devices_own_and_says_how_to_give_another() -> None:
    """The network went from 25 to 2,960 Gbit/s, and no note named the option to keep the other one."""
    there = GPU.replace(info=replace(GPU.info, gpu="NVIDIA H100 80GB HBM3"))
    assert network_of(there, "mine", workers=4).described == (
        "4 at 2,960 Gbit/s and 3.4 us (usual for H100-SXM-80), as neither bandwidth= nor cluster= is given"
    )
    given: list[dict[str, Any]] = [{"bandwidth": Bandwidth("25Gbps")}, {"latency_us": LATENCY_US}]
    for options in given:
        assert network_of(there, "mine", workers=4, **options).described == "4 at 25 Gbit/s and 14 us"


def test_what_is_given_for_links_that_no_worker_uses_is_named() -> None:
    """Four workers of a node of eight silently kept their 2,960 Gbit/s."""
    options: dict[str, Any] = {"cluster": "dgx-h100", "bandwidth": Bandwidth("8Gbps")}
    assert network_of(GPU, "mine", workers=4, **options).described == (
        "4 at 2,960 Gbit/s and 3.4 us (bandwidth= of the outermost links, which these workers do not use)"
    )
    assert not network_of(GPU, "mine", workers=16, **options).unused
    assert not network_of(GPU, "mine", workers=4, cluster="dgx-h100").unused


def test_bandwidth_moves_a_curve_and_a_latency_replaces_it(tmp_path: Path) -> None:
    """As of every cluster's outermost links; smaller messages are never slower than larger ones."""
    path = tmp_path / "curve.toml"
    path.write_text('[[level]]\nworkers = 4\nmodel = "sigmoid"\nk = 14\na = 1.3\nw = 0.8\n')
    size = 2.0 ** np.arange(8, 31)
    known = network_of(GPU, "mine", cluster=str(path)).cost("send", size).total_ns
    twice = network_of(GPU, "mine", cluster=str(path), bandwidth=Bandwidth("172.3Gbps")).cost("send", size).total_ns
    assert (twice < known).all()
    assert (np.diff(known) > 0).all()
    flat = network_of(GPU, "mine", cluster=str(path), latency_us=5.0).cost("send", size)
    assert flat.latency_ns.tolist() == pytest.approx([5_000.0] * len(size))


def test_gloo_sends_from_a_cpu_over_tcp_around_a_ring() -> None:
    network = network_of(recording(CPU), "mine", bandwidth=Bandwidth("8Gbps"))
    assert network.levels[0].link.byte_s == TCP_SHARE * 1e9
    assert network.algorithm == "ring"
    assert network_of(recording(CPU), "mine", algorithm="hierarchical").algorithm == "hierarchical"
    # Others of its operations have no ring.
    assert network.cost("all_to_all", 1_000).total_ns > 0


def test_a_cluster_states_workers_and_links(tmp_path: Path) -> None:
    assert network_of(GPU, "mine", cluster="dgx-a100").workers == 8
    sixteen = network_of(GPU, "mine", cluster="dgx-a100", workers=16, bandwidth=Bandwidth("8Gbps"), latency_us=1)
    assert [level.workers for level in sixteen.levels] == [8, 2]
    assert sixteen.levels[0].link.byte_s == 240e9
    assert sixteen.levels[1] == Level(2, Link(1e9, 1_000), shared=False)
    path = tmp_path / "mine.toml"
    path.write_text('[[level]]\nworkers = 3\nbandwidth = "1GB/s"\n')
    assert network_of(GPU, "mine", cluster=str(path)).levels == (Level(3, Link(1e9)),)


def test_a_cluster_of_any_number_of_machines_has_eight(tmp_path: Path) -> None:
    assert network_of(GPU, "mine", cluster="ethernet-10g").levels[0].workers == 8
    assert network_of(GPU, "mine", cluster="ethernet-10g", workers=1).workers == 1
    alone = tmp_path / "alone.toml"
    alone.write_text('[[level]]\nworkers = 1\nbandwidth = "1GB/s"\n')
    assert network_of(GPU, "mine", cluster=str(alone)).workers == 1
    table = tmp_path / "times.csv"
    table.write_text("workers,size_bytes,time_us\n4,1000,5\n")
    network = network_of(GPU, "mine", cluster="ethernet-10g", table=str(table))
    assert network.workers == 4
    assert network.described == f"4 workers, times from {table}"
    two = network_of(GPU, "mine", cluster="dgx-a100", workers=16)
    assert two.described == "8 at 1,920 Gbit/s and 3.4 us x 2 at 192 Gbit/s and 14 us"


def test_a_table_states_times_and_workers(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("workers,size_bytes,time_us\n4,1000,5\n")
    network = network_of(GPU, "mine", table=str(path))
    assert network.workers == 4
    assert network.cost("all_reduce", 1_000).total_ns == pytest.approx(5_000)
    assert network_of(GPU, "mine", table=str(path), workers=16).workers == 16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "mine: expected from 1 to 100,000 workers, got 0"),
        ({"workers": -3}, "got -3"),
        ({"latency_us": -1.0}, "mine: expected latency_us from 0 to 1,000,000, got -1"),
        ({"latency_us": float("nan")}, "expected latency_us"),
        ({"algorithm": "star"}, "mine: expected an algorithm of auto, ring, .*got 'star'"),
        ({"cluster": "dgx-9"}, "got 'dgx-9'"),
        ({"cluster": "pcie-4gpu", "workers": 8}, "fills equal groups of 4, got 8"),
        ({"table": "none.csv"}, "No such file"),
        ({"table": "none.csv", "bandwidth": Bandwidth("1Gbps")}, "got both"),
        ({"table": "none.csv", "latency_us": 3.0}, "got both"),
    ],
)
def test_nonsense_is_one_sentence(options: dict[str, object], said: str) -> None:
    with pytest.raises(WhatifError, match=said) as error:
        network_of(GPU, "mine", **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
