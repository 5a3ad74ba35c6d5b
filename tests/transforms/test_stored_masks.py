"""The masks that compiled loops on a CPU store for the backward pass: which operators store one, and what it costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.helpers import CPU
from tests.transforms.programs import BACKWARD, FORWARD, NORM, POINTWISE, Program
from whatif import Phase, TaskKind
from whatif.graph.kernels import KernelFamily
from whatif.models.kernels.stored_masks import READ_NS, WRITE_NS, with_stored_masks

CONVOLUTION, POOLING = KernelFamily.CONVOLUTION, KernelFamily.POOLING
ELEMENTS = 10_000


def longer_by(*operators: tuple[str, KernelFamily, Phase]) -> dict[str, float]:
    """By how many ns an element the operators of a step grow that do; fp32 tensors of ``ELEMENTS`` each."""
    build = Program(CPU)
    for name, family, phase in operators:
        tensors = 3 if name.endswith("_backward") or name == "aten::mul" else 2
        size = tensors * ELEMENTS * 4 if family == POINTWISE else -1
        build.task(0, 100_000, name, TaskKind.CPU_OP, family=family, phase=phase, size_bytes=size)
    graph = build.graph()
    # Each operator is called something of its own, as in a recording with shapes.
    graph = graph.replace(called=graph.name.copy())
    after = with_stored_masks(graph, np.arange(len(graph)))
    grown = np.flatnonzero(after.duration_ns != graph.duration_ns)
    return {graph.names[graph.name[i]]: (after.duration_ns[i] - graph.duration_ns[i]) / ELEMENTS for i in grown}


CONV = ("aten::mkldnn_convolution", CONVOLUTION, FORWARD)
POOL = ("aten::max_pool2d_with_indices", POOLING, FORWARD)
RELU, LEAKY = ("aten::clamp_min", POINTWISE, FORWARD), ("aten::leaky_relu_", POINTWISE, FORWARD)
CONV_BACK = ("aten::convolution_backward", CONVOLUTION, BACKWARD)
RELU_BACK = ("aten::threshold_backward", POINTWISE, BACKWARD)


def test_a_relu_ahead_of_maximum_pooling_stores_its_mask_and_its_backward_operator_reads_it() -> None:
    pool_back = ("aten::max_pool2d_with_indices_backward", POOLING, BACKWARD)
    grown = longer_by(CONV, RELU, POOL, pool_back, RELU_BACK, CONV_BACK)
    assert grown == {"aten::clamp_min": WRITE_NS[0], "aten::threshold_backward": READ_NS[0]}


@pytest.mark.parametrize(
    "between",
    [
        (RELU, CONV),  # the next product keeps the output of the ReLU, which gives the mask
        (("aten::native_batch_norm", NORM, FORWARD), RELU, POOL),  # computed again from the normalization's input
        (RELU, ("aten::avg_pool2d", POOLING, FORWARD)),
        (("aten::gelu", POINTWISE, FORWARD), POOL),
    ],
)
def test_others_store_none(between: tuple[tuple[str, KernelFamily, Phase], ...]) -> None:
    assert not longer_by(CONV, *between, CONV_BACK, RELU_BACK, CONV_BACK)


def test_a_leaky_relu_behind_a_product_and_dropout_store_theirs() -> None:
    leaky_back = ("aten::leaky_relu_backward", POINTWISE, BACKWARD)
    assert longer_by(CONV, LEAKY, CONV, CONV_BACK, leaky_back, CONV_BACK) == {
        "aten::leaky_relu_": WRITE_NS[0], "aten::leaky_relu_backward": READ_NS[0],
    }  # fmt: skip
    draws, keeps = ("aten::bernoulli_", KernelFamily.OTHER, FORWARD), ("aten::mul", POINTWISE, FORWARD)
    between = [(f"aten::{name}", KernelFamily.OTHER, FORWARD) for name in ("dropout", "div_", "to", "copy_")]
    assert longer_by(CONV, draws, *between, *between, keeps, CONV, CONV_BACK) == {"aten::mul": WRITE_NS[0]}


def test_a_forward_pass_alone_stores_no_mask() -> None:
    assert not longer_by(CONV, RELU, POOL)


def test_what_reads_no_mask_is_as_long_as_before() -> None:
    assert longer_by(CONV, RELU, POOL, CONV_BACK, RELU_BACK, CONV_BACK) == {"aten::clamp_min": WRITE_NS[0]}


def test_compiling_a_network_with_such_pooling_does_not_pay(own_traces: Path) -> None:
    baseline = whatif.read(own_traces / "campaign_cpu_5" / "vgg19--baseline.trace.json.gz")
    assert whatif.apply(baseline, "compile").speedup < 1
