"""What-ifs that change an operator on the recorded GPU draw on what was measured on that very device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import CPU, STREAM, Build, id_of, need, replace
from whatif import Phase, TaskGraph, WhatifError
from whatif.graph.described import Described
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.models.durations import changed_operators, database, forms
from whatif.models.durations.estimator import Source, sources
from whatif.prediction.transform import load_transform

need("pyarrow")

V100 = "V100-PCIE-16"
F = KernelFamily


def product(m: int, n: int, k: int, *, batch: int = 1, dtype: str = "fp32") -> Described:
    return Described("matmul", "mm", dtype, (("batch", batch), ("m", m), ("n", n), ("k", k)))


TABLE = (
    product(512, 64, 256),  # forward: 512 samples
    product(256, 64, 512),  # gradient of weights: sums over the samples
    product(512, 256, 64),  # gradient of the input
    product(512, 512, 512),  # nobody knows which of these are samples
    product(64, 64, 64, batch=512),
    Described("elementwise", "add", "fp32", (("elements", 5120), ("tensors", 2))),
)


def step() -> TaskGraph:
    """A kernel of 1 ms for each operator of the table, the first in the forward pass, the others in the backward."""
    build = Build(CPU, STREAM, gpu=V100, n_steps=1)
    for row, what in enumerate(TABLE):
        call = build.task(0, 1000, f"launch {row}")
        family = F.ELEMENTWISE if what.family == "elementwise" else F.GEMM
        phase = Phase.FORWARD if row == 0 else Phase.BACKWARD
        columns: dict[str, Any] = {"family": family, "dtype": DTYPES.index("fp32"), "flops": 10**9, "called": row}
        build.edge(call, build.task(1, 1_000_000, f"kernel {row}", phase=phase, operator=row, **columns))
    graph = build.graph()
    return graph.replace(info=replace(graph.info, operators=TABLE))


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A database of this device: the products above, at twice the samples, and in fp16; a time for each."""
    from tests.opdb.builders import database as make
    from tests.opdb.builders import origin
    from whatif.opdb.rows import measurements, operators

    sizes = [(512, 64, 256, 1), (256, 64, 512, 1), (512, 256, 64, 1), (512, 512, 512, 1), (64, 64, 64, 512)]
    doubled = [(1024, 64, 256, 1), (256, 64, 1024, 1), (1024, 256, 64, 1), (1024, 512, 512, 1), (64, 64, 64, 1024)]
    contributions = []
    for dtype, shapes, us in (("fp32", sizes, 100.0), ("fp32", doubled, 170.0), ("fp16", sizes[:1], 25.0)):
        m, n, k, batch = (np.array(column) for column in zip(*shapes, strict=True))
        ops = operators("matmul", {"batch": batch, "m": m, "n": n, "k": k}, name="mm", dtype=dtype)
        where = origin(V100, method="kernel", launch=False, author=f"{dtype} {us}")
        contributions.append((measurements(ops, np.full(len(ops), us * 1e-6)), where))
    make(tmp_path / "db", *contributions)
    monkeypatch.setenv("WHATIF_OPDB", str(tmp_path / "db"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    database._opened.cache_clear()
    yield
    database._opened.cache_clear()


@pytest.mark.usefixtures("measured")
def test_twice_the_samples_take_what_was_measured() -> None:
    graph = step()
    found = changed_operators.at_batch(graph, graph.on_gpu, 2.0)
    assert found.ratio[[0, 1, 2, 4]] == pytest.approx(1.7)
    assert np.isnan(found.ratio[[3, 5]]).all()
    changed = load_transform("batch_size:factor=2")(graph)
    for row in (0, 1, 2, 4):
        task = id_of(changed, f"kernel {row}")
        assert changed.duration_ns[task] == pytest.approx(1_700_000, abs=1)
        assert changed.low_ns[task] < changed.duration_ns[task] < changed.high_ns[task]
        assert sources(changed)[task] == Source.DATABASE
    # The others follow the model: nobody measured them.
    assert sources(changed)[id_of(changed, "kernel 3")] != Source.DATABASE
    # A third of the samples is no whole number of rows.
    assert np.isnan(changed_operators.at_batch(graph, graph.on_gpu, 1 / 3).ratio).all()


@pytest.mark.usefixtures("measured")
def test_half_precision_takes_what_was_measured() -> None:
    changed = load_transform("amp")(step())
    task = id_of(changed, "kernel 0")
    assert changed.duration_ns[task] == pytest.approx(250_000, abs=1)
    assert sources(changed)[task] == Source.DATABASE
    assert sources(changed)[id_of(changed, "kernel 1")] == Source.ROOFLINE  # not measured in fp16
    # Once it is half, its recorded operator is none of it any more.
    again = forms.in_form(changed, changed.on_gpu, changed.dtype, dtype="fp16")
    assert again.ratio[again.known] == pytest.approx(1.0)


def test_without_measurements_the_models_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHATIF_OPDB", str(tmp_path / "no database"))
    database._opened.cache_clear()
    graph = step()
    assert not changed_operators.at_batch(graph, graph.on_gpu, 2.0).known.any()
    found = forms.in_form(graph, graph.on_gpu, graph.dtype, dtype="fp16")
    assert (found.source[found.known] >= Source.OTHER_DEVICES).all()
    database._opened.cache_clear()


@pytest.mark.usefixtures("measured")
def test_a_layer_of_other_sizes_asks_for_the_new_operator() -> None:
    """Measured in the new size: the ratio of both; else of two data sheets. A gradient has the size elsewhere."""
    graph = step()
    found = changed_operators.resized(graph, np.flatnonzero(graph.on_gpu), {"m": 1024})
    # 512 rows become 1024: the forward product, and both gradients, were measured in either size.
    assert found.ratio[:3] == pytest.approx(1.7)
    assert found.source[:3].tolist() == [Source.DATABASE] * 3
    assert np.isnan(found.ratio[5])  # an elementwise operator has no rows
    wider = changed_operators.resized(graph, np.flatnonzero(graph.on_gpu), {"n": 64_000})
    assert wider.source[0] == Source.ROOFLINE
    assert 1 < wider.ratio[0] < 1000
    assert (wider.low[:3] <= wider.ratio[:3]).all()
    assert (wider.ratio[:3] <= wider.high[:3]).all()


def test_where_nobody_knows_the_device_work_decides() -> None:
    graph = step()
    graph = graph.replace(info=replace(graph.info, gpu="Voodoo 3"))
    found = changed_operators.resized(graph, np.flatnonzero(graph.on_gpu), {"n": 32, "elements": 51200})
    assert found.ratio[0] == pytest.approx(0.5)
    assert found.ratio[5] == pytest.approx(10)
    assert (found.low[0], found.high[0]) == pytest.approx((0.5**1.3, 0.5**0.6))
    assert found.source[0] == Source.ASSUMED


def test_metaflow_takes_sizes(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "campaign_cpu" / "resnet50--baseline.trace.json.gz")
    layer = "stages.2.0.reduce.0"

    def of(sizes: Any) -> TaskGraph:
        return load_transform("metaflow", policy={"scale": [{"layers": layer, "sizes": sizes}]})(graph).check()

    rows = [what for what in graph.info.operators if what.family == "conv"]
    assert rows
    mine = graph.called[(graph.layer == graph.layers.index(layer)) & (graph.called >= 0)]
    layer_sizes = [dict(graph.info.operators[row].integers) for row in mine.tolist()]
    (channels,) = {integers["out_channels"] for integers in layer_sizes if "out_channels" in integers}
    assert of({"out_channels": channels}).duration_ns.tolist() == graph.duration_ns.tolist()
    half, twice = (of({"out_channels": size}).duration_ns.sum() for size in (channels // 2, channels * 2))
    assert half < graph.duration_ns.sum() < twice
    for sizes, message in (
        ({"chanels": 3}, "expected sizes among batch, "), ({"out_channels": 0}, "a whole number above 0"),
        ({"out_channels": True}, "a whole number above 0"), ({}, "expected sizes as"), (5, "expected sizes as"),
        ({"n": 3}, "got none that the recording has sizes of"),
    ):  # fmt: skip
        with pytest.raises(WhatifError, match=message):
            of(sizes)
