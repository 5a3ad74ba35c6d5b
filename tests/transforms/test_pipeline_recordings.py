"""Pipelines of real recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.helpers import baseline_of
from whatif.models.parallel.stages import model_of
from whatif.prediction.predict import Baseline
from whatif.simulation.transfers import cpu_work_of, latency_of, of_activations, workers_of

CPU_RECORDINGS = [
    ("resnet18_cifar_cpu.json.gz", 8, 4_194_304),
    ("campaign_cpu_3/gpt2-small--baseline.trace.json.gz", 3, None),
    ("campaign_cpu_2/bert-large--baseline.trace.json.gz", 4, None),
]


@pytest.mark.parametrize(("name", "blocks", "first_map"), CPU_RECORDINGS)
def test_blocks_and_maps_of_real_models(own_traces: Path, name: str, blocks: int, first_map: int | None) -> None:
    graph = baseline_of(own_traces / name).graph
    model = model_of(graph)
    named = [graph.layers[code] for code in model.layer.tolist()]
    inside = {n.split(".")[0] + n.split(".")[1] for n in named if n.split(".")[0] in ("blocks", "layers") and "." in n}
    assert len(inside) == blocks
    for block in inside:  # each is one part
        assert len({int(p) for p, n in zip(model.part, named, strict=True) if "".join(n.split(".")[:2]) == block}) == 1
    if first_map:  # 32 images, 32 channels, 32 x 32, float32
        row = named.index("blocks.0.conv1")
        assert model.input_bytes[row] == first_map


def test_workers_that_share_blocks_send_a_part_each_and_gather_it(own_traces: Path) -> None:
    """Narayanan et al., SC 2021, section 4.1; with sequence parallelism they work on parts, and gather nothing."""
    graph = baseline_of(own_traces / "campaign_cpu/gpt2-small--baseline.trace.json.gz").graph
    pipeline = "pipeline:stages=3,micro_batches=6,bandwidth=1Gbps,latency_us=0"
    cut = "tensor_parallel:workers=2,bandwidth=1Gbps,latency_us=0"
    sizes, times_ms = [], []
    for specs in ((pipeline,), (cut, pipeline), (f"{cut},sequence_parallel=true", pipeline)):
        found = whatif.apply(graph, *specs).graph
        sent = np.flatnonzero((workers_of(found) == 2) & found.select(name="send"))
        sizes.append(set(found.size_bytes[sent].tolist()))
        times_ms.append(found.duration_ns[sent].mean() / 1e6)
    whole = 64 * 128 * 4
    assert sizes == [{whole}, {whole // 2}, {whole // 2}]
    # An all-gather is half of a sum, which is of six samples here.
    before = whatif.apply(graph, cut).graph
    one = np.flatnonzero(of_activations(before))[0]
    sum_ms, work_ms, messages_ms = (column[one] / 1e6 for column in (before.duration_ns, *cpu_work_of(before)))
    assert latency_of(before)[one] == 0 < messages_ms < work_ms < sum_ms
    # The network takes a sixth; the CPU sends as many messages.
    gathered_ms = max(sum_ms / 6, messages_ms + (work_ms - messages_ms) / 6) / 2
    assert times_ms == pytest.approx([2 * times_ms[2], times_ms[2] + gathered_ms, whole / 2 * 8 / 0.95e6], rel=1e-3)


@pytest.mark.parametrize(("name", "blocks", "first_map"), CPU_RECORDINGS)
def test_the_parts_of_a_real_step_add_up_to_it(own_traces: Path, name: str, blocks: int, first_map: int | None) -> None:
    """Two stages, one micro-batch, nothing sent: what is saved is the part of the update that runs beside the other."""
    baseline = baseline_of(own_traces / name)
    graph = baseline.graph
    found = whatif.apply(baseline, "pipeline:stages=2,micro_batches=1,activation_mb=0,latency_us=0")
    update = graph.on_cpu & (graph.phase == whatif.Phase.UPDATE) & (graph.step == graph.info.steady[0])
    n_spans = graph.info.n_steps if baseline.clock == "span" else 1
    saved_ms = n_spans * float(graph.duration_ns[update].sum()) / 1e6
    calls_ms = n_spans * 4 * 0.055
    assert baseline.step_ns / 1e6 - saved_ms - 0.02 * baseline.step_ns / 1e6 <= found.predicted_ms
    assert found.predicted_ms <= baseline.step_ns / 1e6 * 1.02 + calls_ms


@pytest.mark.parametrize(("name", "blocks", "first_map"), CPU_RECORDINGS)
def test_faster_links_and_more_stages_help_real_models(
    own_traces: Path, name: str, blocks: int, first_map: int | None
) -> None:
    baseline = baseline_of(own_traces / name)
    times = [
        whatif.apply(baseline, f"pipeline:stages=2,micro_batches=2,bandwidth={rate}").predicted_ms
        for rate in ("100Mbps", "1Gbps", "25Gbps")
    ]
    assert times == sorted(times, reverse=True)
    four = whatif.apply(baseline, "pipeline:stages=4,micro_batches=4")
    assert four.predicted_ms < baseline.step_ns / 1e6
    assert four.low_ms <= four.predicted_ms <= four.high_ms


def test_a_real_gpu_recording(shared_traces: Path) -> None:
    """ResNet-50 on a V100, which names no layers: four stages take the 98 ms of kernels together."""
    path = shared_traces / "kineto-resnet50-v100" / "num_workers_0.2021-06.pt.trace.json.gz"
    baseline = Baseline.of(whatif.read(path), calibrated=False)  # the host bounds it: no step runs ahead
    found = whatif.apply(baseline, "pipeline:stages=4,micro_batches=1,bandwidth=600GB/s")
    graph = found.graph
    kernels = graph.on_gpu & np.isin(graph.phase, [whatif.Phase.FORWARD, whatif.Phase.BACKWARD])
    busy_ns = [
        int(graph.duration_ns[kernels & (graph.thread == code)].sum())
        for code, thread in enumerate(graph.threads)
        if thread.name.endswith("GPU")
    ]
    recorded = baseline.graph.on_gpu & np.isin(baseline.graph.phase, [whatif.Phase.FORWARD, whatif.Phase.BACKWARD])
    lag_ns = max(thread.lag_ns for thread in baseline.graph.threads)
    assert sum(busy_ns) == pytest.approx(
        baseline.graph.duration_ns[recorded].sum() + lag_ns * int(recorded.sum()), rel=0.001
    )
    # A pipeline of one micro-batch does what one GPU did, one stage after the other.
    assert found.predicted_ms == pytest.approx(baseline.step_ns / 1e6, rel=0.06)


@pytest.mark.parametrize("what_if", ["pipeline:stages=4,micro_batches=4", "distributed:workers=4"])
def test_a_recorded_gpu_talks_over_its_usual_network(shared_traces: Path, what_if: str) -> None:
    """Four V100s are those of a DGX-1, whose NVLink is faster than the Ethernet between machines."""
    path = shared_traces / "kineto-resnet50-v100" / "num_workers_0.2021-06.pt.trace.json.gz"
    usual, inside, ethernet = (
        whatif.apply(baseline_of(path), f"{what_if}{network}").predicted_ms
        for network in ("", ",cluster=dgx-1", ",bandwidth=25Gbps")
    )
    assert usual == inside < ethernet
