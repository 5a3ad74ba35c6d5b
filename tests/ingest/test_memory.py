"""The memory of a step in recordings drawn by hand, from their allocations and from their shapes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import mark, op, read_events, replace
from tests.memory_steps import attention, slow_peak, totals
from tests.memory_traces import METADATA, NODE, Allocator, shaped, two_linear_layers
from whatif import WhatifError
from whatif.graph.memory import peak
from whatif.ingest.kept_tensors import Kept, kept_by
from whatif.models.layers.memory_effects import with_batch, without_scores
from whatif.questions.memory_summary import memory_of

TRACES = Path(__file__).parents[2] / "traces" / "profiler_cost_cpu"


def test_allocations_of_the_drawn_step_are_split(tmp_path: Path) -> None:
    memory = read_events(tmp_path, two_linear_layers(), whatif=METADATA).info.memory
    assert memory is not None
    assert memory.source == "allocations"
    assert (memory.parameters, memory.optimizer_state, memory.inputs) == (240, 480, 80)
    assert [(row.name, row.activations, row.gradients) for row in memory.layers] == [
        ("fc1", 0, 160), ("relu", 400, 0), ("fc2", 40, 80),
    ]  # fmt: skip
    assert [(row.forward_workspace, row.backward_workspace) for row in memory.layers] == [
        (400, 400),
        (400, 800),
        (0, 400),
    ]
    assert memory.update_workspace == 240
    # Resident 800; the levels drawn in two_linear_layers.
    assert totals(memory) == [1200, 1600, 1240, 1720, 2080, 1440, 1280]
    assert not memory.gradients_stay
    assert not memory.gradients_in_forward


def test_gradients_zeroed_late_are_seen_in_the_forward_pass(tmp_path: Path) -> None:
    memory = read_events(tmp_path, two_linear_layers(zero_at=190), whatif=METADATA).info.memory
    assert memory is not None
    assert memory.gradients_in_forward
    assert totals(memory) == [1440, 1840, 1480, 1720, 2080, 1440, 1280]


@pytest.mark.parametrize(("zero_at", "late"), [(5, False), (90, False), (190, True), (520, False)])
def test_where_gradients_are_zeroed_is_seen_without_allocations(tmp_path: Path, zero_at: float, late: bool) -> None:
    """The forward pass of a usual loop, zero_grad right before backward, seemed to have no gradients."""
    events = two_linear_layers(allocations=False, shapes=True, zero_at=zero_at)
    memory = read_events(tmp_path, events, whatif=METADATA).info.memory
    assert memory is not None
    assert memory.source == "shapes"
    assert memory.gradients_in_forward is late
    forward = next(iter(totals(memory)))
    assert forward == next(iter(totals(replace(memory, gradients_in_forward=False)))) + late * memory.gradients


def test_a_batch_that_each_step_makes_counts_once(tmp_path: Path) -> None:
    """It was among what a CPU's steps hold all the while, and among what they allocate."""
    batches = Allocator()
    for number in range(3):
        batches.take(f"x{number}", 1000 * number + 7, 80)
        if number:
            batches.give(f"x{number - 1}", 1000 * number + 8)
    for event in batches.events:
        event["args"]["Addr"] += 1 << 20
    plain, memory = (
        read_events(tmp_path, [*two_linear_layers(), *more], whatif=METADATA).info.memory
        for more in ([], batches.events)
    )
    assert plain is not None
    assert memory == plain


def test_a_gpu_states_what_it_holds_beside_the_model(tmp_path: Path) -> None:
    """Its allocator holds 5,000 bytes before the first step, and all that the step itself holds beside them."""
    memory = read_events(tmp_path, two_linear_layers(device_type=1, held=5000), whatif=METADATA).info.memory
    assert memory is not None
    assert memory.inputs == 5000 - 240 - 480
    # All but the batch of 80 stays when that grows.
    assert with_batch(memory, 2).inputs == memory.inputs + 80
    assert peak(memory).total == 5000 + 1280


def test_allocations_without_addresses_are_not_used(tmp_path: Path) -> None:
    graph = read_events(tmp_path, two_linear_layers(with_address=False), whatif=METADATA)
    assert graph.info.memory is None
    assert not graph.info.quirks


