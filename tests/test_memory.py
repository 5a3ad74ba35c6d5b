"""What a step keeps: walks and what-ifs by hand, properties on random steps, and real recordings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, Build, replace
from tests.memory_steps import drawn, slow_peak, totals
from tests.transforms.test_precision import attention_step
from whatif import WhatifError
from whatif.graph.info import GraphInfo
from whatif.graph.memory import (
    LayerMemory,
    Memory,
    moments,
    peak,
    update_workspace,
)
from whatif.graph.types import Phase
from whatif.ingest.allocation_memory import _by_address, blocks_of
from whatif.ingest.events import Allocations
from whatif.models.layers.memory_effects import (
    accumulated,
    change_memory,
    checkpointed,
    in_half,
    updated_as,
    updated_in_backward,
    with_batch,
    without_scores,
)

# -- the walk ---------------------------------------------------------------------------------------------------------


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


# -- what-ifs by hand -------------------------------------------------------------------------------------------------


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
    # Nothing keeps what flows into a (its input is recorded as 0); b's input was made by a, whose copy is gone.
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
    with pytest.raises(WhatifError, match="expected 0 bytes or more in each part of the memory, got -1"):
        change_memory(known, lambda memory: replace(memory, parameters=-1))
    with pytest.raises(WhatifError, match="returns a Memory, got NoneType"):
        change_memory(known, lambda memory: None)  # type: ignore[arg-type, return-value]
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


# -- properties -------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("highest", [7, 2**47, 2**63 - 1])
def test_allocations_of_one_address_stay_in_order(highest: int) -> None:
    address = np.random.default_rng(0).choice([0, 3, highest // 2, highest], 200)
    assert (_by_address(address) == np.argsort(address, kind="stable")).all()
    assert not len(_by_address(address[:0]))
