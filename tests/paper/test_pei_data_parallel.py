"""Pei et al. (IEEE Access 2019) §III D and E and table 8: a ResNet-50 on 1, 2 and 4 P40, by PS and by NCCL.

The cells are computed in benchmarks/cluster_accuracy.py, which says every constant that the paper does not print.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pei import (
    Iteration,
    Machine,
    nccl_ns,
    parameter_server_ns,
    ring_all_reduce_ns,
    stretched_ns,
)
from benchmarks.sigmoid import Sigmoid

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cluster_accuracy", ROOT / "benchmarks" / "cluster_accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# 1 byte/ns on each link, without a latency that counts; memories 100 and 1,000 times as fast.
LINK = Sigmoid.of(1e-6, 1e9)
MACHINE = Machine(LINK, LINK, LINK, host_byte_s=1e11, gpu_byte_s=1e12, multiprocessors=10, copy_latency_ns=50)


def test_parameter_server_by_hand() -> None:
    """Layer 2 is uploaded behind the backward work of layer 1, layer 1 when there is none left.

    backward  |2 2 2 2|1 1 1|                      1,000 and 800 ns
    upload            |2 2 2 2|1 1|                1,000 + 30 and 500 + 15 ns: 230 + 515 show
    download                      |1 1 2 2 2|      500 + 1,000, and 50 for each of the others
    """
    work = Iteration(100, 400, np.array([800.0, 1_000.0]), 70, np.array([500.0, 1_000.0]))
    on_cpu = np.array([500.0, 1_000.0]) * 3 / 100
    exposed = (1_000 + on_cpu[1] - 800) + 500 + on_cpu[0]
    expected = 100 + 400 + 1_800 + exposed + 1_500 + 2 * 50
    assert parameter_server_ns(work, 2, MACHINE) == pytest.approx(expected)


def test_nccl_by_hand() -> None:
    """Two GPUs: each layer's all-reduce is 2 halves and adding a half; it keeps one of 10 multiprocessors."""
    gradients = np.array([500.0, 2_000.0])
    reduced = ring_all_reduce_ns(gradients, 2, MACHINE)
    assert reduced.tolist() == pytest.approx([500 + 0.75, 2_000 + 3])
    backward = np.array([900.0, 1_000.0])
    # The all-reduce of layer 2 outlasts layer 1's work, which takes 10/9 as long; nothing runs beside layer 2's.
    stretched = stretched_ns(backward, reduced, 10)
    assert stretched.tolist() == pytest.approx([1_000, 1_000])
    work = Iteration(0, 0, backward, 70, gradients)
    assert nccl_ns(work, 2, MACHINE) == pytest.approx(2_000 + (2_003 - 1_000) + 500.75 + 70)


def test_equation_31_by_hand() -> None:
    """An all-reduce of 90 ns beside work of 900: 81 ns' worth is done meanwhile, 819 are left."""
    assert stretched_ns(np.array([900.0, 1.0]), np.array([0.0, 90.0]), 10).tolist() == pytest.approx([90 + 819, 1])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), min_size=1, max_size=10), st.integers(2, 128)
)  # fmt: skip
def test_work_beside_an_all_reduce_takes_between_once_and_sm_over_sm_less_one(
    layers: list[tuple[float, float]], multiprocessors: int
) -> None:
    backward, reduced = np.array(layers).T
    stretched = stretched_ns(backward, reduced, multiprocessors)
    assert (stretched >= backward * (1 - 1e-12)).all()
    assert (stretched <= backward * multiprocessors / (multiprocessors - 1) * (1 + 1e-12)).all()


def test_resnet_50_has_its_known_size(accuracy: ModuleType) -> None:
    """25.557 million parameters and 4.09 billion multiply-adds (torchvision's counts, without biases of none)."""
    gradients, operations = accuracy.resnet_50()
    assert len(gradients) == 54
    assert gradients.sum() / 4 == 25_557_032
    assert operations.sum() / 2e9 == pytest.approx(4.09, abs=0.01)


@pytest.mark.parametrize(("mode", "gpus"), [("PS", 1), ("PS", 2), ("PS", 4), ("NCCL", 1), ("NCCL", 2), ("NCCL", 4)])
def test_table_8_within_eight_percent_of_what_they_measured(accuracy: ModuleType, mode: str, gpus: int) -> None:
    measured = accuracy.TABLE_8[mode][gpus]
    assert accuracy.table_8_ns(mode, gpus) / 1e9 == pytest.approx(measured, rel=0.08)


def test_the_page_says_what_the_code_computes(accuracy: ModuleType) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    for table in (accuracy.nccl_table(), accuracy.pei_table(), accuracy.sensitivity_table()):
        assert table in page
