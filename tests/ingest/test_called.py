"""The operator of each task, in the op database's terms."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import whatif
from tests.helpers import launched, op, read_events
from whatif import TaskKind
from whatif.graph.insert import NewTasks
from whatif.graph.task_graph import TaskGraph
from whatif.ingest.called import _stride_and_padding

X, W, Y = [32, 3, 224, 224], [64, 3, 7, 7], [32, 64, 112, 112]
FLOATS = ["float", "float", "float"]


def kernel_of(graph: TaskGraph, name: str) -> dict[str, Any]:
    """What the operator of the one kernel of that name is."""
    (task,) = np.flatnonzero(graph.select(name=f"^{name}$", kind=TaskKind.KERNEL)).tolist()
    row = int(graph.called[task])
    if row < 0:
        return {}
    what = graph.info.operators[row]
    return {"family": what.family, "name": what.name, "phase": what.phase, "dtype": what.dtype, **dict(what.integers)}


def _shapes(*dims: list[int]) -> dict[str, Any]:
    return {"Input Dims": list(dims), "Input type": FLOATS}


def _halves(second: list[int]) -> dict[str, Any]:
    return {"Input Dims": [[], Y, second], "Input type": ["", "float", "float"]}


def test_kernels_of_one_call_share_its_operator(tmp_path: Path) -> None:
    shapes: dict[str, Any] = {
        "Input Dims": [[8, 64], [64, 32]],
        "Input type": ["float", "float"],
        "Concrete Inputs": ["", ""],
    }
    events = [
        op("aten::matmul", 0, 100, **shapes), op("aten::mm", 5, 90, **shapes),
        *launched("gemm_a", 10, 5, 20, 30, 1), *launched("gemm_b", 30, 5, 50, 10, 2),
        op("aten::mm", 200, 50, **shapes), *launched("gemm_c", 210, 5, 220, 30, 3),
        op("aten::silent", 300, 50), *launched("nothing", 310, 5, 320, 30, 4),
    ]  # fmt: skip
    graph = read_events(tmp_path, events)
    described = [kernel_of(graph, name) for name in ("gemm_a", "gemm_b", "gemm_c")]
    assert (
        described
        == [{"family": "matmul", "name": "mm", "phase": "fwd", "dtype": "fp32", "batch": 1, "m": 8, "n": 32, "k": 64}]
        * 3
    )
    assert kernel_of(graph, "nothing") == {}
    assert len(graph.info.operators) == 1  # each once, also when it is called twice


def test_a_product_with_a_sparse_matrix_is_none_of_its_shapes(tmp_path: Path) -> None:
    """A graph network's 8 GFLOP a step were counted as those of dense matrices, where its other products are 1.5."""
    shapes: dict[str, Any] = {"Input Dims": [[64, 64], [64, 32]], "Input type": FLOATS[:2]}
    events = [
        op("aten::mm", 0, 50, **shapes), op("aten::sparse_dim", 2, 3), *launched("spmm", 10, 5, 20, 30, 1),
        op("aten::mm", 60, 40, **shapes), *launched("gemm", 70, 5, 80, 30, 2),
        op("aten::sparse_dim", 110, 3),
    ]  # fmt: skip
    graph = read_events(tmp_path, events)
    assert kernel_of(graph, "spmm") == {}
    assert kernel_of(graph, "gemm")["k"] == 64
    assert len(graph.info.operators) == 1


def test_old_convolutions_are_identified_by_sizes(tmp_path: Path) -> None:
    """PyTorch before 1.11: no numbers, and a gradient in two calls that record one tensor each."""
    forward: dict[str, Any] = {"Input Dims": [X, W, [], [], []], "Input type": FLOATS}
    whole: dict[str, Any] = {"Input Dims": [X, Y, W, [], []], "Input type": FLOATS}
    events = [
        op("aten::cudnn_convolution", 0, 50, **forward), *launched("fprop", 10, 5, 20, 30, 1),
        op("aten::cudnn_convolution_backward", 100, 100, **whole),
        op("aten::cudnn_convolution_backward_input", 105, 40, **_halves(W)),
        *launched("dgrad_kernel", 110, 5, 120, 30, 2),
        op("aten::cudnn_convolution_backward_weight", 150, 40, **_halves(X)),
        *launched("wgrad_kernel", 160, 5, 170, 30, 3),
        op("aten::cudnn_convolution", 300, 50, **_shapes([8, 3, 9, 9], W)),
        *launched("alone", 310, 5, 320, 30, 4),
        op("aten::cudnn_convolution_backward_input", 400, 50, **_shapes([], Y, W)),
        *launched("orphan", 410, 5, 420, 30, 5),
    ]  # fmt: skip
    graph = read_events(tmp_path, events)
    fprop = kernel_of(graph, "fprop")
    assert fprop == {
        "family": "conv", "name": "conv2d", "phase": "fwd", "dtype": "fp32", "batch": 32, "in_channels": 3,
        "out_channels": 64, "in_h": 224, "in_w": 224, "kernel_h": 7, "kernel_w": 7, "stride_h": 2, "stride_w": 2,
        "padding_h": 3, "padding_w": 3, "dilation_h": 1, "dilation_w": 1, "groups": 1,
    }  # fmt: skip
    assert kernel_of(graph, "dgrad_kernel") == {**fprop, "phase": "dgrad"}
    assert kernel_of(graph, "wgrad_kernel") == {**fprop, "phase": "wgrad"}
    assert kernel_of(graph, "alone")["family"] == "other"  # no gradient shows its output
    assert kernel_of(graph, "orphan") == {}


