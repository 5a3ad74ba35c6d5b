"""Batch size, accumulation, checkpointing, layout and batch norm: by hand on small steps, and on real recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import Event, call, copy, kernel, launched, mark, op, read_events, with_metadata
from whatif import Phase, TaskGraph, TaskKind, WhatifError
from whatif.models.layers.segments import RECOMPUTED_NAME, repeated_blocks, segments
from whatif.prediction.predict import Baseline

RESNET = "resnet18_cifar_cpu.json.gz"


def gpu_steps(folder: Path, **metadata: Any) -> TaskGraph:
    """Four GPU-bound steps of two layers: forward 200 us each, backward 300 us each, an update of 50 us, one stream."""
    events: list[Event] = []
    for i in range(4):
        at, corr = 2000 * i, 100 * i + 1
        events += [mark(f"ProfilerStep#{i}", at, 2000), mark("whatif::layer::net", at, 90)]
        for k in range(2):
            start = at + 5 + 40 * k
            events += [
                mark(f"whatif::layer::net.{k}", start, 38), mark(f"whatif::layer::net.{k}.fc", start + 2, 34),
                op("aten::mm", start + 3, 30, **{"Sequence number": 10 * i + k}),
                *launched("sgemm", start + 8, 5, at + 50 + 200 * k, 200, corr + k),
            ]  # fmt: skip
        for k in (1, 0):
            start = at + 100 + 40 * (1 - k)
            events += [
                op("autograd::engine::evaluate_function: MmBackward0", start, 38, **{"Sequence number": 10 * i + k}),
                op("aten::mm", start + 3, 30, **{"Sequence number": 10 * i + k, "Fwd thread id": 1}),
                *launched("sgemm_bwd", start + 8, 5, at + 450 + 300 * (1 - k), 300, corr + 10 + k),
            ]
        events += [mark("Optimizer.step#SGD.step", at + 200, 40), op("aten::add_", at + 205, 20),
                   *launched("elementwise_kernel<add>", at + 208, 5, at + 1050, 50, corr + 20)]  # fmt: skip
    return read_events(folder, events, whatif={"version": 1, "batch_size": 4, **metadata})


def gpu_us(graph: TaskGraph, phase: Phase, step: int = 1) -> float:
    return float(graph.duration_ns[graph.on_gpu & (graph.phase == phase) & (graph.step == step)].sum()) / 1e3


def test_the_hand_made_step_is_what_it_should_be(tmp_path: Path) -> None:
    graph = gpu_steps(tmp_path)
    assert [gpu_us(graph, phase) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)] == [400, 600, 50]
    assert set(graph.layers) >= {"net", "net.0", "net.1", "net.0.fc", "net.1.fc"}


def test_batch_size_keeps_the_update_and_the_start_of_each_kernel(tmp_path: Path) -> None:
    graph = gpu_steps(tmp_path)
    doubled = whatif.apply(graph, "batch_size:factor=2").graph
    # 2 us of each kernel do not grow: 2 x (2 + 198 x 2) and 2 x (2 + 298 x 2).
    assert [gpu_us(doubled, p) for p in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)] == [796, 1196, 50]
    assert doubled.info.batch_size == 8
    assert (doubled.duration_ns[doubled.on_cpu] == graph.duration_ns[graph.on_cpu]).all()


@pytest.mark.parametrize("coalesces", [True, False])
def test_an_update_with_sparse_gradients_grows_with_the_batch(tmp_path: Path, coalesces: bool) -> None:
    """SparseAdam's update stayed as it was for twice the rows; samples may share rows, so the range includes that."""
    name = "aten::_coalesce" if coalesces else "aten::lerp_"
    graph = read_events(tmp_path, [
        mark("ProfilerStep#0", 0, 250), mark("Optimizer.step#SparseAdam.step", 40, 200), op(name, 50, 150),
        op("aten::linear", 0, 10, **{"Sequence number": 1}),
        op("AddmmBackward0", 15, 12, **{"Sequence number": 1, "Fwd thread id": 1}),
    ])  # fmt: skip
    doubled = whatif.apply(graph, "batch_size:factor=2").graph
    task, before = int(np.argmax(graph.duration_ns)), int(graph.duration_ns.max())
    assert doubled.names[doubled.name[task]] == name
    assert (doubled.duration_ns[task] > 1.9 * before) == coalesces
    assert doubled.low_ns[task] <= before


def test_the_samples_a_second_of_a_larger_batch_count_its_samples(tmp_path: Path) -> None:
    prediction = whatif.apply(gpu_steps(tmp_path), "batch_size:size=8")
    rates = prediction.to_dict()["samples_per_s"]
    assert rates["baseline"] == pytest.approx(4e3 / prediction.baseline_ms)
    assert rates["predicted"] == pytest.approx(8e3 / prediction.predicted_ms)


