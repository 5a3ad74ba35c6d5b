"""Run one candidate in a separate process and report its CPU time and peak memory as a line of JSON.

It runs under the interpreter of the package it measures, so it imports only the standard library at the top.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def whatif_columns(path: Path) -> dict[str, Any]:
    """Read a trace into columns with whatif."""
    from whatif.ingest.kineto import read_kineto

    cpu_s, events = _timed(lambda: read_kineto(path))
    return {"cpu_s": cpu_s, "events": len(events)}


def whatif_graph(path: Path) -> dict[str, Any]:
    """Read a trace into a task graph with whatif."""
    from whatif.ingest.read import read

    cpu_s, graph = _timed(lambda: read(path))
    return {"cpu_s": cpu_s, "tasks": len(graph)}


def simulate_synthetic(exponent: Path) -> dict[str, Any]:
    """Simulate a synthetic graph of 10^exponent tasks."""
    sys.path.insert(0, str(Path(__file__).parent))
    import synthetic

    from whatif.simulation.simulator import simulate

    graph = synthetic.in_order(10 ** int(str(exponent)), small=True)
    cpu_s, timeline = _timed(lambda: simulate(graph))
    return {"cpu_s": cpu_s, "tasks": len(graph), "makespan_ns": timeline.makespan_ns}


def json_load(path: Path) -> dict[str, Any]:
    """Read a trace into Python objects with the standard library."""
    with path.open("rb") as file:
        cpu_s, trace = _timed(lambda: json.load(file))
    return {"cpu_s": cpu_s, "events": len(trace["traceEvents"])}


def hta_load(path: Path) -> dict[str, Any]:
    """Read a trace with Holistic Trace Analysis into its table of events."""
    from hta.common.trace import Trace

    def load() -> Trace:
        trace = Trace(trace_files={0: str(path)}, trace_dir=str(path.parent))
        trace.load_traces(use_multiprocessing=False)
        return trace

    cpu_s, trace = _timed(load)
    return {"cpu_s": cpu_s, "events": len(trace.get_trace(0))}


def hta_recompute(path: Path) -> dict[str, Any]:
    """Find the critical path of all steps with Holistic Trace Analysis, and recompute it: its form of a what-if."""
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))
    n_steps = len(analysis.t.get_trace(0).index) and _n_steps(analysis)
    build_s, (graph, found) = _timed(
        lambda: analysis.critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=(0, n_steps - 1))
    )
    if not found:
        raise RuntimeError("hta found no critical path")
    return {"cpu_s": min(_timed(graph.critical_path)[0] for _ in range(5)), "build_s": build_s, "nodes": len(graph)}


def _n_steps(analysis: Any) -> int:
    names = analysis.t.symbol_table.get_sym_table()
    steps = [code for code, name in enumerate(names) if name.startswith("ProfilerStep")]
    events = analysis.t.get_trace(0)
    return int((events["name"].isin(steps) & (events["stream"] < 0)).sum())


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin_s = time.process_time()
    result = call()
    return time.process_time() - begin_s, result


def _peak_bytes() -> int:
    """The process's own peak memory; getrusage would include its parent's memory before exec."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


CANDIDATES = {
    call.__name__: call
    for call in (whatif_columns, whatif_graph, simulate_synthetic, json_load, hta_load, hta_recompute)
}

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    report = CANDIDATES[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps(report | {"peak_bytes": _peak_bytes()}))
    sys.stdout.flush()
    os._exit(0)  # skip the destruction of objects
