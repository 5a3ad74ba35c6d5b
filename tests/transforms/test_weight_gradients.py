"""Which products of the backward pass compute gradients of weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.helpers import replace
from whatif import Phase, TaskGraph, WhatifError
from whatif.models import KernelFamily, in_layers, weight_gradients

# 4 blocks of 4 linear layers, and a head.
LINEAR_LAYERS = 17


@pytest.fixture(scope="module")
def graph(own_traces: Path) -> TaskGraph:
    return whatif.read(str(own_traces / "transformer_cpu.json.gz"))


def calls_per_layer(graph: TaskGraph, tasks: np.ndarray) -> dict[str, set[int]]:
    """How many operator calls a step has among ``tasks``, by layer."""
    calls: dict[tuple[int, int], set[int]] = {}
    for task in np.flatnonzero(tasks).tolist():
        calls.setdefault((int(graph.layer[task]), int(graph.step[task])), set()).add(int(graph.operator[task]))
    found: dict[str, set[int]] = {}
    for (layer, _), operators in calls.items():
        found.setdefault(graph.layers[layer], set()).add(len(operators))
    return found


def test_every_linear_layer_has_one_with_half_of_the_backward_operations(graph: TaskGraph) -> None:
    found = weight_gradients(graph)
    assert list(calls_per_layer(graph, found).values()) == [{1}] * LINEAR_LAYERS
    assert in_layers(graph, "Linear")[found].all()
    with pytest.raises(WhatifError, match=r"expected a regular expression, got '\('"):
        in_layers(graph, "(")
    products = (graph.phase == Phase.BACKWARD) & (graph.family == KernelFamily.GEMM)
    assert graph.flops[found].sum() == pytest.approx(graph.flops[products].sum() / 2, rel=1e-3)


def test_where_both_products_have_the_same_shapes_one_is_taken(graph: TaskGraph) -> None:
    """With as many tokens as features: 256 in place of 128, as a weight of 256 x 256 has."""

    def resized(sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        return tuple((name, 256 if value == 128 else value) for name, value in sizes)

    operators = tuple(replace(one, integers=resized(one.integers)) for one in graph.info.operators)
    square = graph.replace(info=replace(graph.info, operators=operators))
    assert list(calls_per_layer(square, weight_gradients(square)).values()) == [{1}] * LINEAR_LAYERS


def test_a_convolution_without_an_input_gradient_is_one(own_traces: Path) -> None:
    """The first convolution needs no gradient of its input; the others compute both at once."""
    graph = whatif.read(str(own_traces / "resnet18_cifar_cpu.json.gz"))
    assert calls_per_layer(graph, weight_gradients(graph)) == {"stem.0": {1}, "fc": {1}}


def test_a_recording_without_shapes_has_none(graph: TaskGraph) -> None:
    unknown = graph.replace(called=np.full(len(graph), -1, dtype=graph.called.dtype))
    assert not weight_gradients(unknown).any()
