"""Measured times in place of formulas: tables by hand, NCCL's on A100 and H100, what nccl-tests prints, and errors."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sigmoid import Sigmoid, fit_sigmoid
from whatif import WhatifError
from whatif.hardware.cluster.calibration import Curve, Table
from whatif.hardware.cluster.cluster_file import parse_cluster
from whatif.hardware.cluster.collectives import bus_factor
from whatif.hardware.cluster.links import Link
from whatif.hardware.cluster.network import Network
from whatif.opdb.collective_table import read_table

DATA = Path(__file__).resolve().parents[1] / "data"
EIGHT = Network.of(8, Link(1.0))

# Latencies of NCCL's ring in steps of protocol LL: 11 to start it (6.6 us / 0.6 us), and one a message.
STARTING = 11


def table(text: str, folder: Path, name: str = "times.csv") -> Table:
    path = folder / name
    path.write_text(text)
    return read_table(path)


def measured(network: Network, times: Table) -> Network:
    return Network(network.levels, "auto", times)


def test_a_table_by_hand(tmp_path: Path) -> None:
    """1 KB 10 us, 100 KB 100 us: 10 KB lies in the middle of both logarithms; the last rate, 1 byte/ns, goes on."""
    times = table("# ours\nsize_kb, time_us\n1, 10\n\n100, 100\n", tmp_path)
    curve = times.curves[0]
    assert (curve.operation, curve.workers) == ("all_reduce", None)
    expected_us = [10, 10, np.sqrt(10 * 100), 100, 200]
    assert (curve.time_of([1, 1_000, 10_000, 100_000, 200_000]) / 1e3).tolist() == pytest.approx(expected_us)
    cost = measured(EIGHT, times).cost("all_reduce", [1, 10_000, 200_000])
    assert cost.latency_ns.tolist() == pytest.approx([10_000] * 3)
    assert cost.total_ns.tolist() == pytest.approx([10_000, 31_622.7766, 200_000])


def test_a_size_that_is_measured_several_times_takes_the_median(tmp_path: Path) -> None:
    times = table("size_bytes,time_ns\n8,30\n8,10\n16,40\n8,20\n", tmp_path)
    assert times.curves[0].time_ns == (20, 40)


def test_units_are_read_from_the_header(tmp_path: Path) -> None:
    for size, byte in (
        ("bytes", 1),
        ("kb", 1e3),
        ("mb", 1e6),
        ("gb", 1e9),
        ("kib", 2**10),
        ("mib", 2**20),
        ("gib", 2**30),
    ):
        for time, ns in (("ns", 1), ("us", 1e3), ("ms", 1e6), ("s", 1e9)):
            curve = table(f"time_{time},size_{size}\n3,2\n", tmp_path, f"{size}{time}.csv").curves[0]
            assert (curve.size_bytes, curve.time_ns) == ((2 * byte,), (3 * ns,))


def test_a_table_names_other_operations_and_workers_by_bus_factors(tmp_path: Path) -> None:
    """An all-reduce among 4: 11 + 6 steps of latency, factor 6/4; an all-gather among 8: 11 + 7, 7/8."""
    times = table("operation,workers,size_bytes,time_ns\nall_reduce,4,10,1700\nall_reduce,4,1000,3700\n", tmp_path)
    cost = measured(EIGHT, times).cost("all_gather", [10, 1_000])
    assert cost.latency_ns.tolist() == pytest.approx([1_700 * (STARTING + 7) / (STARTING + 6)] * 2)
    assert cost.transfer_ns.tolist() == pytest.approx([0, 2_000 * (7 / 8) / (6 / 4)])
    same = measured(Network.of(4, Link(1.0)), times).cost("all_reduce", [10, 1_000])
    assert same.total_ns.tolist() == pytest.approx([1_700, 3_700])


def test_the_closest_curve_is_taken(tmp_path: Path) -> None:
    rows = ["operation,workers,size_bytes,time_ns", "all_reduce,2,8,1", "all_reduce,8,8,2", "all_gather,16,8,4"]
    times = measured(EIGHT, table("\n".join(rows), tmp_path))
    assert times.cost("all_reduce", 8).total_ns == 2
    # The same operation comes before the same number of workers.
    assert times.cost("all_gather", 8).total_ns == pytest.approx(4 * (STARTING + 7) / (STARTING + 15))
    assert times.cost("send", 8).total_ns == pytest.approx(2 * (STARTING + 1) / (STARTING + 14))


def test_an_algorithm_that_is_named_asks_for_the_formula(tmp_path: Path) -> None:
    network = measured(EIGHT, table("size_bytes,time_s\n8,1\n", tmp_path))
    assert network.cost("all_reduce", 8).total_ns == pytest.approx(1e9)
    assert network.cost("all_reduce", 8, "ring").total_ns == EIGHT.cost("all_reduce", 8, "ring").total_ns


NCCL_TESTS = """# nccl-tests version 2.17.1 nccl-headers=22703 nccl-library=22703
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid   1 on  node1 device  0 [0000:00] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid   2 on  node1 device  1 [0000:01] NVIDIA A100-SXM4-80GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
     1048576        262144     float     sum      -1    20.00   52.43   52.43       0    30.00   34.95   34.95       0
     2097152        524288     float     sum      -1    40.00   52.43   52.43       0    40.00   52.43   52.43       0
