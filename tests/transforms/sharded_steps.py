"""Steps of blocks, drawn by hand or at random, for what-ifs that share a model among workers."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.helpers import CPU, STREAM, Build, names
from whatif import DependencyKind, Phase, TaskGraph, TaskKind, Timeline
from whatif.graph.kernels import KernelFamily

V100 = "Tesla V100-SXM2-32GB"
# A V100 moves 792 bytes/ns (0.88 of 900 GB/s), so that this is copied, read and written, in 10,000 ns.
BLOCK_BYTES = 3_960_000
# 19.8 bytes/ns: half of a block, which is what two workers gather or scatter of it, takes 100,000 ns.
LINK = "workers=2,bandwidth=158.4Gbps,latency_us=0"


def gradient_rows(sizes: dict[str, int]) -> list[dict[str, Any]]:
    """The recorder's list of gradients: the last layer's is ready first."""
    return [
        {"name": f"{layer}.weight", "layer": layer, "bytes": size, "dtype": "float32"}
        for layer, size in reversed(sizes.items())
    ]


def blocks(
    sizes: dict[str, int] | None = None, *, steps: int = 1, forward_ns: int = 1_000_000, launch_ns: int = 1_000,
    update_ns: int = 502_000, **info: Any,
) -> TaskGraph:  # fmt: skip
    """Layers that work ``forward_ns`` forward and twice that backward, and an update; every launch takes 1,000 ns.

    ::

        us      0    1    2     3     4     5      1,000     2,001      4,001      6,001    6,503
        CPU     |data|-f0-|-f1-|-b1-|-b0-|-u-|
        stream       |data|f0--------|f1--------|b1---------|b0---------|u---------|
    """
    sizes = {"h.0": BLOCK_BYTES, "h.1": BLOCK_BYTES} if sizes is None else sizes
    metadata = {"grad_ready_order": gradient_rows(sizes)}
    build = Build(CPU, STREAM, metadata=metadata, gpu=V100, n_steps=steps, **info)
    forward = [(f"f{n}", Phase.FORWARD, layer, 1.0) for n, layer in enumerate(sizes)]
    backward = [(f"b{n}", Phase.BACKWARD, layer, 2.0) for n, layer in reversed(list(enumerate(sizes)))]
    for step in range(steps):
        call = build.task(0, launch_ns, "launch data", phase=Phase.DATA, step=step)
        work = build.task(1, 1_000, "data", TaskKind.MEMCPY, phase=Phase.DATA, step=step)
        build.edge(call, work, 0, DependencyKind.LAUNCH)
        for name, phase, layer, length in (*forward, *backward, ("u", Phase.UPDATE, "", 0.0)):
            family = KernelFamily.OPTIMIZER if name == "u" else KernelFamily.GEMM
            call = build.task(0, launch_ns, f"launch {name}", phase=phase, step=step, layer=layer)
            work = build.task(
                1,
                round(forward_ns * length) or update_ns,
                name,
                phase=phase,
                step=step,
                layer=layer,
                family=int(family),
            )
            build.edge(call, work, 0, DependencyKind.LAUNCH)
    return build.graph()


def blocks_on_cpu(sizes: dict[str, int] | None = None, *, steps: int = 1) -> TaskGraph:
    """The same as operators of one thread: 1,000,000 ns forward, twice that backward, 502,000 for the update."""
    sizes = {"h.0": BLOCK_BYTES, "h.1": BLOCK_BYTES} if sizes is None else sizes
    build = Build(CPU, metadata={"grad_ready_order": gradient_rows(sizes)}, n_steps=steps)
    forward = [(f"f{n}", Phase.FORWARD, layer, 1_000_000) for n, layer in enumerate(sizes)]
    backward = [(f"b{n}", Phase.BACKWARD, layer, 2_000_000) for n, layer in reversed(list(enumerate(sizes)))]
    for step in range(steps):
        build.task(0, 1_000, "data", TaskKind.CPU_OP, phase=Phase.DATA, step=step)
        for name, phase, layer, length in (*forward, *backward, ("u", Phase.UPDATE, "", 502_000)):
            family = KernelFamily.OPTIMIZER if name == "u" else KernelFamily.GEMM
            build.task(0, length, name, TaskKind.CPU_OP, phase=phase, step=step, layer=layer, family=int(family))
        build.task(0, 1_000, "end", TaskKind.CPU_OP, phase=Phase.UPDATE, step=step)
    return build.graph()


def drawn(timeline: Timeline, thread: str) -> list[tuple[str, int, int]]:
    """Name, start and end of the tasks of a thread, in us, in the order in which they start."""
    graph = timeline.graph
    code = [one.name for one in graph.threads].index(thread)
    tasks = np.flatnonzero(graph.thread == code)
    tasks = tasks[np.argsort(timeline.start_ns[tasks], kind="stable")]
    called = names(graph)
    return [
        (called[task], int(timeline.start_ns[task]) // 1_000, int(timeline.end_ns[task]) // 1_000)
        for task in tasks.tolist()
    ]


@st.composite
def training(draw: st.DrawFn) -> TaskGraph:
    """Random steps of up to five blocks and layers outside of them, on a GPU or a CPU, with a pass or two a step."""
    n_blocks = draw(st.integers(1, 5))
    sizes = {f"h.{n}": draw(st.integers(1, 10**8)) for n in range(n_blocks)}
    if draw(st.booleans()):
        sizes = {"embedding": draw(st.integers(1, 10**8)), **sizes, "head": draw(st.integers(1, 10**6))}
    on_gpu, steps, n_passes = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    streams = (CPU, STREAM) if on_gpu else (CPU,)
    lag_ns = draw(st.integers(0, 5_000)) if on_gpu else 0
    build = Build(*streams, metadata={"grad_ready_order": gradient_rows(sizes)}, launch_lag_ns=lag_ns)
    length = st.integers(0, 3_000_000)
    for step in range(steps):
        build.task(0, draw(length), "data", TaskKind.CPU_OP, phase=Phase.DATA, step=step)
        work = [(layer, Phase.FORWARD) for layer in sizes] + [(layer, Phase.BACKWARD) for layer in reversed(sizes)]
        for layer, phase in [*work * n_passes, ("", Phase.UPDATE)]:
            for _ in range(draw(st.integers(1, 2))):
                columns = {"phase": phase, "step": step, "layer": layer, "family": int(KernelFamily.OPTIMIZER)}
                if on_gpu:
                    call = build.task(0, draw(st.integers(0, 20_000)), "launch", **columns)
                    build.edge(call, build.task(1, draw(length), "kernel", **columns), lag_ns, DependencyKind.LAUNCH)
                else:
                    build.task(0, draw(length), "operator", TaskKind.CPU_OP, **columns)
        if draw(st.booleans()):
            build.sync(1_000) if on_gpu else build.task(0, 5, "end", TaskKind.CPU_OP, phase=Phase.DATA, step=step)
    return build.graph()


def keeps_the_step(before: TaskGraph, after: TaskGraph) -> None:
    """Every old task is still there, in the order of its thread, and still waits for what it waited for."""
    old = np.flatnonzero(after.start_ns >= 0)
    assert len(old) == len(before)
    place = np.empty(len(before), dtype=np.int64)
    for thread in range(len(before.threads)):
        mine = np.flatnonzero(before.thread == thread)
        there = old[after.thread[old] == thread]
        assert after.start_ns[there].tolist() == before.start_ns[mine].tolist()
        place[mine] = there
    pairs = set(zip(after.dependencies.source.tolist(), after.dependencies.target.tolist(), strict=True))
    d = before.dependencies
    assert {(int(place[s]), int(place[t])) for s, t in zip(d.source, d.target, strict=True)} <= pairs


def sent_bytes(graph: TaskGraph, workers: int) -> dict[str, float]:
    """Bytes that one worker sends in a step of one pass, by the name of the collective (a ring's bus factors)."""
    mine = np.flatnonzero((graph.kind == TaskKind.COMMUNICATION) & (graph.step == graph.step.max()))
    found: dict[str, float] = {}
    called = names(graph)
    for task in mine.tolist():
        share = (workers - 1) / workers
        found[called[task]] = found.get(called[task], 0.0) + share * float(graph.size_bytes[task])
    return found
