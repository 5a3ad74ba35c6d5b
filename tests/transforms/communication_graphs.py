"""Steps drawn by hand and at random for what-ifs of communication, and what shows their timelines.

The recorded GPU is a V100, whose copies move 720 bytes/ns (0.8 of 900 GB/s), so that a gradient of 3.6 MB is copied,
read and written, in 10,000 ns; a launch costs 1,000 ns, that of a copy 1,300, and a call of an all-reduce 55,000.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, names
from whatif import Phase, TaskGraph, TaskKind, Timeline

V100 = "Tesla V100-SXM2-32GB"


GRADIENT = 3_600_000


def rows(*sizes: int) -> list[dict[str, Any]]:
    """The recorder's list of gradients: the last layer's is ready first."""
    last = len(sizes)
    return [
        {"name": f"{last - i}.weight", "layer": f"layer{last - i}", "bytes": size, "dtype": "float32"}
        for i, size in enumerate(sizes)
    ]


def two_layers(steps: int = 1, *, kernel_ns: int = 10_000, update: bool = True, **metadata: Any) -> TaskGraph:
    """Forward takes ``kernel_ns`` a layer, backward twice that, the update half; every launch 1,000.

    ::

        us      0    1    2    3    4    5          11         21                  41                  61   66
        CPU     |lf1-|lf2-|lb2-|lb1-|lu--|
        stream       |f1---------|f2--------|b2------------------|b1-----------------|u---|
    """
    info = {"metadata": {"grad_ready_order": rows(GRADIENT, GRADIENT), **metadata}, "gpu": V100, "n_steps": steps}
    build = Build(CPU, STREAM, **info)
    for step in range(steps):
        for name, phase, layer, length in (
            ("f1", Phase.FORWARD, "layer1", 1.0), ("f2", Phase.FORWARD, "layer2", 1.0),
            ("b2", Phase.BACKWARD, "layer2", 2.0), ("b1", Phase.BACKWARD, "layer1", 2.0), ("u", Phase.UPDATE, "", 0.5),
        ):  # fmt: skip
            if name == "u" and not update:
                continue
            call = build.task(0, 1_000, f"launch {name}", phase=phase, step=step, layer=layer)
            work = build.task(1, round(kernel_ns * length), name, phase=phase, step=step, layer=layer)
            build.edge(call, work, 0, whatif.DependencyKind.LAUNCH)
    return build.graph()


def on_cpu(steps: int = 1) -> TaskGraph:
    """One thread does it all: 10,000 a forward and 20,000 a backward operator, 5,000 for the update.

    Copies count a third of the 7.2 MB that they move, here at 2,400 bytes/ns, and 2,000 for the call: 3,000.
    """
    metadata = {"grad_ready_order": rows(GRADIENT, GRADIENT), "rates": {"copy_gbyte_s": 2400.0}}
    build = Build(CPU, metadata=metadata, n_steps=steps)
    for step in range(steps):
        for name, phase, layer, length in (
            ("f1", Phase.FORWARD, "layer1", 10_000), ("f2", Phase.FORWARD, "layer2", 10_000),
            ("b2", Phase.BACKWARD, "layer2", 20_000), ("b1", Phase.BACKWARD, "layer1", 20_000),
            ("u", Phase.UPDATE, "", 5_000),
        ):  # fmt: skip
            build.task(0, length, name, TaskKind.CPU_OP, phase=phase, step=step, layer=layer)
    return build.graph()


def drawn(timeline: Timeline, thread: str) -> list[tuple[str, int, int]]:
    """Name, start and end of what a thread runs, in order."""
    graph = timeline.graph
    found = [
        (start, end, name)
        for name, code, start, end in zip(
            names(graph), graph.thread.tolist(), timeline.start_ns.tolist(), timeline.end_ns.tolist(), strict=True
        )
        if graph.threads[code].name == thread
    ]
    return [(name, start, end) for start, end, name in sorted(found)]


# Two workers: a ring of two sends S bytes of a bucket of S; at 36 GB/s that is 100,000 ns for each gradient.
RING = "distributed:workers=2,bandwidth=36GB/s,latency_us=0"


SLICED = {"grad_ready_order": rows(400_000, 400_000)}


SERVERS = "p3:workers=2,bandwidth=1GB/s,latency_us=0"


EIGHT = "distributed:workers=8,bandwidth=1GB/s,latency_us=14,bucket_mb=100,gradient_as_bucket_view=true"


STAGES = "blueconnect:factors=4x2,inner_bandwidth=4GB/s"


def communication(graph: TaskGraph) -> list[tuple[str, int, int]]:
    """Name, duration and size of each transfer, in order."""
    tasks = np.flatnonzero(graph.kind == TaskKind.COMMUNICATION).tolist()
    columns = (names(graph), graph.duration_ns.tolist(), graph.size_bytes.tolist())
    return [(columns[0][task], columns[1][task], columns[2][task]) for task in tasks]


@st.composite
def training(draw: st.DrawFn) -> TaskGraph:
    """Steps of layers with random kernels and gradients, some of them without work or without a gradient."""
    layers = draw(st.integers(1, 5))
    steps = draw(st.integers(2, 3))
    sizes = [draw(st.integers(0, 9_000_000)) for _ in range(layers)]
    sizes[0] = max(sizes[0], 1)
    on_gpu = draw(st.booleans())
    build = Build(
        CPU, STREAM, metadata={"grad_ready_order": rows(*sizes)}, gpu=V100 if on_gpu else None, n_steps=steps,
        launch_lag_ns=draw(st.integers(0, 3_000)), queue_depth=draw(st.sampled_from([0, 3])),
    )  # fmt: skip
    time = st.integers(0, 2_000_000)
    for step in range(steps):
        order = [(Phase.FORWARD, i) for i in range(1, layers + 1)]
        order += [(Phase.BACKWARD, i) for i in range(layers, 0, -1)] + [(Phase.UPDATE, 0)]
        for phase, layer in order:
            for kernel in range(draw(st.integers(0 if layer > 1 else 1, 2))):
                columns: dict[str, Any] = {"phase": phase, "step": step, "layer": f"layer{layer}" if layer else ""}
                if not on_gpu:
                    build.task(0, draw(time), f"{step} {phase.name} {layer} {kernel}", TaskKind.CPU_OP, **columns)
                    continue
                name = f"{step} {phase.name} {layer} {kernel}"
                call = build.task(0, draw(st.integers(0, 5_000)), f"launch {name}", **columns)
                work = build.task(1, draw(time), name, **columns)
                build.edge(call, work, build.info.launch_lag_ns, whatif.DependencyKind.LAUNCH)
    return build.graph()


def kept_order(before: TaskGraph, after: TaskGraph) -> None:
    """Every old dependency holds in the new graph, between tasks of the same (distinct) names."""
    old, new = names(before), names(after)
    place = {name: number for number, name in enumerate(new)}
    pairs = {(int(s), int(t)) for s, t in zip(after.dependencies.source, after.dependencies.target, strict=True)}
    for source, target in zip(before.dependencies.source.tolist(), before.dependencies.target.tolist(), strict=True):
        if old[source] in place and old[target] in place:
            assert (place[old[source]], place[old[target]]) in pairs
    for thread in range(len(before.threads)):
        kept = [old[task] for task in np.flatnonzero(before.thread == thread) if old[task] in place]
        assert kept == [new[task] for task in np.flatnonzero(after.thread == thread) if new[task] in set(kept)]


ANY_LINK = st.sampled_from([("1Gbps", "2Gbps"), ("10Gbps", "11Gbps"), ("100Mbps", "3GB/s")])
