"""What a step keeps: walks and what-ifs by hand, properties on random steps, and real recordings."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, Build, Event, mark, op, read_events
from tests.memory_traces import METADATA, NODE, shaped, two_linear_layers
from tests.transforms.test_precision import attention_step
from whatif.graph import GraphInfo
from whatif.ingest.allocation_memory import blocks_of
from whatif.ingest.events import Allocations
from whatif.ingest.kept_tensors import Kept, kept_by
from whatif.memory import LayerMemory, Memory, moments, peak
from whatif.models.memory_effects import (
    accumulated,
    change_memory,
    checkpointed,
    in_half,
    update_workspace,
    updated_as,
    updated_in_backward,
    with_batch,
    without_scores,
)
from whatif.types import Phase

ROOT = Path(__file__).resolve().parent.parent


def drawn() -> Memory:
    """Three layers; 100 of parameters, 200 of state, 10 of inputs of which 4 are buffers.

    ::

        layer   a    b.0   b.1  |  b.1   b.0    a   | update
        kept   +30   +20   +40  |  -40   -20   -30  |
        grads                   |  +10    +5   +15  |
        needs   7     3     0   |   25     6     8  |   50
        in all
          310  347   363   400  |  435   381   378  |  390
    """
    return Memory(
        parameters=100,
        optimizer_state=200,
        inputs=10,
        buffers=4,
        layers=(
            LayerMemory("a", 30, 15, 7, 8),
            LayerMemory("b.0", 20, 5, 3, 6, kept_input=20, input=20),
            LayerMemory("b.1", 40, 10, 0, 25),
        ),
        update_workspace=50,
    )


def totals(memory: Memory) -> list[int]:
    return [moment.total for moment in moments(memory)]


# -- the walk -------------------------------------------------------------------------------------------------------


def test_the_drawn_step_is_walked_through() -> None:
    assert totals(drawn()) == [347, 363, 400, 435, 381, 378, 390]
    most = peak(drawn())
    assert (most.phase, most.layer, most.total) == (Phase.BACKWARD, "b.1", 435)
    assert (most.parameters, most.optimizer_state, most.inputs) == (100, 200, 10)
    assert (most.gradients, most.activations, most.workspace) == (10, 90, 25)
    assert [moment.phase for moment in moments(drawn())] == [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 3 + [Phase.UPDATE]


def test_gradients_that_stay_are_there_all_the_while() -> None:
    """All 30 bytes from the start, and a layer's new ones until they are added: 10, 5, 15."""
    assert totals(accumulated(drawn())) == [377, 393, 430, 465, 401, 393, 390]


def test_gradients_zeroed_before_the_backward_pass_are_there_in_the_forward_pass() -> None:
    assert totals(replace(drawn(), gradients_in_forward=True)) == [377, 393, 430, 435, 381, 378, 390]


# -- what-ifs by hand -----------------------------------------------------------------------------------------------


def test_twice_the_batch_doubles_all_but_parameters_and_buffers() -> None:
    memory = with_batch(drawn(), 2)
    assert (memory.parameters, memory.optimizer_state, memory.inputs, memory.gradients) == (100, 200, 16, 30)
    assert totals(memory) == [316 + 74, 316 + 106, 316 + 180, 316 + 240, 316 + 127, 316 + 106, 396]


def test_workspace_as_large_as_parameters_stays() -> None:
    layer = drawn().layers[2]._replace(fixed_workspace=20)
    assert with_batch(drawn().with_layers([layer]), 3).layers[0].backward_workspace == 20 + 3 * 5


def test_a_checkpointed_segment_keeps_its_input_and_is_computed_again() -> None:
    """Layer b keeps the 20 that a made; 40 come again before its last layer's backward work.

    ::

        layer   a    b.0   b.1  |     b.1         b.0     a   | update
        kept   +30   +20        |                 -20   -30   |
        needs   7     3    40   |  25+40 again     6      8   |   50
    """
    memory = checkpointed(drawn(), ["b"])
    assert [row.activations for row in memory.layers] == [30, 20, 0]
    assert totals(memory) == [347, 363, 400, 435, 381, 378, 390]  # b.0 keeps nothing but its input: nothing is saved
    both = checkpointed(drawn(), ["a", "b"])
    # Nothing keeps what flows into a (its input is told as 0); b's input was made by a, whose copy is gone.
    assert [row.activations for row in both.layers] == [0, 20, 0]
    # a: forward 310 + 37; then b's input; backward b.1: 20 + 10 + 25 + 40; b.0: 20 + 15 + 6; a: 30 gradients and, while
    # it is computed again, 30 + 7 beside the gradient of its output (20), then 30 + 8.
    assert totals(both) == [347, 333, 370, 405, 351, 397, 390]
    assert checkpointed(drawn(), []) == drawn()


