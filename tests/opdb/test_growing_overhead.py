"""An overhead that grew while a table was measured: found where it was put in, left alone where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import extra_data
from whatif.opdb.importers.growing_overhead import FEWEST_ROWS, growing_overhead
from whatif.opdb.importers.neusight import read_neusight


def table(rows: int, seed: int, floor_s: float = 5e-5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operators in random order of sizes, each 10 % off a linear model: FLOPs, bytes, seconds."""
    draw = np.random.default_rng(seed)
    flops, moved = np.exp(draw.uniform(15, 25, rows)), np.exp(draw.uniform(12, 18, rows))
    t_s = (floor_s + flops / 1e13 + moved / 1e12) * np.exp(draw.normal(0, 0.1, rows))
    return flops, moved, t_s


@settings(max_examples=12)
@given(seed=st.integers(0, 10_000), grown_s=st.floats(1e-4, 1e-3), bend=st.floats(0.9, 2.0))
def test_what_was_put_in_is_taken_out(seed: int, grown_s: float, bend: float) -> None:
    """A line or a curve: what is left is within a few microseconds of the times without it."""
    flops, moved, t_s = table(3000, seed)
    put_in = grown_s * (np.arange(3000) / 3000) ** bend
    taken = growing_overhead(flops, moved, t_s + put_in)
    assert np.abs(taken - put_in).mean() < 0.06 * grown_s
    assert (taken >= 0).all()
    assert (t_s + put_in - taken > 0).all()


@settings(max_examples=12)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 3000))
def test_nothing_is_taken_where_nothing_grew(seed: int, rows: int) -> None:
    """Short tables are left alone; of long ones noise is no growth, or a few microseconds of it."""
    flops, moved, t_s = table(rows, seed)
    taken = growing_overhead(flops, moved, t_s)
    if rows < FEWEST_ROWS:
        assert not taken.any()
    assert taken.max() <= 1.2e-5


def test_a_table_in_order_of_sizes_is_left_alone() -> None:
    """Later rows take longer there because they are larger."""
    flops, moved, t_s = table(2000, 1)
    order = np.argsort(flops)
    assert not growing_overhead(flops[order], moved[order], t_s[order] + np.linspace(0, 1e-3, 2000)).any()


def test_a_corrected_import_says_so(tmp_path: Path) -> None:
    """The sidecar's note shows what was taken out; a table without growth has none."""
    draw = np.random.default_rng(3)
    rows = 1500
    shape = {
        "B": draw.integers(1, 64, rows), "Input_Channel": draw.integers(3, 512, rows),
        "Output_Channel": draw.integers(3, 512, rows), "Input_Size": draw.integers(5, 60, rows),
    }  # fmt: skip
    work = np.prod([column.astype(float) for column in shape.values()], axis=0) * shape["Input_Size"] * 18
    for grown_ms in (0.4, 0.0):
        ms = 0.06 + work / 1e10 + np.linspace(0, grown_ms, rows)
        table = pd.DataFrame({"OPName": "conv", "Latency": ms, "Device": "Tesla T4", **shape, "Kernel_Szie": 3})
        file = tmp_path / f"{grown_ms}" / "conv" / "p2.1.0" / "T4.csv"
        file.parent.mkdir(parents=True)
        table.assign(Stride=1, Padding=1).to_csv(file, index=False)
        ((read, origin),) = read_neusight(tmp_path / f"{grown_ms}").contributions
        if grown_ms:
            assert origin.source.note is not None
            assert "taken out" in origin.source.note
            np.testing.assert_allclose(np.sort(read.t_s), np.sort(0.06e-3 + work / 1e13), rtol=0.2)
        else:
            assert origin.source.note is None
            np.testing.assert_allclose(np.sort(read.t_s), np.sort(ms * 1e-3), rtol=1e-9)


@pytest.mark.slow
def test_neusights_convolutions_grew() -> None:
    """The overhead that the importer removes from the V100's table; the rest has no trend over the rows."""
    import tarfile

    with tarfile.open(extra_data("opdata", "neusight", "train_collect.tar.gz")) as tar:
        read = tar.extractfile(next(m for m in tar if "/conv/" in m.name and "V100" in m.name))
        assert read is not None
        table = pd.read_csv(read)
    batch, channels, out, side = (
        table[c].to_numpy(dtype=np.float64) for c in ("B", "Input_Channel", "Output_Channel", "Input_Size")
    )
    flops = 18 * batch * channels * out * side**2
    moved = 4 * (batch * side**2 * (channels + out) + 9 * channels * out)
    t_s = table["Latency"].to_numpy() * 1e-3
    taken = growing_overhead(flops, moved, t_s)
    assert 0.24e-3 < taken.max() < 0.31e-3
    small = np.flatnonzero(np.maximum(flops / 14e12, moved / 900e9) < 50e-6)  # kernels of less than 50 us
    late, early = small > 0.8 * len(t_s), small < 0.2 * len(t_s)
    assert np.median(t_s[small[late]]) > 2 * np.median(t_s[small[early]])
    corrected = (t_s - taken)[small]
    assert np.median(corrected[late]) == pytest.approx(np.median(corrected[early]), rel=0.2)
