"""Every public recording and some of our own, row by row against the slow reader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers import EXTRA_DATA, extra_data, op, write_trace
from tests.ingest.kineto_oracle import (
    as_rows,
    check_columns,
    expected_flows,
    expected_rows,
    read_bytes,
)
from whatif.ingest.kineto import FOREIGN_CATEGORIES, read_kineto

OWN = ("transformer_cpu.json.gz", "resnet18_cifar_cpu_loader2.json.gz")


def public_traces() -> list[str]:
    """Return the names of the public recordings, or one placeholder if there are none."""
    folder = Path(os.environ.get(EXTRA_DATA) or os.devnull, "traces")
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.json.gz")) or ["hta"]


@pytest.mark.parametrize("name", OWN)
def test_own_recordings_equal_the_slow_reader(own_traces: Path, name: str) -> None:
    equals_the_slow_reader(own_traces / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", public_traces())
def test_public_recordings_equal_the_slow_reader(name: str) -> None:
    equals_the_slow_reader(extra_data("traces", name))


def equals_the_slow_reader(path: Path) -> None:
    events = read_kineto(path)
    text = read_bytes(path)
    rows, header = expected_rows(text)
    check_columns(events)
    assert as_rows(events) == rows
    foreign = events.header.pop(FOREIGN_CATEGORIES)
    assert events.header == header
    assert not events.dropped
    assert bool(foreign) == (path.name in ("mtia_inference.json.gz", "homemade_not_kineto.json.gz"))
    flows = events.flows
    assert expected_flows(text) == [
        (source_ns, events.tracks[source], target_ns, events.tracks[target])
        for source_ns, source, target_ns, target in zip(
            flows.source_ns.tolist(),
            flows.source_track.tolist(),
            flows.target_ns.tolist(),
            flows.target_track.tolist(),
            strict=True,
        )
    ]


def test_a_plain_file_reads_like_its_gzip_under_any_name(own_traces: Path, tmp_path: Path) -> None:
    path = own_traces / "transformer_cpu.json.gz"
    plain = tmp_path / "trace with spaces.gz"
    plain.write_bytes(read_bytes(path))
    assert as_rows(read_kineto(plain)) == as_rows(read_kineto(path))


def test_foreign_categories_are_counted(tmp_path: Path) -> None:
    foreign = [{**op("work", ts, 1.0), "cat": "mtia_runtime" if ts % 3 else "mtia_ccp_events"} for ts in range(9)]
    events = read_kineto(write_trace(tmp_path / "trace.json", [op("aten::add", 0, 9), *foreign]))
    assert events.header[FOREIGN_CATEGORIES] == {"mtia_runtime": 6, "mtia_ccp_events": 3}
    assert len(events) == 1


def test_foreign_categories_of_a_recording_are_counted() -> None:
    events = read_kineto(extra_data("traces", "hta", "mtia_inference.json.gz"))
    assert events.header[FOREIGN_CATEGORIES] == {"mtia_ccp_events": 1313, "mtia_runtime": 823}
