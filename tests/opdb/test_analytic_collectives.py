"""Collectives from a data sheet: NCCL's tuner on the device's own links, and a measured sweep that takes its place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT
from tests.opdb.builders import indexed, origin
from whatif.hardware.gpu import gpu_names, load_gpu
from whatif.opdb.analytic_collectives import answers_collective, collective_analytic, machine_of
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.rows import Operators, measurements, operators

DATA = ROOT / "tests" / "data"


def collective(sizes: Sequence[int], ranks: int = 8, name: str = "all_reduce", nodes: int = 1) -> Operators:
    return operators("collective", {"bytes": sizes, "ranks": ranks, "nodes": nodes}, name=name, dtype="fp16")


def test_a_small_all_reduce_by_hand() -> None:
    """Ring LL on 2 H100: 6.6 us and two steps of 0.6, and 1,024 bytes at the 141 GB/s that LL reaches at most."""
    t, low, high = collective_analytic(load_gpu("H100-SXM-80"), collective([1024], ranks=2))
    assert t[0] == pytest.approx(7.8e-6 + 1024 / 141e9)
    assert low[0] < t[0] < high[0]


def test_a_large_all_gather_by_hand() -> None:
    """Simple around a ring of 8 A100s: 8.4 us and 7 steps of 3.4; 7/8 of a gigabyte at 12 links of 20 GB/s."""
    t, _, _ = collective_analytic(load_gpu("A100-SXM-80"), collective([2**30], name="all_gather"))
    assert t[0] == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 7 / 8 * 2**30 / 240e9)


def test_an_all_to_all_by_hand() -> None:
    t, _, _ = collective_analytic(load_gpu("A100-SXM-80"), collective([2**30], ranks=4, name="all_to_all"))
    assert t[0] == pytest.approx(11.8e-6 + 3 / 4 * 2**30 / 240e9)


@pytest.mark.parametrize(
    ("name", "ranks", "kind", "gbyte_s"),
    [("H100-SXM-80", 8, "NVLink", 18 * 20.6), ("B200-SXM", 8, "NVLink", 18 * 40.1), ("V100-SXM2-32", 4, "NVLink", 120),
     ("A100-PCIE-80", 2, "NVLink", 240), ("A100-PCIE-80", 4, "PCIe", 24), ("A40", 2, "NVLink", 48),
     ("T4", 2, "PCIe", 12), ("L40S", 8, "PCIe", 24), ("H100-NVL-94", 8, "PCIe", 48)],
)  # fmt: skip
def test_what_joins_the_gpus_of_a_machine(name: str, ranks: int, kind: str, gbyte_s: float) -> None:
    """A bridge joins two boards; links count as NCCL counts them."""
    [level] = machine_of(load_gpu(name), ranks).levels
    assert (level.kind, level.workers) == (kind, ranks)
    assert level.link.byte_s / 1e9 == pytest.approx(gbyte_s, rel=1e-3)


def test_what_a_data_sheet_lacks_is_left_out() -> None:
    h100 = load_gpu("H100-SXM-80")
    for ops in (
        collective([1024], nodes=2), collective([1024], ranks=1), collective([1024], ranks=2_000_000),
        collective([1024], name="send_recv"), collective([1024], name="gossip"),
    ):  # fmt: skip
        assert not answers_collective(h100, ops).any()
        assert np.isnan(collective_analytic(h100, ops)[0]).all()
    for name in ("K40", "MI300X"):  # NCCL's tuner does not know them
        assert not answers_collective(load_gpu(name), collective([1024])).any()


@given(
    st.sampled_from([name for name in gpu_names() if answers_collective(load_gpu(name), collective([1])).all()]),
    st.sampled_from(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")),
    st.integers(2, 16),
    st.lists(st.integers(1, 2**34), min_size=2, max_size=10),
)
def test_any_collective_has_a_time_and_a_range(name: str, operation: str, ranks: int, sizes: list[int]) -> None:
    t, low, high = collective_analytic(load_gpu(name), collective(sorted(sizes), ranks=ranks, name=operation))
    assert np.isfinite(t).all()
    assert (t > 0).all()
    assert (low < t).all()
    assert (t < high).all()


def measured(gpu: str) -> pd.DataFrame:
    """NVIDIA's own times on one machine (aiconfigurator-core, Apache-2.0), of what the tuner models."""
    table = pd.read_csv(DATA / f"nccl_{gpu}.csv", comment="#")
    return table[table["operation"].isin(("all_reduce", "all_gather", "reduce_scatter"))]


@pytest.mark.parametrize(("table", "gpu", "most"), [("a100", "A100-SXM-80", 0.30), ("h100", "H100-SXM-80", 0.16)])
def test_real_times_without_a_measured_one(table: str, gpu: str, most: float) -> None:
    """28.3 and 14.6 %; over eight systems 24.3 % (docs/opdb.md). An A100's is over the 25 % that all together keep."""
    missed, inside = [], []
    for (operation, ranks), rows in measured(table).groupby(["operation", "workers"]):
        t, low, high = collective_analytic(
            load_gpu(gpu), collective(rows["size_bytes"].tolist(), int(ranks), operation)
        )
        real = rows["time_us"].to_numpy() * 1e-6
        missed.append(np.abs(t / real - 1))
        inside.append((real >= low) & (real <= high))
    assert np.concatenate(missed).mean() < most
    assert np.concatenate(inside).mean() > 0.88


@pytest.mark.parametrize(("table", "gpu"), [("a100", "A100-SXM-80"), ("h100", "H100-SXM-80")])
def test_real_times_with_one_sweep(table: str, gpu: str) -> None:
    """Every other octave is held out, both ways: 6.2 and 5.1 %, and 5.8 % over eight systems."""
    missed = []
    for odd in (0, 1):
        for (operation, ranks), rows in measured(table).groupby(["operation", "workers"]):
            rows = rows.sort_values("size_bytes")
            ops = collective(rows["size_bytes"].tolist(), int(ranks), operation)
            real = rows["time_us"].to_numpy() * 1e-6
            known = np.arange(len(rows)) % 2 == odd
            index = indexed(
                (measurements(ops.take(known), real[known]), origin(gpu, method="graph_replay", launch=False))
            )
            answers = Estimator(index, gpu).estimate(ops.take(~known))
            assert set(answers.answered_by.tolist()) == {AnswerSource.INTERPOLATED}
            missed.append(np.abs(answers.t_s / real[~known] - 1))
    assert np.concatenate(missed).mean() < 0.068
