"""Reports of Nsight Systems: real runs in its schema give the graphs of their Kineto traces; each table by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.helpers import names as task_names
from tests.ingest.nsys_report import COLUMNS, PID, Report, from_kineto, global_id
from whatif import Phase, WhatifError
from whatif.cli.main import main
from whatif.graph.kernels import KernelFamily
from whatif.ingest.events import MISSING, EventCategory, Events
from whatif.ingest.kineto import read_kineto
from whatif.ingest.nsys import read_nsys
from whatif.prediction.predict import Baseline

V100 = "Tesla V100-SXM2-32GB"
# All that the two files have in common; FLOPs and bytes come from shapes with types, which emit_nvtx does not write.
SAME_COLUMNS = ("kind", "thread", "start_ns", "duration_ns", "layer", "phase", "step", "in_optimizer")
REAL = (
    "kineto-resnet50-v100/num_workers_4.2021-06.pt.trace.json.gz",
    "harryjmoss-a100-batch/bs8.run0.pt.trace.json.gz",
    "hta/cuda_event_sync_multi_stream.json.gz",
)


@pytest.mark.parametrize("name", REAL)
def test_a_real_run_gives_the_graph_of_its_kineto_trace(shared_traces: Path, tmp_path: Path, name: str) -> None:
    """Tasks, dependencies, step times and a prediction agree exactly: the same run, written in another schema."""
    expected = whatif.read(shared_traces / name)
    events = read_kineto(shared_traces / name)
    graph = whatif.read(from_kineto(events, gpu=V100).write(tmp_path / "report.sqlite"))
    assert task_names(graph) == task_names(expected)
    for column in SAME_COLUMNS:
        np.testing.assert_array_equal(getattr(graph, column), getattr(expected, column), err_msg=column)
    # Nsight Systems records no shapes; without them a product inside of a convolution counts as one.
    ours, theirs = graph.family, expected.family
    differ = ours != theirs
    assert set(zip(ours[differ].tolist(), theirs[differ].tolist(), strict=True)) <= {
        (KernelFamily.CONVOLUTION, KernelFamily.GEMM)
    }
    for column in ("source", "target", "kind", "lag_ns"):
        np.testing.assert_array_equal(
            getattr(graph.dependencies, column), getattr(expected.dependencies, column), err_msg=column
        )
    assert graph.info.measured_step_ns == expected.info.measured_step_ns
    assert graph.info.step_source == expected.info.step_source
    assert graph.info.gpu == V100
    assert not [quirk for quirk in graph.info.quirks if "not read" in quirk]
    # What torch's profiler cost is known of torch's own traces alone.
    assert graph.info.profiler is None
    assert (expected.info.profiler is None) == (not expected.profiler_ns.any())
    baselines = [Baseline.of(g, calibrated=False) for g in (graph, expected)]
    predicted, reference = (whatif.apply(baseline, "scale:kind=gpu,factor=0.5") for baseline in baselines)
    assert (predicted.baseline_ms, predicted.predicted_ms) == (reference.baseline_ms, reference.predicted_ms)


def rows(events: Events, category: EventCategory) -> list[int]:
    return np.flatnonzero(events.category == category).tolist()


def names(events: Events, category: EventCategory) -> list[str]:
    return [events.names[events.name[row]] for row in rows(events, category)]


def launch(report: Report, at: int, correlation: int, name: str = "k<float>", **more: int) -> None:
    """A call of 10 ns and a kernel of 100 ns."""
    report.call(at, at + 10, "cudaLaunchKernel_v7000", correlation, pid=more.get("pid", PID))
    report.kernel(at + 20, at + 120, name, correlation, **more)


def test_every_table_becomes_its_columns(tmp_path: Path) -> None:
    report = Report()
    launch(report, 1_000, 1, "void gemm<float>(int)")
    where = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": global_id(PID)}
    report.add("CUPTI_ACTIVITY_KIND_MEMCPY", start=2_000, end=2_050, correlationId=2, bytes=4096, copyKind=1, srcKind=1,
               dstKind=2, **where)  # fmt: skip
    report.add("CUPTI_ACTIVITY_KIND_MEMSET", start=3_000, end=3_010, correlationId=3, value=0, bytes=64, memKind=2,
               **where)  # fmt: skip
    report.add("TARGET_INFO_GPU", vmId=0, id=3, name="Not used", totalMemory=1, cuDevice=1)
    report.add("TARGET_INFO_GPU", vmId=0, id=4, name="NVIDIA H100 80GB HBM3", totalMemory=85_000_000_000, cuDevice=0)
    events = read_nsys(report.write(tmp_path / "r.sqlite"))
    assert names(events, EventCategory.KERNEL) == ["void gemm<float>(int)"]
    assert names(events, EventCategory.RUNTIME) == ["cudaLaunchKernel"]
    assert names(events, EventCategory.MEMCPY) == ["Memcpy HtoD (Pinned -> Device)"]
    assert names(events, EventCategory.MEMSET) == ["Memset (Device)"]
    (kernel,), (copy,) = rows(events, EventCategory.KERNEL), rows(events, EventCategory.MEMCPY)
    assert (events.start_ns[kernel], events.duration_ns[kernel]) == (1_020, 100)
    assert (events.device[kernel], events.stream[kernel], events.correlation[kernel]) == (0, 7, 1)
    assert events.tracks[events.track[kernel]] == ("GPU 0", "stream 7")
    assert (events.size_bytes[copy], events.correlation[copy]) == (4096, 2)
    (called,) = rows(events, EventCategory.RUNTIME)
    assert events.tracks[events.track[called]] == (str(PID), "1")
    assert events.stream[called] == events.sequence[called] == MISSING
    assert events.header["deviceProperties"] == [{"name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}]
    assert not events.dropped


@pytest.mark.parametrize(
    ("sizes", "warps"),
    [((10, 2, 1, 48, 1, 1), 40), ((10, 2, 1, 48, 0, 1), -1), ((2**62, 2**62, 2**62, 1, 1, 1), -1), ((), -1)],
)
def test_the_thread_blocks_of_a_kernel_are_counted_in_warps(tmp_path: Path, sizes: tuple[int, ...], warps: int) -> None:
    report = Report()
    columns = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
    launch(report, 1_000, 1, registersPerThread=96, **dict(zip(columns, sizes, strict=False)))
    events = read_nsys(report.write(tmp_path / "r.sqlite"))
    (kernel,) = rows(events, EventCategory.KERNEL)
    assert (events.warps[kernel], events.registers[kernel]) == (warps, 96)


def test_memory_kinds_are_those_of_the_reports_own_enumeration(tmp_path: Path) -> None:
    """CUPTI counts pageable memory as 1 and the tool as 0: the file's own table decides."""
    report = Report()
    report.add("CUPTI_ACTIVITY_KIND_MEMCPY", start=0, end=9, deviceId=0, contextId=1, streamId=7, bytes=1, copyKind=2,
               srcKind=3, dstKind=1)  # fmt: skip
    for code, label in enumerate(("Unknown", "Pageable", "Pinned", "Device")):
        report.add("ENUM_CUDA_MEM_KIND", id=code, name=label, label=label)
    events = read_nsys(report.write(tmp_path / "r.sqlite"))
    assert names(events, EventCategory.MEMCPY) == ["Memcpy DtoH (Device -> Pageable)"]