def test_checkpointing_twice_is_once() -> None:
    once = checkpointed(drawn(), ["a", "b"])
    assert [r.activations for r in checkpointed(once, ["a", "b"]).layers] == [r.activations for r in once.layers]


def test_half_precision_halves_what_autocast_computes_in_it() -> None:
    layers = [
        LayerMemory("linear", 80, 40, 20, 40, weights=40, copied=8),
        LayerMemory("softmax", 60, 0, 20, 40, full_precision=60),
    ]
    half = in_half(drawn().with_layers(layers))
    # The product keeps half of its 80, a copy of its weights and one of an input that is kept elsewhere.
    assert [row.activations for row in half.layers] == [40 + 20 + 4, 60]
    assert [row.backward_workspace for row in half.layers] == [20, 40]
    assert [row.activations for row in in_half(half).layers] == [64, 60]


def test_a_fused_attention_keeps_no_scores() -> None:
    """Queries, keys and values of 20 each stay; 2 x 40 of the 100 are the gradients around the softmax."""
    layers = [LayerMemory("attention", 100, 0, 55, 100, full_precision=60, scores=40), drawn().layers[0]]
    attention, other = without_scores(drawn().with_layers(layers)).layers
    assert attention == LayerMemory("attention", 60, 0, 15, 60, full_precision=60)
    assert other == drawn().layers[0]


def test_under_autocast_scores_stay_and_get_a_copy() -> None:
    """A softmax of 40 in full precision, of which the product behind it keeps 20 in 16 bits; 60 of others become 30."""
    row = LayerMemory("attention", 100, 0, 0, 0, full_precision=40, copied=40, scores=40)
    half = in_half(drawn().with_layers([row])).layers[0]
    assert (half.activations, half.scores) == (40 + 20 + 30, 60)
    # With dropout of 16 and 30: its result is kept in 16 bits alone.
    row = LayerMemory("attention", 146, 0, 0, 0, full_precision=56, scores=86)
    half = in_half(drawn().with_layers([row])).layers[0]
    assert (half.activations, half.scores) == (56 + 15 + 30, 56 + 15)


def test_updated_in_the_backward_pass_one_layer_has_gradients_at_a_time() -> None:
    memory = updated_in_backward(drawn())
    assert totals(memory) == [347, 363, 400, 435, 371, 363, 335]
    assert memory.update_workspace == 25  # half of the gradients are the largest layer's
    assert totals(updated_in_backward(replace(drawn(), gradients_in_forward=True))) == totals(memory)


def test_what_an_update_computes_with() -> None:
    assert update_workspace("Adam", "foreach", 1000, 100) == 1000
    assert update_workspace("AdamW", "for_loop", 1000, 100) == 200
    assert update_workspace("Adam", "fused", 1000, 100) == 0
    assert update_workspace("SGD", "foreach", 1000, 100) == 0
    assert updated_as(drawn(), "Adam", "foreach").update_workspace == 100


def test_a_graph_without_memory_stays_the_very_same() -> None:
    build = Build(CPU)
    build.task(0, 5, "op")
    graph = build.graph()
    assert change_memory(graph, accumulated) is graph
    known = graph.replace(info=GraphInfo(memory=drawn()))
    assert change_memory(known, accumulated).info.memory == accumulated(drawn())
    assert known.info.memory == drawn()


def test_flash_attention_takes_the_scores_out_of_the_memory() -> None:
    rows = [LayerMemory("attention", 100, 0, 55, 100, scores=40)]
    graph = attention_step().replace(info=GraphInfo(memory=drawn().with_layers(rows)))
    changed = whatif.load_transform("flash_attention")(graph)
    assert changed.info.memory == without_scores(drawn().with_layers(rows))


@pytest.mark.parametrize("name", ["compile", "cuda_graph", "fp8"])
def test_some_what_ifs_say_that_their_memory_is_not_modelled(name: str) -> None:
    graph = attention_step(gpu="NVIDIA H100 80GB HBM3", flops=10**9, size_bytes=10**6)
    graph = graph.replace(info=replace(graph.info, memory=drawn()))
    memory = whatif.load_transform(name)(graph).info.memory
    assert memory == replace(drawn(), not_modelled=(name,))


# -- properties -----------------------------------------------------------------------------------------------------

SIZES = st.integers(0, 1000)


