"""Compare predicted and measured peak memory: writes the tables of docs/memory.md.

python benchmarks/memory_accuracy.py [--check]

Four questions. From a recording with allocations (traces/memory_cpu) and from one with only shapes (the campaign's
baselines): the baseline's peak, and the peak under the what-if for each of the campaign's other runs, compared with
the peak measured in that run. The peak of each of the campaign's recordings from its own shapes. And
for public GPU recordings with allocations: the peak from shapes alone, compared with the allocator's maximum;
these recordings are in the folder WHATIF_EXTRA_DATA.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from extra_data import extra_data
from msgspec import structs

import whatif
from whatif import TaskGraph, WhatifError
from whatif.graph.memory import peak
from whatif.ingest.graph_of_events import graph_of_events
from whatif.ingest.kineto import read_kineto
from whatif.ingest.record_file import read_record
from whatif.prediction.composition import compose
from whatif.prediction.peak_fit import SHAPES_MISS
from whatif.prediction.transform import load_transform
from whatif.questions.validate.validate_records import read_run
from whatif.questions.validate.validate_what_ifs import what_ifs_between
from whatif.report.layout import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/memory.md")
CAMPAIGN, RECORDED = Path("traces/campaign_cpu"), Path("traces/memory_cpu")
# Public recordings: one with the allocator's totals, one with sizes but without addresses or totals.
WITH_TOTALS = "triosim-vgg13-h100/vgg13_bs512_adam.json.gz"
WITH_SIZES = "kineto-resnet50-v100/num_workers_4.2021-06.pt.trace.json.gz"
# What-ifs whose effect on memory is modelled; others only affect time.
MODELLED = re.compile(
    r"(batch_size|activation_checkpoint|gradient_accumulation|amp|fused_adam|optimizer_in_backward)\b"
)


@dataclass(frozen=True)
class Scored:
    """A predicted and a measured peak, bytes."""

    model: str
    what_if: str
    source: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error_pct(self) -> float:
        """The signed error of the prediction, percent."""
        return 100.0 * (self.predicted_bytes / self.measured_bytes - 1)

    @property
    def below_high(self) -> bool:
        """Whether the measured peak is below the upper end of the range reported for a peak from shapes."""
        return self.measured_bytes <= SHAPES_MISS * self.predicted_bytes


def score_campaign() -> list[Scored]:
    """Score every run of the campaign with a measured peak and a what-if that models memory."""
    found: list[Scored] = []
    for trace in sorted(RECORDED.glob("*.trace.json.gz")):
        model = trace.name.split(".")[0]
        found += _score_model(model, trace, "allocations")
        found += _score_model(model, CAMPAIGN / f"{model}--baseline.trace.json.gz", "shapes")
    return found


def _score_model(model: str, trace: Path, source: str) -> Iterator[Scored]:
    graph = whatif.read(trace)
    assert graph.info.memory is not None
    assert graph.info.memory.source == source
    baseline = read_run(CAMPAIGN / f"{model}--baseline.json")
    assert baseline is not None
    for record in sorted(CAMPAIGN.glob(f"{model}--*.json")):
        run, measured = read_run(record), ((read_record(record) or {}).get("memory") or {}).get("peak_allocated_bytes")
        if run is None or not measured:
            continue
        names, missing = what_ifs_between(baseline.options, run.options)
        if missing or not all(MODELLED.match(name) for name in names):
            continue
        try:
            changed = compose(graph, [load_transform(name) for name in names])
        except WhatifError:
            continue
        what_if = "(as recorded)" if not names else " + ".join(re.sub(r":layers=.*", "", name) for name in names)
        yield Scored(model, what_if, source, _peak(changed), measured)


def score_own() -> list[Scored]:
    """Score the peak of each of the campaign's recordings from its own shapes; unknown for compiled steps."""
    found = []
    for trace in sorted(CAMPAIGN.glob("*.trace.json.gz")):
        record = read_record(trace.with_name(trace.name.replace(".trace.json.gz", ".json"))) or {}
        measured = (record.get("memory") or {}).get("peak_allocated_bytes")
        graph = whatif.read(trace)
        if measured and graph.info.memory is not None:
            model, _, variant = trace.name.split(".trace")[0].partition("--")
            found.append(Scored(model, variant, graph.info.memory.source, _peak(graph), measured))
    return found


def own_table(scored: list[Scored]) -> str:
    """Return the errors by variant, in Markdown."""
    rows = []
    for variant in [*sorted({row.what_if for row in scored}), "all"]:
        selected = [row for row in scored if variant in (row.what_if, "all")]
        errors, below = [abs(row.error_pct) for row in selected], [row.below_high for row in selected]
        counts = f"{sum(below)} of {len(below)}"
        rows.append((variant, f"{statistics.mean(errors):.2f} %", f"{max(errors):.2f} %", counts))
    headers = ("run", "from its own shapes: mean", "largest", "measured peak below the range's upper end")
    return markdown_table(headers, rows)


