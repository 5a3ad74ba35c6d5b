"""When operations and their kernels run, worked out by hand; and that reading the written steps gives them back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import whatif
from whatif.from_module.cpu_costs import CpuCosts, cpu_costs
from whatif.from_module.durations import unanswered
from whatif.from_module.operations import (
    Allocation,
    LayerCall,
    Operation,
    OperatorGraph,
)
from whatif.from_module.recording import trace_of, write_trace
from whatif.from_module.schedule import schedule_steps
from whatif.graph.types import Phase, TaskKind
from whatif.hardware.gpu import load_gpu
from whatif.ingest.graph_of_events import NOT_RECORDED
from whatif.ingest.saved_graph import PREDICTED
from whatif.prediction.baseline import Baseline
from whatif.runtime.errors import WhatifError

COSTS = CpuCosts(
    launch_ns=4_000, operator_ns=2_000, view_ns=1_000, layer_call_ns=6_000, node_ns=5_000, parameter_ns=0,
    range_factor=2.0, operators={},
)  # fmt: skip


def made(name: str, phase: Phase, node: str = "", sequence: int = -1) -> Operation:
    return Operation(f"aten::{name}", [[4, 4], [4, 4]], ["float", "float"], ["", ""], phase, (((4, 4), "float"),),
                     sequence, node)  # fmt: skip


def small_step() -> OperatorGraph:
    """A product in a layer, its gradient, an update.

    CPU    |enter 3|mm 1+4+1|leave 3|node 5|mm 1+4+1|add 1+4+1|
    GPU              at 8+2 (launch lag)
    """
    operations = [
        made("mm", Phase.FORWARD, sequence=0), made("mm", Phase.BACKWARD, "MmBackward0", 0), made("add_", Phase.UPDATE),
    ]  # fmt: skip
    metadata = {"version": 1, "optimizer": {"type": "SGD", "parameter_tensors": 1}}
    return OperatorGraph("drawn", operations, [LayerCall("up", 0, 1)], [Allocation(0, 2, 512)], 1024, metadata)


def test_a_step_by_hand() -> None:
    kernels = [[("predicted_gemm_mm_fp32", 50_000)], [("predicted_gemm_mm_fp32", 1_000)], [("k", 1_000)]]
    found = schedule_steps(small_step(), kernels, [0, 0, 0], COSTS, steps=1)
    assert [(s.start_ns, s.end_ns) for s in found.operations] == [(3_000, 9_000), (17_000, 23_000), (23_000, 29_000)]
    assert [(s.start_ns, s.end_ns) for s in found.calls] == [(4_000, 8_000), (18_000, 22_000), (24_000, 28_000)]
    # 2 us behind its launch; then each one 1 us behind the one before.
    assert [(s.start_ns, s.end_ns) for s in found.kernels] == [
        (10_000, 60_000), (61_000, 62_000), (63_000, 64_000),
    ]  # fmt: skip
    assert [(s.name, s.start_ns, s.end_ns) for s in found.layers] == [("up", 0, 12_000)]
    assert [(s.name, s.start_ns, s.end_ns) for s in found.nodes] == [("MmBackward0", 12_000, 23_000)]
    assert [(s.start_ns, s.end_ns) for s in found.steps] == [(0, 29_000)]


def test_a_full_queue_holds_the_host_back() -> None:
    operations = [made("mm", Phase.FORWARD)] * 1_100
    kernels = [[("k", 10_000_000)]] * 1_100
    found = schedule_steps(OperatorGraph("drawn", operations), kernels, [0] * 1_100, COSTS, steps=1)
    # The 1,022nd launch waits until the first kernel has started, the next one until the second.
    assert found.calls[1021].end_ns <= found.kernels[1].start_ns
    assert found.calls[1022].end_ns == found.kernels[1].start_ns + COSTS.launch_ns


@pytest.fixture
def written(tmp_path: Path) -> Path:
    kernels = [[("predicted_gemm_mm_fp32", 50_000)], [("predicted_gemm_mm_fp32", 1_000)], [("k_elementwise", 1_000)]]
    schedule = schedule_steps(small_step(), kernels, [0, 0, 0], COSTS, steps=4)
    metadata = {PREDICTED: {"low_ns": [25_000, 500, 500], "high_ns": [100_000, 2_000, 2_000], "cpu_range_factor": 2.0}}
    path = tmp_path / "step.json.gz"
    write_trace(trace_of(small_step(), schedule, load_gpu("A100-SXM-80"), metadata), path, user_named=True)
    return path


def test_what_is_written_is_read_back(written: Path) -> None:
    graph = whatif.read(written)
    assert graph.info.gpu == "A100-SXM-80"
    assert graph.info.n_steps == 4
    assert graph.info.quirks == (NOT_RECORDED,)
    kernels = np.flatnonzero(graph.kind == TaskKind.KERNEL)
    assert len(kernels) == 12
    assert graph.duration_ns[kernels].tolist() == [50_000, 1_000, 1_000] * 4
    assert graph.low_ns[kernels].tolist() == [25_000, 500, 500] * 4
    assert graph.high_ns[kernels].tolist() == [100_000, 2_000, 2_000] * 4
    assert [Phase(p).name for p in graph.phase[kernels][:3].tolist()] == ["FORWARD", "BACKWARD", "UPDATE"]
    assert [graph.layers[code] for code in graph.layer[kernels][:2].tolist()] == ["up", "up"]
    baseline = Baseline.of(graph)
    assert baseline.replay_error_pct == pytest.approx(0.0, abs=0.01)
    assert baseline.unexplained_wait_pct == 0


def test_ranges_that_do_not_fit_are_refused(written: Path, tmp_path: Path) -> None:
    kernels = [[("a_elementwise", 5)], [], []]
    schedule = schedule_steps(small_step(), kernels, [0, 0, 0], COSTS, steps=4)
    for ranges in ({"low_ns": [1, 2, 3], "high_ns": [1, 2, 3]}, {"low_ns": "x"}, {"low_ns": [-1], "high_ns": [1]}):
        path = tmp_path / "bad.json"
        write_trace(trace_of(small_step(), schedule, load_gpu("T4"), {PREDICTED: ranges}), path, user_named=True)
        with pytest.raises(WhatifError, match="predict it again"):
            whatif.read(path)


def test_the_table_of_the_hosts_costs_ships() -> None:
    costs = cpu_costs()
    assert costs.launch_ns > 0
    assert all(ns > 0 for ns in costs.operators.values())


@pytest.mark.parametrize(("answered", "families"), [(np.nan, 1), (1e-6, 0)])
def test_what_nobody_answers_is_asked_for_again(answered: float, families: int) -> None:
    """On a CPU the work of an operator that has no time of its own is what a GPU computes in its place."""
    nobody = SimpleNamespace(device="cpu", estimate=lambda ops: SimpleNamespace(t_s=np.full(len(ops), answered)))
    found = unanswered(nobody, small_step())
    assert (len(found) >= 1) == bool(families)
    assert all(len(ops) for ops in found)