def test_accumulation_repeats_the_passes_and_adds_gradients(tmp_path: Path) -> None:
    gradients = [{"name": f"p{k}", "layer": "net", "bytes": 90_000_000} for k in range(2)]
    graph = gpu_steps(tmp_path, grad_ready_order=gradients)
    changed = whatif.apply(graph, "gradient_accumulation:passes=3").graph
    assert gpu_us(changed, Phase.FORWARD) == 1200
    assert gpu_us(changed, Phase.UPDATE) == 50
    # An unknown GPU moves 0.83 x 900 GB/s: 3 accesses of 180 MB take 723 us, twice.
    assert gpu_us(changed, Phase.BACKWARD) == pytest.approx(1800 + 2 * 540e6 / (0.83 * 900e3), abs=0.01)
    assert changed.info.batch_size == 12
    assert whatif.apply(graph, "gradient_accumulation:passes=1").graph is graph


def test_every_later_pass_adds_a_layers_gradient_after_its_backward_work(tmp_path: Path) -> None:
    """All were added after the last pass; recordings show AccumulateGrad's addition in each pass but the first."""
    gradients = [{"name": f"{k}.weight", "layer": f"net.{k}.fc", "bytes": 90_000_000} for k in (1, 0)]
    changed = whatif.apply(gpu_steps(tmp_path, grad_ready_order=gradients), "gradient_accumulation:passes=3").graph
    backward = np.flatnonzero(changed.on_gpu & (changed.step == 1) & (changed.phase == Phase.BACKWARD))
    found = [f"{changed.names[changed.name[t]].split(' ')[0]} {changed.layers[changed.layer[t]]}" for t in backward]
    later = ["sgemm_bwd net.1.fc", "add net.1.fc", "sgemm_bwd net.0.fc", "add net.0.fc"]
    assert found == ["sgemm_bwd net.1.fc", "sgemm_bwd net.0.fc", *later, *later]


def test_accumulation_says_when_the_gradients_are_unknown(tmp_path: Path) -> None:
    prediction = whatif.apply(gpu_steps(tmp_path), "gradient_accumulation")
    assert any("gradients" in warning for warning in prediction.warnings)


def test_checkpointing_runs_the_forward_pass_of_each_segment_again(tmp_path: Path) -> None:
    graph = gpu_steps(tmp_path)
    changed = whatif.apply(graph, "activation_checkpoint").graph
    again = changed.select(name=r"^recomputed") & changed.on_gpu & (changed.step == 1)
    assert changed.duration_ns[again].tolist() == [200_000, 200_000]
    # Before the backward work of its own segment: layer net.1 first, as the backward pass goes.
    order = np.flatnonzero(changed.on_gpu & (changed.step == 1))
    found = [(changed.names[changed.name[t]].split(" ")[0], changed.layers[changed.layer[t]]) for t in order]
    assert found[2:6] == [("recomputed", "net.1.fc"), ("sgemm_bwd", "net.1.fc"), ("recomputed", "net.0.fc"),
                          ("sgemm_bwd", "net.0.fc")]  # fmt: skip
    # The CPU bounds the step (2,000 us against 1,050), so what it costs is 2 x 38 us of launching.
    assert whatif.apply(graph, "activation_checkpoint").predicted_ms == pytest.approx(2.076)
    # Ten times faster it is ahead, and the GPU's 2 x 200 us count.
    fast = [whatif.apply(graph, "scale:kind=cpu,factor=0.1", *more) for more in ((), ("activation_checkpoint",))]
    assert fast[1].predicted_ms - fast[0].predicted_ms == pytest.approx(0.4, abs=0.002)


def test_checkpointing_what_is_named(tmp_path: Path) -> None:
    graph = gpu_steps(tmp_path)
    one = whatif.apply(graph, r"activation_checkpoint:layers=net\.1").graph
    assert (one.select(name="^recomputed") & one.on_gpu & (one.step == 1)).sum() == 1
    with pytest.raises(WhatifError, match="layers named"):
        whatif.apply(graph, "activation_checkpoint:layers=nosuch")


