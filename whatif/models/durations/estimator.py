"""Durations of work that a what-if changes or adds: every estimate has a range and a source.

Transforms contain no durations. They get estimates here, which are stored with the tasks: the range in ``low_ns`` and
``high_ns``, the source in the attached column ``ESTIMATED``, which reports count.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from whatif.graph.edit import as_index
from whatif.graph.selection import Tasks
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Float64, Int8, TaskKind
from whatif.hardware.gpu import Gpu, find_gpu
from whatif.hardware.roofline import kernel_floor_ns, memory_share
from whatif.models.durations.memory_rate import UNKNOWN_MEMORY_GBYTE_S, UNKNOWN_MEMORY_SPREAD, memory_gbyte_s
from whatif.runtime.errors import WhatifError

# The attached column that holds the source of each task's duration.
ESTIMATED = "estimated by"


class Source(IntEnum):
    """The source of a duration, from the best to the worst."""

    RECORDED = 0  # the recording itself; also the value of inserted rows in an attached column
    MEASURED = 1  # measured alone on the recorded machine: operators, copies, rates
    DATABASE = 2  # the op database: the operator measured on the device, or interpolated between its neighbours
    LEARNED = 3  # a model of the device's measurements
    OTHER_DEVICES = 4  # measurements of other devices, or a model of them
    ROOFLINE = 5  # data sheet of the device, with the kernel's own efficiency
    PAPER = 6  # a constant published by a paper or a vendor
    ASSUMED = 7  # our estimate, not measured


class Estimates(Struct, frozen=True):
    """Durations of n pieces of work, ns, each with a nominal 90 % range and a source; all of shape (n,)."""

    duration_ns: Float64
    low_ns: Float64
    high_ns: Float64
    source: Int8

    def __len__(self) -> int:
        return len(self.duration_ns)

    def take(self, rows: Array) -> Estimates:
        """Return the given ``rows``: a mask of shape (n,), or places."""
        return Estimates(self.duration_ns[rows], self.low_ns[rows], self.high_ns[rows], self.source[rows])

    @staticmethod
    def of(
        duration_ns: npt.ArrayLike, source: npt.ArrayLike, low_ns: npt.ArrayLike, high_ns: npt.ArrayLike
    ) -> Estimates:
        """Estimates from arrays or numbers, broadcast together; the range is extended to contain the duration."""
        duration, low, high, code = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(column, dtype=np.float64)) for column in (duration_ns, low_ns, high_ns, source))
        )
        return Estimates(duration, np.minimum(low, duration), np.maximum(high, duration), code.astype(np.int8))


def device(graph: TaskGraph) -> Gpu | None:
    """Return the data of the recorded GPU; None on a CPU, or if the device is not in ``whatif/hardware/gpus``."""
    return find_gpu(graph.info.gpu, graph.info.gpu_memory_bytes) if graph.info.gpu else None


# The overhead of an operator on a CPU (dispatch, allocation): operators on a few elements in the CPU recordings in
# traces/ take 1 to 4 us.
CPU_OPERATOR_NS = 2_000


def shortest_kernel_ns(graph: TaskGraph) -> int:
    """Return the time of the shortest kernels of the recorded GPU, or of the smallest operators of a CPU, ns."""
    return kernel_floor_ns(device(graph)) if graph.has_gpu else CPU_OPERATOR_NS


def scaled(
    graph: TaskGraph, tasks: Tasks, factor: npt.ArrayLike, source: npt.ArrayLike, *,
    low: npt.ArrayLike, high: npt.ArrayLike,
) -> Estimates:  # fmt: skip
    """Estimate ``tasks`` at ``factor`` times their present durations; ``low`` and ``high`` are factors."""
    return Estimates.of(
        graph.duration_ns[tasks] * np.asarray(factor), source,
        graph.low_ns[tasks] * np.asarray(low), graph.high_ns[tasks] * np.asarray(high),
    )  # fmt: skip


def check_units(graph: TaskGraph, units: str, what_if: str, expected: str) -> None:
    """Raise WhatifError if the recorded GPU has no ``units`` (a field of ``Gpu``), is unknown, or is not named.

    ``expected`` is the message's text about the units and the devices that have them.
    """
    gpu = device(graph)
    if gpu is not None and getattr(gpu, units) is not None:
        return
    known = f"{graph.info.gpu}, which {'has none' if gpu else 'is not in whatif/hardware/gpus'}"
    got = known if graph.info.gpu else "a recording that does not name its own"
    raise WhatifError(f"{what_if}: expected a GPU with {expected}, got {got}; `amp` models half precision.")


def put(graph: TaskGraph, tasks: Tasks, estimates: Estimates) -> TaskGraph:
    """Return the graph with the estimated durations of ``tasks``, their ranges and sources."""
    graph = graph.with_duration(tasks, estimates.duration_ns, low_ns=estimates.low_ns, high_ns=estimates.high_ns)
    return mark(graph, tasks, estimates.source)


def mark(graph: TaskGraph, tasks: Tasks, source: npt.ArrayLike) -> TaskGraph:
    """Record the source of the durations of ``tasks``.

    A duration that several what-ifs changed has the worst of their sources.
    """
    index = as_index(graph, tasks)
    column = sources(graph).copy()
    column[index] = np.maximum(column[index], np.asarray(source, dtype=np.int8))
    return graph.attach(**{ESTIMATED: column})


def sources(graph: TaskGraph) -> Int8:
    """Return the ``Source`` of each task's duration, shape (n_tasks,)."""
    found = graph.attached.get(ESTIMATED)
    return np.zeros(len(graph), dtype=np.int8) if found is None else np.asarray(found, dtype=np.int8)


