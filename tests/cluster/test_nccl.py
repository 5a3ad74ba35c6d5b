"""NCCL's own tuner: by hand from its constants, as properties, and on NVIDIA's measurements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import STREAM, Build
from whatif import WhatifError
from whatif.hardware.cluster.cluster_file import load_cluster
from whatif.hardware.cluster.links import Link
from whatif.hardware.cluster.network import Level, Network
from whatif.models.exchange.network_options import network_of
from whatif.opdb.collective_table import read_table

DATA = Path(__file__).resolve().parents[1] / "data"


def node(gpu: str, workers: int, gbyte_s: float, kind: str = "NVLink") -> Network:
    return Network((Level(workers, Link(gbyte_s * 1e9), True, kind),), gpu=gpu)


def test_a_ring_of_eight_a100_by_hand() -> None:
    """14 steps: LL 6.6 + 14 · 0.6 us at 87.7 · 8/14 GB/s for few bytes, Simple 8.4 + 14 · 3.4 us at 240 for many."""
    cost = node("A100-SXM-80", 8, 240).cost("all_reduce", [64, 1 << 32], "nccl")
    assert cost.latency_ns.tolist() == pytest.approx([15_000, 56_000])
    assert cost.transfer_ns.tolist() == pytest.approx([64 / (87.7 * 8 / 14), (1 << 32) / (240 * 8 / 14)])


def test_an_all_gather_by_hand() -> None:
    """7 steps, no tree: LL128 in the middle, 14 + 7 · 1.9 us at 0.92 · 240 · 8/7 GB/s."""
    size = 8 << 20
    cost = node("A100-SXM-80", 8, 240).cost("all_gather", size, "nccl")
    assert cost.latency_ns.tolist() == pytest.approx([14_000 + 7 * 1_900])
    assert cost.transfer_ns.tolist() == pytest.approx([size / (0.92 * 240 * 8 / 7)])


def test_the_switch_reduces_among_more_than_four_h100() -> None:
    """NVLS: 25 us, then 370 · 0.85 · 7/8 GB/s, where a ring has 370 · 8/14."""
    cost = node("H100-SXM-80", 8, 370).cost("all_reduce", 1 << 30, "nccl")
    assert cost.latency_ns.tolist() == pytest.approx([25_000])
    assert cost.transfer_ns.tolist() == pytest.approx([(1 << 30) / (370 * 0.85 * 7 / 8)])
    four = node("H100-SXM-80", 4, 370).cost("all_reduce", 1 << 32, "nccl")
    assert four.transfer_ns.tolist() == pytest.approx([(1 << 32) / (370 * 4 / 6)])


def test_two_machines_of_one_gpu_by_hand() -> None:
    """A tree of two: LL 6.8 + 2 · 5 us; a ring takes 6.6 + 2 · 2.7 us: both steps cross the network."""
    pair = Network((Level(2, Link(12e9), True, "Ethernet"),), gpu="V100-SXM2-16")
    assert pair.cost("all_reduce", 8, "nccl").latency_ns.tolist() == pytest.approx([12_000])


def test_pcie_has_no_ll128() -> None:
    """Where LL128 would win, 14 + 7 · 2.5 us at 0.92 of the rate, Simple is taken."""
    cost = node("A40", 8, 12, "PCIe").cost("all_gather", [1 << 20, 2 << 20], "nccl")
    assert cost.latency_ns.tolist() == pytest.approx([8_400 + 7 * 5_700] * 2)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["V100-SXM2-16", "A100-SXM-80", "H100-SXM-80", "B200-SXM"]), st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3, 16]), st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "broadcast"]),
    st.integers(0, 1 << 34), st.floats(1, 8),
)  # fmt: skip
def test_more_bandwidth_is_never_slower(
    gpu: str, per_node: int, nodes: int, operation: str, size: int, faster: float
) -> None:
    def cluster(factor: float) -> Network:
        inner = Level(per_node, Link(100e9 * factor), True, "NVLink")
        return Network((inner, Level(nodes, Link(12e9 * factor), True, "InfiniBand")), gpu=gpu)

    before, after = (cluster(factor).cost(operation, size, "nccl").total_ns for factor in (1.0, faster))
    assert (after <= before * (1 + 1e-12)).all()
    assert np.isfinite(before).all()


def test_operations_that_the_tuner_does_not_model_take_autos() -> None:
    network = Network((Level(8, Link(100e9), True, "NVLink"),), "nccl", gpu="A100-SXM-80")
    assert network.cost("all_to_all", 8_000).total_ns == network.cost("all_to_all", 8_000, "direct").total_ns
    with pytest.raises(WhatifError, match="for all_to_all of auto"):
        network.cost("all_to_all", 8_000, "nccl")


@pytest.mark.parametrize("gpu", [None, "MI300X", "K40"])
def test_a_gpu_that_nccl_does_not_know_is_one_sentence(gpu: str | None) -> None:
    network = Network((Level(8, Link(100e9)),), gpu=gpu)
    with pytest.raises(WhatifError, match=r"^nccl: expected a GPU whose architecture .* got \w+;"):
        network.cost("all_reduce", 1, "nccl")


def test_the_recording_states_the_gpu() -> None:
    build = Build(STREAM, gpu="Tesla V100-SXM2-32GB")
    build.task(0, 1)
    network = network_of(build.graph(), "mine", algorithm="nccl")
    assert network.gpu is not None
    assert network.gpu.startswith("V100")
    assert network.cost("all_reduce", 1e6).total_ns > 0
    assert network_of(build.graph(), "mine", cluster="dgx-h100").gpu == "H100-SXM-80"


@pytest.mark.parametrize(("system", "preset", "mean"), [("a100", "dgx-a100", 0.30), ("h100", "dgx-h100", 0.16)])
def test_nccls_times_without_a_measurement(system: str, preset: str, mean: float) -> None:
    """Mean error ≤ 30 % on A100 and ≤ 16 % on H100, below that of the plain formulas on both."""
    tuner, formulas = [], []
    for curve in read_table(DATA / f"nccl_{system}.csv").curves:
        if curve.operation != "all_to_all":
            network = load_cluster(preset).network(curve.workers)
            for errors, name in ((tuner, "nccl"), (formulas, "auto")):
                predicted = network.cost(curve.operation, curve.size_bytes, name).total_ns
                errors.extend(np.abs(predicted / np.asarray(curve.time_ns) - 1))
    assert len(tuner) == 9 * 21
    assert np.mean(tuner) <= mean
    assert np.mean(tuner) < np.mean(formulas)