def test_what_the_recorded_run_recomputes_is_not_recomputed_again(own_traces: Path) -> None:
    recorded = own_traces / "campaign_cpu" / "resnet50--checkpoint.trace.json.gz"
    prediction = whatif.apply(whatif.read(recorded), "activation_checkpoint")
    assert prediction.predicted_ms == prediction.baseline_ms
    assert any("nothing changes" in note for note in prediction.notes)


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [
        (("", "layer1", "layer1.0", "layer1.0.conv", "layer1.1", "layer1.1.conv"), ["layer1.0", "layer1.1"]),
        (("", "h.0", "h.0.mlp.0", "h.0.mlp.0.x", "h.0.mlp.1", "h.0.mlp.1.x", "h.1", "h.1.a"), ["h.0", "h.1"]),
        (("", "features.0", "features.1"), []),
        (("", "fc1", "fc1.weight_norm"), []),
    ],
)
def test_blocks_are_the_outermost_numbered_layers_that_repeat(layers: tuple[str, ...], blocks: list[str]) -> None:
    assert repeated_blocks(layers) == blocks


def test_segments_do_not_lie_in_one_another(own_traces: Path) -> None:
    graph = whatif.read(own_traces / RESNET)
    chosen = segments(graph, "blocks.*")
    assert not any(a != b and a.startswith(b + ".") for a in chosen for b in chosen)


@pytest.mark.parametrize(
    "spec", ["batch_size:factor=2", "gradient_accumulation:passes=2", "activation_checkpoint", "batch_norm_eval",
             "channels_last"],
)  # fmt: skip
def test_on_a_real_recording(own_traces: Path, spec: str) -> None:
    graph = whatif.read(own_traces / RESNET)
    prediction = whatif.apply(graph, spec)
    assert prediction.low_ms <= prediction.predicted_ms <= prediction.high_ms
    slower = spec.split(":")[0] in ("batch_size", "gradient_accumulation", "activation_checkpoint")
    assert (prediction.predicted_ms > prediction.baseline_ms) == slower
    update = graph.select(phase=Phase.UPDATE) & graph.on_cpu
    new_update = prediction.graph.select(phase=Phase.UPDATE) & prediction.graph.on_cpu
    before = Baseline.of(graph).graph
    assert prediction.graph.duration_ns[new_update].sum() == before.duration_ns[update].sum()


def test_recomputed_time_is_the_forward_time_of_the_blocks(own_traces: Path) -> None:
    graph = whatif.read(own_traces / RESNET)
    changed = whatif.load_transform(r"activation_checkpoint:layers=blocks\.3")(graph)
    again = changed.select(name=RECOMPUTED_NAME.replace("(", r"\(").replace(")", r"\)"))
    inside = graph.select(layer=r"^blocks\.3(\.|$)", phase=Phase.FORWARD) & graph.on_cpu & (graph.step >= 0)
    assert again.sum() == inside.sum()
    assert changed.duration_ns[again].sum() == graph.duration_ns[inside].sum()


@pytest.mark.parametrize(
    "spec",
    ["batch_size", "batch_size:factor=0", "batch_size:factor=nan", "batch_size:factor=1,size=2", "batch_size:size=0",
     "gradient_accumulation:passes=0", "gradient_accumulation:passes=100000", "activation_checkpoint:layers=(",
     "data_loading:workers=0", "data_loading:workers=-1", "data_loading:workers=2,time_ms=3",
     f"data_loading:workers={10**400}", f"batch_size:size={10**400}", f"gradient_accumulation:passes={10**400}"],
)  # fmt: skip
def test_options_that_make_no_sense_are_one_sentence(own_traces: Path, spec: str) -> None:
    with pytest.raises(WhatifError) as error:
        whatif.apply(whatif.read(own_traces / "resnet18_cifar_cpu_loader0.json.gz"), spec)
    assert "\n" not in str(error.value)


def test_inference_has_nothing_to_accumulate(tmp_path: Path) -> None:
    events = [op("aten::mm", 10 * i, 8) for i in range(5)]
    with pytest.raises(WhatifError, match="backward"):
        whatif.apply(read_events(tmp_path, events), "gradient_accumulation")


def test_workers_share_the_cores_that_training_leaves(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "resnet18_cifar_cpu_loader0.json.gz")
    one, two = (whatif.apply(graph, f"data_loading:workers={n}") for n in (1, 2))
    assert two.predicted_ms == one.predicted_ms  # both fit behind the rest of the step
    assert json.dumps(two.to_dict())
    loading = two.graph.select(kind=TaskKind.DATA_LOADING)
    assert (
        0
        < two.graph.duration_ns[loading].sum()
        < 0.1 * graph.duration_ns[graph.select(kind=TaskKind.DATA_LOADING)].sum()
    )


