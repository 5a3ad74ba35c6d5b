"""CUDA graphs: by hand, on random graphs, and on recordings of others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, id_of, names, replace, starts
from tests.test_edit import reaches, traced
from tests.transforms.programs import BACKWARD, FORWARD, LATE_STREAM, UPDATE, Program, changed, said, unbounded
from whatif import DependencyKind, Phase, TaskGraph, TaskKind, WhatifError, simulate
from whatif.graph.kernels import KernelFamily
from whatif.graph.types import HANDOFF_NAME
from whatif.hardware.gpu import find_gpu
from whatif.hardware.roofline import kernel_floor_ns
from whatif.models.durations.estimator import Source, sources
from whatif.models.kernels.capturable import SCALAR_NAME
from whatif.models.kernels.launches import GRAPH_LAUNCH_NAME


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
        stream              ..|k0--|.|k1--|.|k2--|     2 us after the call, 0.5 us apart
    """
    after = changed("cuda_graph", three_launches())
    assert starts(simulate(after)) == {
        GRAPH_LAUNCH_NAME: 0, "gap 2": 10_300, "k0": 12_300, "k1": 17_800, "k2": 23_300,
    }  # fmt: skip
    launch = id_of(after, r"cudaGraphLaunch.*")
    assert (after.low_ns[launch], after.high_ns[launch]) == (2_500 + 3, 20_000 + 600)
    assert sources(after)[launch] == Source.PAPER
    # In a graph 0.2 to 2 us lie between kernels, 0.5 in the middle.
    assert after.low_ns[after.on_gpu].tolist() == [4_700] * 3
    assert after.high_ns[after.on_gpu].tolist() == [6_500] * 3
    assert said(after) == "cuda_graph: 3 launches a step become 1"
    assert after.info.execution == ("cuda_graph",)


def adam_step(**facts: object) -> TaskGraph:
    """A backward pass and Adam's eight kernels for each of two tensors, 3 us each, in one step."""
    optimizer = {"type": "AdamW", "foreach": False, "fused": None, "capturable": False, "parameter_tensors": 2, **facts}
    build = Program(CPU, LATE_STREAM, gpu="NVIDIA H100 80GB HBM3", metadata={"optimizer": optimizer})
    build.call("bwd", 100_000, BACKWARD)
    for tensor in "ab":
        for kernel in range(8):
            build.call(f"{tensor}{kernel}", 3_000, UPDATE, in_optimizer=True, family=KernelFamily.ELEMENTWISE)
    return build.graph()


def test_a_captured_adam_keeps_its_counters_on_the_gpu() -> None:
    """Twelve kernels of one element a tensor (torch/optim/adam.py, capturable=True), of the shortest time."""
    after = changed("cuda_graph", adam_step())
    new = after.select(name=SCALAR_NAME)
    assert int(new.sum()) == 2 * 12
    floor_ns = kernel_floor_ns(find_gpu("H100-SXM-80"))
    assert after.duration_ns[new].tolist() == [floor_ns] * 24
    # Half behind each tensor's kernels, launched by the graph that launches these.
    order = [names(after)[i] for i in after.by_thread[after.on_gpu[after.by_thread]]]
    assert order[1:3] == ["a0", SCALAR_NAME]
    assert order.index("b0") < [i for i, name in enumerate(order) if name == SCALAR_NAME][12]
    assert len(np.unique(after.launch_of[new])) == 1
    assert "12 kernels of one element for each of 2 tensors" in said(after)
    assert int(changed("cuda_graph", after).select(name=SCALAR_NAME).sum()) == 24


def test_fused_adam_has_none_of_them_in_either_order() -> None:
    first, last = (
        changed(two, changed(one, adam_step()))
        for one, two in (("fused_adam", "cuda_graph"), ("cuda_graph", "fused_adam"))
    )
    assert not first.select(name=SCALAR_NAME).any()
    assert not last.select(name=SCALAR_NAME).any()
    assert sorted(first.duration_ns[first.on_gpu].tolist()) == sorted(last.duration_ns[last.on_gpu].tolist())


@pytest.mark.parametrize(
    ("metadata", "what_if"),
    [
        ({"capturable": True}, "cuda_graph"), ({"capturable": None}, "cuda_graph"), ({"type": "SGD"}, "cuda_graph"),
        ({"parameter_tensors": 3_000}, "cuda_graph"), ({"parameter_tensors": None}, "cuda_graph"),
        ({}, "cuda_graph:capture=passes"),
    ],
)  # fmt: skip
def test_other_updates_keep_their_kernels(metadata: dict[str, object], what_if: str) -> None:
    after = changed(what_if, adam_step(**metadata))
    assert not after.select(name=SCALAR_NAME).any()
    assert "capturable" not in said(after)


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
        (GRAPH_LAUNCH_NAME, 0), ("k0", 12_200), ("k1", 17_700), ("sync", 10_200), ("wait", 22_700),
        (GRAPH_LAUNCH_NAME, 22_700), ("k2", 34_900), ("k3", 40_400),
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
    build = Program(CPU, replace(CPU, name="autograd"), STREAM, queue_depth=depth)
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


def test_differing_steps_are_noted() -> None:
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
    prediction = whatif.apply(whatif.read(shared_traces / trace), "cuda_graph", calibrated=False)
    busy_ms = prediction.baseline.breakdown.gpu_busy_ms
    assert busy_ms <= prediction.predicted_ms <= at_most * busy_ms
    assert prediction.predicted_ms < 0.9 * prediction.baseline_ms
    assert prediction.low_ms <= prediction.predicted_ms <= prediction.high_ms


def test_a_step_that_the_gpu_bounds_gains_its_gaps(shared_traces: Path) -> None:
    prediction = whatif.apply(whatif.read(shared_traces / "triosim-vgg13-h100/vgg13_bs512_adam.json.gz"), "cuda_graph")
    assert 0.998 * prediction.baseline_ms < prediction.predicted_ms < prediction.baseline_ms


@pytest.mark.parametrize("trace", ["current", "hook"])
def test_marks_of_the_cpu_do_not_run_away_from_a_gpu_that_bounds_the_step(shared_traces: Path, trace: str) -> None:
    """By its marks a step would take the time of one launch; run on, a full queue holds the CPU up."""
    baseline = whatif.apply(shared_traces / "modded-nanogpt-8xh100" / f"{trace}.rank0.json.gz")
    assert baseline.baseline.clock == "mark"
    for what_if in ("cuda_graph", "cuda_graph:capture=passes", "compile:mode=reduce-overhead", "cpu:speedup=100"):
        found = whatif.apply(baseline.baseline, what_if)
        assert 0.97 * baseline.breakdown.gpu_busy_ms < found.predicted_ms <= baseline.predicted_ms
        assert found.breakdown.gpu_busy_ms == pytest.approx(baseline.breakdown.gpu_busy_ms, rel=0.03)
    twice = whatif.apply(baseline.baseline, "cuda_graph", "scale:factor=2")
    assert twice.predicted_ms == pytest.approx(2 * baseline.predicted_ms, rel=0.03)
