"""Counters of a timeline file: the memory of a step, and the rates of its links and copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from whatif.graph.memory import moments
from whatif.graph.types import TaskKind
from whatif.models.layers.layer_facts import layer_codes
from whatif.simulation.timeline import Timeline

MIB = 2**20
# Parts of the memory at a moment; those that stay for the whole step come first.
MEMORY_PARTS = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "inputs": "inputs, buffers, rest",
    "gradients": "gradients",
    "activations": "activations",
    "workspace": "workspace",
}


def memory_counter(timeline: Timeline) -> Iterator[tuple[int, dict[str, float]]]:
    """Return times, ns, and the memory at each, MiB by part: a moment of the model is at the start of its layer.

    The model describes a step layer by layer; a layer missing from the timeline has no counter.
    """
    graph = timeline.graph
    memory = graph.info.memory
    if memory is None:
        return
    found = list(moments(memory))
    layer_code = layer_codes(graph)
    chosen = np.flatnonzero((graph.step >= 0) & graph.of_clock & (graph.kind != TaskKind.WAIT))
    for step in np.unique(graph.step[chosen]).tolist():
        tasks = chosen[graph.step[chosen] == step]
        starts: dict[tuple[int, int], list[int]] = {}
        order = tasks[np.argsort(timeline.start_ns[tasks], kind="stable")]
        for phase, layer, start_ns in zip(
            graph.phase[order].tolist(), graph.layer[order].tolist(), timeline.start_ns[order].tolist(), strict=True
        ):
            starts.setdefault((phase, layer), []).append(start_ns)
        now_ns = 0
        for moment in found:
            # The update is one entry for all layers.
            wanted = [key for key in starts if key[0] == moment.phase] if not moment.layer else [
                (int(moment.phase), layer_code.get(moment.layer, -1))
            ]  # fmt: skip
            later = [time for key in wanted for time in starts.get(key, ())[:1] if time >= now_ns] or [
                time for key in wanted for time in starts.get(key, ()) if time >= now_ns
            ][:1]
            if not later:
                continue
            now_ns = min(later)
            parts = {label: getattr(moment, key) / MIB for key, label in MEMORY_PARTS.items()}
            yield now_ns, {**parts, "total": moment.total / MIB}


def rate_counters(timeline: Timeline) -> Iterator[tuple[int, str, str, int, float]]:
    """Return thread, name, unit, time, ns, and value: the payload rate of each link and of each stream's copies.

    Gbit/s for communication and GB/s for copies; 1 and 0 if a transfer's size is unknown.
    """
    graph = timeline.graph
    length_ns = timeline.end_ns - timeline.start_ns
    for kind, title, unit, scale in (
        (TaskKind.COMMUNICATION, "link", "Gbit/s of payload", 8.0),
        (TaskKind.MEMCPY, "copies", "GB/s", 1.0),
    ):
        tasks = np.flatnonzero((graph.kind == kind) & (length_ns > 0))
        for thread in np.unique(graph.thread[tasks]).tolist():
            sent = tasks[graph.thread[tasks] == thread]
            sent = sent[np.argsort(timeline.start_ns[sent], kind="stable")]
            sized = graph.size_bytes[sent] >= 0
            known = bool(sized.all())
            rate = np.where(sized, graph.size_bytes[sent], 0) * scale / length_ns[sent] if known else np.ones(len(sent))
            start_ns, end_ns = timeline.start_ns[sent], timeline.end_ns[sent]
            # No zero between transfers that follow one another immediately.
            rests = np.append(end_ns[:-1] < start_ns[1:], True)
            for begin, end, value, ends in zip(
                start_ns.tolist(), end_ns.tolist(), rate.tolist(), rests.tolist(), strict=True
            ):
                yield thread, title, unit if known else "busy", begin, value
                if ends:
                    yield thread, title, unit if known else "busy", end, 0.0
