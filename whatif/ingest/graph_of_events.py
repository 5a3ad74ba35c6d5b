"""Make a checked task graph of decoded events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from whatif.graph.info import GraphInfo
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Finding, Severity
from whatif.ingest.assemble import assemble
from whatif.ingest.build import find_parts
from whatif.ingest.busy import BUSY, machine_doubts
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.execution import find_execution
from whatif.ingest.file_bytes import cut_first
from whatif.ingest.find_steps import StepRule, steady_range
from whatif.ingest.gpu_side import GPU_CATEGORIES
from whatif.ingest.gradient_sizes import gradient_sizes
from whatif.ingest.integrity import find_damage
from whatif.ingest.memory import find_memory
from whatif.ingest.ranks.files import rank_facts
from whatif.ingest.recorded import recorded_of
from whatif.ingest.saved_graph import with_ranges
from whatif.ingest.step_rows import StepRows, find_step_rows
from whatif.runtime.errors import WhatifError
from whatif.simulation.steps import step_times_ns
from whatif.units import counted

FOUND = StepRule()

# In the name of the annotation with which torch's loader marks a batch that other processes prepare.
WORKER_LOADER = "_MultiProcessingDataLoaderIter"


def graph_of_events(events: Events, path: str, rule: StepRule = FOUND) -> TaskGraph:
    """Return the checked task graph of decoded events. Raises WhatifError if they contain no work.

    ``rule`` is the user's rule for the steps; by default they are detected.
    """
    try:
        return _graph_of_events(events, path, rule)
    except WhatifError as error:
        if events.ends_early_at is None:
            raise
        raise cut_first(path, events.ends_early_at, error) from error


def _graph_of_events(events: Events, path: str, rule: StepRule) -> TaskGraph:
    events = msgspec.structs.replace(events)  # its cached properties live no longer than this call
    refuse_what_has_no_work(events, path)
    info = _recording_info(events, path)
    parts = find_parts(events, is_amd=_is_amd(info, events), rule=rule)
    execution, execution_notes = find_execution(parts, info.recorded)
    edges_ns = parts.steps.edges_ns
    n_steps = max(len(edges_ns) - 1, 0)
    info = replace(
        info,
        n_steps=n_steps,
        step_source=parts.steps.source,
        loop=parts.steps.loop,
        step_option=rule.option,
        batch_size=info.batch_size or parts.steps.sequences,
        steady=steady_range(n_steps, n_steps > 0),
        optimizer=_optimizer(parts.marks.optimizer, events),
        launch_lag_ns=parts.gpu.launch_lag_ns if len(parts.gpu.event) else 0,
        queue_depth=parts.gpu.queue_depth if len(parts.gpu.event) else 0,
        execution=execution,
        profiler=parts.profiler.estimate if parts.profiler else None,
        quirks=(
            *info.quirks,
            *execution_notes,
            *_short_loop(parts.steps.loop),
            *filter(None, [parts.steps.doubt]),
        ),
    )
    rows = find_step_rows(parts)
    info = replace(
        info, passes=_passes(info, rows), gradient_bytes=gradient_sizes(events, rows, edges_ns),
        differentiates_gradients=parts.labeller.differentiates_gradients,
    )  # fmt: skip
    info = replace(info, memory=find_memory(parts, info, rows))
    graph = assemble(parts, info).check()
    graph = _with_measured_steps(graph)
    findings, checks = find_damage(parts, graph)
    busy = [
        Finding(BUSY, Severity.DOUBT, 1, sentence, "record again on an idle machine")
        for sentence in machine_doubts(info.recorded)
    ]
    graph = graph.replace(info=replace(graph.info, findings=(*findings, *busy), checks=(*checks, BUSY)))
    if any(WORKER_LOADER in name for name in graph.names):
        graph = graph.replace(info=replace(graph.info, loads_in_processes=True))
    # A predicted step carries ranges: `whatif predict --save`.
    return with_ranges(graph) if info.is_predicted else graph


def _short_loop(loop: tuple[int, int]) -> list[str]:
    tasks, times = loop
    return [
        f"{tasks} GPU tasks repeat {times:,} times, too few for a step: the number of repeats per step is unknown "
        "(set --step-count or --step-mark)"
    ] * (times > 0)


def _passes(info: GraphInfo, rows: StepRows | None) -> int:
    """The passes of a step: by the recorder's count of samples, else by the operators of a step."""
    samples = info.recorded.samples_per_step
    if samples and info.batch_size:
        return max(round(samples / info.batch_size), 1)
    return rows.passes if rows is not None else 1