@st.composite
def rows(draw: st.DrawFn, name: str) -> LayerMemory:
    activations, workspace = draw(SIZES), draw(SIZES)
    return LayerMemory(
        name, activations, draw(SIZES), draw(SIZES), workspace, kept_input=draw(st.integers(0, activations)),
        full_precision=draw(st.integers(0, activations)), input=draw(SIZES),
        fixed_workspace=draw(st.integers(0, workspace)), weights=draw(SIZES), copied=draw(SIZES),
        scores=draw(st.integers(0, activations)),
    )  # fmt: skip


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    names = draw(st.lists(st.sampled_from(["a", "b.0", "b.1", "b.2.x", "c.0", "d"]), min_size=1, max_size=12))
    inputs = draw(SIZES)
    return Memory(
        draw(SIZES), draw(SIZES), inputs, tuple(draw(rows(name)) for name in names), draw(SIZES),
        gradients_stay=draw(st.booleans()), gradients_in_forward=draw(st.booleans()),
        buffers=draw(st.integers(0, inputs)),
    )  # fmt: skip


def slow_peak(memory: Memory) -> int:
    """The peak by an explicit list of what is held."""
    held = {"resident": memory.parameters + memory.optimizer_state + memory.inputs}
    most = 0
    if memory.gradients_stay or memory.gradients_in_forward:
        held["gradients"] = sum(row.gradients for row in memory.layers)
    for number, row in enumerate(memory.layers):
        held[f"kept {number}"] = row.activations
        most = max(most, sum(held.values()) + row.forward_workspace)
    if not memory.gradients_stay:
        held["gradients"] = 0
    for number, row in reversed(list(enumerate(memory.layers))):
        most = max(most, sum(held.values()) + row.gradients + row.backward_workspace)
        if not memory.gradients_stay:
            held["gradients"] += row.gradients
        del held[f"kept {number}"]
    return max(most, sum(held.values()) + memory.update_workspace)


@given(memories())
def test_peak_is_that_of_the_slow_walk(memory: Memory) -> None:
    assert peak(memory).total == slow_peak(memory)


@given(memories(), st.floats(1.0, 50.0))
def test_a_larger_batch_never_takes_less(memory: Memory, factor: float) -> None:
    assert with_batch(memory, 1.0) == memory
    assert peak(with_batch(memory, factor)).total >= peak(memory).total
    assert with_batch(memory, factor).gradients == memory.gradients


@given(memories(), st.lists(st.sampled_from(["a", "b", "c", "d", "b.1"]), unique=True))
def test_identities_and_bounds(memory: Memory, names: list[str]) -> None:
    assert checkpointed(memory, []) == memory
    assert peak(without_scores(memory)).total <= peak(memory).total
    assert without_scores(without_scores(memory)) == without_scores(memory)
    assert in_half(in_half(memory)).activations == in_half(memory).activations
    assert peak(accumulated(memory)).total >= peak(replace(memory, gradients_stay=False)).total
    assert peak(updated_in_backward(memory)).total <= peak(memory).total
    # Of two segments, one inside the other, the outer one counts; nothing becomes negative.
    for row in checkpointed(memory, names).layers:
        assert min(row.activations, row.kept_input, row.forward_workspace, row.backward_workspace) >= 0


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), max_size=60), st.integers(0, 60), st.integers(0, 60))
def test_blocks_are_those_of_the_slow_pairing(changes: list[tuple[int, int]], begin: int, length: int) -> None:
    """At an address that is free memory is taken, at one that is not it is given back; some were taken before."""
    held: dict[int, tuple[int, int]] = {4: (-1, 33)}
    rows_, blocks = [], []
    for time, (address, size) in enumerate(changes):
        if address in held:
            birth, size = held.pop(address)
            blocks.append((birth, time, size))
            size = -size
        else:
            held[address] = time, size
        rows_.append((time, size, address))
    end = begin + length
    blocks += [(birth, end, size) for birth, size in held.values() if birth >= 0]
    expected = []
    for birth, death, size in blocks:
        birth, death = birth if birth >= begin else -1, min(death, end)
        if birth < end and death >= begin and not (birth < 0 and death >= end):
            expected.append((birth, death, size))
    table = np.array(rows_, dtype=np.int64).reshape(-1, 3)
    zeros = np.zeros(len(table), dtype=np.int32)
    found = blocks_of(Allocations(table[:, 0], table[:, 1], table[:, 2], table[:, 1], zeros, zeros), begin, end)
    columns = (found.birth_ns, found.death_ns, found.size_bytes)
    assert sorted(zip(*(column.tolist() for column in columns), strict=True)) == sorted(expected)


