"""Gradients of recordings that list none: by shapes, by the optimizer's thread blocks, by the memory of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.helpers import Event, extra_data, mark, op, read_events, replace
from tests.ingest.drawn import two_passes
from whatif import TaskGraph
from whatif.models.exchange.buckets import gradients_source, step_gradients
from whatif.models.layers.found_gradients import FoundGradients, accumulations, found_gradients
from whatif.models.layers.gradients import step_of, superseded

VGG13, RESNET50, RESNET18 = 133_047_848, 25_557_032, 11_689_512


def found(*parts: str) -> tuple[TaskGraph, FoundGradients]:
    graph = whatif.read(extra_data("traces", *parts))
    gradients = found_gradients(graph)
    assert gradients is not None
    return graph, gradients


def without_shapes(graph: TaskGraph) -> TaskGraph:
    return graph.replace(info=replace(graph.info, gradient_bytes=(), memory=None))


@pytest.mark.parametrize(
    ("parts", "tensors", "numbers"),
    [
        (("triosim-vgg13-h100", "vgg13_bs512_adam.json.gz"), 26, VGG13),
        (("kineto-resnet50-v100", "num_workers_0.2021-06.pt.trace.json.gz"), 161, RESNET50),
        (("kineto-resnet50-v100", "num_workers_0.2020-12.pt.trace.json.gz"), 161, RESNET50),
    ],
)
def test_shapes_give_gradients_exactly(parts: tuple[str, ...], tensors: int, numbers: int) -> None:
    graph, gradients = found(*parts)
    assert (len(gradients.size_bytes), int(gradients.size_bytes.sum())) == (tensors, 4 * numbers)
    assert (gradients.low, gradients.high) == (1, 1)
    # The optimizer's kernels of the same recording are within 1 %, and their range holds the truth.
    blocks = found_gradients(without_shapes(graph))
    assert blocks is not None
    total = float(blocks.size_bytes.sum())
    assert total == pytest.approx(4 * numbers, rel=0.01)
    assert blocks.low * total <= 4 * numbers <= blocks.high * total


def test_the_optimizers_chunks_hold_every_parameter() -> None:
    _, gradients = found("param-2080ti", "resnet_kineto.json.gz")
    total = int(gradients.size_bytes.sum()) / 4
    assert len(gradients.size_bytes) == 62
    assert total == pytest.approx(RESNET18, rel=0.02)
    assert gradients.low * total <= RESNET18 <= gradients.high * total


def test_a_gradient_is_ready_with_the_work_that_was_launched_before_its_operator() -> None:
    graph, gradients = found("kineto-resnet50-v100", "num_workers_0.2021-06.pt.trace.json.gz")
    rows = step_gradients(graph, None, "test")
    assert len(rows.task) == 161 * graph.info.n_steps
    assert (step_of(graph)[rows.task] == rows.step).all()
    first = rows.step == 0
    assert (np.diff(rows.task[first]) >= 0).all()
    assert rows.size_bytes[first].tolist() == gradients.size_bytes.tolist()
    # The classifier's gradients finish first, those of the first convolution last.
    assert rows.size_bytes[first][:2].tolist() == [4 * 1000, 4 * 2048 * 1000]
    assert rows.size_bytes[first][-1] == 4 * 64 * 3 * 7 * 7


ZEROED, STEPPED = mark("Optimizer.zero_grad#SGD.zero_grad", 37, 2), mark("Optimizer.step#Adam.step", 31, 6)


@pytest.mark.parametrize(
    ("between", "update_us", "begins_us"),
    [([], 80, 50), ([ZEROED], 80, 50), ([], 31, 50), ([STEPPED], 80, 10)],
    ids=["accumulation", "moved weights", "closure", "two optimizers"],
)
def test_gradients_are_exchanged_in_the_last_pass_before_the_update(
    tmp_path: Path, between: list[Event], update_us: float, begins_us: int
) -> None:
    """An even spread began in the first of two passes. A recorder counts the samples of SAM once."""
    graph = read_events(tmp_path, two_passes([op("aten::sub_", 32, 4), *between], update_us))
    graph = graph.replace(info=replace(graph.info, passes=1))
    rows = step_gradients(graph, 4.0, "test")
    assert graph.start_ns[rows.task].min() // 1000 == begins_us
    accumulated = accumulations(graph, step_of(graph))
    assert len(accumulated) == (1 if begins_us == 50 else 2)


def test_the_forward_work_of_another_rank_ends_no_pass(own_traces: Path) -> None:
    assert not superseded(whatif.read(own_traces / "ranks_cpu" / "even")).any()


STOCK = [
    "triosim-vgg13-h100/vgg13_bs512_adam.json.gz",
    *(f"kineto-resnet50-v100/num_workers_{n}.{d}.pt.trace.json.gz" for n in (0, 4) for d in ("2020-12", "2021-06")),
    "param-2080ti/linear_kineto.json.gz",
    "param-2080ti/resnet_kineto.json.gz",
    "hta/mi250_minitoy_train.json.gz",
    "hta/step_based_gp100.json.gz",
    "edls-a4000/torch_profiler_trace.json.gz",
]


@pytest.mark.parametrize("name", STOCK)
def test_every_stock_training_trace_of_one_worker_trains_on_eight(name: str) -> None:
    graph = whatif.read(extra_data("traces", name))
    base = whatif.apply(graph)
    for what_if in ("distributed", "zero", "fsdp"):
        answer = whatif.apply(graph, f"{what_if}:workers=8,bandwidth=25Gbps")
        assert answer.predicted_ms > base.predicted_ms
        assert any("the batch is per worker (8 workers)" in note for note in answer.notes)


def test_an_uncertain_sum_widens_the_range_of_the_transfer() -> None:
    graph, gradients = found("param-2080ti", "linear_kineto.json.gz")
    guessed = whatif.apply(graph, "distributed:workers=8,bandwidth=5Gbps")
    exact_mb = float(gradients.size_bytes.sum()) / 1e6
    exact = whatif.apply(graph, f"distributed:workers=8,bandwidth=5Gbps,gradient_mb={exact_mb}")
    assert guessed.high_ms - guessed.low_ms > exact.high_ms - exact.low_ms
    assert gradients_source(graph, None).startswith("the thread blocks of the optimizer's kernels (-3.2 to +9.7 %)")
    assert gradients_source(graph, exact_mb) == ""


def test_a_second_pass_adds_the_found_gradients_to_its_own() -> None:
    """They were added in no time, as if the trace had none."""
    name = "triosim-vgg13-h100/vgg13_bs512_adam.json.gz"
    answer = whatif.apply(whatif.read(extra_data("traces", name)), "gradient_accumulation:passes=2")
    assert answer.notes[-1] == "532.2 MB of gradients are added up (by the shapes of 26 AccumulateGrad operators)"
    added = answer.graph.select(name=r"add gradients.*").ids
    assert len(added) == 1
    # Two reads and a write of all of them, at 0.91 of the H100's 3,350 GB/s.
    assert answer.graph.duration_ns[added[0]] == pytest.approx(3 * 4 * VGG13 / (0.91 * 3_350), rel=0.01)


def test_a_recording_of_this_project_keeps_its_own_list(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "transformer_cpu.json.gz")
    listed = [row.size_bytes for row in graph.info.recorded.gradients]
    assert gradients_source(graph, None) == ""
    # Autograd's operators say the same.
    assert sum(graph.info.gradient_bytes) == sum(size for size in listed if size)
