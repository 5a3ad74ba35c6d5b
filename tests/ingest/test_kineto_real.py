"""Every real trace, row by row against the slow reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ingest.kineto_oracle import (
    STRICT,
    TRACES,
    as_rows,
    check_columns,
    expected_flows,
    expected_rows,
    need,
    read_bytes,
    real_traces,
)
from whatif.ingest.kineto import FOREIGN_CATEGORIES, read_kineto


@pytest.mark.skipif(not STRICT, reason="only WHATIF_STRICT=1 requires them")
def test_real_traces_are_here() -> None:
    assert real_traces(), f"no traces in {TRACES}"


@pytest.mark.parametrize("path", real_traces(), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_equals_the_slow_reader(path: Path) -> None:
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


def test_a_plain_file_reads_like_its_gzip_under_any_name(tmp_path: Path) -> None:
    path = need(TRACES / "hta" / "cuda_event_sync.json.gz")
    plain = tmp_path / "trace with spaces.gz"
    plain.write_bytes(read_bytes(path))
    assert as_rows(read_kineto(plain)) == as_rows(read_kineto(path))


def test_foreign_categories_are_counted() -> None:
    events = read_kineto(need(TRACES / "hta" / "mtia_inference.json.gz"))
    assert events.header[FOREIGN_CATEGORIES] == {"mtia_ccp_events": 1313, "mtia_runtime": 823}
