"""Times of reading: from a file to columns, and from columns to the task graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from inputs import trace
from measure import Row, best_of, candidate, least_cpu_s
from rivals import hta_python

from whatif.ingest.graph_of_events import graph_of_events
from whatif.ingest.kineto import read_kineto

# MB/s, and speedup over HTA.
BUDGETS = {"v100-50": (300, 20), "v100-100": (230, 25), "resnet50-100": (230, 20), "h100-100": (230, 20)}


def ingest(rounds: int, quick: bool, large: bool) -> Iterator[Row]:
    """JSON to columns, against the standard library's objects and Holistic Trace Analysis' table."""
    for name in ["v100-50", "v100-100"] if quick else BUDGETS:
        yield from _ingest_one(trace(name), rounds, BUDGETS[name])
    if large:
        path = trace("v100-1000")
        yield from _ingest_one(path, 1, BUDGETS["v100-50"], rivals=False)
        peak = best_of([candidate("whatif_graph", path)], "peak_bytes")
        title = f"{path.name}: peak memory over the file, with the task graph"
        yield Row("ingest", title, peak and peak / path.stat().st_size, "x", 1.3, None, True)


def _ingest_one(path: Path, rounds: int, budgets: tuple[int, int], *, rivals: bool = True) -> Iterator[Row]:
    hta = hta_python() if rivals else None
    ours, objects, tables = [], [], []
    for _ in range(rounds):
        ours.append(candidate("whatif_columns", path))
        if rivals:
            objects.append(candidate("json_load", path))
        if hta:
            tables.append(candidate("hta_load", path, hta))
    cpu_s, size = best_of(ours, "cpu_s"), path.stat().st_size
    if cpu_s is None:
        raise RuntimeError(f"{path.name}: {ours}")
    title = f"{path.name} ({size / 1e6:.0f} MB)"
    yield Row("ingest", f"{title}: JSON to columns", size / cpu_s / 1e6, "MB/s", budgets[0])
    yield Row("ingest", f"{title}: duration events", ours[0]["events"] / cpu_s, "events/s")
    peak = best_of(ours, "peak_bytes")
    yield Row("ingest", f"{title}: peak memory of the process over the file", peak and peak / size, "x", 3.5, 1.5, True)
    if not rivals:
        return
    json_s, hta_s = best_of(objects, "cpu_s"), best_of(tables, "cpu_s") if hta else None
    yield Row("ingest", f"{title}: faster than json.load", json_s and json_s / cpu_s, "x")
    failed = next((result["error"] for result in tables if "error" in result), "") if hta else "not installable"
    yield Row("ingest", f"{title}: faster than HTA's load", hta_s and hta_s / cpu_s, "x", budgets[1], note=failed)


def build(rounds: int, quick: bool, large: bool) -> Iterator[Row]:
    """Columns to the checked task graph with all its dependencies."""
    for name in ["v100-50"] if quick else ["v100-50", "resnet50-100", "h100-100"]:
        path = trace(name)
        events = read_kineto(path)
        n_tasks = len(graph_of_events(events, str(path)))
        cpu_s = least_cpu_s({"": partial(graph_of_events, events, str(path))}, rounds)[""]
        title = f"{path.name}: {len(events):,} events to {n_tasks:,} tasks"
        yield Row("graph", title, n_tasks / cpu_s / 1e6, "M tasks/s", 2.5, 8)
