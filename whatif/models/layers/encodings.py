"""Feature maps kept in an encoded form between their forward and backward use. Used by ``gist``.

Source: Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA 2018, §3 and §4; Daydream
(USENIX ATC 2020), Algorithm 11.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from whatif.graph.insert import NewTasks, insert_all
from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Change,
    Float64,
    Int64,
)
from whatif.models.durations.estimator import Estimates, mark, moving
from whatif.models.durations.half_precision import is_half
from whatif.models.layers.calls import calls_of, operator_cost_ns, task_before
from whatif.models.layers.layer_calls import CallRole, Calls

ENCODE_NAME, DECODE_NAME = "encode (Gist)", "decode (Gist)"
# A row of Gist's sparse form holds as many values as one byte of index can address, after a pointer of 4 bytes.
ROW_VALUES, POINTER_BYTES = 256, 4
# cuSPARSE counts, scans and scatters, and does not reach the rate of a copy: our estimate.
SPARSE_SLOWER = 3.0


class Encoding(NamedTuple):
    """One row per feature map, shape (n,) each: the forward call that reads it last, and bytes.

    ``kept_bytes`` of its ``size_bytes`` stay; ``encode_bytes`` and ``decode_bytes`` are the kernels' traffic (0: no
    decoding, backward work reads the encoded form); ``sparse`` maps are encoded by cuSPARSE.
    """

    call: Int64
    size_bytes: Int64
    kept_bytes: Int64
    encode_bytes: Float64
    decode_bytes: Float64
    sparse: Bool

    def __len__(self) -> int:
        return len(self.call)

    def take(self, chosen: Array) -> Encoding:
        """The maps at ``chosen`` (a mask or positions)."""
        columns: list[Any] = [column[chosen] for column in self]
        return Encoding(*columns)


def encodings(
    graph: TaskGraph, calls: Calls, size_bytes: Int64, keeps: Bool, *, sparsity: float, lossy_bytes: float | None
) -> Encoding:
    """Return the encodings of the feature maps that are inputs of forward calls, by Gist's rules.

    A ReLU's output for pooling is kept as one bit per value (Binarize). The output of a ReLU, or of pooling after one,
    for a convolution is kept as its values above zero (SSDC), a share of 1 - ``sparsity``. The other kept maps take
    ``lossy_bytes`` per value (DPR); they stay unchanged if that is None or no gain. ``size_bytes`` and ``keeps`` (the
    calls that keep their input) have shape (n_calls,).
    """
    role = np.append(calls.role, -1)  # the last entry: no call
    before = calls.before
    from_relu = role[before] == CallRole.ACTIVATION
    through_pool = (role[before] == CallRole.POOLING) & np.append(from_relu, False)[before]
    known = keeps & (size_bytes > 0) & (calls.backward_tasks()[0] >= 0)
    binarized = known & (calls.role == CallRole.POOLING) & from_relu
    sparse = known & (calls.role == CallRole.CONVOLUTION) & (from_relu | through_pool)

    size = size_bytes.astype(np.float64)
    half = np.zeros(len(calls) + 1, dtype=np.bool_)
    half[calls.call[is_half(graph.dtype)]] = True
    value_bytes = np.where(half[:-1], 2.0, 4.0)
    values = size / value_bytes
    narrow = value_bytes if lossy_bytes is None else np.minimum(value_bytes, lossy_bytes)
    above_zero = values * (1 - sparsity)
    kept = np.where(sparse, above_zero * (narrow + 1) + values / ROW_VALUES * POINTER_BYTES, values * narrow)
    kept = np.where(binarized, values / 8, kept)
    chosen = known & (kept < size)
    # Binarize reads the map; its backward work reads bits. SSDC reads it twice, to count and to pack, and clears it
    # before scattering the values. DPR reads one form and writes the other.
    encode = np.where(sparse, 2 * size, size) + kept
    decode = np.where(binarized, 0.0, kept + size + np.where(sparse, above_zero * value_bytes, 0.0))
    rows = np.flatnonzero(chosen)
    return Encoding(
        rows, size_bytes[rows], np.rint(kept[rows]).astype(np.int64), encode[rows], decode[rows], sparse[rows]
    )


def encode(graph: TaskGraph, calls: Calls, maps: Encoding) -> TaskGraph:
    """Return the graph that encodes each map after its last forward use and decodes it before its backward use.

    Includes the calls that launch the kernels; on a CPU these are operators.
    """
    decoded = maps.take(maps.decode_bytes > 0)
    used, needed = calls.last[maps.call], calls.backward_tasks()[0][decoded.call]
    times = [_times(graph, maps.encode_bytes, maps.sparse), _times(graph, decoded.decode_bytes, decoded.sparse)]
    begins = _launches(graph, needed)
    lots = [
        replace(_kernels(graph, ENCODE_NAME, used, times[0]), launched_after=_launches(graph, used)),
        replace(
            _kernels(graph, DECODE_NAME, needed, times[1]),
            after=task_before(graph, needed),
            launched_after=None if begins is None else task_before(graph, begins),
        ),
    ]
    done = insert_all(graph, lots)
    ids = np.concatenate([inserted.ids for inserted in done])
    changed = mark(done[0].graph, ids, np.concatenate([each.source for each in times]))
    return changed.with_change(Change.ENCODES)


def _kernels(graph: TaskGraph, name: str, beside: Int64, times: Estimates) -> NewTasks:
    """Kernels, or operators, after the tasks ``beside``, on their threads, in their layers and passes."""
    return NewTasks(
        beside, name, graph.kernel_kind, times.duration_ns, thread=graph.thread[beside],
        low_ns=times.low_ns, high_ns=times.high_ns, layer=graph.layer[beside], phase=graph.phase[beside],
        family=int(KernelFamily.ELEMENTWISE), launch_ns=operator_cost_ns(graph) if graph.has_gpu else 0,
    )  # fmt: skip


def _times(graph: TaskGraph, moved_bytes: Float64, sparse: Bool) -> Estimates:
    times = moving(graph, moved_bytes)
    slow = np.where(sparse, SPARSE_SLOWER, 1.0)
    return Estimates.of(times.duration_ns, times.source, times.low_ns, times.high_ns * slow)


def _launches(graph: TaskGraph, tasks: Int64) -> Int64 | None:
    """The call after which each task's added kernel is launched; None on a CPU."""
    return calls_of(graph, tasks) if graph.has_gpu else None
