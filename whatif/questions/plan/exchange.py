"""The cost of exchanging gradients and parameters among copies of a model: work besides the passes, and exposed time.

The same pieces as the tasks of ``distributed``, ``zero`` and ``fsdp``, which are named with each. Volumes:
Rajbhandari et al., SC 2020, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Float64, Phase, TaskKind
from whatif.hardware.cluster.network import Network
from whatif.models.durations.estimator import moving
from whatif.models.exchange import gloo
from whatif.models.exchange.beside_kernels import traffic_ns
from whatif.models.exchange.buckets import MEBIBYTE, StepGradients, bucket_of
from whatif.models.exchange.collective_tasks import CALL_NS
from whatif.models.exchange.data_parallel import COPY_CALL
from whatif.models.layers.calls import usual_launch_ns
from whatif.models.layers.gradients import step_of
from whatif.models.parallel.sharding import BUCKET_CALL, UNIT_CALL
from whatif.units import Size

# Bytes that ZeRO sends at once: the default of `zero`.
BUCKET_BYTES = Size("25MiB").size_bytes


class Exchanged(NamedTuple):
    """The CPU and GPU time that exchanging adds to a step, and the exposed time of the transfers, ns."""

    cpu: float
    gpu: float
    exposed: float


class Exchanges:
    """The exchanges of copies that share one graph."""

    def __init__(self, graph: TaskGraph, gradients: StepGradients) -> None:
        """Find the gradients of one step, and when in its backward pass each is ready."""
        first = gradients.step == gradients.step.min()
        self._graph = graph
        self._gradients = StepGradients(*(column[first] for column in gradients))
        self._on_gpu = graph.has_gpu
        worker = graph.on_device
        backward = np.asarray(worker & (graph.phase == Phase.BACKWARD) & (step_of(graph) == gradients.step.min()))
        over = np.cumsum(np.where(backward, graph.duration_ns, 0), dtype=np.float64)
        self._ready = over[self._gradients.task] / max(over[-1], 1.0)
        launches = graph.on_gpu & (graph.kind == TaskKind.KERNEL)
        self._launch_ns = float(usual_launch_ns(graph, launches)) if self._on_gpu else 0.0
        self._buckets: dict[float | None, tuple[Float64, Float64]] = {}

    def replicated(self, network: Network, backward_ns: float) -> Exchanged:
        """DDP's buckets after one backward pass (``data_parallel.all_reduce_buckets``)."""
        graph, count = self._graph, len(self._gradients.size_bytes)
        sizes, ready = self._in_buckets(None)
        copied = 2 * float(moving(graph, 2 * self._gradients.size_bytes).duration_ns.sum())
        cost, work, *_ = gloo.sent(graph, network, "all_reduce", sizes)
        if self._on_gpu:
            calls = 2 * count * COPY_CALL * self._launch_ns + len(sizes) * CALL_NS
            beside = float(traffic_ns(graph, "all_reduce", sizes, network.workers).sum())
            return Exchanged(calls, copied + beside, _exposed_ns(ready * backward_ns, cost.total_ns, backward_ns))
        buffers, _ = gloo.buffers(graph)
        overhead = copied + count * gloo.HOOK_NS + gloo.STEP_NS + buffers * gloo.BUFFER_NS
        done = float(work.sum()) + len(sizes) * CALL_NS
        # gloo's work lengthens the backward pass, and elapses during the transfers.
        lengthened = backward_ns + overhead + done
        exposed = _exposed_ns(ready * lengthened - work, cost.total_ns, lengthened)
        return Exchanged(overhead + done, 0.0, exposed)

    def sharded_state(self, network: Network, backward_ns: float, passes: int = 1) -> Exchanged:
        """ZeRO-1 and 2: buckets are reduced and scattered, parameters gathered (``sharding.sharded_gradients``).

        ``passes``: of a step, in which gradients are sent: the last one of ZeRO-1, each one of ZeRO-2.
        """
        graph = self._graph
        sizes, ready = self._in_buckets(BUCKET_BYTES / MEBIBYTE)
        copied = passes * float(moving(graph, 2 * sizes).duration_ns.sum())
        scattered = gloo.sent(graph, network, "reduce_scatter", sizes).cost.total_ns
        gathered = float(gloo.sent(graph, network, "all_gather", [sizes.sum()]).cost.total_ns[0])
        count = passes * len(sizes)
        calls = (count + 1) * BUCKET_CALL.centre_ns
        if not self._on_gpu:  # every call blocks
            return Exchanged(copied + calls, 0.0, passes * float(scattered.sum()) + gathered)
        beside = passes * float(traffic_ns(graph, "reduce_scatter", sizes, network.workers).sum())
        exposed = passes * _exposed_ns(ready * backward_ns, scattered, backward_ns) + gathered
        return Exchanged(calls + count * self._launch_ns, copied + beside, exposed)

    def all_sharded(
        self, network: Network, units: Sequence[int], root: int, forward_ns: float, backward_ns: float,
        across: Network | None,
    ) -> Exchanged:  # fmt: skip
        """FSDP in one pass: ``units`` are gathered twice and scattered once, the root once (``fully_sharded``).

        ``across``: the network between nodes that hold the same shards, over which they sum them after each scatter.
        """
        graph = self._graph
        sizes = np.array(units, dtype=np.float64)
        all_bytes = np.append(sizes, [root] if root else [])
        gather = gloo.sent(graph, network, "all_gather", all_bytes).cost.total_ns
        scatter = gloo.sent(graph, network, "reduce_scatter", all_bytes).cost.total_ns
        regather = float(gather[: len(sizes)].sum())
        copied = float(moving(graph, 2 * np.concatenate([all_bytes, all_bytes, sizes])).duration_ns.sum())
        count = len(all_bytes) + len(all_bytes) + len(sizes)
        calls = count * UNIT_CALL.centre_ns
        summed = np.zeros(len(all_bytes))
        if across is not None:
            parts = all_bytes / network.workers
            summed = gloo.sent(graph, across, "all_reduce", parts).cost.total_ns
            calls += len(all_bytes) * BUCKET_CALL.centre_ns
        if not self._on_gpu:
            return Exchanged(calls, 0.0, copied + float(gather.sum()) + regather + float(scatter.sum() + summed.sum()))
        beside = sum(
            float(traffic_ns(graph, name, size, network.workers).sum())
            for name, size in (("all_gather", all_bytes), ("all_gather", sizes), ("reduce_scatter", all_bytes))
        )
        if across is not None:
            beside += float(traffic_ns(graph, "all_reduce", parts, across.workers).sum())
        first, last = float(gather[0] + gather[-1]) if root else float(gather[0]), float(scatter[-1])
        in_forward = max(float(gather.sum()) - first - forward_ns, 0.0)
        in_backward = max(regather + float(scatter.sum()) - last - backward_ns, 0.0)
        # Sums run on a separate channel, and begin with the first scatter.
        behind = max(float(summed.sum()) - float(summed[-1]) - backward_ns - in_backward - last, 0.0)
        exposed = first + in_forward + in_backward + last + behind + float(summed[-1])
        return Exchanged(calls + count * self._launch_ns, copied + beside, exposed)

    def _in_buckets(self, bucket_mb: float | None) -> tuple[Float64, Float64]:
        """Bytes of the buckets, in the order of sending, and the share of the backward pass when each is full."""
        if bucket_mb not in self._buckets:
            number = bucket_of(self._graph, self._gradients, bucket_mb)
            sizes = np.bincount(number, weights=self._gradients.size_bytes).astype(np.float64)
            ready = np.zeros(len(sizes), dtype=np.float64)
            np.maximum.at(ready, number, self._ready)
            self._buckets[bucket_mb] = sizes, np.maximum.accumulate(ready)
        return self._buckets[bucket_mb]


def _exposed_ns(ready_ns: Float64, took_ns: Float64, end_ns: float) -> float:
    """The time after ``end_ns`` of transfers that run one after the other, each once it is ready."""
    left = np.cumsum(took_ns[::-1])[::-1]
    return max(float((ready_ns + left).max()) - end_ns, 0.0)