def test_migrations_of_managed_memory_are_left_out_and_counted(tmp_path: Path) -> None:
    report = Report()
    launch(report, 0, 1)
    report.add("CUPTI_ACTIVITY_KIND_MEMCPY", start=1, end=9, deviceId=0, contextId=1, streamId=0, bytes=1, copyKind=11)
    events = read_nsys(report.write(tmp_path / "r.sqlite"))
    assert not names(events, EventCategory.MEMCPY)
    assert dict(events.dropped) == {"migration of managed memory, which no stream orders": 1}


@pytest.mark.parametrize("numbered", [True, False], ids=["eventSyncId", "eventId"])
def test_a_wait_for_an_event_is_joined_with_its_last_record(tmp_path: Path, numbered: bool) -> None:
    """Event 5 is recorded by calls 11 and 13; what stream 8 waits for with call 14 is the second record."""
    report = Report()
    launch(report, 0, 10)
    report.call(60, 65, "cudaStreamWaitEvent_v3020", 14)
    for call, number in ((11, 101), (13, 102), (15, 103)):
        report.call(call, call + 1, "cudaEventRecord_v3020", call)
        report.add("CUPTI_ACTIVITY_KIND_CUDA_EVENT", deviceId=0, contextId=1, streamId=7, correlationId=call, eventId=5,
                   globalPid=global_id(PID), eventSyncId=number)  # fmt: skip
    report.add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", start=60, end=65, deviceId=0, contextId=1, streamId=8,
               correlationId=14, globalPid=global_id(PID), syncType=2, eventId=5, eventSyncId=102)  # fmt: skip
    tables = ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT")
    without = [] if numbered else [(table, "eventSyncId") for table in tables]
    events = read_nsys(report.write(tmp_path / "r.sqlite", without=without))
    (sync,) = rows(events, EventCategory.SYNC)
    assert events.details[events.detail[sync]] == "Stream Wait Event"
    assert (events.stream[sync], events.correlation[sync]) == (8, 14)
    assert (events.wait_stream[sync], events.wait_correlation[sync]) == (7, 13)