# -- recordings drawn by hand ---------------------------------------------------------------------------------------


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


def test_a_gpu_tells_what_it_holds_beside_the_model(tmp_path: Path) -> None:
    """Its allocator holds 5,000 bytes before the first step, and all that the step itself holds beside them."""
    memory = read_events(tmp_path, two_linear_layers(device_type=1, held=5000), whatif=METADATA).info.memory
    assert memory is not None
    assert memory.inputs == 5000 - 240 - 480
    # All but the batch of 80 stays when that grows.
    assert with_batch(memory, 2).inputs == memory.inputs + 80
    assert peak(memory).total == 5000 + 1280


def test_allocations_without_addresses_are_not_used(tmp_path: Path) -> None:
    graph = read_events(tmp_path, two_linear_layers(tell_address=False), whatif=METADATA)
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


def test_with_both_allocations_decide_and_shapes_add_what_they_know(tmp_path: Path) -> None:
    both = read_events(tmp_path, two_linear_layers(shapes=True), whatif=METADATA).info.memory
    recorded = read_events(tmp_path, two_linear_layers(), whatif=METADATA).info.memory
    assert both is not None
    assert recorded is not None
    assert totals(both) == totals(recorded)
    assert [row.weights for row in both.layers] == [160, 0, 80]


def test_a_compiled_step_is_told_by_allocations_alone(tmp_path: Path) -> None:
    region = mark("Torch-Compiled Region: 0/0", 11, 38)
    shapes = [*two_linear_layers(allocations=False, shapes=True), region]
    assert read_events(tmp_path, shapes, whatif=METADATA).info.memory is None
    assert read_events(tmp_path, [*two_linear_layers(), region], whatif=METADATA).info.memory is not None


def test_what_a_gpu_holds_does_not_grow_with_the_batch_where_nobody_tells_parameters(tmp_path: Path) -> None:
    memory = read_events(tmp_path, two_linear_layers(device_type=1, held=5000)).info.memory
    assert memory is not None
    assert (memory.parameters, memory.inputs) == (0, 5000)
    # 400 of activations and 800 of workspace are twice as many, 80 of gradients stay.
    assert (peak(memory).total, peak(with_batch(memory, 2)).total) == (5000 + 1280, 5000 + 2480)


def attention(*, taken: bool = True) -> list[Event]:
    """Two heads of 3 x 4 and a softmax of 3 x 3, with dropout, in one layer; then what takes it, or something else.

    ::

        keeps   bmm: two of 96    softmax 72    dropout 18 (a byte each)    bmm: 72 and 120
    """
    product = shaped([2, 3, 3], [2, 3, 5]) if taken else shaped([2, 9, 3], [2, 3, 5])
    forward = [
        ("aten::bmm", shaped([2, 3, 4], [2, 4, 3])), ("aten::_softmax", shaped([1, 2, 3, 3], [])),
        ("aten::native_dropout", shaped([1, 2, 3, 3], [], [])), ("aten::bmm", product),
    ]  # fmt: skip
    events = []
    for at in (0, 1000, 2000):
        events += [mark(f"ProfilerStep#{at}", at, 1000), mark("whatif::layer::attention", at + 5, 95)]
        for number, (name, shapes) in enumerate(forward):
            seq = {"Sequence number": at + number}
            events.append(op(name, at + 10 + 20 * number, 15, **seq, **shapes))
            back = {**seq, "Fwd thread id": 1}
            events.append(op(NODE + f"Node{number}Backward0", at + 400 - 20 * number, 15, **back))
    return events


def test_scores_of_an_attention_are_told_by_shapes(tmp_path: Path) -> None:
    memory = read_events(tmp_path, attention()).info.memory
    assert memory is not None
    assert [(row.activations, row.scores) for row in memory.layers] == [(2 * 96 + 120 + 72 + 18 + 72, 72 + 18 + 72)]
    assert [row.activations for row in without_scores(memory).layers] == [2 * 96 + 120]


def test_a_softmax_that_no_product_takes_makes_no_scores(tmp_path: Path) -> None:
    memory = read_events(tmp_path, attention(taken=False)).info.memory
    assert memory is not None
    assert [row.scores for row in memory.layers] == [0]


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
    assert any("1 event was not read: allocation" in quirk for quirk in graph.info.quirks)


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
    told: Any,
    device_type: int,
) -> None:
    events = two_linear_layers(shapes=True, device_type=device_type)
    for place, field, value in damage:
        event = events[place % len(events)]
        if field in ("ts", "dur"):
            event[field] = value
        else:
            event["args"][field] = value
    memory = read_events(tmp_path_factory.mktemp("odd"), events, whatif={**METADATA, key: told}).info.memory
    if memory is not None:
        assert peak(memory).total == slow_peak(memory)


