"""The kernels of recurrent layers in cuDNN: of which algorithm, which products, and their published times."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from whatif.from_module.durations import ask
from whatif.from_module.gpu_work import kernels_of
from whatif.from_module.operations import Operation
from whatif.from_module.recurrent import without_persistence
from whatif.graph.types import Phase
from whatif.ingest.gpu_side import DEFAULT_STREAM_LAG_NS
from whatif.ingest.op_cost import op_cost
from whatif.opdb.default import estimator

RELU, LSTM, GRU = 0, 2, 3


def call(
    steps: int, batch: int, inputs: int, hidden: int, *, mode: int = LSTM, layers: int = 1, both: bool = False,
    kind: str = "float", packed: str = "[]", backward: bool = False, projection: int = 0, dropout: float = 0.0,
) -> Operation:  # fmt: skip
    """A call of `_cudnn_rnn`, or of its backward operator, as torch's schemas order the arguments."""
    first = 10 if backward else 6
    configured = [
        str(mode),
        str(hidden),
        str(projection),
        str(layers),
        "False",
        str(dropout),
        "True",
        str(both),
        packed,
    ]
    concrete = [""] * first + [*configured, ""] + ["", "[True, True, True, True]"] * backward
    dims = [[steps, batch, inputs], *([] for _ in concrete[1:])]
    name = "aten::_cudnn_rnn" + "_backward" * backward
    outputs = (((steps, hidden), kind),)
    return Operation(name, dims, [kind, *("" for _ in concrete[1:])], concrete, Phase.FORWARD, outputs)


def products(operation: Operation) -> Counter[tuple[int, int, int]]:
    """The (m, n, k) of the products, by how often."""
    sizes = [dict(kernel.what.integers) for kernel in kernels_of(operation) if "gemm" in kernel.name]
    return Counter((size["m"], size["n"], size["k"]) for size in sizes)


def test_a_step_is_one_product_and_one_pointwise_kernel() -> None:
    forward, backward = call(5, 32, 256, 512), call(5, 32, 256, 512, backward=True)
    assert products(forward) == {(160, 2048, 256): 1, (32, 2048, 512): 5}
    assert products(backward) == {(32, 512, 2048): 5, (160, 256, 2048): 1, (256, 2048, 160): 1, (512, 2048, 160): 1}
    assert len(kernels_of(forward)) == 1 + 2 * 5
    assert len(kernels_of(backward)) == 2 * 5 + 3 + 1  # and the biases' gradient


def test_layers_read_both_directions_and_drop_between_them() -> None:
    operation = call(5, 32, 64, 512, mode=GRU, layers=2, both=True, dropout=0.1)
    assert products(operation) == {(160, 1536, 64): 2, (160, 1536, 1024): 2, (32, 1536, 512): 20}
    assert sum("dropout" in kernel.name for kernel in kernels_of(operation)) == 1
    assert products(call(5, 32, 64, 512, projection=128))[32, 128, 512] == 5


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"mode": GRU, "layers": 3, "both": True}, {"projection": 128, "layers": 2}, {"packed": "[32, 32, 16]"}],
    ids=str,
)
def test_the_cost_of_a_call_is_that_of_its_products(options: dict[str, Any], backward: bool) -> None:
    operation = call(5, 32, 64, 512, backward=backward, **options)
    if "packed" in options:
        operation.dims[0] = [80, 64]
    cost = op_cost(operation.name, operation.dims, operation.types, operation.concrete)
    assert cost is not None
    assert cost.flops == sum(2 * m * n * k * count for (m, n, k), count in products(operation).items())
    assert cost.dtype == "fp32"


def test_a_packed_batch_shrinks() -> None:
    operation = call(9, 0, 8, 16, packed="[4, 4, 1]")
    assert products(operation) == {(9, 64, 8): 1, (4, 64, 16): 2, (1, 64, 16): 1}


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({"hidden": 128}, True, True),
        ({"hidden": 192}, True, False),
        ({"hidden": 256}, False, False),
        ({"hidden": 256, "mode": RELU}, True, True),
        ({"hidden": 64, "kind": "double"}, False, False),
        ({"hidden": 64, "packed": "[32, 32]"}, False, False),
    ],
    ids=str,
)
def test_small_layers_persist_as_pytorch_chooses(options: dict[str, Any], forward: bool, backward: bool) -> None:
    for asked, expected in ((False, forward), (True, backward)):
        kernels = kernels_of(call(100, 32, 64, **options, backward=asked))
        persistent = [kernel.published_ns for kernel in kernels if kernel.published_ns is not None]
        assert bool(persistent) == expected


def test_an_old_gpu_has_no_persistent_kernels() -> None:
    for backward in (False, True):
        operation = call(7, 4, 64, 64, backward=backward)
        kernels = kernels_of(without_persistence(operation))
        assert all(kernel.published_ns is None for kernel in kernels)
        assert products(without_persistence(operation)).total() == 7 + (3 if backward else 1)


def test_damaged_arguments_are_priced_by_their_bytes() -> None:
    assert [kernel.known for kernel in kernels_of(call(5, 32, 64, 512, mode=9))] == [False]


# (device, calls, measured ms). K80: four layers forward, 100 steps less 10, to leave out the copies around them
# (Tiramisu-Compiler/tiramisu#204). RTX 5070 Ti: the persistent kernel, and cuDNN's
# standard algorithm for the same layer (docs of OpenNN's LSTM benchmark, 2026-09). V100: pytorch/pytorch#62143, before
# and after, whose GPU is not named.
PUBLISHED = [
    ("K80-die", [call(90, 64, 512, 512, layers=4)], 54.32 - 9.36),
    ("RTX5070Ti", [call(24, 256, 15, 128, kind="c10::Half")], 0.0464),
    ("RTX5070Ti", [call(24, 256, 16, 128, kind="c10::BFloat16", packed=str([256] * 24))], 0.0870),
    ("V100-SXM2-16", [call(3854, 16, 112, 128)], 10.2),
    ("V100-SXM2-16", [call(3854, 16, 112, 128, backward=True)], 15.9),
    ("V100-SXM2-16", [call(1252, 12, 304, 192, backward=True)], 17.4),
    ("V100-SXM2-16", [call(1824, 3, 80, 336, mode=1, layers=3, backward=True)], 59.0),
]


@pytest.mark.parametrize(("device", "operations", "measured_ms"), PUBLISHED)
def test_published_times_are_in_the_range(device: str, operations: list[Operation], measured_ms: float) -> None:
    kernels = [kernel for operation in operations for kernel in kernels_of(operation)]
    durations = ask(estimator(device), kernels)
    gaps_ms = len(kernels) * DEFAULT_STREAM_LAG_NS / 1e6
    low_ms, high_ms = (float(end.sum()) / 1e6 for end in (durations.low_ns, durations.high_ns))
    assert low_ms <= measured_ms <= high_ms + gaps_ms