def test_a_synchronisation_without_a_stream_says_so(tmp_path: Path) -> None:
    report = Report()
    launch(report, 0, 10)
    for kind, correlation in ((4, 20), (1, 21)):
        report.add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", start=200, end=210, deviceId=0, contextId=1,
                   streamId=2**32 - 1, correlationId=correlation, globalPid=global_id(PID), syncType=kind,
                   eventId=2**32 - 1)  # fmt: skip
    events = read_nsys(report.write(tmp_path / "r.sqlite"))
    for row in rows(events, EventCategory.SYNC):
        assert events.stream[row] == events.wait_stream[row] == events.wait_correlation[row] == MISSING


def test_the_busiest_process_is_read_and_helpers_are_counted(tmp_path: Path) -> None:
    """Correlation ids of two processes are the same; only one's calls and kernels may meet."""
    report = Report()
    for number in range(1, 21):
        launch(report, 4_000 * number, number, "mine")
    launch(report, 1_000, 1, "other", pid=77)
    report.range(0, 10_000, "whatif::layer::other", pid=77)
    events = read_nsys(report.write(tmp_path / "r.sqlite"))
    assert set(names(events, EventCategory.KERNEL)) == {"mine"}
    assert not rows(events, EventCategory.ANNOTATION)
    assert dict(events.dropped) == {f"of processes other than {PID}, which uses the GPU most": 2}


def two_ranks(*, meet: bool) -> Report:
    """Two processes of four steps each; they meet in an all-reduce a step, or never."""
    report = Report()
    for rank, pid in enumerate((PID, 77)):
        for step in range(6):
            begin = 100_000 * step
            report.range(begin, begin + 90_000, f"ProfilerStep#{step}", pid=pid)
            launch(report, begin + 1_000, 2 * step + 1, "gemm", pid=pid)
            second = "ncclDevKernel_AllReduce_Sum_f32_RING_LL" if meet else "add"
            launch(report, begin + 20_000 + 5_000 * rank, 2 * step + 2, second, pid=pid)
    return report


def test_processes_of_one_report_are_read_as_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = two_ranks(meet=True).write(tmp_path / "r.sqlite")
    graph = whatif.read(path)
    assert graph.info.workers == 2
    assert sorted({thread.rank for thread in graph.threads}) == [-1, 0, 1]  # -1: they meet
    assert main(["info", str(path), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in info["ranks"]["ranks"]] == [0, 1]
    with pytest.raises(WhatifError, match=rf"2 that use GPUs \(77 and {PID}\)"):
        read_nsys(path)


def test_processes_that_never_meet_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match=r"r\.sqlite \(process 77\).*expected collectives between the ranks"):
        whatif.read(two_ranks(meet=False).write(tmp_path / "r.sqlite"))