# -- several what-ifs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["channels_last", "batch_norm_eval", "activation_checkpoint"])
def test_what_is_done_already_is_not_done_again(own_traces: Path, spec: str) -> None:
    graph = whatif.read(own_traces / RESNET)
    once, twice = whatif.apply(graph, spec), whatif.apply(graph, spec, spec)
    assert (twice.predicted_ms, twice.low_ms, twice.high_ms) == (once.predicted_ms, once.low_ms, once.high_ms)
    assert any("nothing changes" in note for note in twice.warnings)


def doubt(graph: TaskGraph) -> TaskGraph:
    return graph.scale(graph.on_gpu, 1.0, low=0.5, high=2.0)


@pytest.mark.parametrize("spec", ["batch_size:factor=2", "gradient_accumulation:passes=2", "amp:target=bf16"])
def test_a_range_that_was_there_before_stays(tmp_path: Path, spec: str) -> None:
    changed = whatif.apply(gpu_steps(tmp_path), doubt, spec).graph
    passes = changed.select(name="^sgemm")
    assert (changed.low_ns[passes] < 0.6 * changed.duration_ns[passes]).all()
    assert (changed.high_ns[passes] > 1.8 * changed.duration_ns[passes]).all()


def test_a_recomputed_kernel_is_as_uncertain_as_the_first_one(tmp_path: Path) -> None:
    changed = whatif.apply(gpu_steps(tmp_path), doubt, "activation_checkpoint").graph
    again = changed.on_gpu & changed.select(name="^recomputed")
    assert set(changed.low_ns[again].tolist()) == {100_000}
    assert set(changed.high_ns[again].tolist()) == {400_000}


@pytest.mark.parametrize("spec", ["batch_size:factor=2", "gradient_accumulation:passes=2"])
def test_the_known_work_grows_with_the_samples(tmp_path: Path, spec: str) -> None:
    graph = gpu_steps(tmp_path)
    products = graph.select(name="^sgemm$")
    graph = graph.replace(flops=np.where(graph.on_gpu, 10**9, -1), size_bytes=np.where(products, 10**6, -1))
    changed = whatif.apply(graph, spec).graph
    for name, column in (("^sgemm", "flops"), ("^sgemm$", "size_bytes")):
        before, after = (int(getattr(one, column)[one.select(name=name).mask].sum()) for one in (graph, changed))
        assert after == 2 * before > 0
    assert set(changed.size_bytes[changed.select(name="^sgemm_bwd$")].tolist()) == {-1}
    assert set(changed.flops[changed.on_gpu & changed.select(phase=Phase.UPDATE)].tolist()) == {10**9}


def test_casts_to_half_come_before_or_after_a_checkpoint(own_traces: Path) -> None:
    graph = whatif.read(own_traces / RESNET)
    one = whatif.apply(graph, "amp", "activation_checkpoint").predicted_ms
    other = whatif.apply(graph, "activation_checkpoint", "amp").predicted_ms
    assert other == pytest.approx(one, rel=0.03)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_added_gradients_are_as_large_for_any_batch_and_format(tmp_path: Path, own_traces: Path, on_gpu: bool) -> None:
    rows = [{"name": "p", "layer": "net", "bytes": 90_000_000}]
    graph = gpu_steps(tmp_path, grad_ready_order=rows) if on_gpu else whatif.read(own_traces / RESNET)
    if not on_gpu:
        graph = with_metadata(graph, grad_ready_order=rows)
    accumulated = whatif.apply(graph, "gradient_accumulation:passes=2").graph
    before = accumulated.duration_ns[accumulated.select(name="^add gradients")].tolist()
    assert before
    for spec in ("batch_size:factor=4", "amp:target=bf16"):
        changed = whatif.apply(graph, "gradient_accumulation:passes=2", spec).graph
        assert changed.duration_ns[changed.select(name="^add gradients")].tolist() == before


def test_launching_the_copy_of_a_batch_costs_what_it_costs(tmp_path: Path) -> None:
    """A loader launches a kernel in 10 of its 50 us; a quarter of the batch loads in a quarter of the other 40."""
    events: list[Event] = []
    for i in range(5):
        at = 1000 * i
        events += [
            mark(f"ProfilerStep#{i}", at, 1000), mark("enumerate(DataLoader)#mine", at, 50),
            mark("Optimizer.step#SGD.step", at + 900, 20),
            *launched("normalize", at + 20, 10, at + 32, 60, 10 * i + 1), copy("HtoD", at + 100, 40, 10 * i + 2),
            call("cudaMemcpyAsync", at + 60, 5, 10 * i + 2),
            op("aten::mm", at + 200, 30), *launched("sgemm", at + 210, 5, at + 220, 300, 10 * i + 3),
        ]  # fmt: skip
    graph = read_events(tmp_path, events)
    changed = whatif.apply(graph, "batch_size:factor=0.25").graph
    launches = graph.launch_of[graph.select(name="normalize")]
    assert (changed.duration_ns[launches] == 10_000).all()
    loading = graph.on_cpu & (graph.phase == Phase.DATA) & (graph.step == 1)
    assert graph.duration_ns[loading].sum() == 50_000
    assert changed.duration_ns[loading].sum() == 10_000 + 40_000 / 4


