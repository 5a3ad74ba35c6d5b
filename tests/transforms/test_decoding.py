"""Steps of decoding: weights are read once for the whole batch, are stored cast, and are cut across workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.helpers import CPU, STREAM, Build, replace
from whatif import DependencyKind, Phase, TaskGraph, WhatifError
from whatif.graph.described import Described
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.models import at_batch
from whatif.models.kernels.fp8 import CAST_NAME, SCALE_NAME
from whatif.models.kernels.mixed_precision import WEIGHT_CAST_NAME
from whatif.models.kernels.stored_weights import stored_weights
from whatif.prediction.composition import compose
from whatif.prediction.transform import load_transform

US = 1_000
INPUTS, OUTPUTS = 4096, 14336
# Medians of seven rounds without the profiler (traces/decode_cpu/README.md), ms by batch.
MEASURED_MS = {1: 35.75, 2: 70.17, 8: 87.06}


@pytest.mark.parametrize(("batch", "to"), [(1, 2), (1, 8), (2, 8), (2, 1), (8, 1), (8, 2)])
def test_cpu_decoding_at_another_batch(own_traces: Path, batch: int, to: int) -> None:
    graph = whatif.read(str(own_traces / "decode_cpu" / f"decode_b{batch}.json.gz"))
    prediction = whatif.apply(graph, f"batch_size:factor={to / batch}")
    assert prediction.predicted_ms == pytest.approx(MEASURED_MS[to], rel=0.15)
    assert prediction.low_ms < MEASURED_MS[to] < prediction.high_ms


def decoding(rows: int, dtype: str = "bf16", *, trains: bool = False) -> TaskGraph:
    """Three steps of a product of weights on an H100, of an attention and of an activation, each with its launch."""
    value_bytes = 4 if dtype == "fp32" else 2
    weights = INPUTS * OUTPUTS * value_bytes
    product_us = round(weights / 3350e3 / 0.8)  # at 0.8 of 3.35 TB/s
    build = Build(CPU, STREAM)
    phases = (Phase.FORWARD, Phase.BACKWARD) if trains else (Phase.FORWARD,)
    for step in range(3):
        for phase in phases:
            for name, us, family in (
                ("product", product_us, KernelFamily.GEMM),
                ("attention", 20, KernelFamily.ATTENTION),
                ("silu", 10, KernelFamily.ELEMENTWISE),
            ):
                of = {"step": step, "phase": phase, "layer": "l"}
                call = build.task(0, 5 * US, f"launch {name}", **of)
                build.edge(call, build.task(1, us * US, name, family=family, **of), kind=DependencyKind.LAUNCH)
    graph = build.graph()
    product = graph.name == graph.names.index("product")
    sizes = (("batch", 1), ("m", rows), ("n", OUTPUTS), ("k", INPUTS))
    info = replace(graph.info, gpu="NVIDIA H100 80GB HBM3", n_steps=3, steady=(1, 2),
                   operators=(Described("matmul", "mm", dtype, sizes),))  # fmt: skip
    work = np.where(product, 2 * rows * INPUTS * OUTPUTS, -1), np.where(product, weights, -1)
    return graph.replace(
        called=np.where(product, 0, -1).astype(np.int32), flops=work[0], size_bytes=work[1], info=info,
        dtype=np.where(graph.on_gpu.mask, DTYPES.index(dtype), 0).astype(np.int8),
    )  # fmt: skip


def changed_by(graph: TaskGraph, what_if: str) -> TaskGraph:
    return compose(graph, [load_transform(what_if)])


def times_us(graph: TaskGraph, name: str) -> float:
    return float(graph.duration_ns[graph.name == graph.names.index(name)].mean()) / US


def test_weights_are_read_once_for_the_whole_batch() -> None:
    graph = decoding(rows=4)
    changed = changed_by(graph, "batch_size:factor=8")
    assert times_us(changed, "product") == pytest.approx(times_us(graph, "product"), rel=0.02)
    assert times_us(changed, "attention") > 5 * times_us(graph, "attention")  # it reads the cache of each sequence
    product = graph.name == graph.names.index("product")
    assert (changed.flops[product] == 8 * graph.flops[product]).all()
    assert changed.size_bytes[product].tolist() == pytest.approx(graph.size_bytes[product].tolist(), rel=0.02)
    # From the balance of an H100 on (990 TFLOP/s, 3.35 TB/s: 295 rows) computing takes longer than reading.
    many = changed_by(graph, "batch_size:factor=512")
    expected = 2048 / (990e12 / 3.35e12)
    assert times_us(many, "product") / times_us(graph, "product") == pytest.approx(expected, rel=0.1)


def test_many_rows_and_training_are_none_of_it() -> None:
    assert stored_weights(decoding(rows=4)) is not None
    assert stored_weights(decoding(rows=4096)) is None
    assert stored_weights(decoding(rows=4, trains=True)) is None
    other = decoding(rows=4)
    scores = Described("matmul", "bmm", "bf16", (("batch", 8), ("m", 1), ("n", 256), ("k", 64)))
    assert stored_weights(other.replace(info=replace(other.info, operators=(scores,)))) is None


def test_stored_weights_are_not_cast() -> None:
    graph = decoding(rows=4)
    fp8 = changed_by(graph, "fp8")
    # Half of the bytes at best; published products of a decoded step go from 5.12 to 3.47 ms.
    assert 0.5 <= times_us(fp8, "product") / times_us(graph, "product") <= 3.47 / 5.12
    casts = fp8.name == fp8.names.index(CAST_NAME)
    assert int((casts & fp8.on_gpu.mask).sum()) == 3  # of the input, one a product
    assert SCALE_NAME not in fp8.names
    assert WEIGHT_CAST_NAME not in changed_by(decoding(rows=4, dtype="fp32"), "amp:target=bf16").names
    trained = changed_by(decoding(rows=4, dtype="fp32", trains=True), "amp:target=bf16")
    assert WEIGHT_CAST_NAME in trained.names


def test_inference_on_a_cpu_stores_its_weights_in_half_precision(own_traces: Path) -> None:
    trained = whatif.read(own_traces / "transformer_cpu.json.gz")
    forward = trained.remove(trained.phase != Phase.FORWARD)
    forward = forward.replace(info=replace(forward.info, optimizer=None))
    assert stored_weights(forward) is None  # of many rows
    assert any("stored in half precision once" in note for note in whatif.apply(forward, "amp").notes)
    assert not any("stored in half precision once" in note for note in whatif.apply(trained, "amp").notes)
    assert WEIGHT_CAST_NAME not in changed_by(forward, "amp").names
    assert WEIGHT_CAST_NAME in changed_by(trained, "amp").names


def test_weights_are_cut_across_workers() -> None:
    graph = decoding(rows=4)
    product = graph.name == graph.names.index("product")
    now_ns = graph.duration_ns[product]
    cut = at_batch(graph, product, 0.5, cut_weights=True)
    assert (cut.duration_ns / now_ns).tolist() == pytest.approx([0.5] * 3, abs=0.03)
    fewer = at_batch(graph, product, 0.5)
    assert (fewer.duration_ns / now_ns).tolist() == pytest.approx([1.0] * 3, abs=0.01)


def test_without_shapes_another_batch_is_refused() -> None:
    graph = decoding(rows=4)
    unknown = np.full(len(graph), -1)
    bare = graph.replace(called=unknown.astype(np.int32), flops=unknown, size_bytes=unknown)
    with pytest.raises(WhatifError, match="batch_size: expected the shapes of the products of a forward pass"):
        changed_by(bare, "batch_size:factor=2")
