"""The one place for durations: each answer by hand, with its range and its source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, equal, ids_of, kernel, read_events, step, with_metadata
from whatif import DependencyKind, Phase, TaskGraph, TaskKind, WhatifError
from whatif.graph.columns import concatenated
from whatif.graph.insert import NewTasks, insert_all
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.ingest.kineto_columns import _Warps
from whatif.models.durations.computing import Share, computing, recorded_share
from whatif.models.durations.estimator import (
    Estimates,
    Source,
    described,
    device,
    host_copies,
    mark,
    moving,
    put,
    scaled,
    sources,
)
from whatif.models.durations.occupancy import (
    filled,
    latency_ns,
    matrix_flops_per_ns,
    roofline_ns,
)
from whatif.models.durations.precision import in_precision
from whatif.models.kernels.batch import at_batch, batch_tasks
from whatif.report.text import print_prediction

A100, V100, T4 = "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB", "Tesla T4"
F = KernelFamily
FP32, FP16 = DTYPES.index("fp32"), DTYPES.index("fp16")


def kernels(*rows: dict[str, int], gpu: str | None = A100) -> TaskGraph:
    """Forward kernels one behind the other, each with its launch; ids 1, 3, 5, ... are the kernels."""
    build = Build(CPU, STREAM, gpu=gpu, n_steps=1)
    for number, row in enumerate(rows):
        call = build.task(0, 1000, "launch", phase=Phase.FORWARD)
        columns = {"phase": Phase.FORWARD, "family": F.ELEMENTWISE, **row}
        task = build.task(1, columns.pop("ns"), f"k{number}", **columns)
        build.edge(call, task, kind=DependencyKind.LAUNCH)
    return build.graph()


# -- estimates and their sources -------------------------------------------------------------------------------------


def test_estimates_hold_their_duration_within_their_range() -> None:
    estimates = Estimates.of([10, 20], Source.PAPER, [12, 5], 15)
    assert estimates.low_ns.tolist() == [10, 5]
    assert estimates.high_ns.tolist() == [15, 20]
    assert estimates.source.tolist() == [Source.PAPER] * 2
    joined = concatenated([estimates, Estimates.of(7, Source.MEASURED, 6, 8)])
    assert (len(joined), joined.duration_ns.tolist()) == (3, [10, 20, 7])


def test_what_is_put_travels_with_the_tasks_and_is_counted() -> None:
    graph = step()
    ids = ids_of(graph, "k0", "k2")
    changed = put(graph, ids, Estimates.of([4, 5], [Source.MEASURED, Source.ROOFLINE], [3, 4], [8, 9]))
    assert [int(changed.duration_ns[i]) for i in ids] == [4, 5]
    assert [int(changed.low_ns[i]) for i in ids] == [3, 4]
    assert [int(changed.high_ns[i]) for i in ids] == [8, 9]
    assert described(changed) == {"measured": 1, "roofline": 1}
    assert described(graph) == {}
    # Removing and inserting keeps the others' sources; what comes new is recorded until somebody says otherwise.
    fewer = changed.remove(ids[:1])
    assert described(fewer) == {"roofline": 1}
    more = changed.insert(NewTasks(ids, "new", TaskKind.KERNEL, 3)).graph
    assert described(more) == described(changed)


def test_a_duration_is_known_as_well_as_the_worst_of_its_answers() -> None:
    graph = step()
    (task,) = ids_of(graph, "k1")
    for source, expected in (
        (Source.PAPER, Source.PAPER), (Source.MEASURED, Source.PAPER), (Source.RECORDED, Source.PAPER),
        (Source.ASSUMED, Source.ASSUMED),
    ):  # fmt: skip
        graph = mark(graph, np.array([task]), source)
        assert sources(graph)[task] == expected


def test_scaled_keeps_the_range_that_was_there() -> None:
    graph = step()
    graph = graph.scale(graph.select(name="k1"), 1.0, low=0.5, high=2.0)
    estimates = scaled(graph, ids_of(graph, "k1"), 0.5, Source.PAPER, low=0.4, high=0.6)
    assert [float(column[0]) for column in (estimates.duration_ns, estimates.low_ns, estimates.high_ns)] == [5, 2, 12]


# -- new kernels -----------------------------------------------------------------------------------------------------


def test_a_kernel_that_moves_data_takes_its_bandwidth() -> None:
    """2,039 GB/s at 0.84, and from 0.5 to 0.95 of it; never below the floor of a kernel."""
    estimates = moving(kernels({"ns": 5}), [1_712_760_000, 1])
    assert estimates.duration_ns == pytest.approx([1e6, 2_000])
    assert estimates.low_ns[0] == pytest.approx(1_712.76e6 / (0.95 * 2039))
    assert estimates.high_ns[0] == pytest.approx(1_712.76e6 / (0.5 * 2039))
    assert estimates.source.tolist() == [Source.ROOFLINE] * 2
    unknown = moving(kernels({"ns": 5}, gpu="A device of tomorrow"), 10**9)
    assert unknown.source.tolist() == [Source.ASSUMED]
    assert unknown.high_ns[0] / unknown.low_ns[0] > 15


def test_copies_take_the_link_or_what_the_recorder_measured() -> None:
    graph = kernels({"ns": 5})
    by_link = host_copies(graph, 31_500_000)
    assert by_link.duration_ns[0] == pytest.approx(31.5e6 / (0.8 * 31.5))
    rates = {"rates": {"h2d_pinned_gbyte_s": 24.0, "d2h_pinned_gbyte_s": 25.0}}
    measured = host_copies(with_metadata(graph, **rates), 24_000_000)
    assert measured.duration_ns[0] == pytest.approx(1e6)
    assert measured.source[0] == Source.MEASURED
    assert measured.low_ns[0] == pytest.approx(24e6 / 25)


def test_a_new_product_runs_as_the_recorded_ones_do() -> None:
    """Three fp32 products at 0.2, 0.4 and 0.6 of 19.5 TFLOP/s in one time: 0.4 in the middle."""
    rows = [{"ns": 100_000, "family": F.GEMM, "dtype": FP32, "flops": int(share * 19.5e3 * 100_000)}
            for share in (0.2, 0.4, 0.6)]  # fmt: skip
    graph = kernels(*rows)
    share = recorded_share(graph, F.GEMM, "fp32")
    assert share is not None
    assert (share.centre, share.low, share.high) == pytest.approx((0.4, 0.24, 0.56))
    estimates = computing(graph, int(0.4 * 19.5e3 * 50_000), 0, F.GEMM, "fp32")
    assert estimates.duration_ns[0] == pytest.approx(50_000)
    assert estimates.low_ns[0] == pytest.approx(50_000 * 0.4 / 0.56)
    assert estimates.source[0] == Source.ROOFLINE
    # None in fp16: half of what the best shapes reach, of 312 TFLOP/s.
    usual = computing(graph, 271.2e3 * 0.5 * 50_000, 0, F.GEMM, "fp16")
    assert usual.duration_ns[0] == pytest.approx(50_000)
    assert usual.source[0] == Source.PAPER
    given = computing(graph, 312e3 * 0.5 * 50_000, 0, F.GEMM, "fp16", Share(0.5, 0.25, 1.0))
    assert [float(c[0]) for c in (given.duration_ns, given.low_ns, given.high_ns)] == [50_000, 25_000, 100_000]


def test_a_new_product_that_memory_bounds() -> None:
    estimates = computing(kernels({"ns": 5}), 1, 1_712_760_000, F.GEMM, "fp16")
    assert estimates.duration_ns[0] == pytest.approx(1e6)


def test_a_new_product_on_an_unknown_device_and_on_a_cpu(own_traces: Path) -> None:
    unknown = computing(kernels({"ns": 5}, gpu="A device of tomorrow"), 10**12, 0, F.GEMM, "fp32")
    assert unknown.source[0] == Source.ASSUMED
    assert unknown.high_ns[0] > 5 * unknown.low_ns[0]
    with pytest.raises(WhatifError, match="got one of a CPU"):
        computing(whatif.read(own_traces / "transformer_cpu.json.gz"), 1, 1, F.GEMM, "fp32")


# -- what a device could do at best ----------------------------------------------------------------------------------


def test_roofline_and_occupancy_by_hand() -> None:
    graph = kernels(
        {
            "ns": 9_000,
            "family": F.GEMM,
            "dtype": FP16,
            "flops": 312_000_000,
            "size_bytes": 1,
            "warps": 108 * 64,
            "registers": 250,
        },
        {"ns": 9_000, "size_bytes": 2_039_000, "flops": 10**12, "warps": 108 * 16},
        {"ns": 9_000},
        {"ns": 9_000, "family": F.GEMM, "warps": 108 * 4},
    )
    gpu = device(graph)
    assert gpu is not None
    assert matrix_flops_per_ns(np.array([FP32, FP16]), gpu) == pytest.approx([18.6e3, 271.2e3])
    # 1 us each at the peak; operations of what is no product are none of the matrix units'.
    assert roofline_ns(graph, gpu, np.array([1, 3, 5])) == pytest.approx([312e3 / 271.2, 1000 / 0.84, 0])
    share = filled(graph, gpu, np.arange(len(graph)))
    # 256 registers a thread leave places for 8 warps; a product that does not record them is taken for such a one.
    assert share[[1, 3, 7]].tolist() == [8.0, 0.25, 0.5]
    assert np.isnan(share[[0, 2, 4, 5]]).all()
    assert np.isnan(filled(graph, None, np.arange(3))).all()
    assert not roofline_ns(graph, None, np.arange(3)).any()


def test_a_turing_sm_holds_half_the_warps() -> None:
    graph = kernels({"ns": 9_000, "warps": 40 * 32}, gpu=T4)
    gpu = device(graph)
    assert gpu is not None
    assert filled(graph, gpu, np.array([1])).tolist() == [1.0]


def test_latency_is_that_of_idle_kernels() -> None:
    small = [{"ns": us * 1000, "warps": 4} for us in (8, 6, 4, 5, 7)]
    graph = kernels(*small, {"ns": 3_000, "warps": 10**6})
    assert latency_ns(graph, device(graph)) == 5_000  # the lower quartile of 4 to 8
    few = kernels(*small[:4])
    assert latency_ns(few, device(few)) == 2_000


# -- the batch -------------------------------------------------------------------------------------------------------


def test_a_batch_fills_the_device_before_it_takes_longer() -> None:
    """Idle kernels take 5 us. Twice the batch, kernels of 25 us:

    an eighth of the device filled: 20 / 8 of it in proportion, 27.5; full: 25 + 20; a roofline of 10 us: 25 + 10;
    nothing known: all but the floor, 25 + 23; an update's kernel: stays.
    """
    idle = [{"ns": 5_000, "warps": 4}] * 5
    graph = kernels(
        *idle, {"ns": 25_000, "warps": 108 * 8}, {"ns": 25_000, "warps": 108 * 640},
        {"ns": 25_000, "warps": 108 * 8, "size_bytes": int(10_000 * 0.84 * 2039)}, {"ns": 25_000},
        {"ns": 25_000, "phase": Phase.UPDATE},
    )  # fmt: skip
    tasks = batch_tasks(graph)
    estimates = at_batch(graph, tasks, 2.0)
    assert estimates.duration_ns[5:].tolist() == [27_500, 45_000, 35_000, 48_000]
    assert estimates.source[5:].tolist() == [Source.ROOFLINE] * 3 + [Source.ASSUMED]
    # Half of what is neither latency nor known work may grow all the same: 8.75 of 17.5 us; and a tenth of the change.
    assert estimates.high_ns[5] == pytest.approx(27_500 + 8_750 + 250)
    assert estimates.low_ns[5] == pytest.approx(27_500 - 250)
    assert not tasks[graph.select(phase=Phase.UPDATE)].any()


def test_the_batch_of_a_wider_graph_is_wider(tmp_path: Path) -> None:
    graph = kernels({"ns": 25_000, "warps": 8, "flops": 10, "size_bytes": 20})
    larger = whatif.load_transform("batch_size:factor=4")(graph)
    assert [int(c[1]) for c in (larger.warps, larger.flops, larger.size_bytes)] == [32, 40, 80]


# -- formats ---------------------------------------------------------------------------------------------------------


def test_who_answers_for_half_precision() -> None:
    graph = kernels(
        {"ns": 90_000, "family": F.GEMM, "dtype": FP32, "flops": 10**9},
        {"ns": 90_000, "family": F.GEMM, "dtype": FP32},
        {"ns": 90_000, "family": F.ELEMENTWISE, "dtype": FP32},
        {"ns": 90_000, "family": F.SOFTMAX, "dtype": FP32},
        {"ns": 90_000, "family": F.OPTIMIZER, "dtype": FP32},
        gpu=V100,
    )
    estimates = in_precision(graph, graph.on_gpu, "fp16")
    # Of unknown shapes usual products answer, by the data sheet; of unknown bytes a constant share is left.
    expected = [Source.ROOFLINE, Source.ROOFLINE, Source.PAPER, Source.PAPER, Source.RECORDED]
    assert estimates.source.tolist() == expected
    assert (estimates.duration_ns[:4] < 90_000).all()
    assert estimates.duration_ns[4] == 90_000


# -- one insertion, one cache ----------------------------------------------------------------------------------------


def test_lots_of_new_tasks_at_once_are_those_of_one_after_the_other() -> None:
    graph = step()
    k0, k1, l1 = ids_of(graph, "k0", "k1", "l1")
    first = NewTasks([k0], "a", TaskKind.KERNEL, 5, launched_after=[l1], launch_ns=1)
    second = NewTasks([k1], "b", TaskKind.KERNEL, 6)
    together = insert_all(graph, [first, NewTasks([], "none", TaskKind.KERNEL, 1), second])
    once = graph.insert(first)
    twice = once.graph.insert(NewTasks(once.moved[[k1]], "b", TaskKind.KERNEL, 6))
    assert equal(together[0].graph, twice.graph)
    assert together[0].graph is together[2].graph
    assert len(together[1].ids) == 0
    names = together[0].graph.names
    assert [names[together[lot].graph.name[together[lot].ids[0]]] for lot in (0, 2)] == ["a", "b"]
    assert np.array_equal(together[0].moved, twice.moved[once.moved])


def test_no_lots_leave_the_graph() -> None:
    graph = step()
    assert insert_all(graph, []) == []
    assert insert_all(graph, [NewTasks([], "none", TaskKind.KERNEL, 1)])[0].graph is graph


def test_graphs_of_one_structure_share_what_is_found_of_it() -> None:
    graph = step()
    longer = graph.scale(graph.on_gpu, 2.0).note("longer").attach(x=np.zeros(len(graph)))
    assert longer.neighbours is graph.neighbours
    assert graph.derived is longer.derived
    shorter = graph.remove(ids_of(graph, "k1"))
    assert shorter.launch_of is not graph.launch_of
    assert len(shorter.launch_of) == len(shorter)


# -- thread blocks of recorded kernels -------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 2000), min_size=3, max_size=3), st.lists(st.integers(1, 64), min_size=3, max_size=3))
def test_warps_of_a_launch(grid: list[int], block: list[int]) -> None:
    warps = _Warps()[str(grid).encode(), str(block).encode()]
    assert warps == grid[0] * grid[1] * grid[2] * ((block[0] * block[1] * block[2] + 31) // 32)


@pytest.mark.parametrize("grid", ["[]", "[1, 2]", "[1, 2, 0]", "[1, 2, -3]", '["a", 1, 1]', "7", "", "[1, 2, 1e300]"])
def test_damaged_launches_give_nothing(grid: str) -> None:
    assert _Warps()[grid.encode(), b"[32, 1, 1]"] == -1


def test_warps_reach_the_graph(tmp_path: Path) -> None:
    events = [kernel("a", 10, 5, 1), kernel("b", 20, 5, 2)]
    events[0]["args"] |= {"grid": [10, 2, 1], "block": [48, 1, 1], "registers per thread": 96}
    graph = read_events(tmp_path, events)
    assert sorted(graph.warps[graph.on_gpu].tolist()) == [-1, 40]
    assert sorted(graph.registers[graph.on_gpu].tolist()) == [-1, 96]


# -- what is reported ------------------------------------------------------------------------------------------------


def test_the_report_counts_the_sources(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = whatif.read(own_traces / "resnet18_cifar_cpu.json.gz")
    prediction = whatif.apply(graph, "batch_size:factor=2")
    counted = prediction.to_dict()["estimates"]
    assert counted == described(prediction.graph)
    assert set(counted) <= {"measured", "assumed"}
    assert counted
    # What a user says outright is nobody's estimate.
    assert whatif.apply(graph, "scale:kind=cpu,factor=0.5").to_dict()["estimates"] == {}
    print_prediction(prediction)
    assert "tasks with estimated durations:" in capsys.readouterr().out


def test_accumulated_gradients_know_their_source(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "campaign_cpu" / "resnet50--baseline.trace.json.gz")
    changed = whatif.apply(graph, "gradient_accumulation:passes=2").graph
    added = changed.select(name="add gradients")
    assert added.any()
    assert (sources(changed)[added] != Source.RECORDED).all()
