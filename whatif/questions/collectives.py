"""The collectives of a step of one rank: rates as nccl-tests defines them, and waiting for peers.

With the recording of one rank, waiting is estimated; with those of several it is known, for the first of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct, structs

from whatif.graph.kernels import collective_of
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import GPU_KINDS, Float64, Int64, TaskKind, among
from whatif.hardware.cluster.collectives import OPERATIONS, bus_factor
from whatif.ingest.ranks.merge import COLLECTIVE
from whatif.models.exchange.stragglers import expected_transfers_ns, waiting_for_peers, workers_of_groups
from whatif.prediction.baseline import Baseline
from whatif.prediction.utilization import steady_tasks
from whatif.questions.stragglers import meetings
from whatif.simulation.intervals import covered_until, union


class Collective(Struct, frozen=True):
    """Equal collectives of a step; None if unknown. Rates as in nccl-tests, PERFORMANCE.md."""

    kind: str
    size_bytes: int | None
    group: str | None  # the process group's name and size
    count: float
    ms: float
    exposed_ms: float | None  # while this rank's GPU does nothing else, as recorded; the rest is hidden
    waits_ms: float  # for other ranks
    expected_ms: float | None  # mean of one, on this GPU's usual links
    algorithm_gbyte_s: float | None  # size over time
    bus_gbyte_s: float | None
    critical_ms: float

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return structs.asdict(self)


def collectives(baseline: Baseline, critical_ms: Float64) -> tuple[Collective, ...]:
    """Return one row for each kind, size and process group, the longest first.

    ``critical_ms`` is each task's time on the critical path, shape (n_tasks,); of several ranks, that of all counts.
    """
    graph = baseline.graph
    steady, n_steps = steady_tasks(graph, baseline.clock)
    everywhere = np.flatnonzero(steady & (graph.kind == TaskKind.COMMUNICATION))
    of_clock = graph.of_clock.mask[everywhere]
    tasks = everywhere[of_clock]
    if not len(tasks):
        return ()
    all_kinds = np.array(
        [collective_of(graph.names[code], "") or "unknown" for code in graph.name[everywhere].tolist()]
    )
    kinds = all_kinds[of_clock]
    waits_ns, expected_ns = _waits_ns(baseline)[tasks], expected_transfers_ns(graph, tasks)
    spent_ns = graph.duration_ns[tasks] + (waits_ns if graph.info.ranks else 0)
    # A rank waits inside its kernel. With several ranks the wait is simulated and precedes the transfer.
    start_ns = baseline.timeline.start_ns if graph.info.ranks else graph.start_ns
    begin_ns = start_ns[tasks] - (waits_ns if graph.info.ranks else 0)
    exposed_ns = _exposed_ns(graph, start_ns, begin_ns, spent_ns)
    size, group, among_ranks = graph.size_bytes[tasks], graph.group[tasks], workers_of_groups(graph, tasks)
    names = [*(f"{each.name} ({each.size})" if each.size > 0 else each.name for each in graph.info.groups), None]
    found = []
    for kind, bytes_, code in sorted({*zip(kinds.tolist(), size.tolist(), group.tolist(), strict=True)}):
        equal = (kinds == kind) & (size == bytes_) & (group == code)
        total_ns, count, workers = float(spent_ns[equal].sum()), int(equal.sum()), int(among_ranks[equal][0])
        # The critical path goes through the transfers of any rank.
        of_ranks = everywhere[
            (all_kinds == kind) & (graph.size_bytes[everywhere] == bytes_) & (graph.group[everywhere] == code)
        ]
        operation = "all_to_all" if kind == "send_recv" else kind
        data_bytes = bytes_ * (workers if kind == "all_gather" and workers else 1)
        known = bytes_ > 0 and total_ns > 0
        rate = data_bytes * count / total_ns if known else None
        bus = rate * bus_factor(operation, workers) if rate and workers > 1 and operation in OPERATIONS else None
        expected = float(expected_ns[equal].mean()) / 1e6
        found.append(
            Collective(
                kind, bytes_ if bytes_ >= 0 else None, names[code], count / n_steps, total_ns / n_steps / 1e6,
                float(exposed_ns[equal].sum()) / n_steps / 1e6 if graph.has_gpu else None,
                float(waits_ns[equal].sum()) / n_steps / 1e6, expected or None, rate, bus,
                float(critical_ms[of_ranks].sum()),
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda row: -row.ms))


def _waits_ns(baseline: Baseline) -> Int64:
    """How long each collective waits for other ranks, ns, shape (n_tasks,)."""
    graph = baseline.graph
    if COLLECTIVE not in graph.attached:
        return waiting_for_peers(graph)
    waits, met = np.zeros(len(graph), dtype=np.int64), meetings(baseline.timeline)
    waits[met.task] = met.all_here_ns - met.arrival_ns
    return waits


def _exposed_ns(graph: TaskGraph, start_ns: Int64, begin_ns: Int64, spent_ns: Int64) -> Float64:
    """The part of ``spent_ns`` from ``begin_ns`` on in which the rank runs no kernel and no copy, ns, shape of both.

    ``start_ns``: when each task starts, shape (n_tasks,).
    """
    other = np.flatnonzero(among(graph.kind, GPU_KINDS) & (graph.kind != TaskKind.COMMUNICATION) & graph.of_clock.mask)
    other = other[np.argsort(start_ns[other], kind="stable")]
    begins_ns, ends_ns = union(start_ns[other], start_ns[other] + graph.duration_ns[other])
    busy_ns = covered_until(begins_ns, ends_ns, begin_ns + spent_ns) - covered_until(begins_ns, ends_ns, begin_ns)
    return np.asarray(spent_ns - busy_ns, dtype=np.float64)