# Avg bus bandwidth    : 48.0
"""


def test_nccl_tests_output_is_a_table(tmp_path: Path) -> None:
    times = table(NCCL_TESTS, tmp_path, "run.txt")
    assert times.curves == (Curve("all_reduce", 2, (1_048_576, 2_097_152), (25_000, 40_000)),)
    assert times.workers == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("size,time\n1,2\n", "expected one column of sizes, its unit in its name .size_bytes, "),
        ("size_bytes,time\n1,2\n", "expected one column of times, its unit in its name .time_ns, "),
        ("size_bytes,size_mb,time_us\n1,1,2\n", "expected one column of sizes"),
        ("size_bytes,time_us\n1,0\n", "line 2: expected a time above 0, got '0'"),
        ("size_bytes,time_us\n-1,1\n", "line 2: expected a size above 0, got '-1'"),
        ("size_bytes,time_us\n1,1\n#\nx,1\n", "line 4: expected a size above 0, got 'x'"),
        ("size_bytes,time_us\n1,nan\n", "line 2: expected a time above 0, got 'nan'"),
        ("size_bytes,time_us\n1,1e300\n", "line 2: expected a time above 0"),
        ("size_bytes,time_us\n1\n", "line 2: expected 2 columns, got 1"),
        ("size_bytes,time_us,operation\n1,1,scan\n", "line 2: expected one of all_reduce.*got 'scan'"),
        ("size_bytes,time_us,workers\n1,1,1\n", "line 2: expected from 2 to 1,000,000 workers, got '1'"),
        ("size_bytes,time_us\n", "expected rows of sizes and times, got none"),
        ("# nothing\n\n", "got an empty file"),
        ("workers,workers,size_bytes,time_us\n2,4,1,1\n", "expected distinct column names"),
        ("size_bytes,time_us\n" + "1" * 200_000, "field larger than field limit"),
    ],
)
def test_a_table_that_is_none_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match=said) as error:
        table(text, tmp_path)
    assert "times.csv: " in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match="No such file"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(WhatifError, match=r"Is a directory|not UTF-8"):
        read_table(tmp_path)
    with pytest.raises(WhatifError, match="expected the path of a file"):
        read_table(Path("nul\0"))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(WhatifError, match="not UTF-8"):
        read_table(tmp_path / "binary.csv")


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["size_bytes,time_us\n1,2\n3,4\n", NCCL_TESTS]),
    st.integers(0, 900),
    st.integers(0, 5),
    st.text(max_size=5),
)
def test_any_text_is_a_table_or_a_sentence(text: str, place: int, gone: int, put: str) -> None:
    changed = text[:place] + put + text[place + gone :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "all_reduce.txt"
        path.write_text(changed, encoding="utf-8", errors="surrogatepass")
        said = _cost_or_sentence(path)
    assert "\n" not in said


def _cost_or_sentence(path: Path) -> str:
    try:
        cost = measured(EIGHT, read_table(path)).cost("all_reduce", [1, 10**6, 10**12])
    except WhatifError as error:
        return str(error)
    assert (cost.latency_ns >= 0).all()
    assert (cost.transfer_ns >= 0).all()
    return "a table"


curves = st.lists(
    st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=8, unique_by=lambda p: p[0]
)


@settings(max_examples=50, deadline=None)
@given(curves, st.integers(2, 64), st.integers(2, 64))
def test_a_measured_size_takes_its_measured_time(points: list[tuple[int, int]], workers: int, others: int) -> None:
    points.sort()
    curve = Curve("all_reduce", workers, tuple(float(s) for s, _ in points), tuple(float(t) for _, t in points))
    np.testing.assert_allclose(curve.time_of([s for s, _ in points]), [t for _, t in points], rtol=1e-9)
    network = measured(Network.of(others, Link(1.0)), Table((curve,)))
    scattered = network.cost("reduce_scatter", [s for s, _ in points])
    reduced = network.cost("all_reduce", [s for s, _ in points])
    np.testing.assert_allclose(2 * scattered.transfer_ns, reduced.transfer_ns, rtol=1e-9, atol=1e-6)
    assert (scattered.latency_ns <= reduced.latency_ns).all()


# -- NCCL on real machines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["a100", "h100"])
def test_nccl_within_ten_percent_after_calibration_on_half_of_the_sizes(system: str) -> None:
    """NVIDIA's measurements of NCCL on 2, 4 and 8 GPUs, 512 B to 1 GB: median ≤ 4 % in all, ≤ 10 % of each kind."""
    errors: dict[str, list[float]] = {}
    for curve in read_table(DATA / f"nccl_{system}.csv").curves:
        kept, held = (
            Curve(curve.operation, curve.workers, curve.size_bytes[i::2], curve.time_ns[i::2]) for i in (0, 1)
        )
        network = measured(Network.of(curve.workers or 0, Link(1.0)), Table((kept,)))
        predicted = network.cost(curve.operation, held.size_bytes).total_ns
        errors.setdefault(curve.operation, []).extend(np.abs(predicted / np.asarray(held.time_ns) - 1))
    assert set(errors) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert len(errors["all_reduce"]) == 30
    assert np.median(np.concatenate(list(errors.values()))) <= 0.04
    assert max(np.median(values) for values in errors.values()) <= 0.10