@given(size=st.integers(1, 400), kernel=st.integers(1, 11), stride=st.integers(1, 4), share=st.floats(0, 1))
def test_stride_and_padding_give_the_recorded_output(size: int, kernel: int, stride: int, share: float) -> None:
    """Whatever is found has the output that was recorded; the usual ones (half of the kernel around) are found."""
    padding = round(share * (kernel // 2))
    out = (size + 2 * padding - kernel) // stride + 1
    if out < 1:
        return
    dims = [[1, 4, out, out], [1, 2, size, size], [4, 2, kernel, kernel]]
    geometry = _stride_and_padding(dims, 0, 1, 2)
    if geometry is not None:
        (found_stride, _), (found_padding, _) = geometry
        assert (size + 2 * found_padding - kernel) // found_stride + 1 == out
    if kernel % 2 and padding == kernel // 2 and size >= 8 * stride:
        assert geometry is not None
        assert geometry[0] == [stride, stride]


@pytest.mark.parametrize(
    "dims", [None, [], [[1]], [[1, 2, 3, 4]] * 2, [[0, 1, 1, 1]] * 3, [["a"] * 4] * 3, [[1, 1, 9**9, 1]] * 3]
)
def test_damaged_shapes_are_no_geometry(dims: Any) -> None:
    geometry = _stride_and_padding(dims, 0, 1, 2)
    assert geometry is None or all(isinstance(value, int) for axis in geometry for value in axis)


def test_edits_keep_it_and_new_tasks_have_none(tmp_path: Path) -> None:
    shapes: dict[str, Any] = {
        "Input Dims": [[8, 64], [64, 32]],
        "Input type": ["float", "float"],
        "Concrete Inputs": ["", ""],
    }
    graph = read_events(tmp_path, [op("aten::mm", 0, 50, **shapes), *launched("gemm", 10, 5, 20, 30, 1)])
    (task,) = np.flatnonzero(graph.on_gpu)
    more = graph.insert(NewTasks([task], "cast", TaskKind.KERNEL, 100, launched_after=[0]))
    assert more.graph.called[more.ids].tolist() == [-1]
    assert more.graph.called[more.moved[task]] == graph.called[task] >= 0
    halves = graph.split(np.array([task]), 2)
    assert halves.called[halves.on_gpu].tolist() == [graph.called[task]] * 2


def test_real_recordings_know_most_of_their_time(shared_traces: Path) -> None:
    graph = whatif.read(shared_traces / "kineto-resnet50-v100" / "num_workers_0.2021-06.pt.trace.json.gz")
    time_ns: Counter[str] = Counter()
    for task in np.flatnonzero(graph.on_gpu).tolist():
        row = graph.called[task]
        time_ns[graph.info.operators[row].family if row >= 0 else ""] += int(graph.duration_ns[task])
    share = {family: ns / sum(time_ns.values()) for family, ns in time_ns.items()}
    assert share["conv"] == pytest.approx(0.647, abs=0.02)  # two thirds of ResNet-50 are convolutions
    assert share[""] < 0.05
    convolutions = [what for what in graph.info.operators if what.family == "conv"]
    assert Counter(what.phase for what in convolutions).keys() == {"fwd", "dgrad", "wgrad"}
    # The first layer's input needs no gradient.
    phases = Counter(what.phase for what in convolutions)
    assert phases["fwd"] == phases["wgrad"] == phases["dgrad"] + 1


def test_ranks_share_one_table(own_traces: Path) -> None:
    folder = own_traces / "ranks_cpu" / "even"
    graph = whatif.read(folder)
    assert graph.info.ranks
    assert len(set(graph.info.operators)) == len(graph.info.operators)
    known = graph.called >= 0
    assert known.any()
    assert int(graph.called.max()) < len(graph.info.operators)
    names = {graph.names[code] for code in graph.name[known & graph.select(name=r"^aten::addmm$")].tolist()}
    rows = graph.called[known & graph.select(name=r"^aten::addmm$")]
    assert names <= {"aten::addmm"}
    assert {graph.info.operators[row].name for row in rows.tolist()} <= {"linear", "aten::addmm"}
