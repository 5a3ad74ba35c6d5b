"""What-ifs of the host's side: CUDA graphs, torch.compile, another CPU, the update within the backward pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, OTHER, STREAM, Build, id_of, names, starts, step
from tests.test_edit import reaches, traced
from whatif import DependencyKind, Phase, TaskGraph, TaskKind, WhatifError, simulate
from whatif.contract import GOES, STAYS, contract
from whatif.kernels import KernelFamily
from whatif.memory import LayerMemory, Memory
from whatif.models.estimator import Source, sources
from whatif.models.fusion import FUSED_NAME, REGION_NAME
from whatif.models.launches import GRAPH_LAUNCH_NAME
from whatif.models.update_in_backward import PIECE_NAME
from whatif.predict import Baseline
from whatif.types import HANDOFF_NAME

FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE
LATE_STREAM = dataclasses.replace(STREAM, lag_ns=1_000)


def changed(spec: str, graph: TaskGraph) -> TaskGraph:
    return whatif.load_transform(spec)(graph).check()


def said(graph: TaskGraph) -> str:
    return " | ".join(graph.notes)


class Program(Build):
    """A build whose calls take 20 us and are followed by 10 us of Python, in one step."""

    def call(
        self, name: str, kernel_ns: int, phase: Phase = FORWARD, cpu: int = 0, stream: int = 1, **columns: Any
    ) -> int:
        call = self.task(cpu, 20_000, f"call {name}", phase=phase, layer=columns.get("layer", ""),
                         in_optimizer=columns.get("in_optimizer", False))  # fmt: skip
        kernel = self.task(stream, kernel_ns, name, phase=phase, **columns)
        self.edge(call, kernel, self.info.launch_lag_ns, DependencyKind.LAUNCH)
        return kernel

    def gap(self, name: str, duration_ns: int = 10_000, phase: Phase = FORWARD, cpu: int = 0, **columns: Any) -> int:
        return self.task(cpu, duration_ns, name, TaskKind.GAP, phase=phase, **columns)


# -- taking tasks out in bulk ---------------------------------------------------------------------------------------


def test_a_task_that_stands_for_another_takes_over_what_both_wait_for_and_start() -> None:
    """
    ::

        ns      0   3  5   8  10  13
        CPU     |l0-|g0|l1-|g1|l2-|...      l1 goes into l0:  |l0-|g0|g1|l2-|...
        stream       |k0--------|k1--------|k2--------|       k1 is launched by l0
    """
    graph = step()
    fate = np.full(len(graph), STAYS)
    fate[id_of(graph, "l1")] = id_of(graph, "l0")
    after = contract(graph, fate).check()
    assert names(after) == [name for name in names(graph) if name != "l1"]
    assert after.launch_of[id_of(after, "k1")] == id_of(after, "l0")
    assert starts(simulate(after)) == {"l0": 0, "g0": 3, "g1": 5, "l2": 7, "g2": 10, "sync": 12,
                                       "k0": 5, "k1": 15, "k2": 25, "wait": 35}  # fmt: skip


def unbounded(graph: TaskGraph) -> TaskGraph:
    """Give the graph without a limit of the launch queue, which is a thousand launches where there is one."""
    return graph.replace(info=dataclasses.replace(graph.info, queue_depth=0))


@given(traced(), st.data())
@settings(max_examples=150, deadline=None)
def test_taking_out_cpu_tasks_keeps_the_order_of_everything_else(graph: TaskGraph, data: st.DataObject) -> None:
    """Of two tasks that stay, one that had to wait for the other over kept ones alone still has to."""
    graph = unbounded(graph)
    cpu = np.flatnonzero(graph.kind != TaskKind.WAIT)
    gone = data.draw(st.lists(st.sampled_from(cpu[~graph.on_gpu[cpu]].tolist() or [0]), unique=True))
    fate = np.full(len(graph), STAYS)
    fate[gone] = GOES
    heirs = [task for task in np.flatnonzero(graph.on_cpu).tolist() if task not in gone]
    waits = np.append(graph.waits.task, -1)
    for task in gone:
        near = [heir for heir in heirs if heir < task and not ((heir < waits) & (waits < task)).any()]
        launches = task in graph.launch_of
        if near and (launches or data.draw(st.booleans())):
            fate[task] = data.draw(st.sampled_from(near))
        elif launches:  # nobody is there to start what it started
            fate[task] = STAYS
    graph = graph.attach(was=np.arange(len(graph)))
    left = contract(graph, fate).check()
    was = left.attached["was"]
    assert len(left) == (fate == STAYS).sum()
    kept = np.isin(graph.dependencies.source, was) & np.isin(graph.dependencies.target, was)
    before, after = graph.replace(dependencies=graph.dependencies.take(kept)), reaches(left)
    direct = reaches(before.replace(thread=np.arange(len(graph), dtype=np.int32),
                                    threads=tuple(graph.threads[t] for t in graph.thread)))  # fmt: skip
    for a in range(len(left)):
        for b in range(len(left)):
            assert after[a, b] or not direct[was[a], was[b]]
    assert (simulate(left).start_ns >= 0).all()


@given(traced())
@settings(max_examples=30, deadline=None)
def test_nothing_taken_out_is_the_same_graph(graph: TaskGraph) -> None:
    assert contract(graph, np.full(len(graph), STAYS)) is graph


# -- CUDA graphs ----------------------------------------------------------------------------------------------------


def three_launches() -> TaskGraph:
    """
    ::

        us      0     20  30    50  60    80  90
        CPU     |call-|gap|call-|gap|call-|gap|
        stream         |k0|      |k1|      |k2|      5 us each, 2 us after their calls
    """
    build = Program(CPU, LATE_STREAM, launch_lag_ns=2_000)
    for i in range(3):
        build.call(f"k{i}", 5_000)
        build.gap(f"gap {i}")
    return build.graph()


def test_one_launch_takes_the_place_of_three() -> None:
    """
    ::

        us      0          10.3      20.3     29.3
        CPU     |graph -----|gap------|
        stream              ..|k0--|.|k1--|.|k2--|     2 us after the call, 1 us apart
    """
    after = changed("cuda_graph", three_launches())
    assert starts(simulate(after)) == {
        GRAPH_LAUNCH_NAME: 0, "gap 2": 10_300, "k0": 12_300, "k1": 18_300, "k2": 24_300,
    }  # fmt: skip
    launch = id_of(after, r"cudaGraphLaunch.*")
    assert (after.low_ns[launch], after.high_ns[launch]) == (2_500 + 3, 20_000 + 600)
    assert sources(after)[launch] == Source.PAPER
    # In a graph half a microsecond to two lie between kernels, where the stream had one.
    assert after.low_ns[after.on_gpu].tolist() == [4_500] * 3
    assert after.high_ns[after.on_gpu].tolist() == [6_000] * 3
    assert said(after) == "cuda_graph: 3 launches a step become 1"
    assert after.info.execution == ("cuda_graph",)


def test_what_is_captured_is_not_captured_again() -> None:
    once = changed("cuda_graph", three_launches())
    twice = changed("cuda_graph", once)
    assert starts(simulate(twice)) == starts(simulate(once))
    assert "nothing changes" in said(twice)


def test_a_wait_for_the_gpu_splits_the_graph() -> None:
    """loss.item() behind two kernels: the second graph cannot be launched before it has returned.

    ::

        us      0        10.2  13.2     23.2      33.4
        CPU     |graph A---|sync|.......w|graph B---|
        stream             ..|k0--|.|k1--|          ..|k2--|.|k3--|
    """
    build = Program(CPU, LATE_STREAM, launch_lag_ns=2_000)
    build.call("k0", 5_000)
    build.call("k1", 5_000)
    build.sync(3_000)
    build.call("k2", 5_000)
    build.call("k3", 5_000)
    graph = build.graph()
    graph = graph.replace(phase=np.full(len(graph), FORWARD, dtype=np.int8))
    after = changed("cuda_graph", graph)
    found = [(name, start) for name, start in zip(names(after), simulate(after).start_ns.tolist(), strict=True)]
    assert found == [
        (GRAPH_LAUNCH_NAME, 0), ("k0", 12_200), ("k1", 18_200), ("sync", 10_200), ("wait", 23_200),
        (GRAPH_LAUNCH_NAME, 23_200), ("k2", 35_400), ("k3", 41_400),
    ]  # fmt: skip
    assert (
        said(after) == "cuda_graph: 4 launches a step become 2, because the CPU waits for the GPU in between (1 splits)"
    )


def test_the_batch_is_loaded_and_copied_outside_and_what_the_model_does_before_its_first_kernel_goes() -> None:
    build = Program(CPU, STREAM)
    build.task(0, 50_000, "load", TaskKind.DATA_LOADING, phase=Phase.DATA)
    build.call("Memcpy HtoD (Pageable -> Device)", 7_000, kind=TaskKind.MEMCPY)
    build.gap("python of the loop")
    build.gap("python of the model", 90_000, layer="net")
    build.call("k0", 5_000, layer="net")
    build.call("k1", 5_000, layer="net")
    build.gap("python behind", layer="")
    after = changed("cuda_graph", build.graph())
    assert names(after) == [
        "load", "call Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)", "python of the loop",
        GRAPH_LAUNCH_NAME, "k0", "k1", "python behind",
    ]  # fmt: skip
    assert starts(simulate(after))["k0"] == 50_000 + 20_000 + 10_000 + 10_200


def two_threads(depth: int = 0) -> TaskGraph:
    """A step whose backward pass runs on a thread of its own.

    ::

        main      |f0|f1|..............w|u0|u1|
        autograd         |b0|b1|
    """
    build = Program(CPU, dataclasses.replace(CPU, name="autograd"), STREAM, queue_depth=depth)
    for i in range(2):
        last = build.call(f"f{i}", 5_000, FORWARD, stream=2, layer="net")
    first = build.call("b0", 5_000, BACKWARD, cpu=1, stream=2, layer="net")
    build.edge(last - 1, first - 1, kind=DependencyKind.HANDOFF)
    build.gap("gap", 10_000, BACKWARD, cpu=1)
    last = build.call("b1", 5_000, BACKWARD, cpu=1, stream=2, layer="net")
    build.edge(last - 1, build.task(0, 0, HANDOFF_NAME, TaskKind.WAIT, phase=BACKWARD), kind=DependencyKind.HANDOFF)
    for i in range(2):
        build.call(f"u{i}", 5_000, UPDATE, stream=2, in_optimizer=True)
    return build.graph()


def test_a_step_of_two_threads_becomes_one_call() -> None:
    after = changed("cuda_graph", two_threads())
    assert names(after) == [GRAPH_LAUNCH_NAME, "f0", "f1", "b0", "b1", "u0", "u1"]
    assert simulate(after).start_ns.tolist() == [0, *(10_600 + 5_000 * i for i in range(6))]


def test_without_the_update_its_calls_wait_for_the_thread_that_launched_the_graph() -> None:
    after = changed("cuda_graph:capture=passes", two_threads())
    assert names(after) == [GRAPH_LAUNCH_NAME, "f0", "f1", "b0", "b1", "call u0", "u0", "call u1", "u1"]
    found = starts(simulate(after))
    assert (found["call u0"], found["call u1"], found["u0"], found["u1"]) == (10_400, 30_400, 30_400, 50_400)


def test_a_graph_is_one_entry_of_a_full_launch_queue() -> None:
    """Only the kernels that calls launch one by one fill the queue: nothing holds back the one launch."""
    after = changed("cuda_graph", two_threads(depth=1))
    assert simulate(after).start_ns.tolist() == simulate(changed("cuda_graph", two_threads())).start_ns.tolist()


def test_steps_that_differ_are_told() -> None:
    build = Program(CPU, STREAM, steady=(0, 2), n_steps=2)
    for i in range(2):
        for k in range(2 + i):
            build.call(f"k{i}{k}", 5_000, step=i)
    graph = build.graph()
    graph = graph.replace(
        step=np.where(graph.on_gpu, graph.step, graph.step[np.minimum(np.arange(len(graph)) + 1, len(graph) - 1)])
    )
    assert "each kind of step needs a graph of its own" in said(changed("cuda_graph", graph))


def test_a_cpu_has_no_graphs(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "resnet18_cifar_cpu.json.gz")
    for spec in ("cuda_graph", "compile:mode=reduce-overhead"):
        with pytest.raises(WhatifError, match="CPU") as error:
            changed(spec, graph)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["cuda_graph", "cuda_graph:capture=passes"])
@given(graph=traced(), phases=st.lists(st.sampled_from(list(Phase)), min_size=60, max_size=60))
@settings(max_examples=100, deadline=None)
def test_capturing_keeps_all_gpu_work_in_its_order_and_all_waits(
    spec: str, graph: TaskGraph, phases: list[Phase]
) -> None:
    assume(graph.on_gpu.any())
    graph = unbounded(graph).replace(phase=np.resize(np.array(phases, dtype=np.int8), len(graph)))
    graph = graph.attach(was=np.arange(len(graph)))
    after = changed(spec, graph)
    was = after.attached["was"]
    assert sorted(was[after.on_gpu].tolist()) == np.flatnonzero(graph.on_gpu).tolist()
    assert after.duration_ns[after.on_gpu].tolist() == graph.duration_ns[was[after.on_gpu]].tolist()
    assert len(after.waits.task) == len(graph.waits.task)
    before = reaches(
        graph.replace(dependencies=graph.dependencies.take(graph.dependencies.kind == DependencyKind.EVENT))
    )
    now = reaches(after)
    tasks = np.flatnonzero(after.on_gpu)
    assert all(now[a, b] or not before[was[a], was[b]] for a in tasks for b in tasks)
    timeline = simulate(after)
    busy = [after.duration_ns[after.on_gpu & (after.thread == thread)].sum() for thread in range(len(after.threads))]
    assert timeline.makespan_ns >= max(busy)


@pytest.mark.parametrize(
    ("trace", "at_most"),
    [("tracelens-h100-mi300/h100.Falconsai_nsfw_image_detection__1016002.json.gz", 1.2),
     ("tracelens-h100-mi300/h100.gaunernst_bert-small-uncased__1016001.json.gz", 1.5),
     ("harryjmoss-a100-batch/bs8.run1.pt.trace.json.gz", 1.15),
     ("harryjmoss-a100-batch/bs64.run1.pt.trace.json.gz", 1.15),
     ("kineto-resnet50-v100/num_workers_4.2021-06.pt.trace.json.gz", 1.1)],
)  # fmt: skip
def test_a_host_bound_step_shrinks_to_about_its_gpu_time(shared_traces: Path, trace: str, at_most: float) -> None:
    prediction = whatif.apply(whatif.read(shared_traces / trace), "cuda_graph")
    busy_ms = prediction.baseline.breakdown.gpu_busy_ms
    assert busy_ms <= prediction.predicted_ms <= at_most * busy_ms
    assert prediction.predicted_ms < 0.9 * prediction.baseline_ms
    assert prediction.low_ms <= prediction.predicted_ms <= prediction.high_ms


def test_a_step_that_the_gpu_bounds_gains_nothing(shared_traces: Path) -> None:
    prediction = whatif.apply(whatif.read(shared_traces / "triosim-vgg13-h100/vgg13_bs512_adam.json.gz"), "cuda_graph")
    assert prediction.predicted_ms == pytest.approx(prediction.baseline_ms, rel=1e-4)


# -- torch.compile --------------------------------------------------------------------------------------------------


def layer_of(*kernels: tuple[str, KernelFamily, int], **info: Any) -> Program:
    """Calls of 20 us behind 30 us of Python each, all of the layer net; a launch lag of 2 us, 1 us between kernels."""
    build = Program(CPU, LATE_STREAM, OTHER, launch_lag_ns=2_000, **info)
    build.gap("loop", 1_000)
    for name, family, duration_ns in kernels:
        build.gap(f"gap {name}", 30_000, layer="net")
        build.call(name, duration_ns, layer="net", family=family)
    return build


GEMM, POINTWISE, NORM = KernelFamily.GEMM, KernelFamily.ELEMENTWISE, KernelFamily.LAYER_NORM
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
    assert said(after) == "compile: 5 kernels of both passes become 3, in 1 regions"
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
    return [name for name, gpu in zip(names(after), after.on_gpu, strict=True) if gpu]


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
    assert [name for name, gpu in zip(names(after), after.on_gpu, strict=True) if gpu] == [
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


# -- another CPU ----------------------------------------------------------------------------------------------------


def test_a_cpu_twice_as_slow_doubles_what_the_cpu_does_and_nothing_else() -> None:
    """
    ::

        ns      0     6   10    16  20    26  30
        CPU     |l0---|g0-|l1---|g1-|l2---|g2-|s-|....w|
        stream         ..|k0-------|.|k1-------|.|k2-------|
    """
    after = changed("cpu:speedup=0.5", step())
    assert starts(simulate(after)) == {"l0": 0, "g0": 6, "l1": 10, "g1": 16, "l2": 20, "g2": 26, "sync": 30,
                                       "k0": 8, "k1": 18, "k2": 28, "wait": 38}  # fmt: skip


@given(traced(), st.floats(0.1, 10), st.floats(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_faster_cpu_is_never_slower(graph: TaskGraph, speedup: float, more: float) -> None:
    graph = graph.replace(
        duration_ns=graph.duration_ns * 1000, low_ns=graph.low_ns * 1000, high_ns=graph.high_ns * 1000
    )
    slow, fast = (simulate(changed(f"cpu:speedup={factor}", graph)).makespan_ns for factor in (speedup, speedup * more))
    assert fast <= slow + len(graph)  # whole nanoseconds
    assert changed("cpu:speedup=1", graph) is graph


def test_loading_by_others_stays_as_it_is(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "resnet18_cifar_cpu_loader0.json.gz")
    loading = graph.select(kind=TaskKind.DATA_LOADING)
    kept = changed("cpu:speedup=4,loading=false", graph)
    assert (kept.duration_ns[loading] == graph.duration_ns[loading]).all()
    assert kept.duration_ns.sum() > changed("cpu:speedup=4", graph).duration_ns.sum()


@pytest.mark.parametrize("spec", ["cpu:speedup=0", "cpu:speedup=-1", "cpu:speedup=nan", "cpu:speedup=1e9",
                                  "cuda_graph:capture=all", "compile:mode=fast"])  # fmt: skip
def test_options_that_make_no_sense_are_one_sentence(spec: str) -> None:
    with pytest.raises(WhatifError) as error:
        changed(spec, step())
    assert "\n" not in str(error.value)


# -- the update within the backward pass ----------------------------------------------------------------------------

READY = [{"name": "b.weight", "layer": "b", "bytes": 300}, {"name": "a.weight", "layer": "a", "bytes": 100}]


def training_step(
    *, update: str = "upd", between: str = "", memory: Memory | None = None, **metadata: Any
) -> TaskGraph:
    """Two layers, and an update of one kernel a parameter.

    ::

        us      0     20    40    60   70     90
        CPU     |bwd b|bwd a|upd b|gap-|upd a|
        stream        ..|b ------|a ------|u-|...|u-|     100 us a layer, 6 us an update; 2 us after their calls
    """
    build = Program(CPU, STREAM, launch_lag_ns=2_000, metadata={"grad_ready_order": READY, **metadata}, memory=memory)
    build.call("bwd b", 100_000, BACKWARD, layer="b", family=GEMM)
    build.call("bwd a", 100_000, BACKWARD, layer="a", family=GEMM)
    if between:
        build.call(between, 3_000, UPDATE, family=KernelFamily.REDUCTION)
    build.call(f"{update} b", 6_000, UPDATE, in_optimizer=True, family=POINTWISE)
    build.gap("gap", 10_000, UPDATE, in_optimizer=True)
    build.call(f"{update} a", 6_000, UPDATE, in_optimizer=True, family=POINTWISE)
    return build.graph()


def test_each_parameter_is_updated_behind_its_gradient() -> None:
    """Three quarters of 8 us above the floor are b's; each call takes its half of the gap and of the calls, and 110 us.

    ::

        us      0     20              155   175              310
        CPU     |bwd b|update of b-----|bwd a|update of a-----|
        stream        ..|b ---------|     ..|ub |  ..|a --------|   ..|ua|
                        22        122       157 165  177      277     312
    """
    after = changed("optimizer_in_backward", training_step())
    timeline = simulate(after)
    found = list(zip(names(after), timeline.start_ns.tolist(), after.duration_ns.tolist(), strict=True))
    found.sort(key=lambda row: row[1])
    # 2 x 20 us of calls and 10 us of the gap, for two parameters; calls that launch are part of what the CPU does.
    assert found == [
        ("call bwd b", 0, 20_000), (PIECE_NAME, 20_000, 135_000), ("bwd b", 22_000, 100_000),
        ("call bwd a", 155_000, 20_000), (PIECE_NAME, 157_000, 8_000),
        (PIECE_NAME, 175_000, 135_000), ("bwd a", 177_000, 100_000), (PIECE_NAME, 312_000, 4_000),
    ]  # fmt: skip
    assert set(after.phase[after.select(name="^update")].tolist()) == {UPDATE}
    assert said(after) == "optimizer_in_backward: the update becomes 2 pieces of the backward pass"
    twice = changed("optimizer_in_backward", after)
    assert len(twice) == len(after)
    assert "nothing changes" in said(twice)


def test_a_multi_tensor_update_is_split_by_bytes_with_a_launch_for_each_operation() -> None:
    """One kernel name: one launch a parameter, 10 us where no forward pass tells what a small operator takes."""
    build = Program(CPU, STREAM, metadata={"grad_ready_order": READY})
    build.call("bwd b", 100_000, BACKWARD, layer="b", family=GEMM)
    build.call("bwd a", 100_000, BACKWARD, layer="a", family=GEMM)
    build.call("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 42_000, UPDATE, in_optimizer=True,
               family=KernelFamily.OPTIMIZER)  # fmt: skip
    after = changed("optimizer_in_backward", build.graph())
    pieces = after.select(name="^update")
    assert after.duration_ns[pieces & after.on_gpu].tolist() == [40_000 * 3 / 4 + 2_000, 40_000 / 4 + 2_000]
    assert after.duration_ns[pieces & after.on_cpu].tolist() == [120_000, 120_000]


def test_gradients_no_longer_live_together() -> None:
    memory = Memory(400, 800, 0, (LayerMemory("a", 10, 100), LayerMemory("b", 10, 300)))
    after = changed("optimizer_in_backward", training_step(memory=memory))
    assert after.info.memory is not None
    assert after.info.memory.gradients_leave


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (lambda: training_step(grad_ready_order=[]), "whatif collect"),
        (lambda: step(), "whatif collect"),
        (lambda: training_step(between="LpNormFunctor"), "clips by a norm"),
        (lambda: training_step(between="amp_foreach_non_finite_check_and_unscale"), "scales the loss"),
    ],
)
def test_an_update_that_cannot_be_split_says_why(graph: Any, reason: str) -> None:
    with pytest.raises(WhatifError, match=reason) as error:
        changed("optimizer_in_backward", graph())
    assert "\n" not in str(error.value)


def test_after_a_loss_scaler_the_update_cannot_be_split() -> None:
    scaled = changed("amp:matrix_speedup=3", training_step())
    changed("optimizer_in_backward", scaled)
    build = training_step()
    inserted = build.insert(
        whatif.NewTasks([id_of(build, "bwd a")], "unscale gradients", TaskKind.KERNEL, 3_000, phase=UPDATE)
    )
    with pytest.raises(WhatifError, match="scales the loss"):
        changed("optimizer_in_backward", inserted.graph)


def test_collectives_and_inference_are_refused() -> None:
    graph = training_step()
    kind = graph.kind.copy()
    kind[id_of(graph, "bwd a")] = TaskKind.COMMUNICATION
    with pytest.raises(WhatifError, match="one device"):
        changed("optimizer_in_backward", graph.replace(kind=kind))
    no_update = graph.remove(graph.select(phase=UPDATE))
    with pytest.raises(WhatifError, match="inference"):
        changed("optimizer_in_backward", no_update)


@pytest.mark.parametrize("name", ["bert-base--baseline", "bert-base--adam_fused", "resnet50--baseline"])
def test_the_update_of_real_steps_moves_as_a_whole(own_traces: Path, name: str) -> None:
    graph = whatif.read(own_traces / "campaign_cpu" / f"{name}.trace.json.gz")
    before = Baseline.of(graph)
    after = whatif.apply(before, "optimizer_in_backward")
    assert not (after.graph.in_optimizer & after.graph.on_cpu).any()
    pieces = after.graph.select(name="^update")
    n_parameters = len(graph.info.metadata["grad_ready_order"])
    steps = len(np.unique(after.graph.step[pieces]))
    recorded_ns = before.graph.duration_ns[before.graph.in_optimizer & before.graph.on_cpu].sum()
    calls_ns = 110_000 * n_parameters * steps
    moved_ns = after.graph.duration_ns[pieces].sum()
    if "fused" in name:  # what collects the parameters for one call is not repeated for each
        assert calls_ns < moved_ns < recorded_ns + calls_ns
    else:
        assert moved_ns == pytest.approx(recorded_ns + calls_ns, rel=0.1)
    # Between the first and the last backward work of its step.
    backward = after.graph.on_cpu & after.graph.select(phase=BACKWARD)
    for number in np.unique(after.graph.step[pieces]).tolist():
        mine, work = (np.flatnonzero(tasks & (after.graph.step == number)) for tasks in (pieces, backward))
        assert work[0] < mine[0]
    assert after.low_ms <= after.predicted_ms <= after.high_ms


# -- a transform that a user could have written -----------------------------------------------------------------------


def test_a_reduce_scatter_that_leaves_step_for_a_hook(shared_traces: Path) -> None:
    """modded-nanogpt, predicted from the recording before the change alone; a step takes 60 ms. Change in ms a step:

    ======================================  ========  =========
    clock                                   measured  predicted
    ======================================  ========  =========
    span, first kernel to last               -0.121    -0.145
    gpu, ends of all five steps              -0.157    -0.145
    gpu, as reported: a step with Adam       -0.62     -0.36
    mark, mean of five                       -0.137    +0.103
    ======================================  ========  =========

    The two clocks of the GPU tell how fast the program is. The marks are the CPU's, which a full launch queue holds
    back a thousand kernels ahead of the GPU (1,183 calls wait for a place in it): they tell where the CPU stood when
    it set the mark. By them the sign is missed, and the error is 0.4 % of the step as by the others.
    """
    folder = shared_traces / "modded-nanogpt-8xh100"
    current, hook = (whatif.read(folder / f"{name}.rank0.json.gz") for name in ("current", "hook"))
    script = Path(__file__).resolve().parents[2] / "examples" / "early_reduce_scatter.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 80
    change_ms: dict[str, tuple[float, float]] = {}
    for clock in ("span", "gpu", "mark"):
        prediction = whatif.apply(current, str(script), clock=clock)
        measured_ms, before_ms = (sum(g.info.measured_step_ns[clock]) / 5e6 for g in (hook, current))
        predicted_ms, replayed_ms = (
            sum(timeline.step_times_ns(clock)) / 5e6 for timeline in (prediction.timeline, prediction.baseline.timeline)
        )
        assert abs(predicted_ms / measured_ms - 1) < 0.01
        change_ms[clock] = (measured_ms - before_ms, predicted_ms - replayed_ms)
    assert change_ms["span"] == pytest.approx((-0.121, -0.145), abs=0.01)
    assert change_ms["gpu"] == pytest.approx((-0.157, -0.145), abs=0.01)
    assert change_ms["mark"] == pytest.approx((-0.137, 0.103), abs=0.01)

    reported = whatif.apply(current, str(script))
    assert reported.baseline.clock == "gpu"
    # Every other step updates by Adam; the median of the steady ones is such a step.
    steps_ms = [[time / 1e6 for time in g.info.measured_step_ns["gpu"]] for g in (current, hook)]
    assert steps_ms[1][2] - steps_ms[0][2] == pytest.approx(-0.62, abs=0.01)
    assert reported.baseline_ms == pytest.approx(steps_ms[0][2], rel=0.001)
    assert reported.predicted_ms - reported.baseline_ms == pytest.approx(-0.36, abs=0.01)
    assert reported.predicted_ms == pytest.approx(steps_ms[1][2], rel=0.01)
    early = reported.graph.select(name="^early ReduceScatter$") & reported.graph.on_gpu
    assert np.bincount(reported.graph.step[early], minlength=5).tolist() == [0, 6, 0, 6, 0]


def test_early_reduce_scatter_says_what_it_needs(own_traces: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "early_reduce_scatter.py"
    with pytest.raises(WhatifError, match="reduce-scatters"):
        whatif.apply(whatif.read(own_traces / "resnet18_cifar_cpu.json.gz"), str(script))