def test_recomputation_runs_beside_collectives_and_not_among_them(tmp_path: Path) -> None:
    """The backward pass of a layer begins with a collective on stream 9, whose forward one is not repeated."""
    events: list[Event] = []
    for i in range(4):
        at, corr = 2000 * i, 100 * i + 1
        events.append(mark(f"ProfilerStep#{i}", at, 2000))
        for k in range(2):
            start = at + 5 + 60 * k
            events += [
                mark(f"whatif::layer::net.{k}", start, 50), mark(f"whatif::layer::net.{k}.fc", start + 2, 45),
                op("aten::mm", start + 3, 40, **{"Sequence number": 10 * i + k}),
                call("cudaLaunchKernel", start + 5, 5, corr + k),
                kernel("ncclKernel_AllGather", at + 70 + 200 * k, 90, corr + k, stream=9),
                *launched("sgemm", start + 20, 5, at + 180 + 200 * k, 100, corr + 10 + k),
            ]  # fmt: skip
        for k in (1, 0):
            start = at + 200 + 60 * (1 - k)
            events += [
                op("autograd::engine::evaluate_function: MmBackward0", start, 50, **{"Sequence number": 10 * i + k}),
                call("cudaLaunchKernel", start + 5, 5, corr + 20 + k),
                kernel("ncclKernel_AllGather", at + 500 + 300 * (1 - k), 90, corr + 20 + k, stream=9),
                *launched("sgemm_bwd", start + 20, 5, at + 600 + 300 * (1 - k), 150, corr + 30 + k),
            ]
    graph = read_events(tmp_path, events)
    changed = whatif.apply(graph, "activation_checkpoint").graph
    again = np.flatnonzero(changed.select(name="^recomputed") & changed.on_gpu & (changed.step == 1))
    assert changed.duration_ns[again].tolist() == [100_000, 100_000]
    assert {changed.threads[thread].stream for thread in changed.thread[again].tolist()} == {7}
    behind = changed.neighbours[1][again]
    assert [changed.names[changed.name[task]] for task in behind.tolist()] == ["sgemm_bwd", "sgemm_bwd"]


def test_layers_that_are_classes_are_reported(tmp_path: Path) -> None:
    events: list[Event] = []
    for i in range(4):
        at = 1000 * i
        events += [
            mark(f"ProfilerStep#{i}", at, 1000), mark("whatif::layer::Block_0", at, 100),
            op("aten::mm", at + 10, 80, **{"Sequence number": i}),
            op("autograd::engine::evaluate_function: MmBackward0", at + 300, 100, **{"Sequence number": i}),
        ]  # fmt: skip
    prediction = whatif.apply(read_events(tmp_path, events), "activation_checkpoint:layers=Block_.*")
    assert any("by class" in warning for warning in prediction.warnings)


def test_an_inference_has_nothing_to_recompute(tmp_path: Path) -> None:
    events = [mark("whatif::layer::net.0", 0, 50), op("aten::mm", 5, 40)]
    prediction = whatif.apply(read_events(tmp_path, events), r"activation_checkpoint:layers=net\.0")
    assert any("nothing changes" in warning for warning in prediction.warnings)
    assert not any("segments" in warning for warning in prediction.warnings)


def test_workers_hide_what_fits_behind_the_changed_step(own_traces: Path) -> None:
    """A twentieth of the machine's pace: one loader then has time for its batch, which takes as long as recorded."""
    graph = whatif.read(own_traces / "resnet18_cifar_cpu_loader0.json.gz")

    def slow_loading(graph: TaskGraph) -> TaskGraph:
        return graph.scale(graph.select(kind=TaskKind.DATA_LOADING), 20.0)

    def slow_training(graph: TaskGraph) -> TaskGraph:
        return graph.scale(graph.on_cpu & ~graph.select(kind=TaskKind.DATA_LOADING), 20.0)

    waiting, hidden = (
        next(note for note in whatif.apply(graph, *changes, "data_loading:workers=1").warnings if "ms now" in note)
        for changes in ((slow_loading,), (slow_loading, slow_training))
    )
    assert not waiting.endswith("1.5 ms now")
    assert hidden.endswith("1.5 ms now")
