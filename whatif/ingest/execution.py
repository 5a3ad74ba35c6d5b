"""How the recorded steps were executed: operator by operator, compiled by torch.compile, launched by CUDA graphs."""

from __future__ import annotations

import re

import numpy as np

from whatif.graph.order import each_once
from whatif.graph.recorded import Execution, Recorded
from whatif.graph.types import Bool, Int64
from whatif.ingest.build import Parts
from whatif.ingest.calls import CallKind
from whatif.ingest.events import Events
from whatif.ingest.grouped import by_track, named
from whatif.simulation.intervals import lies_inside, union
from whatif.units import counted

# Names of kernels that Inductor generates, of any version: triton_poi_fused_add_relu_3, triton__0d1d2d.
_INDUCTOR_KERNEL = re.compile(r"triton_(poi|red|per|tem|for|mm|bmm|split_scan)_|triton__\d+d|cpp_fused_")
# A graph whose launches were recorded as one task each (Nsight Systems without --cuda-graph-trace=node).
WHOLE_GRAPH = re.compile(r"CUDA graph \d+")


def find_execution(parts: Parts, recorded: Recorded) -> tuple[tuple[str, ...], list[str]]:
    """Return the ways of execution ("eager" alone, else "compiled", "cuda_graph") and a sentence on each special one.

    ``recorded`` reports compiled modules that do not show in a recording without operators.
    """
    reported = recorded.execution or Execution()
    compiled, launched = _compiled(parts), _graph_launches(parts)
    ways = []
    if reported.compiled or compiled:
        ways.append("compiled")
    if reported.cuda_graph or launched:
        ways.append("cuda_graph")
    return tuple(ways) or ("eager",), [*compiled, *launched]


def _compiled(parts: Parts) -> list[str]:
    """A sentence on the share of time in code of torch.compile; none without such code."""
    events, marks = parts.events, parts.marks
    named_region = np.array([bool(region) for region in marks.region], dtype=np.bool_)
    codes = each_once(events.name[named(events, parts.operators.rows, named_region)])
    regions = {marks.region[code] for code in codes.tolist()}
    by_compiler = named(events, events.on_host, marks.compiled)
    gpu = parts.gpu
    if len(gpu.event):
        generated = np.array([_INDUCTOR_KERNEL.match(name) is not None for name in events.names], dtype=np.bool_)
        inside = generated.take(events.name[gpu.event]) | _launched_inside(parts, by_compiler)
        duration_ns = gpu.end_ns - gpu.start_ns
        time_ns, all_ns, whose = int(duration_ns[inside].sum()), int(duration_ns.sum()), "GPU"
    else:
        time_ns, all_ns, whose = _union_ns(events, by_compiler), _union_ns(events, parts.operators.rows), "operators'"
    if not time_ns and not regions:
        return []
    among = f"{counted(len(regions), 'region')}, " if regions else ""
    share_pct = 100 * time_ns / max(all_ns, 1)
    return [
        f"compiled by torch.compile: {among}{share_pct:.0f} % of the {whose} time; modules inside a region are unknown"
    ]


def _graph_launches(parts: Parts) -> list[str]:
    """Sentences on the tasks that CUDA graphs launched: one call launches many, so their operators are unknown."""
    gpu = parts.gpu
    launched = _of_calls(parts, parts.calls.kind == CallKind.GRAPH_LAUNCH)
    if not launched.any():
        return []
    duration_ns = gpu.end_ns - gpu.start_ns
    share_pct = 100 * int(duration_ns[launched].sum()) / max(int(duration_ns.sum()), 1)
    tasks = counted(int(launched.sum()), "GPU task")
    launches = counted(len(each_once(gpu.call[launched])), "launch", "launches")
    # By the launches: work may end in a later step.
    steps = each_once(parts.steps.of(parts.calls.start_ns[each_once(gpu.call[launched])]))
    some, n_steps = int((steps >= 0).sum()), len(parts.steps.edges_ns) - 1
    mixed = f", in {some:,} of {n_steps:,} steps alone: the step time is the median of both kinds"
    sentences = [
        f"launched by CUDA graphs: {tasks} by {launches}, {share_pct:.0f} % of the GPU time"
        f"{mixed if 0 < some < n_steps else ''}; all tasks of a launch have its phase and layer"
    ]
    whole_graph = np.array([WHOLE_GRAPH.fullmatch(name) is not None for name in parts.events.names], dtype=np.bool_)
    single = int(whole_graph[parts.events.name[gpu.event[launched]]].sum())
    if single:
        sentences.append(
            f"{counted(single, 'launch', 'launches')} of CUDA graphs recorded as one task each, without their kernels: "
            "record with `nsys profile --cuda-graph-trace=node` to see them"
        )
    return sentences


def _launched_inside(parts: Parts, by_compiler: Int64) -> Bool:
    """Mask of the GPU tasks launched while compiled code ran on the launching thread."""
    events, calls = parts.events, parts.calls
    inside = np.zeros(len(calls.event), dtype=np.bool_)
    if not len(by_compiler):
        return np.zeros(len(parts.gpu.event), dtype=np.bool_)
    for track, rows in by_track(events, by_compiler).items():
        on_track = calls.of_track[track]
        inside[on_track] = lies_inside(calls.start_ns[on_track], *_union(events, rows))
    return _of_calls(parts, inside)


def _of_calls(parts: Parts, chosen: Bool) -> Bool:
    """Mask of the GPU tasks that the chosen calls launched."""
    call = parts.gpu.call
    if not chosen.any():
        return np.zeros(len(call), dtype=np.bool_)
    launched: Bool = (call >= 0) & np.append(chosen, False)[call]
    return launched


def _union(events: Events, chosen: Int64) -> tuple[Int64, Int64]:
    return union(events.start_ns[chosen], events.end_ns[chosen])


def _union_ns(events: Events, chosen: Int64) -> int:
    """The time in which any chosen event (rows) runs on its thread, summed over the threads."""
    total_ns = 0
    for rows in by_track(events, chosen).values():
        start_ns, end_ns = _union(events, rows)
        total_ns += int((end_ns - start_ns).sum())
    return total_ns
