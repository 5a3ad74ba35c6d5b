"""Damaged, hostile or foreign reports of Nsight Systems: one sentence, or a count of the losses."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import whatif
from tests.ingest.nsys_report import PID, Report, global_id
from whatif import WhatifError
from whatif.graph.types import Severity
from whatif.ingest.events import EventCategory
from whatif.ingest.file_bytes import ends_early
from whatif.ingest.nsys import read_nsys


def report(n: int = 3) -> Report:
    made = Report()
    for i in range(n):
        made.call(1_000 * i, 1_000 * i + 100, "cudaLaunchKernel_v7000", i + 1)
        made.kernel(1_000 * i + 200, 1_000 * i + 900, f"k{i % 7}", i + 1)
        made.range(1_000 * i, 1_000 * i + 150, "aten::mm, op_id = 1")
    return made


def change(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path


def refusal(path: Path) -> str:
    with pytest.raises(WhatifError) as error:
        whatif.read(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def quirks_or_refusal(path: Path) -> tuple[str, ...] | str:
    """What the graph of a sound part of a report says was odd, or the sentence that refuses it."""
    try:
        return whatif.read(path).check().info.remarks
    except WhatifError as error:
        return str(error)


def test_another_tools_database_is_refused(tmp_path: Path) -> None:
    path = change(tmp_path / "a.sqlite", "CREATE TABLE bookmarks (id INTEGER, url TEXT)")
    assert "got a SQLite database of another tool" in refusal(path)


def test_nvprofs_database_is_refused(tmp_path: Path) -> None:
    """It has tables of the same names, and keeps its strings elsewhere."""
    path = change(
        tmp_path / "a.sqlite",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (_id_ INTEGER, start INT, end INT, name INT)",
        "CREATE TABLE StringTable (_id_ INTEGER, value TEXT)",
    )
    assert "got a SQLite database of another tool" in refusal(path)


def test_a_report_without_gpu_work_is_refused_with_what_to_do(tmp_path: Path) -> None:
    made = Report()
    made.range(0, 10, "step 1")
    assert "got no CUDA activity at all; record again with `nsys profile --trace=cuda,nvtx`" in refusal(
        made.write(tmp_path / "a.sqlite")
    )
    made.call(0, 10, "cudaMalloc_v3020", 1)
    assert "got 1 CUDA calls and no kernel" in refusal(made.write(tmp_path / "b.sqlite"))


def test_a_header_without_a_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5_000)
    assert "expected a readable SQLite export" in refusal(path)
    path.write_bytes(b"SQLite format 3\0")
    assert "expected a readable SQLite export" in refusal(path)


def test_the_suffix_does_not_matter(tmp_path: Path) -> None:
    assert len(whatif.read(report().write(tmp_path / "trace.json")))
    path = tmp_path / "real.sqlite"
    path.write_text('{"traceEvents": []}')
    assert "no event at all" in refusal(path)


def test_the_tools_own_format_is_refused_with_how_to_export_it(tmp_path: Path) -> None:
    path = tmp_path / "report.nsys-rep"
    path.write_bytes(bytes(range(256)) * 40)
    assert "`nsys export --type sqlite report.nsys-rep`" in refusal(path)
    path.write_text('{"traceEvents": []}')
    assert "no event at all" in refusal(path)


def test_reading_writes_nothing(tmp_path: Path) -> None:
    path = report().write(tmp_path / "a?b#c%d 1.sqlite")
    before = path.read_bytes()
    path.chmod(0o444)
    whatif.read(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_rows_with_damaged_times_are_counted_by_reason(tmp_path: Path) -> None:
    path = report(20).write(tmp_path / "a.sqlite")
    kernels = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET"
    change(
        path,
        f"{kernels} start = 'soon' WHERE correlationId = 2",
        f"{kernels} start = 0, end = 0 WHERE correlationId = 3",
        f"{kernels} end = x'00' WHERE correlationId = 4",
        f"{kernels} end = start - 5 WHERE correlationId = 5",
        f"{kernels} start = {2**63 - 1} WHERE correlationId = 6",
        f"{kernels} start = start + {2**55}, end = end + {2**55} WHERE correlationId = 7",
        "UPDATE NVTX_EVENTS SET end = NULL WHERE start = 1000",
    )
    events = read_nsys(path)
    assert (events.category == EventCategory.KERNEL).sum() == 14
    assert dict(events.dropped) == {
        "no timestamp": 2,
        "no duration": 2,
        "negative duration": 1,
        "timestamp out of range": 1,
        "more than 13 days from the rest of the trace": 1,
    }
    assert whatif.read(path).check()


def test_identifiers_of_any_type_and_size_cost_only_themselves(tmp_path: Path) -> None:
    path = report(20).write(tmp_path / "a.sqlite")
    kernels = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET"
    change(
        path,
        f"{kernels} streamId = {2**62} WHERE correlationId = 1",
        f"{kernels} deviceId = -7 WHERE correlationId = 2",
        f"{kernels} streamId = 1.5 WHERE correlationId = 3",
        f"{kernels} demangledName = 'DROP TABLE StringIds' WHERE correlationId = 4",
        f"{kernels} demangledName = {2**60}, shortName = -3 WHERE correlationId = 5",
        f"{kernels} correlationId = NULL WHERE correlationId = 6",
        "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = NULL WHERE correlationId = 7",
        "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET nameId = x'ff' WHERE correlationId = 8",
        "UPDATE NVTX_EVENTS SET text = 3.25 WHERE start = 5000",
        "UPDATE NVTX_EVENTS SET domainId = 'default' WHERE start = 6000",
    )
    events = read_nsys(path)
    assert (events.category == EventCategory.KERNEL).sum() == 20
    assert not events.dropped
    assert whatif.read(path).check()


def test_nameless_kernels_are_reported(tmp_path: Path) -> None:
    path = report(20).write(tmp_path / "a.sqlite")
    change(path, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = 999 WHERE correlationId < 3")
    (finding,) = (found for found in whatif.read(path).info.findings if found.check == "lost names")
    assert finding.severity == Severity.DOUBT
    assert finding.sentence.startswith("2 of 20 GPU tasks have no name")


def test_names_are_text_whatever_they_hold(tmp_path: Path) -> None:
    hostile = ["'); DROP TABLE StringIds; --", "\x1b[31mred", "../../etc/passwd", "{0.__class__}", "%s%n", "a\nb", ""]
    made = Report()
    for i, name in enumerate(hostile):
        made.call(1_000 * i, 1_000 * i + 100, name, i + 1)
        made.kernel(1_000 * i + 200, 1_000 * i + 900, name, i + 1)
        made.range(1_000 * i, 1_000 * i + 950, name)
    path = made.write(tmp_path / "a.sqlite")
    change(path, f"INSERT INTO StringIds VALUES (999, CAST(x'{b'bad '.hex()}fffe' AS TEXT))",
           "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = 999 WHERE correlationId = 1")  # fmt: skip
    events = read_nsys(path)
    kernels = {events.names[c] for c in events.name[events.category == EventCategory.KERNEL].tolist()}
    assert kernels == {*hostile[1:], "bad \ufffd\ufffd"}


def test_a_view_in_the_place_of_a_table_is_not_run(tmp_path: Path) -> None:
    """A view could compute for ever; it counts as a table that the report lacks."""
    path = change(
        report().write(tmp_path / "a.sqlite"),
        "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME",
        "CREATE VIEW CUPTI_ACTIVITY_KIND_RUNTIME AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 "
        "FROM n) SELECT start, start AS end, 0 AS globalTid, 1 AS correlationId, 1 AS nameId FROM n",
    )
    events = read_nsys(path)
    assert not (events.category == EventCategory.RUNTIME).any()


def test_indexes_that_other_tools_add_do_not_mix_up_rows(tmp_path: Path) -> None:
    made = Report()
    made.call(0, 10, "cudaLaunchKernel_v7000", 1)
    made.kernel(20, 90, "k", 1)
    texts = ["whatif::layer::z", "whatif::layer::a", "whatif::layer::m"]
    for i, text in enumerate(texts):
        made.range(100 * i, 100 * i + 50, text)
    path = change(made.write(tmp_path / "a.sqlite"), "CREATE INDEX by_text ON NVTX_EVENTS (text)",
                  "CREATE INDEX by_end ON NVTX_EVENTS (end, start, eventType, globalTid)")  # fmt: skip
    events = read_nsys(path)
    found = events.category == EventCategory.ANNOTATION
    assert [events.names[code] for code in events.name[found].tolist()] == texts


def test_a_truncated_file_is_read_as_far_as_it_goes_or_refused(tmp_path: Path) -> None:
    whole = report(3_000).write(tmp_path / "whole.sqlite").read_bytes()
    outcomes = set()
    for share in (0.999, 0.9, 0.7, 0.5, 0.3, 0.1, 0.01):
        path = tmp_path / "cut.sqlite"
        path.write_bytes(whole[: int(len(whole) * share)])
        early = ends_early(path.stat().st_size)
        outcome = quirks_or_refusal(path)
        outcomes.add(type(outcome))
        assert (isinstance(outcome, str) and f"cut.sqlite: {early}" in outcome) or outcome[0].startswith(early), share
    assert outcomes == {str, tuple}


def test_flipped_bytes_never_raise_anything_but_a_sentence(tmp_path: Path) -> None:
    whole = report(200).write(tmp_path / "whole.sqlite").read_bytes()
    chance = random.Random(5)
    path = tmp_path / "flipped.sqlite"
    outcomes = set()
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 10, 300))):
            damaged[chance.randrange(16, len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        outcomes.add(type(quirks_or_refusal(path)))
    assert outcomes == {str, tuple}


def test_other_processes_without_gpu_work_do_not_count_as_damage(tmp_path: Path) -> None:
    """Data-loader workers write ranges and call nothing."""
    made = report()
    made.range(0, 10, "worker", pid=PID + 1)
    made.add("NVTX_EVENTS", start=0, end=5, eventType=59, text="nobody's", globalTid=None, domainId=0)
    made.add("TARGET_INFO_GPU", vmId=global_id(0), id=0, name=None, totalMemory=None, cuDevice=None)
    graph = whatif.read(made.write(tmp_path / "a.sqlite"))
    assert graph.info.gpu is None
    assert not graph.info.quirks