# A call without a wait: our estimate.
SYNC_CALL_NS = 2_000
# The overhead of a copy on a CPU: our estimate.
CPU_COPY_NS = 2_000


def moving(graph: TaskGraph, size_bytes: npt.ArrayLike) -> Estimates:
    """Estimate new memory-bound kernels that read and write ``size_bytes`` in total, shape (n,).

    On a GPU by the device's bandwidth. On a CPU by the recorded copy rate, which counts only the bytes written: a copy
    also reads as many and fetches as many before it overwrites them.
    """
    wanted = np.atleast_1d(np.asarray(size_bytes, dtype=np.float64))
    if graph.has_gpu:
        gpu = device(graph)
        peak, spread = (gpu.memory_gbyte_s, 1.0) if gpu else (UNKNOWN_MEMORY_GBYTE_S, UNKNOWN_MEMORY_SPREAD)
        source = Source.ROOFLINE if gpu else Source.ASSUMED
        reached = memory_share(gpu)
        centre, low, high = (
            np.maximum(wanted / (peak * share), kernel_floor_ns(gpu))  # 1 GB/s is 1 byte/ns
            for share in (reached.centre, reached.high * spread, reached.low / spread)
        )
        return Estimates.of(centre, source, low, high)
    measured = graph.info.recorded.rates is not None
    centre = wanted / 3 / memory_gbyte_s(graph, None) + CPU_COPY_NS
    spread = 1.5 if measured else 3.0
    return Estimates.of(centre, Source.MEASURED if measured else Source.ASSUMED, centre / spread, centre * spread)


# Host to device and back with pinned memory over PCIe 3.0 x16 (15.75 GB/s): 11.9 to 13.2 GB/s measured (offline
# profiling proposal, its transfer table), 0.8 of the link.
LINK_SHARE, UNKNOWN_LINK_GBYTE_S = 0.8, 15.75
# Smaller copies are dominated by latency and say nothing about the link.
LARGE_COPY_BYTES = 1 << 20


def host_copies(graph: TaskGraph, size_bytes: npt.ArrayLike) -> Estimates:
    """Estimate copies of ``size_bytes``, shape (n,), between pinned host memory and the GPU, in one direction.

    By the rates that the recorder measured, else the median rate of the recording's large copies, else the link in the
    device's data sheet. Recorded copies may be pageable, which are slower than pinned ones: the range covers both.
    """
    wanted = np.atleast_1d(np.asarray(size_bytes, dtype=np.float64))
    rate, source, low, high = _link_gbyte_s(graph)
    centre, fast, slow = (np.maximum(wanted / by, shortest_kernel_ns(graph)) for by in (rate, high, low))
    return Estimates.of(centre, source, fast, slow)


def _link_gbyte_s(graph: TaskGraph) -> tuple[float, Source, float, float]:
    """The link's rate, its source, and the ends of its range, GB/s."""
    rates = graph.info.recorded.rates
    measured = (rates.h2d_pinned_gbyte_s, rates.d2h_pinned_gbyte_s) if rates is not None else ()
    known = [float(rate) for rate in measured if rate is not None]
    if known:
        return min(known), Source.MEASURED, 0.85 * min(known), max(known)
    gpu = device(graph)
    peak = gpu.pcie_gbyte_s if gpu else UNKNOWN_LINK_GBYTE_S
    large = graph.select(kind=TaskKind.MEMCPY, name=r"(?i)HtoD|DtoH|HostToDevice|DeviceToHost")
    large &= (graph.size_bytes >= LARGE_COPY_BYTES) & (graph.duration_ns > 0)
    if large.any():
        recorded = float(np.median(graph.size_bytes[large] / graph.duration_ns[large]))
        if 0 < recorded <= peak:
            return max(recorded, peak * LINK_SHARE), Source.ROOFLINE if gpu else Source.PAPER, recorded, peak
    return peak * LINK_SHARE, Source.ROOFLINE if gpu else Source.PAPER, peak * LINK_SHARE / 1.5, peak


def described(graph: TaskGraph) -> dict[str, int]:
    """Return the number of tasks of ``graph`` by source, except the recording, the best source first."""
    codes = sources(graph)
    return {s.name.lower(): int((codes == s).sum()) for s in Source if s != Source.RECORDED and (codes == s).any()}


def later(estimates: Estimates, more_ns: float, spread: float) -> Estimates:
    """Lengthen the estimates by ``more_ns``, our estimate, uncertain by a factor ``spread`` up and down."""
    return Estimates.of(
        estimates.duration_ns + more_ns, Source.ASSUMED,
        estimates.low_ns + more_ns / spread, estimates.high_ns + more_ns * spread,
    )  # fmt: skip
