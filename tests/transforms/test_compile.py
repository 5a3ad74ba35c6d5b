"""torch.compile: by hand, on random graphs, and on recordings of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, OTHER, STREAM, id_of, names, replace, starts
from tests.test_edit import traced
from tests.transforms.programs import (
    BACKWARD,
    FORWARD,
    GEMM,
    LATE_STREAM,
    NORM,
    POINTWISE,
    UPDATE,
    Program,
    changed,
    said,
    unbounded,
)
from whatif import DependencyKind, TaskGraph, TaskKind, WhatifError, simulate
from whatif.graph.kernels import KernelFamily
from whatif.models.kernels.fusion import FUSED_NAME, REGION_NAME
from whatif.models.kernels.launches import GRAPH_LAUNCH_NAME


def layer_of(*kernels: tuple[str, KernelFamily, int], **info: Any) -> Program:
    """Calls of 20 us behind 30 us of Python each, all of the layer net; a launch lag of 2 us, 1 us between kernels."""
    build = Program(CPU, LATE_STREAM, OTHER, launch_lag_ns=2_000, **info)
    build.gap("loop", 1_000)
    for name, family, duration_ns in kernels:
        build.gap(f"gap {name}", 30_000, layer="net")
        build.call(name, duration_ns, layer="net", family=family)
    return build


BLOCK = (("mm0", GEMM, 50_000), ("add", POINTWISE, 12_000), ("norm", NORM, 22_000), ("gelu", POINTWISE, 10_000),
         ("mm1", GEMM, 50_000))  # fmt: skip


def test_what_lies_between_two_products_becomes_one_kernel() -> None:
    """
    ::

        us      1            47   67  72   92     97  117
        CPU     |region-------|call-|g|call-|g|g|g|call-|
        stream                   ..|mm0------------|.|fused---|.|mm1--------|
                                   69            119 120   146.5 147.5

    2 + 20 + (10 + 8) / 4 us for the fused kernel; each gap is that of one generated call, 5 us at most.
    """
    graph = layer_of(*BLOCK).graph()
    after = changed("compile", graph)
    found = starts(simulate(after))
    assert found == {
        "loop": 0, REGION_NAME: 1_000, "call mm0": 47_000, "gap add": 67_000, "call add": 72_000,
        "gap norm": 92_000, "gap gelu": 93_667, "gap mm1": 95_334, "call mm1": 97_001,
        "mm0": 69_000, FUSED_NAME: 120_000, "mm1": 147_500,
    }  # fmt: skip
    fused = id_of(after, r"fused \(torch.compile\)")
    assert (after.low_ns[fused], after.high_ns[fused]) == (22_000, 31_000)
    assert (after.family[fused], after.size_bytes[fused]) == (KernelFamily.FUSED, -1)
    assert said(after) == "compile: 5 kernels of the forward pass become 3, in 1 region"
    region = id_of(after, "compiled region.*")
    assert (after.low_ns[region], after.high_ns[region]) == (2_000 + 20_300, 10_000 + 123_000)


def test_each_pass_becomes_a_graph_launch_with_reduce_overhead() -> None:
    after = changed("compile:mode=reduce-overhead", layer_of(*BLOCK).graph())
    assert names(after) == ["loop", GRAPH_LAUNCH_NAME, "mm0", FUSED_NAME, "mm1"]
    assert after.info.execution == ("compiled", "cuda_graph")
    assert simulate(after).start_ns[id_of(after, "mm0")] == 1_000 + (40_000 + 1_000 + 128_000) + 10_300 + 2_000


def fused_runs(graph: TaskGraph) -> list[str]:
    """The kernels that are left, in their order."""
    after = changed("compile", graph)
    return [name for name, gpu in zip(names(after), after.on_gpu.mask, strict=True) if gpu]


def test_a_second_reduction_begins_a_kernel_of_its_own() -> None:
    graph = layer_of(("a", POINTWISE, 9_000), ("n", NORM, 9_000), ("s", KernelFamily.SOFTMAX, 9_000),
                     ("b", POINTWISE, 9_000)).graph()  # fmt: skip
    assert fused_runs(graph) == [FUSED_NAME, FUSED_NAME]


def test_tensors_of_another_size_are_not_walked_together() -> None:
    build = Program(CPU, STREAM)
    for name, size in (("a", 1_000), ("b", 4_000), ("c", 16_001)):
        build.call(name, 9_000, layer="net", family=POINTWISE, size_bytes=size)
    assert fused_runs(build.graph()) == [FUSED_NAME, "c"]


def test_a_wait_for_the_gpu_ends_a_region() -> None:
    build = layer_of(("a", POINTWISE, 9_000), ("b", POINTWISE, 9_000))
    build.task(0, 1_000, "sync", phase=FORWARD, layer="net")
    wait = build.task(0, 0, "wait", TaskKind.WAIT, phase=FORWARD)
    build.edge(id_of(build.graph(), "b"), wait, kind=DependencyKind.SYNC)
    build.call("c", 9_000, layer="net", family=POINTWISE)
    after = changed("compile", build.graph())
    assert [name for name in names(after) if name in (FUSED_NAME, "c", REGION_NAME)] == [REGION_NAME, FUSED_NAME, "c"]
    # The second region begins with a call, which takes what entering it costs as well.
    assert after.duration_ns[id_of(after, "call c")] == 20_000 + 41_000
    assert "in 2 regions" in said(after)


def test_what_another_stream_needs_is_not_hidden_in_the_middle_of_a_kernel() -> None:
    build = Program(CPU, STREAM, OTHER)
    first = build.call("a", 9_000, layer="net", family=POINTWISE)
    build.edge(
        first, build.call("copy", 9_000, stream=2, layer="net", family=KernelFamily.COPY), kind=DependencyKind.EVENT
    )
    build.call("b", 9_000, layer="net", family=POINTWISE)
    build.call("c", 9_000, layer="net", family=POINTWISE)
    assert sorted(fused_runs(build.graph())) == ["a", "copy", FUSED_NAME]


def test_what_is_no_layer_s_and_what_adds_up_gradients_runs_as_before() -> None:
    build = layer_of(("a", POINTWISE, 9_000), ("b", POINTWISE, 9_000))
    build.gap("loss of the script", 30_000)
    build.call("l0", 9_000, family=POINTWISE)
    build.call("l1", 9_000, family=POINTWISE)
    build.gap("torch::autograd::AccumulateGrad", 30_000, BACKWARD, layer="net")
    build.call("u0", 9_000, UPDATE, family=POINTWISE)
    build.call("u1", 9_000, UPDATE, family=POINTWISE)
    after = changed("compile", build.graph())
    assert [name for name, gpu in zip(names(after), after.on_gpu.mask, strict=True) if gpu] == [
        FUSED_NAME,
        "l0",
        "l1",
        "u0",
        "u1",
    ]
    for kept in ("loss of the script", "torch::autograd::AccumulateGrad"):
        assert after.duration_ns[id_of(after, kept)] == 30_000


def test_a_captured_step_can_be_compiled_and_a_compiled_one_captured() -> None:
    """The order of the two what-ifs changes neither the kernels nor, but for what enters the region, their times."""
    graph = layer_of(*BLOCK).graph()
    one, other = (changed("compile", changed("cuda_graph", graph)), changed("cuda_graph", changed("compile", graph)))
    assert names(one) == names(other) == ["loop", GRAPH_LAUNCH_NAME, "mm0", FUSED_NAME, "mm1"]
    assert one.duration_ns[one.on_gpu].tolist() == other.duration_ns[other.on_gpu].tolist() == [50_000, 26_500, 50_000]


def test_compiled_once_is_compiled(shared_traces: Path) -> None:
    once = changed("compile", layer_of(*BLOCK).graph())
    assert names(changed("compile", once)) == names(once)
    graph = whatif.read(shared_traces / "modded-nanogpt-8xh100" / "current.rank0.json.gz")
    prediction = whatif.apply(graph, "compile")
    assert prediction.predicted_ms == prediction.baseline_ms
    assert any("already" in warning for warning in prediction.warnings)


def test_operators_of_a_cpu_are_fused_as_well() -> None:
    """On a core half of the shorter operator's time is saved, and views and Python shrink to the generated call.

    ::

        us      1          47           147 152         201 206         306
        CPU     |region----|mm0---------|gv|fused-------|gg|mm1---------|      mm: 100, gelu: 40, add: 20
    """
    build = Program(CPU)
    build.gap("loop", 1_000)

    def operator(name: str, duration_ns: int, family: KernelFamily) -> None:
        build.gap(f"gap {name}", layer="net")
        build.task(0, duration_ns, name, TaskKind.CPU_OP, family=family, phase=FORWARD, layer="net")

    operator("mm0", 100_000, GEMM)
    operator("view", 1_000, KernelFamily.OTHER)
    operator("gelu", 40_000, POINTWISE)
    operator("add", 20_000, POINTWISE)
    operator("mm1", 100_000, GEMM)
    after = changed("compile", build.graph())
    found = starts(simulate(after))
    assert {name: found[name] for name in ("mm0", FUSED_NAME, "mm1", REGION_NAME)} == {
        REGION_NAME: 1_000, "mm0": 47_000, FUSED_NAME: 152_000, "mm1": 206_000,
    }  # fmt: skip
    assert after.duration_ns[id_of(after, r"fused.*")] == 2_000 + 38_000 + 18_000 / 2


def test_recurrent_layers_run_as_before() -> None:
    """Dynamo breaks the graph at nn.LSTM, nn.GRU and nn.RNN; the layers around them are compiled."""
    build = Program(CPU)
    build.gap("loop", 1_000)
    for layer in ("net", "recurrent"):
        for name in (*(("aten::lstm",) if layer == "recurrent" else ()), "gelu", "add"):
            build.gap("gap", 30_000, layer=layer)
            build.task(0, 20_000, name, TaskKind.CPU_OP, family=POINTWISE, phase=FORWARD, layer=layer)
    graph = build.graph()
    after = changed("compile", graph)
    kept = graph.select(layer="^recurrent$")
    assert after.duration_ns[after.select(layer="^recurrent$")].tolist() == graph.duration_ns[kept].tolist()
    assert len(after) == len(graph) - 1  # of net, the add is part of the fused operator


def test_gradients_of_gradients_are_not_compiled() -> None:
    build = layer_of(*BLOCK)
    build.call("mm_backward", 50_000, layer="net", family=GEMM, phase=BACKWARD)
    graph = build.graph()
    penalty = graph.replace(info=replace(graph.info, differentiates_gradients=True))
    with pytest.raises(WhatifError, match=r"differentiated again.*torch\.func\.grad"):
        whatif.load_transform("compile")(penalty)
    assert len(changed("compile", graph)) < len(graph)


def test_reading_values_in_a_layer_of_a_cpu_breaks_the_region_in_two() -> None:
    """As the routing of a mixture of experts does."""

    def compiled_ns(between: str) -> int:
        build = Program(CPU)
        build.gap("loop", 1_000)
        for name, family in (("gelu", POINTWISE), (between, KernelFamily.INDEXING), ("add", POINTWISE)):
            build.gap("gap", 1_000, layer="net")
            build.task(0, 20_000, name, TaskKind.CPU_OP, family=family, phase=FORWARD, layer="net")
        return int(changed("compile", build.graph()).duration_ns.sum())

    assert compiled_ns("aten::nonzero") - compiled_ns("aten::gather") == 40_000 + 1_000  # the region, its one layer


@given(
    graph=traced(),
    data=st.data(),
    family=st.lists(st.sampled_from([GEMM, POINTWISE, POINTWISE, NORM, KernelFamily.COPY]), min_size=60, max_size=60),
)
@settings(max_examples=120, deadline=None)
def test_compiling_adds_no_gpu_time_and_keeps_what_waits(
    graph: TaskGraph, data: st.DataObject, family: list[KernelFamily]
) -> None:
    phase = data.draw(st.sampled_from([FORWARD, BACKWARD]))
    n = len(graph)
    graph = unbounded(graph).replace(
        phase=np.full(n, phase, dtype=np.int8), family=np.where(graph.on_gpu, np.resize(family, n), -1).astype(np.int8)
    )
    if phase == BACKWARD:
        with pytest.raises(WhatifError, match="forward"):
            changed("compile", graph)
        return
    mode = data.draw(st.sampled_from(["default", "reduce-overhead"]))
    if not graph.on_gpu.any():
        return
    after = changed(f"compile:mode={mode}", graph)
    assert after.duration_ns[after.on_gpu].sum() <= graph.duration_ns[graph.on_gpu].sum()
    matrix = graph.on_gpu & np.isin(graph.family, [GEMM, KernelFamily.COPY])
    left = after.on_gpu & np.isin(after.family, [GEMM, KernelFamily.COPY])
    assert after.duration_ns[left].tolist() == graph.duration_ns[matrix].tolist()
    assert len(after.waits.task) == len(graph.waits.task)
    assert (simulate(after).start_ns >= 0).all()


@pytest.mark.parametrize("spec", ["compile", "compile:mode=reduce-overhead"])
def test_compiling_real_steps(shared_traces: Path, spec: str) -> None:
    """A vision transformer that its launches bound gets as fast as its kernels; a ResNet's convolutions stay."""
    vit, resnet = (
        whatif.apply(whatif.read(shared_traces / name), spec)
        for name in ("tracelens-h100-mi300/h100.Falconsai_nsfw_image_detection__1016002.json.gz",
                     "kineto-resnet50-v100/num_workers_4.2021-06.pt.trace.json.gz")
    )  # fmt: skip
    assert 1.0 <= vit.predicted_ms / vit.breakdown.gpu_busy_ms < 1.3
    for prediction in (vit, resnet):
        before, after = prediction.baseline.graph, prediction.graph
        for graph in (before, after):
            assert graph.on_gpu.any()
        conv = [graph.family == KernelFamily.CONVOLUTION for graph in (before, after)]
        assert before.duration_ns[conv[0]].sum() == after.duration_ns[conv[1]].sum()
        assert prediction.low_ms <= prediction.predicted_ms <= prediction.high_ms
        assert 0.8 < prediction.breakdown.gpu_busy_ms / prediction.baseline.breakdown.gpu_busy_ms < 1
