"""Samples, energy and price are totals over all devices, for every parallel what-if and every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plan.conftest import BATCH
from whatif.cli.main import main
from whatif.hardware.cluster.cluster_file import usual_cluster
from whatif.hardware.gpu import gpu_names, load_gpu
from whatif.prediction.baseline import Baseline
from whatif.prediction.predict import apply
from whatif.prediction.transform import load_transform
from whatif.questions.recommend.prices import Prices
from whatif.questions.recommend.ranking import recommend
from whatif.questions.sweep import parse_vary, sweep

PIPELINE = "pipeline:stages=2,micro_batches=4"
TENSOR = "tensor_parallel:workers=2"


@pytest.mark.parametrize(
    ("what_ifs", "devices", "batches"),
    [
        (["distributed:workers=8"], 8, 8),
        (["zero:stage=1,workers=8"], 8, 8),
        (["zero:stage=3,workers=8"], 8, 8),
        (["fsdp:workers=8"], 8, 8),
        (["p3:workers=8"], 8, 8),
        ([TENSOR], 2, 1),
        ([PIPELINE], 2, 1),
        ([TENSOR, PIPELINE, "zero:stage=1,workers=4"], 16, 4),
        (["distributed:workers=4", PIPELINE, TENSOR], 16, 4),
        (["amp"], 1, 1),
    ],
)
def test_all_devices_count(predicted: Baseline, what_ifs: list[str], devices: int, batches: int) -> None:
    found = apply(predicted, *what_ifs)
    step_s = found.predicted_ms / 1e3
    assert found.totals.devices == devices
    assert found.totals.samples_per_s == pytest.approx(batches * BATCH / step_s)
    assert found.totals.energy_j == pytest.approx(devices * step_s * 700)
    answer = found.to_dict()
    assert answer["devices"] == {"baseline": 1, "predicted": devices}
    assert answer["samples_per_s"]["predicted"] == found.totals.samples_per_s


def test_a_sweep_counts_devices_and_bytes(predicted: Baseline) -> None:
    chosen = [load_transform(spec) for spec in ("tensor_parallel", "distributed")]
    varied = [parse_vary(text, chosen) for text in ("tensor_parallel.workers=1,2", "distributed.workers=2,4")]
    found = sweep(predicted, chosen, varied)
    assert [point.devices for point in found.points] == [2, 4, 4, 8]
    rows = found.to_dict()["points"]
    assert [row["energy_j"] for row in rows] == [
        pytest.approx(row["devices"] * row["predicted_ms"] / 1e3 * 700) for row in rows
    ]
    assert [(row["tensor_parallel.workers"], row["distributed.workers"]) for row in rows] == [
        ("1", "2"), ("1", "4"), ("2", "2"), ("2", "4"),
    ]  # fmt: skip
    assert rows[2]["peak_memory_bytes"] < rows[0]["peak_memory_bytes"]


def test_every_device_is_paid_for_and_has_its_own_network(predicted: Baseline) -> None:
    prices = Prices("USD", {"H100-SXM-80": 3.6, "T4": 0.36})
    workers = [load_transform("fsdp:workers=8")]
    found = {
        one.device: one for one in recommend(predicted, workers, prices=prices, epoch_samples=8 * BATCH * 10).candidates
    }
    for name, per_second in (("H100-SXM-80", 1e-3), ("T4", 1e-4)):
        one = found[name]
        assert one.devices == 8
        assert one.cost == pytest.approx(8 * per_second * one.step_ms / 1e3)
        assert one.epoch_cost == pytest.approx(10 * one.cost)
    # A DGX's NVLink against PCI Express and Ethernet: where the network is named they differ by their kernels alone.
    here = apply(predicted, "fsdp:workers=8,cluster=dgx-h100")
    assert found["H100-SXM-80"].step_ms == here.predicted_ms
    for name, one in found.items():
        assert any(f"(usual for {name})" in note for note in one.notes)
    slow = apply(predicted, "device:to=H100-SXM-80", "fsdp:workers=8,bandwidth=1Gbps")
    assert slow.predicted_ms == apply(predicted, "fsdp:workers=8,bandwidth=1Gbps").predicted_ms > here.predicted_ms


def test_every_device_stands_somewhere() -> None:
    for name in gpu_names():
        cluster = usual_cluster(load_gpu(name))
        assert cluster.network(16).workers == 16
        inner, outer = cluster.levels[0].link, cluster.levels[-1].link
        assert inner.byte_s > outer.byte_s


def test_recommend_states_the_totals(predicted_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recommend", str(predicted_file), "distributed:workers=16", "--devices", "A100-SXM-80,L4"]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["devices"]
    assert {row["devices"] for row in rows} == {16}
    for row in rows:
        assert any(f"(usual for {row['device']})" in note for note in row["notes"])
        assert row["samples_per_s"] == pytest.approx(16e3 * BATCH / row["predicted_ms"])
        assert row["energy_j"] == pytest.approx(16 * load_gpu(row["device"]).power_watt * row["predicted_ms"] / 1e3)
    assert main(words) == 0
    assert "each over its usual node and network" in capsys.readouterr().out