@pytest.mark.parametrize("system", ["a100", "h100"])
def test_nccls_all_reduces_tell_of_the_other_rings(system: str) -> None:
    """All-gather and reduce-scatter from the all-reduce's table alone, by bus factors: median within 10 %."""
    curves = {(c.operation, c.workers): c for c in read_table(DATA / f"nccl_{system}.csv").curves}
    errors = []
    for (operation, workers), curve in curves.items():
        if operation in ("all_gather", "reduce_scatter"):
            network = measured(Network.of(workers or 0, Link(1.0)), Table((curves["all_reduce", workers],)))
            errors.extend(np.abs(network.cost(operation, curve.size_bytes).total_ns / np.asarray(curve.time_ns) - 1))
    assert np.median(errors) <= 0.10


def test_the_bus_bandwidth_of_large_messages_is_that_of_the_links() -> None:
    """What the ring reaches on 8 A100 is NCCL's own 240 GB/s within 8 %; the preset says the same."""
    curve = next(c for c in read_table(DATA / "nccl_a100.csv").curves if (c.operation, c.workers) == ("all_reduce", 8))
    reached = curve.size_bytes[-1] / curve.time_ns[-1] * bus_factor("all_reduce", 8)
    assert reached == pytest.approx(240, rel=0.08)


# -- Pei et al.'s sigmoid --------------------------------------------------------------------------------------------


def test_sigmoid_by_hand() -> None:
    """k = 2, a = 0.25, w = 1: 1 MB passes at 2 / 1.25 = 1.6 GB/s in 625 us; at most 8 GB/s."""
    curve = Sigmoid(2, 0.25, 1)
    assert curve.gbyte_s([1e6, 1e15]).tolist() == pytest.approx([1.6, 8.0])
    assert curve.time_ns(1e6).tolist() == pytest.approx([625_000])