def test_an_older_version_without_processes_and_full_names_is_read(tmp_path: Path) -> None:
    report = Report()
    launch(report, 1_000, 1, "gemm<float>")
    kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
    lacking = [(kernels, column) for column in ("globalPid", "demangledName", "graphNodeId", "greenContextId")]
    events = read_nsys(report.write(tmp_path / "r.sqlite", without=lacking))
    assert names(events, EventCategory.KERNEL) == ["gemm"]
    assert len(events) == 2


def test_a_graph_that_was_recorded_whole_is_one_task_and_is_said_to_be(tmp_path: Path) -> None:
    report = Report()
    launch(report, 1_000, 1)
    report.call(20_000, 25_000, "cudaGraphLaunch_v10000", 2)
    report.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=27_000, end=90_000, deviceId=0, contextId=1, streamId=7,
               correlationId=2, globalPid=global_id(PID), graphId=3, graphExecId=4)  # fmt: skip
    graph = whatif.read(report.write(tmp_path / "r.sqlite"))
    assert "CUDA graph 3" in task_names(graph)
    assert graph.info.execution == ("cuda_graph",)
    assert [quirk for quirk in graph.info.quirks if "1 launch of CUDA graphs recorded as one task each" in quirk]
    for what_if in ("amp", "batch_size:factor=2"):
        with pytest.raises(
            WhatifError, match=rf"^{what_if.partition(':')[0]}: .* one task each, \d+ % of the GPU time"
        ):
            whatif.apply(graph, what_if)
    assert whatif.apply(graph, "scale:kind=gpu,factor=0.5").speedup > 1.1


def test_progress_grows_to_the_size_of_the_file(tmp_path: Path) -> None:
    report = Report()
    launch(report, 0, 1)
    path = report.write(tmp_path / "r.sqlite")
    reported: list[tuple[int, int]] = []
    read_nsys(path, progress=lambda done, total: reported.append((done, total)))
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert reported[-1] == (path.stat().st_size, path.stat().st_size)


def test_the_backward_threads_kernels_are_backward_without_any_operator(tmp_path: Path) -> None:
    """Three steps; in each the main thread launches, then waits while thread 2 launches, then launches the update.

    ::

        us        0         10        20        30        40
        thread 1  |f|                             |u|  |sync...|
        thread 2              |b|  |b|
    """
    report = Report()
    for step in range(3):
        t, at = 60_000 * step, 10 * step
        report.range(t, t + 55_000, f"iteration {step}")
        report.range(t + 35_000, t + 41_000, "optimizer.step")
        for offset, tid, name in ((0, 1, "f"), (10_000, 2, "b"), (20_000, 2, "b"), (36_000, 1, "u")):
            at += 1
            report.call(t + offset, t + offset + 4_000, "cudaLaunchKernel_v7000", at, tid=tid)
            report.kernel(t + offset + 6_000, t + offset + 9_000, name, at)
    graph = whatif.read(report.write(tmp_path / "r.sqlite"))
    phases = {name: Phase(int(graph.phase[i])) for i, name in enumerate(task_names(graph)) if name in ("f", "b", "u")}
    assert phases == {"f": Phase.FORWARD, "b": Phase.BACKWARD, "u": Phase.UPDATE}
    assert (graph.info.n_steps, graph.info.step_source) == (3, "profiler marks")


def test_the_schema_of_the_tests_names_what_the_reader_asks_for() -> None:
    """So that a column that the reader misspells cannot hide behind "older versions lack it"."""
    from whatif.ingest import nsys_ranges, nsys_tables

    known = {table: {column.split()[0] for column in text.split(", ")} for table, text in COLUMNS.items()}
    for table, asked in (
        (nsys_tables.KERNELS, (*nsys_tables._GPU, "demangledName", "shortName")),
        (nsys_tables.COPIES, (*nsys_tables._GPU, "bytes", "copyKind", "srcKind", "dstKind")),
        (nsys_tables.GRAPHS, (*nsys_tables._GPU, "graphId")),
        (nsys_ranges.RANGES, ("start", "end", "eventType", "globalTid", "endGlobalTid", "domainId", "textId")),
    ):
        assert known[table] >= set(asked), table