def test_shapes_of_the_drawn_step_are_counted(tmp_path: Path) -> None:
    """The batch of 5 x 4 is there anyway; relu keeps its result, which fc2 needs as well, and nothing else is kept."""
    events = two_linear_layers(allocations=False, shapes=True)
    memory = read_events(tmp_path, events, whatif=METADATA).info.memory
    assert memory is not None
    assert memory.source == "shapes"
    assert [(row.name, row.activations, row.gradients) for row in memory.layers] == [
        ("fc1", 0, 160), ("relu", 200, 0), ("fc2", 0, 80),
    ]  # fmt: skip
    # Results that nobody keeps; in the backward pass the gradients of each result and each input.
    assert [row.forward_workspace for row in memory.layers] == [200, 0, 40]
    assert [row.backward_workspace for row in memory.layers] == [200 + 80, 200 + 200, 40 + 200]
    assert [row.input for row in memory.layers] == [80, 200, 200]
    assert [row.weights for row in memory.layers] == [160, 0, 80]
    # Under autocast fc1 would keep a copy of the batch as well.
    assert [row.copied for row in memory.layers] == [80, 0, 0]


def test_a_weight_that_is_transposed_first_is_not_what_flows_in(tmp_path: Path) -> None:
    """A linear layer whose operators alone are recorded: cast, transpose, product."""
    events = two_linear_layers(allocations=False, shapes=True)
    weight = shaped([10, 4])
    for step in range(3):
        events += [op("aten::to", 1000 * step + 10.5, 0.4, **weight), op("aten::t", 1000 * step + 11, 0.5, **weight)]
    memory = read_events(tmp_path, sorted(events, key=lambda event: event["ts"]), whatif=METADATA).info.memory
    assert memory is not None
    assert [row.input for row in memory.layers] == [80, 200, 200]


def test_with_both_allocations_decide_and_shapes_add_what_they_know(tmp_path: Path) -> None:
    both = read_events(tmp_path, two_linear_layers(shapes=True), whatif=METADATA).info.memory
    recorded = read_events(tmp_path, two_linear_layers(), whatif=METADATA).info.memory
    assert both is not None
    assert recorded is not None
    assert totals(both) == totals(recorded)
    assert [row.weights for row in both.layers] == [160, 0, 80]


def test_a_compiled_step_is_known_by_allocations_alone(tmp_path: Path) -> None:
    region = mark("Torch-Compiled Region: 0/0", 11, 38)
    shapes = [*two_linear_layers(allocations=False, shapes=True), region]
    assert read_events(tmp_path, shapes, whatif=METADATA).info.memory is None
    assert read_events(tmp_path, [*two_linear_layers(), region], whatif=METADATA).info.memory is not None