def refuse_what_has_no_work(events: Events, path: str) -> None:
    """Raise WhatifError, one sentence, for a file without training or inference work."""
    count = [len(rows) for rows in events.of_category]
    kernels = sum(count[category] for category in GPU_CATEGORIES)
    foreign = events.header.get("_whatif_foreign_categories") or {}
    devices = sorted({str(name).split("_")[0] for name in foreign if _is_accelerator(str(name))})
    if devices and not kernels:
        raise WhatifError(
            f"{path}: expected CUDA or HIP kernels or a CPU-only recording, got events of the unsupported device "
            f"{', '.join(devices)!r}; record on an NVIDIA or AMD GPU or on a CPU."
        )
    if kernels:
        return
    lost = sum(events.dropped.values())
    path = f"{path} ({lost} of its events could not be read)" if lost else path
    if count[EventCategory.RUNTIME]:
        raise WhatifError(
            f"{path}: expected GPU kernels, got {count[EventCategory.RUNTIME]} CUDA runtime calls and no kernel, "
            "so the recording lost its GPU half; record again with ProfilerActivity.CUDA (and permission for CUPTI)."
        )
    if not count[EventCategory.CPU_OP]:
        got = "no event at all" if not len(events) and not foreign else "only events of another tool"
        raise WhatifError(
            f"{path}: expected operators (cpu_op) or GPU kernels of a PyTorch profiler trace, got {got}; "
            "record with torch.profiler or with `whatif collect`."
        )


def _is_accelerator(category: str) -> bool:
    return any(part in category for part in ("_runtime", "_ccp", "mtia", "xpu", "hpu", "privateuse"))


NOT_RECORDED = "predicted, not recorded: whatif predict made this step, and nothing in it was measured"


def _recording_info(events: Events, path: str) -> GraphInfo:
    header = events.header
    metadata = header.get("whatif")
    metadata = metadata if isinstance(metadata, dict) else {}
    device = recorded_device(header, metadata)
    quirks = []
    recorded, damaged = recorded_of(metadata)
    if damaged:
        facts = counted(len(damaged), "fact")
        quirks.append(f"{facts} in the recording's metadata could not be read in full: {', '.join(damaged)}")
    if recorded.predicted is not None:
        quirks.append(NOT_RECORDED)
    median_ms = recorded.untraced_step.median_ms if recorded.untraced_step is not None else None
    batch = metadata.get("batch_size")
    version, known_version = metadata.get("version", 1), 1
    if version != known_version:
        named = version if isinstance(version, int) else "unknown"
        quirks.append(
            f"the recording's metadata has version {named}, but this whatif reads version {known_version}: its facts "
            "may be misread"
        )
    return GraphInfo(
        path=path,
        gpu=device[0],
        gpu_memory_bytes=device[1] if 0 < (device[1] or 0) < 2**53 else None,
        untraced_step_ns=None if median_ms is None else round(median_ms * 1e6),
        batch_size=batch if type(batch) is int and 0 < batch < 2**31 else None,
        workers=rank_facts(header).world_size,
        quirks=tuple(quirks),
        recorded=recorded,
    )


def _optimizer(is_step: Bool, events: Events) -> str | None:
    """The class in "Optimizer.step#Adam.step"."""
    names = [name for name, step in zip(events.names, is_step.tolist(), strict=True) if step]
    return names[0].partition("#")[2].removesuffix(".step") or None if names else None


def recorded_device(header: dict[str, Any], metadata: dict[str, Any]) -> tuple[str | None, int | None]:
    """Return the name of a recording's first GPU and its memory in bytes; None if unknown."""
    devices = header.get("deviceProperties")
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and isinstance(device.get("name"), str):
            memory = device.get("totalGlobalMem")
            return device["name"], memory if isinstance(memory, int) else None
    gpu = metadata.get("gpu")
    return (gpu if isinstance(gpu, str) else None), None


def _is_amd(info: GraphInfo, events: Events) -> bool:
    named = (info.gpu or "").lower()
    return "amd" in named or "instinct" in named or any(name.startswith("hip") for name in events.names)


def _with_measured_steps(graph: TaskGraph) -> TaskGraph:
    """Add the measured time of every step by each clock, from the recorded starts and ends."""
    end_ns = graph.start_ns + graph.duration_ns
    clocks = ("gpu", "mark", "span") if graph.has_gpu else ("mark", "span")
    measured = {}
    for clock in clocks:
        times = step_times_ns(graph, graph.start_ns, end_ns, clock)
        if times:
            measured[clock] = times
    return graph.replace(info=replace(graph.info, measured_step_ns=measured))
