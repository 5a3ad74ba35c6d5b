"""Two ranks of a run by hand, and what their collectives are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.helpers import CPU, STREAM, Build
from whatif import Phase, TaskGraph, TaskKind
from whatif.ingest.ranks.collectives import Collectives
from whatif.ingest.ranks.files import Places
from whatif.ingest.ranks.read import Ranks, merged


def rank_graph(
    compute_ns: int, spent_ns: int, *, tail_ns: int = 10, beside_ns: int = 0, origin_ns: int = 0, path: str = ""
) -> TaskGraph:
    """One step of one rank: it computes, is ``spent_ns`` in an all-reduce of 1,000 bytes, computes again.

    Beside the all-reduce another stream computes for ``beside_ns``, if any.
    """
    end_ns = 2 + compute_ns + spent_ns + tail_ns
    streams = [STREAM, replace(STREAM, name="stream 9", stream=9)]
    build = Build(
        CPU, *streams[: 1 + (beside_ns > 0)], path=path, origin_ns=origin_ns, n_steps=1, steady=(0, 1),
        measured_step_ns={"span": (end_ns - 2,), "mark": (end_ns,)},
    )  # fmt: skip
    launched: list[int] = []
    at_ns = 2
    for i, (name, kind, ns) in enumerate(
        (("gemm", None, compute_ns), ("ncclDevKernel_AllReduce", TaskKind.COMMUNICATION, spent_ns),
         ("tail", None, tail_ns))
    ):  # fmt: skip
        call = build.task(0, 2, f"launch {name}", start_ns=2 * i)
        phase = Phase.BACKWARD if i else Phase.FORWARD
        launched.append(build.task(1, ns, name, kind, start_ns=at_ns, phase=phase, size_bytes=1_000))
        build.edge(call, launched[-1])
        at_ns += ns
        if beside_ns and not i:
            build.edge(launched[0], build.task(2, beside_ns, "beside", start_ns=at_ns, phase=Phase.FORWARD))
    return build.graph()


def collectives(
    start_ns: Sequence[int], spent_ns: Sequence[int], *, task: Sequence[int] | None = None, **overrides: Any
) -> Collectives:
    """All-reduces of 1,000 bytes in step 0 that start and last so long."""
    n = len(start_ns)
    start = np.array(start_ns, dtype=np.int64)
    columns: dict[str, Any] = {
        "task": np.array(task if task is not None else range(n), dtype=np.int32),
        "start_ns": start,
        "end_ns": start + np.array(spent_ns, dtype=np.int64),
        "step": np.zeros(n, dtype=np.int64),
        "size_bytes": np.full(n, 1_000),
        "group_size": np.full(n, -1),
        "operation": ("all_reduce",) * n,
        "group": ("",) * n,
    }
    return Collectives(**(columns | overrides))


def run_of(graphs: Sequence[TaskGraph]) -> Ranks:
    """The ranks of graphs whose communication is all-reduces."""
    found = []
    for graph in graphs:
        task = np.flatnonzero(graph.kind == TaskKind.COMMUNICATION)
        found.append(collectives(graph.start_ns[task].tolist(), graph.duration_ns[task].tolist(), task=task.tolist()))
    count = len(graphs)
    return merged(graphs, found, Places(tuple(range(count)), count), [f"rank{i}.json" for i in range(count)])


def two_ranks(*, origin_ns: int = 0) -> Ranks:
    """Rank 1 computes for 50 ns longer, for which rank 0 waits; the transfer takes 20 ns.

    ::

        ns              2    22                72   92   102
        rank 0 stream   |gemm |all-reduce            |tail|
        rank 1 stream   |gemm                   |a-r |tail|
    """
    return run_of([rank_graph(20, 70), rank_graph(70, 20, origin_ns=origin_ns)])