def test_what_gradients_of_gradients_need_is_known_by_allocations_alone(tmp_path: Path) -> None:
    """A forward pass shows nothing of it: of a step of MAML 1.9 of 18 MiB were found, and 2.0 at most."""
    numbers = [{"Sequence number": 10 * step + 3, "Fwd thread id": 0} for step in range(3)]
    again = [op("aten::sum", 1000 * step + 205, 30, **each) for step, each in enumerate(numbers)]
    graph = read_events(tmp_path, [*two_linear_layers(allocations=False, shapes=True), *again], whatif=METADATA)
    assert graph.info.memory is None
    with pytest.raises(WhatifError, match=r"differentiates its gradients again.*collect --memory"):
        memory_of(graph)
    assert read_events(tmp_path, [*two_linear_layers(), *again], whatif=METADATA).info.memory is not None


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("allocations", [False, True])
def test_the_forward_work_ahead_of_a_pass_through_another_part_counts(
    tmp_path: Path, accumulates: bool, allocations: bool
) -> None:
    """The generator's work before the discriminator's pass, or before autograd.grad, was in no answer."""
    back, batch = {"Fwd thread id": 1}, shaped([5, 4])
    finished = "torch::autograd::AccumulateGrad"
    other = [
        each
        for at in (0, 1000, 2000)
        for each in (
            op("aten::tanh", at + 155, 5, **{"Sequence number": at // 100 + 3}, **batch),
            op(NODE + "TanhBackward0", at + 165, 8, **{"Sequence number": at // 100 + 3}, **back),
            *([op(finished, at + 175, 3)] if accumulates else []),
            op("aten::neg", at + 185, 5, **{"Sequence number": at // 100 + 4}, **batch),
            op(NODE + "NegBackward0", at + 198, 1, **{"Sequence number": at // 100 + 4}, **back),
            op(finished, at + 341, 1),
        )
    ]
    drawn = two_linear_layers(allocations=allocations, shapes=not allocations)
    plain, memory = (read_events(tmp_path, [*drawn, *more], whatif=METADATA).info.memory for more in ([], other))
    assert plain is not None
    assert memory is not None
    assert memory.gradients_stay is accumulates
    kept = [{row.name: row.activations for row in found.layers if row.name} for found in (plain, memory)]
    assert kept[0] == kept[1]
    assert sum(row.activations for row in memory.layers if not row.name) == 0


def test_what_a_gpu_holds_does_not_grow_with_the_batch_where_nobody_states_parameters(tmp_path: Path) -> None:
    memory = read_events(tmp_path, two_linear_layers(device_type=1, held=5000)).info.memory
    assert memory is not None
    assert (memory.parameters, memory.inputs) == (0, 5000)
    # 400 of activations and 800 of workspace are twice as many, 80 of gradients stay.
    assert (peak(memory).total, peak(with_batch(memory, 2)).total) == (5000 + 1280, 5000 + 2480)


def test_scores_of_an_attention_are_recognized_by_shapes(tmp_path: Path) -> None:
    memory = read_events(tmp_path, attention()).info.memory
    assert memory is not None
    assert [(row.activations, row.scores) for row in memory.layers] == [(2 * 96 + 120 + 72 + 18 + 72, 72 + 18 + 72)]
    assert [row.activations for row in without_scores(memory).layers] == [2 * 96 + 120]


def test_a_softmax_that_no_product_takes_makes_no_scores(tmp_path: Path) -> None:
    memory = read_events(tmp_path, attention(taken=False)).info.memory
    assert memory is not None
    assert [row.scores for row in memory.layers] == [0]


def test_parts_that_are_written_keep_the_whole_and_copies_what_was_there(tmp_path: Path) -> None:
    """A GRUCell's gates: of 12.8 MiB that a loop over one needs, 5.1 were found, and of an LSTMCell's 13.2, 8.2."""
    split = {**shaped([4, 24], [], []), "Concrete Inputs": ["", "8", "1"]}
    forward = [
        ("aten::addmm", 10, 8, shaped([24], [4, 6], [6, 24])),
        ("aten::unsafe_split", 20, 8, split),
        ("aten::sigmoid_", 30, 8, shaped([4, 8])),
        ("aten::sigmoid_", 40, 8, shaped([4, 8])),
        ("aten::mul_", 50, 8, shaped([4, 8], [4, 8])),
        ("aten::clone", 53, 2, shaped([4, 8])),
    ]
    events = [mark("ProfilerStep#0", 0, 1000), mark("whatif::layer::cell", 5, 60)]
    for number, (name, ts, dur, shapes) in enumerate(forward):
        events.append(op(name, ts, dur, **{"Sequence number": number}, **shapes))
        back = {"Sequence number": number, "Fwd thread id": 1}
        events.append(op(f"{NODE}{name[6:].strip('_').title()}Backward0", 500 - 10 * number, 8, **back))
    memory = read_events(tmp_path, [*events, mark("Optimizer.step#SGD.step", 600, 100)], whatif=METADATA).info.memory
    assert memory is not None
    assert sum(row.activations for row in memory.layers) == 4 * (4 * 6 + 4 * 24 + 4 * 8)


@pytest.mark.parametrize(
    ("name", "dims", "concrete", "kept"),
    [
        ("aten::convolution", [[2, 3, 8, 8], [4, 3, 3, 3], [4]], ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False"],
         Kept((1536,), output=2 * 4 * 6 * 6 * 4, weight=432, weight_element=4, input_gradients=1536, source=1536,
              half=True)),
        ("aten::max_pool2d_with_indices", [[2, 3, 8, 8]], ["", "[2, 2]", "[2, 2]", "[0, 0]", "[1, 1]", "False"],
         Kept((1536,), own=96 * 8, output=96 * 4, input_gradients=1536, source=1536)),
        ("aten::relu_", [[7, 5]], [""], Kept(keeps_output=True, in_place=True, input_gradients=140, source=140)),
        ("aten::split", [[4, 6, 9]], ["", "3", "2"], Kept((864,), parts=3, source=864)),
        ("aten::unsafe_split", [[4, 6, 9]], ["", "3", "2"], Kept((864,), parts=3, source=864)),
        ("aten::_to_copy", [[4, 6]], ["", "15"], Kept(output=48, reads=(96,), source=96)),
        ("aten::embedding", [[100, 8], [3, 5]], [], Kept(output=480, table=3200, source=3200, half=False)),
        ("aten::_safe_softmax", [[2, 5, 5], []], ["", "-1"],
         Kept(keeps_output=True, output=200, input_gradients=200, source=200, half=False, scores=True)),
        ("aten::_softmax", [[5, 5], []], ["", "-1"],
         Kept(keeps_output=True, output=100, input_gradients=100, source=100, half=False)),
        ("aten::mm", [[4, 6]], [], None),
        ("aten::mm", [[4], [6]], [], None),
        ("aten::frobnicate", [[4, 6]], [], None),
        ("aten::cat", [[[2, 3], [2, 5]], []], [], Kept(output=64, reads=(24, 40), input_gradients=64, source=24)),
        ("aten::cat", "damage", [], None),
    ],
)  # fmt: skip
def test_what_single_operators_keep(name: str, dims: Any, concrete: list[str], kept: Kept | None) -> None:
    assert kept_by(name, dims, ["float"] * 3, concrete) == kept


def test_factors_that_old_profilers_give_as_tensors_are_none() -> None:
    """torch 1.9 writes the two factors of addmm as inputs without dimensions, of the type Int."""
    dims, types = [[5], [2, 3], [3, 5], [], []], ["float", "float", "float", "Int", "Int"]
    kept = kept_by("aten::addmm", dims, types, [])
    assert kept is not None
    assert (kept.inputs, kept.weight, kept.output) == ((24,), 60, 40)


@pytest.mark.parametrize("model", ["bert-base", "densenet121", "gnmt", "gpt2-small", "resnet50", "vgg19"])
@pytest.mark.parametrize("recorded", ["shapes", "shapes-memory"])
def test_parameters_nobody_listed_are_those_with_gradients(model: str, recorded: str) -> None:
    """Norms and biases have them too; GPT-2's output layer shares the table of its embedding."""
    info = whatif.read(TRACES / f"{model}--{recorded}.trace.json.gz").info
    assert info.memory is not None
    assert info.memory.parameters == sum(info.gradient_bytes) > 0
    assert info.memory.gradients == sum(info.gradient_bytes)


@given(
    st.sampled_from(["aten::convolution", "aten::mm", "aten::split", "aten::cat", "aten::_to_copy", "aten::dropout",
                     "aten::mkldnn_rnn_layer", "aten::native_layer_norm", "aten::max_pool2d_with_indices"]),
    st.recursive(st.integers(-2, 2**70) | st.none() | st.text(max_size=3), lambda x: st.lists(x, max_size=4)),
    st.lists(st.sampled_from(["float", "long int", "", "[2, 2]"]) | st.none(), max_size=4),
    st.lists(st.text(max_size=6) | st.none() | st.sampled_from(["[2, 2]", "1", "-1", "True"]), max_size=4),
)  # fmt: skip
def test_no_shapes_are_too_odd(name: str, dims: Any, types: list[Any], concrete: list[Any]) -> None:
    kept = kept_by(name, dims, types, concrete)
    assert kept is None or min((kept.output, kept.own, *kept.inputs)) >= 0


def test_a_split_into_a_billion_parts_takes_no_memory(tmp_path: Path) -> None:
    events = two_linear_layers(allocations=False, shapes=True)
    for at in (0, 1000, 2000):
        whole = {**shaped([2**30, 1]), "Concrete Inputs": ["", "1", "0"], "Sequence number": 0}
        events.append(op("aten::split", at + 6, 3, **whole))
    memory = read_events(tmp_path, events, whatif=METADATA).info.memory
    assert memory is not None


@pytest.mark.parametrize("field", ["Bytes", "ts"])
def test_damaged_allocations_are_counted(tmp_path: Path, field: str) -> None:
    events = two_linear_layers()
    broken = next(event for event in events if event["name"] == "[memory]")
    if field == "ts":
        broken["ts"] = "soon"
    else:
        broken["args"]["Bytes"] = 2**60
    graph = read_events(tmp_path, events, whatif=METADATA)
    assert any("1 event was not read: allocation" in remark for remark in graph.info.remarks)


ODD = st.sampled_from(
    [None, True, -1, 0, 2**44, 2**63, -(2**70), 1.5, float("nan"), -math.inf, "7", "x", [], {}, [[]], "NaN"]
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.sampled_from(
        ["Bytes", "Addr", "Total Allocated", "Device Type", "Device Id", "ts", "Input Dims", "Input type",
         "Sequence number", "Fwd thread id", "dur"]), ODD), min_size=1, max_size=4),
    st.sampled_from(["layers", "optimizer", "input_shape", "precision", "batch_size"]), ODD, st.sampled_from([0, 1]),
)  # fmt: skip
def test_nothing_that_a_trace_says_of_memory_raises(
    tmp_path_factory: pytest.TempPathFactory,
    damage: list[tuple[int, str, Any]],
    key: str,
    odd: Any,
    device_type: int,
) -> None:
    events = two_linear_layers(shapes=True, device_type=device_type)
    for place, field, value in damage:
        event = events[place % len(events)]
        if field in ("ts", "dur"):
            event[field] = value
        else:
            event["args"][field] = value
    memory = read_events(tmp_path_factory.mktemp("odd"), events, whatif={**METADATA, key: odd}).info.memory
    if memory is not None:
        assert peak(memory).total == slow_peak(memory)
