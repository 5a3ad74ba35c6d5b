"""How long the work takes that a what-if changes or adds: one place, a range with every answer, and who gave it.

A transform never carries a duration of its own. It asks here, and the answer travels with the tasks: the range
into ``low_ns`` and ``high_ns``, the source into the attached column ``ESTIMATED``, which reports count.
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
    """Who answered for a duration, from the best to the worst."""

    RECORDED = 0  # the recording itself; inserted rows of an attached column hold this value as well
    MEASURED = 1  # measured alone on the recorded machine: operators, copies, rates
    DATABASE = 2  # the op database: the operator measured on the device, or interpolated between its neighbours
    LEARNED = 3  # a model of the device's measurements
    OTHER_DEVICES = 4  # measurements of other devices, or a model of them
    ROOFLINE = 5  # data sheet of the device, with the efficiency that the kernel itself reached
    PAPER = 6  # a constant that a paper or a vendor printed
    ASSUMED = 7  # our estimate, not measured


class Estimates(Struct, frozen=True):
    """Durations of n pieces of work, ns, with a nominal 90 % range and the source of each, shape (n,) all of them."""

    duration_ns: Float64
    low_ns: Float64
    high_ns: Float64
    source: Int8

    def __len__(self) -> int:
        return len(self.duration_ns)

    def take(self, rows: Array) -> Estimates:
        """Return those of the ``rows``: a mask of shape (n,), or places."""
        return Estimates(self.duration_ns[rows], self.low_ns[rows], self.high_ns[rows], self.source[rows])

    @staticmethod
    def of(
        duration_ns: npt.ArrayLike, source: npt.ArrayLike, low_ns: npt.ArrayLike, high_ns: npt.ArrayLike
    ) -> Estimates:
        """Estimates from arrays or numbers that fit one another; the range is stretched to hold the duration."""
        duration, low, high, code = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(column, dtype=np.float64)) for column in (duration_ns, low_ns, high_ns, source))
        )
        return Estimates(duration, np.minimum(low, duration), np.maximum(high, duration), code.astype(np.int8))


def device(graph: TaskGraph) -> Gpu | None:
    """Return the facts of the recorded GPU; None on a CPU, and where the device is not in ``whatif/hardware/gpus``."""
    return find_gpu(graph.info.gpu, graph.info.gpu_memory_bytes) if graph.info.gpu else None


# What a small operator takes on a CPU beside its arithmetic (dispatch, allocation): the operators of the CPU
# recordings in traces/ that touch a few elements take 1 to 4 us.
CPU_OPERATOR_NS = 2_000


def shortest_kernel_ns(graph: TaskGraph) -> int:
    """Return what the shortest kernels of the recorded GPU take, or the smallest operators of a CPU, ns."""
    return kernel_floor_ns(device(graph)) if graph.has_gpu else CPU_OPERATOR_NS


def scaled(
    graph: TaskGraph, tasks: Tasks, factor: npt.ArrayLike, source: npt.ArrayLike, *,
    low: npt.ArrayLike, high: npt.ArrayLike,
) -> Estimates:  # fmt: skip
    """Estimate ``tasks`` at ``factor`` times what they take now; ``low`` and ``high`` are factors."""
    return Estimates.of(
        graph.duration_ns[tasks] * np.asarray(factor), source,
        graph.low_ns[tasks] * np.asarray(low), graph.high_ns[tasks] * np.asarray(high),
    )  # fmt: skip


def check_units(graph: TaskGraph, units: str, what_if: str, expected: str) -> None:
    """Raise WhatifError where the recorded GPU has no ``units`` (a field of ``Gpu``), is not known, or is not named.

    ``expected`` says what they are and who has them.
    """
    gpu = device(graph)
    if gpu is not None and getattr(gpu, units) is not None:
        return
    known = f"{graph.info.gpu}, which {'has none' if gpu else 'is not in whatif/hardware/gpus'}"
    got = known if graph.info.gpu else "a recording that does not name its own"
    raise WhatifError(f"{what_if}: expected a GPU with {expected}, got {got}; `amp` models half precision.")


def put(graph: TaskGraph, tasks: Tasks, estimates: Estimates) -> TaskGraph:
    """Return the graph in which ``tasks`` last what was estimated, ranges and sources included."""
    graph = graph.with_duration(tasks, estimates.duration_ns, low_ns=estimates.low_ns, high_ns=estimates.high_ns)
    return mark(graph, tasks, estimates.source)


def mark(graph: TaskGraph, tasks: Tasks, source: npt.ArrayLike) -> TaskGraph:
    """Remember who answered for the durations of ``tasks``.

    A duration that several what-ifs changed is known as well as the worst of their answers.
    """
    index = as_index(graph, tasks)
    column = sources(graph).copy()
    column[index] = np.maximum(column[index], np.asarray(source, dtype=np.int8))
    return graph.attach(**{ESTIMATED: column})


def sources(graph: TaskGraph) -> Int8:
    """Return the ``Source`` of each task's duration, shape (n_tasks,)."""
    found = graph.attached.get(ESTIMATED)
    return np.zeros(len(graph), dtype=np.int8) if found is None else np.asarray(found, dtype=np.int8)