def score_gpu(public: Path) -> list[Scored]:
    """Score the peak from shapes alone for recordings with reliable allocator totals.

    For the recording without totals, scores the increase of memory within a step.
    """
    with_totals, with_sizes = public / WITH_TOTALS, public / WITH_SIZES
    events = read_kineto(with_totals)
    assert events.allocations is not None
    graph = graph_of_events(structs.replace(events, allocations=None), str(with_totals))
    most = int(events.allocations.total_bytes[events.allocations.device_type == 1].max())
    found = [Scored("VGG-13, batch 512, H100", "peak", "shapes", _peak(graph), most)]
    graph = whatif.read(with_sizes)
    memory = graph.info.memory
    assert memory is not None
    assert memory.gradients_stay
    resident = memory.parameters + memory.optimizer_state + memory.inputs + memory.gradients
    added = _peak(graph) - resident
    return [*found, Scored("ResNet-50, V100", "what a step adds", "shapes", added, _added_by_a_step(with_sizes))]


def _added_by_a_step(trace: Path) -> int:
    """The peak of the allocations within one step, from their sizes alone."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    marks = [event for event in events if str(event.get("name")).startswith("ProfilerStep#") and event["ph"] == "X"]
    middle = sorted(marks, key=lambda event: event["ts"])[len(marks) // 2]
    level = most = 0
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 1]
    for event in sorted(changes, key=lambda event: event["ts"]):
        if middle["ts"] <= event["ts"] < middle["ts"] + middle["dur"]:
            level += event["args"]["Bytes"]
            most = max(most, level)
    return most


def _peak(graph: TaskGraph) -> int:
    assert graph.info.memory is not None
    return peak(graph.info.memory).total


def summary_table(scored: list[Scored]) -> str:
    """Return the errors by what-if and source, in Markdown."""
    rows = []
    kinds = sorted({row.what_if for row in scored}, key=lambda name: (name != "(as recorded)", name))
    for kind in [*kinds, "all"]:
        cells = []
        for source in ("allocations", "shapes"):
            errors = [abs(row.error_pct) for row in scored if row.source == source and kind in (row.what_if, "all")]
            cells += [f"{statistics.mean(errors):.2f} %", f"{max(errors):.2f} %"]
        count = sum(row.source == "shapes" and kind in (row.what_if, "all") for row in scored)
        rows.append((kind, *cells, str(count)))
    headers = ("what-if", "from allocations: mean", "largest", "from shapes: mean", "largest", "runs")
    return markdown_table(headers, rows)


def full_table(scored: list[Scored]) -> str:
    """Return every prediction, in Markdown."""
    rows = []
    of = {(row.model, row.what_if, row.source): row for row in scored}
    for model, what_if in sorted(of_both(scored)):
        recorded, shapes = of.get((model, what_if, "allocations")), of.get((model, what_if, "shapes"))
        known = recorded or shapes
        assert known is not None
        cells = [
            cell
            for row in (recorded, shapes)
            for cell in ((_mb(row.predicted_bytes), f"{row.error_pct:+.2f} %") if row else ("–", "–"))
        ]
        rows.append((model, what_if, _mb(known.measured_bytes), *cells))
    headers = ("model", "what-if", "measured", "from allocations", "error", "from shapes", "error")
    return markdown_table(headers, rows)


def of_both(scored: list[Scored]) -> set[tuple[str, str]]:
    """Return every model and what-if once."""
    return {(row.model, row.what_if) for row in scored}


def gpu_table(scored: list[Scored]) -> str:
    """Return the recordings of GPUs, in Markdown."""
    rows = [
        (row.model, row.what_if, _mb(row.measured_bytes), _mb(row.predicted_bytes), f"{row.error_pct:+.2f} %")
        for row in scored
    ]
    return markdown_table(("recording", "what", "recorded", "from shapes", "error"), rows)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.2f} MB"


def main() -> int:
    """Write the page's tables, or check that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    public = extra_data("traces")
    os.chdir(ROOT)
    scored = score_campaign()
    tables = {
        "summary": summary_table(scored),
        "own": own_table(score_own()),
        "gpu": gpu_table(score_gpu(public)),
        "all": full_table(scored),
    }
    before = page = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page = mark.sub(lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2]}", page)
    if page != before and not check:
        PAGE.write_text(page, encoding="utf-8")
    if page != before:
        print(f"{PAGE} {'is out of date' if check else 'written'}")
    return int(check and page != before)


if __name__ == "__main__":
    sys.exit(main())