# -- real recordings ------------------------------------------------------------------------------------------------


def test_a_real_gpu_step_is_split_as_its_network_is(shared_traces: Path) -> None:
    """VGG-13 with a batch of 512 on an H100: 133 million parameters, Adam; the first convolutions' outputs dominate."""
    graph = whatif.read(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    memory = graph.info.memory
    assert memory is not None
    assert memory.source == "allocations"
    assert peak(memory).total == pytest.approx(39_343_881_216, rel=0.001)  # the most that its allocator reports
    kept = {row.name: row.activations for row in memory.layers}
    outputs = 512 * 64 * 224 * 224 * 4
    assert kept["ReLU_0"] == kept["ReLU_1"] == outputs
    assert kept["MaxPool2d_0"] == outputs // 4 * 2  # where the maxima stood, in int64
    assert memory.gradients == pytest.approx(133_053_762 * 4, rel=0.01)
    assert memory.optimizer_state == pytest.approx(2 * memory.parameters)
    capacity = graph.info.gpu_memory_bytes
    assert capacity is not None
    assert peak(memory).total < capacity


def load_benchmark() -> ModuleType:
    path = ROOT / "benchmarks" / "memory_accuracy.py"
    spec = importlib.util.spec_from_file_location("memory_accuracy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scored(own_traces: Path) -> list[tuple[str, str, float]]:
    """Source, what-if and error of each peak that the campaign measured."""
    module = load_benchmark()
    before = Path.cwd()
    os.chdir(own_traces.parent)
    try:
        return [(row.source, row.what_if, row.error_pct) for row in module.score_campaign()]
    finally:
        os.chdir(before)


@pytest.mark.parametrize(("source", "mean_pct", "largest_pct"), [("allocations", 0.6, 7.0), ("shapes", 1.5, 11.5)])
def test_peaks_are_within_the_target(
    scored: list[tuple[str, str, float]], source: str, mean_pct: float, largest_pct: float
) -> None:
    """The target is a mean of 2 %; what was reached is held."""
    errors = [abs(error) for which, _, error in scored if which == source]
    assert len(errors) >= 46
    assert np.mean(errors) <= mean_pct
    assert max(errors) <= largest_pct


def test_every_recording_of_the_campaign_from_its_own_shapes(own_traces: Path) -> None:
    """Accumulated, under autocast, recomputed: what was recorded is seen."""
    module = load_benchmark()
    before = Path.cwd()
    os.chdir(own_traces.parent)
    try:
        found = module.score_own()
    finally:
        os.chdir(before)
    assert len(found) >= 81
    assert np.mean([abs(row.error_pct) for row in found]) <= 1.7
    assert max(abs(row.error_pct) for row in found) <= 12.5


@pytest.mark.parametrize("what_if", ["(as recorded)", "activation_checkpoint", "gradient_accumulation:passes=4"])
def test_peaks_from_allocations_are_within_one_percent(scored: list[tuple[str, str, float]], what_if: str) -> None:
    assert max(abs(error) for which, name, error in scored if (which, name) == ("allocations", what_if)) < 1


def test_the_page_is_what_the_program_writes(shared_traces: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "memory_accuracy.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=os.sep)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("name", "fewer"),
    [
        ("activation_checkpoint", True), ("batch_size:factor=0.5", True), ("batch_size:factor=2", False),
        ("amp", True), ("gradient_accumulation:passes=4", False),
    ],
)  # fmt: skip
def test_what_ifs_change_the_memory_of_a_real_recording(own_traces: Path, name: str, fewer: bool) -> None:
    graph = whatif.read(own_traces / "campaign_cpu" / "gpt2-small--baseline.trace.json.gz")
    changed = whatif.load_transform(name)(graph)
    assert graph.info.memory is not None
    assert changed.info.memory is not None
    before, after = peak(graph.info.memory).total, peak(changed.info.memory).total
    assert after < before if fewer else after > before


Effect = Callable[[Memory], Memory]


@pytest.mark.parametrize(
    "effect", [accumulated, in_half, updated_in_backward, without_scores, lambda memory: with_batch(memory, 0.5)]
)
def test_effects_leave_parameters_alone(effect: Effect) -> None:
    memory = effect(drawn())
    assert (memory.parameters, memory.optimizer_state) == (100, 200)
    assert [row.name for row in memory.layers] == ["a", "b.0", "b.1"]
