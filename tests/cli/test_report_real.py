"""The report of real recordings: their bottlenecks, and the time to write the page."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.cli.reports import written
from whatif.prediction.baseline import Baseline
from whatif.report.html.facts import gather, without_folders
from whatif.report.html.page import page


def advice_of(path: Path) -> dict[str, Any]:
    """The page's advice for a trace as recorded, without calibration: only that was measured."""
    baseline = Baseline.of(without_folders(whatif.read(path)), calibrated=False)
    return json.loads(json.dumps(gather(baseline).advice.to_dict()))  # type: ignore[no-any-return]


def test_data_loading_bounds_resnet50_and_the_gain_is_reported(shared_traces: Path) -> None:
    """Measured with four workers: 122.5 ms, 18.5 % less."""
    advice = advice_of(shared_traces / "kineto-resnet50-v100" / "num_workers_0.2021-06.pt.trace.json.gz")
    bound, first, gain = advice["verdict"]
    assert bound.startswith("Loading-bound: the step waits for its data for 44.51 of 149.68 ms")
    assert first.startswith("Do first: data_loading:workers=4")
    assert float(re.search(r"gains (\d+) %", gain)[1]) == pytest.approx(18.5, abs=2)  # type: ignore[index]


def test_waiting_that_nothing_explains_is_not_attributed_to_the_cpu(tmp_path: Path, shared_traces: Path) -> None:
    """98 % of that recording; nothing helps, and no range is printed."""
    held = written(tmp_path, shared_traces / "edls-a4000" / "torch_profiler_trace.json.gz", "--force")
    assert held.data("facts")["advise"]["verdict"][0].startswith("Waiting: the span is idle")
    assert "host-bound" not in held.text.lower()
    assert "most of the rest is waiting that the recording does not explain" in held.text
    assert "Ranges are given" not in held.text


def test_loading_is_reported_where_other_work_takes_more(shared_traces: Path) -> None:
    """Of the older recording, whose CPU takes most of the step: measured with four workers 173.2 of 214.0 ms."""
    advice = advice_of(shared_traces / "kineto-resnet50-v100" / "num_workers_0.2020-12.pt.trace.json.gz")
    assert advice["verdict"][0].startswith("Host-bound: ")
    assert advice["verdict"][0].endswith("the step also waits for its data for 51.35 of 214.06 ms (24 %).")
    loading = next(entry for entry in advice["advice"] if entry["what_ifs"] == ["data_loading:workers=4"])
    assert loading["gain_pct"] == pytest.approx(100 * (1 - 173.2 / 214.0), abs=2)


def test_the_host_bounds_bert_small_on_an_h100(shared_traces: Path) -> None:
    path = next((shared_traces / "tracelens-h100-mi300").glob("h100.gaunernst*"))
    assert advice_of(path)["verdict"][0].startswith("Host-bound: the GPU is busy 0.31 of 3.91 ms (8 %)")


def test_convolutions_bound_vgg13_and_fused_adam_cannot_help(shared_traces: Path) -> None:
    advice = advice_of(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    assert "42 % of its work in convolution kernels" in advice["verdict"][0]
    fused = next(entry for entry in advice["no_gain"] if entry["what_ifs"] == ["fused_adam"])
    assert 0 <= fused["gain_pct"] < 1
    assert "the saved work is not on the critical path" in fused["reason"]


def test_the_page_of_216_000_events_is_made_in_seconds(shared_traces: Path) -> None:
    """Five seconds of a quiet core for 130,000 events; twice that here, where other tests take the caches."""
    graph = without_folders(whatif.read(shared_traces / "hta" / "v100_allreduce_rank1of2.json.gz"))
    began = time.process_time()
    written = page(gather(Baseline.of(graph)))
    assert time.process_time() - began < 10
    assert len(written.encode()) < 3_000_000