def test_a_sigmoid_with_w_1_is_a_latency_and_a_rate() -> None:
    size = np.array([1e3, 1e6, 1e9])
    np.testing.assert_allclose(Sigmoid.of(10_000, 12e9).time_ns(size), 10_000 + size / 12, rtol=1e-9)


CURVE = """[[level]]
workers = 4
model = "sigmoid"
k = 14
a = 1.3
w = 0.8
"""


def test_a_cluster_file_may_hold_the_curve() -> None:
    """A send is the whole message; a ring passes 2 (n - 1) parts of 1 / n (equations 20, 28 and 30, without adding)."""
    network, curve = parse_cluster(CURVE, "curve.toml").network(), Sigmoid(14, 1.3, 0.8)
    size = np.array([4e3, 1e6, 64e6, 1e6])
    np.testing.assert_allclose(network.cost("send", size).total_ns, curve.time_ns(size), rtol=1e-9)
    ring = network.cost("all_reduce", size, "ring")
    np.testing.assert_allclose(ring.total_ns, 6 * curve.time_ns(size / 4), rtol=1e-9)
    np.testing.assert_allclose(ring.transfer_ns, 6 * size / 4 * 1.3 / 14, rtol=1e-9)


def test_a_curve_with_w_1_is_a_link_with_a_latency() -> None:
    size = np.array([1e3, 1e6, 1e9])
    straight = Network.of(4, Link(12e9, 10_000))
    curved = parse_cluster(
        CURVE.replace("k = 14", "k = 100").replace("1.3", f"{100 / 12}").replace("0.8", "1"), "c.toml"
    )
    for operation in ("send", "all_reduce", "broadcast"):
        for one, other in zip(curved.network().cost(operation, size), straight.cost(operation, size), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("a = 1.3\n", "", r"c.toml: level\[0\].model: expected k, a and w"),
        ("w = 0.8", "w = 0", r"c.toml: level\[0\].w: expected a number from 1e-09"),
        ('"sigmoid"', '"curve"', r"level\[0\].model: expected one of latency, sigmoid"),
        ("k = 14", 'k = 14\nbandwidth = "1Gbps"', r"level\[0\].bandwidth: expected a known key"),
    ],
)
def test_a_curve_that_is_none_is_one_sentence(old: str, new: str, said: str) -> None:
    assert old in CURVE
    with pytest.raises(WhatifError, match=said):
        parse_cluster(CURVE.replace(old, new), "c.toml")


@settings(max_examples=50, deadline=None)
@given(st.floats(0.5, 500), st.floats(0.02, 5), st.floats(0.5, 1.2))
def test_a_fit_finds_the_curve_that_made_the_times(k: float, a: float, w: float) -> None:
    size = 2.0 ** np.arange(10, 31)
    made = Sigmoid(k, a, w)
    fitted = fit_sigmoid(size, made.time_ns(size))
    np.testing.assert_allclose(fitted.time_ns(size), made.time_ns(size), rtol=1e-3)


@pytest.mark.parametrize("system", ["a100", "h100"])
def test_a_sigmoid_through_nccls_times(system: str) -> None:
    """Three constants for 21 sizes each: median error ≤ 10 %."""
    errors = []
    for curve in read_table(DATA / f"nccl_{system}.csv").curves:
        fitted = fit_sigmoid(curve.size_bytes, curve.time_ns)
        errors.extend(np.abs(fitted.time_ns(curve.size_bytes) / np.asarray(curve.time_ns) - 1))
    assert np.median(errors) <= 0.10


@pytest.mark.parametrize(
    ("size", "time"), [([1, 2], [1, 2]), ([1, 2, 2], [1, 2, 3]), ([1, 2, 3], [1, 2, 0]), ([1, 2, 3], [1, 2])]
)
def test_too_little_to_fit_is_one_sentence(size: list[float], time: list[float]) -> None:
    with pytest.raises(WhatifError, match="expected three sizes or more"):
        fit_sigmoid(size, time)
