"""Calls of layers: by hand, on random networks against a slow twin, and on real recordings."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.transforms.layer_graphs import Call, network
from tests.transforms.test_rebatchnorm import layers
from whatif.models.layers.layer_calls import CallRole, layer_calls


def test_a_layer_that_is_called_twice_has_two_calls_each_with_its_backward_work() -> None:
    """conv_0, relu_0, conv_1, relu_0 again; backward in reverse.

    ::

        calls    0 conv_0 | 1 relu_0 | 2 conv_1 | 3 relu_0 | 4 relu_0 b | 5 conv_1 b | 6 relu_0 b | 7 conv_0 b
    """
    graph = network([Call("Conv2d_0", 9, 9), Call("ReLU_0", 9, 9), Call("Conv2d_1", 9, 9), Call("ReLU_0", 9, 9)])
    calls = layer_calls(graph)
    assert [CallRole(role).name for role in calls.role.tolist()][:4] == 2 * ["CONVOLUTION", "ACTIVATION"]
    assert calls.forward.tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    assert calls.before.tolist() == [-1, 0, 1, 2, -1, 4, 5, 6]
    assert calls.behind.tolist() == [1, 2, 3, -1, 5, 6, 7, -1]
    first, last = calls.backward_tasks()
    # Kernels stand behind their launches: call n has task 2 n + 1.
    assert first[:4].tolist() == last[:4].tolist() == [15, 13, 11, 9]


def test_two_convolutions_of_a_trace_without_layers_are_two_calls() -> None:
    calls = layer_calls(network([Call("Conv2d_0", 9), Call("Conv2d_1", 9)], named=False))
    assert calls.role.tolist() == [CallRole.CONVOLUTION, CallRole.CONVOLUTION]


def test_backward_work_that_cannot_be_distinguished_has_no_call() -> None:
    """Two calls of one ReLU, of which only one has backward work."""
    calls = layer_calls(network([Call("ReLU_0", 9, 9), Call("Conv2d_0", 9, 9), Call("ReLU_0", 9)]))
    assert calls.forward.tolist() == [0, 1, 2, 1, -1]
    chosen = np.array([True, False, True, False, False])
    # All forward calls of the layer are chosen, so its backward work is as well; not so for one of them.
    graph = network([Call("ReLU_0", 9, 9), Call("Conv2d_0", 9, 9), Call("ReLU_0", 9)])
    assert np.flatnonzero(layer_calls(graph).tasks(chosen)).tolist() == [1, 5, 9]
    assert np.flatnonzero(layer_calls(graph).tasks(chosen & (np.arange(5) == 0))).tolist() == [1]


@settings(max_examples=100, deadline=None)
@given(layers, st.integers(1, 3), st.booleans())
def test_random_networks_against_a_slow_twin(calls: list[Call], steps: int, on_cpu: bool) -> None:
    """Runs of one layer are a call; the backward calls of a layer belong to its forward ones in reverse."""
    graph = network(calls, steps=steps, on_cpu=on_cpu)
    found = layer_calls(graph)
    # An addition lies in no layer, and one of less than 1 kB is a counter, which is no call.
    names = [
        "" if call.layer.startswith("Add") else call.layer
        for call in calls
        if not (call.layer.startswith("Add") and 0 <= call.size_bytes < 1024)
    ]
    back = [
        "" if call.layer.startswith("Add") else call.layer
        for call in reversed(calls)
        if call.backward_ns and not (call.layer.startswith("Add") and 0 <= call.size_bytes < 1024)
    ]
    forward, backward = ([name for name, _ in groupby(each)] for each in (names, back))
    owners = []
    for position, name in enumerate(backward):
        mine = [row for row, other in enumerate(forward) if other == name]
        rank = sum(other == name for other in backward[:position])
        paired = name and (len(mine) == backward.count(name) or len(mine) == 1)
        owners.append(mine[0 if len(mine) == 1 else -1 - rank] if paired else -1)
    for step in range(steps):
        rows = np.flatnonzero(found.step == step)
        assert [graph.layers[code] for code in found.layer[rows].tolist()] == forward + backward
        begin = int(rows[0]) if len(rows) else 0
        assert found.backward[rows].tolist() == [False] * len(forward) + [True] * len(backward)
        expected = list(range(len(forward))) + owners
        assert found.forward[rows].tolist() == [begin + owner if owner >= 0 else -1 for owner in expected]


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        ("campaign_cpu/densenet121--baseline.trace.json.gz", {
            CallRole.CONVOLUTION: 23, CallRole.NORMALIZATION: 23, CallRole.ACTIVATION: 23, CallRole.POOLING: 2,
            CallRole.PRODUCT: 1}),
        ("campaign_cpu/vgg19--baseline.trace.json.gz", {
            CallRole.CONVOLUTION: 6, CallRole.ACTIVATION: 8, CallRole.POOLING: 4, CallRole.PRODUCT: 3}),
        ("resnet18_cifar_cpu.json.gz", {CallRole.CONVOLUTION: 20, CallRole.NORMALIZATION: 20, CallRole.ACTIVATION: 17,
                                        CallRole.POOLING: 1, CallRole.PRODUCT: 1}),
    ],
)  # fmt: skip
def test_recordings_of_our_own(own_traces: Path, trace: str, expected: dict[CallRole, int]) -> None:
    calls = layer_calls(whatif.read(own_traces / trace))
    for step in range(int(calls.step.max()) + 1):
        forward = ~calls.backward & (calls.step == step)
        roles = np.bincount(calls.role[forward], minlength=len(CallRole))
        assert {role: int(roles[role]) for role in expected} == expected
        assert (calls.backward_tasks()[0][forward & (calls.role != CallRole.OTHER)] >= 0).all()


def test_resnet50_of_others_without_layers(shared_traces: Path) -> None:
    """53 convolutions, some of which run products and transposes, and kernels whose operator is lost."""
    for name in ("num_workers_0.2021-06", "num_workers_4.2021-06"):
        graph = whatif.read(shared_traces / "kineto-resnet50-v100" / f"{name}.pt.trace.json.gz")
        calls = layer_calls(graph)
        # A captured step has no operators on the CPU: 16 additions of a step used to vanish into the norms before.
        captured = layer_calls(whatif.load_transform("cuda_graph")(graph))
        before = [np.append(each.role, -1)[each.before][each.role == CallRole.ACTIVATION] for each in (calls, captured)]
        assert before[0].tolist() == before[1].tolist()
        for step in range(6):
            for backward in (False, True):
                rows = (calls.step == step) & (calls.backward == backward)
                roles = np.bincount(calls.role[rows], minlength=len(CallRole))
                assert roles[[CallRole.CONVOLUTION, CallRole.NORMALIZATION, CallRole.ACTIVATION]].tolist() == [
                    53,
                    53,
                    49,
                ]
                assert (calls.forward[rows & (calls.role != CallRole.OTHER)] >= 0).all()