# A call that waits for nothing: our estimate.
SYNC_CALL_NS = 2_000
# What a copy of a CPU takes beside its bytes: our estimate.
CPU_COPY_NS = 2_000


def moving(graph: TaskGraph, size_bytes: npt.ArrayLike) -> Estimates:
    """Estimate new kernels that read and write ``size_bytes`` in all, shape (n,), and compute next to nothing.

    On a GPU by the device's bandwidth; on a CPU by the copy rate that the recording measured, which counts the bytes
    that a copy writes: as much again is read, and as much fetched before it is overwritten.
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
# Copies below this are all latency, and tell nothing of the link.
LARGE_COPY_BYTES = 1 << 20


def host_copies(graph: TaskGraph, size_bytes: npt.ArrayLike) -> Estimates:
    """Estimate copies of ``size_bytes``, shape (n,), between pinned host memory and the GPU, in one direction.

    By the rates that the recorder measured, else the median rate of the recording's own large copies, else the link
    of the device's data sheet. A pageable copy of a recording may be slower than a pinned one: the range says so.
    """
    wanted = np.atleast_1d(np.asarray(size_bytes, dtype=np.float64))
    rate, source, low, high = _link_gbyte_s(graph)
    centre, fast, slow = (np.maximum(wanted / by, shortest_kernel_ns(graph)) for by in (rate, high, low))
    return Estimates.of(centre, source, fast, slow)


def _link_gbyte_s(graph: TaskGraph) -> tuple[float, Source, float, float]:
    """Rate, its source, and the ends of its range, GB/s."""
    rates = graph.info.recorded.rates
    told = (rates.h2d_pinned_gbyte_s, rates.d2h_pinned_gbyte_s) if rates is not None else ()
    known = [float(rate) for rate in told if rate is not None]
    if known:
        return min(known), Source.MEASURED, 0.85 * min(known), max(known)
    gpu = device(graph)
    peak = gpu.pcie_gbyte_s if gpu else UNKNOWN_LINK_GBYTE_S
    large = graph.select(kind=TaskKind.MEMCPY, name=r"(?i)HtoD|DtoH|HostToDevice|DeviceToHost")
    large &= (graph.size_bytes >= LARGE_COPY_BYTES) & (graph.duration_ns > 0)
    if large.any():
        seen = float(np.median(graph.size_bytes[large] / graph.duration_ns[large]))
        if 0 < seen <= peak:
            return max(seen, peak * LINK_SHARE), Source.ROOFLINE if gpu else Source.PAPER, seen, peak
    return peak * LINK_SHARE, Source.ROOFLINE if gpu else Source.PAPER, peak * LINK_SHARE / 1.5, peak


def described(graph: TaskGraph) -> dict[str, int]:
    """Return how many tasks of ``graph`` take a duration from each source but the recording, best source first."""
    codes = sources(graph)
    return {s.name.lower(): int((codes == s).sum()) for s in Source if s != Source.RECORDED and (codes == s).any()}


def later(estimates: Estimates, more_ns: float, spread: float) -> Estimates:
    """Estimates of work that takes ``more_ns`` longer, our estimate: from 1 / ``spread`` to ``spread`` times that."""
    return Estimates.of(
        estimates.duration_ns + more_ns, Source.ASSUMED,
        estimates.low_ns + more_ns / spread, estimates.high_ns + more_ns * spread,
    )  # fmt: skip
