"""Traces training steps through CUPTI's activity API instead of torch.profiler: GPU work, CUDA calls and layers.

Such a trace contains no CPU operators, so the overhead of a step is per layer and not per operator.
"""

import os
import threading
from typing import Any

import torch
from torch import nn

from ..gpu import GPU
from ..whole_steps import TRACER_WARMUP_STEPS
from .layers import ANNOTATION, LayerStamps, Span
from .session import CuptiSession, cupti_version
from .trace import TraceBuilder, Window


class CuptiTracer:
    """Traces the steps between `start` and `stop`; `step` ends each, `trace` returns the events of complete ones.

    The first `TRACER_WARMUP_STEPS` are traced and dropped: they include CUPTI's start-up. A process can trace once,
    and not after it has used torch.profiler. Raises WhatifError if it has, or if the package cupti-python, the driver
    or a GPU is missing.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._session = session = CuptiSession()
        self._stamps = LayerStamps(model, optimizer, session.clock, session.push, session.pop)
        self._edges_ns: list[int] = []
        self._thread = 0  # the training thread
        self._running = False

    def start(self) -> None:
        """Begin the first step."""
        self._session.start()
        self._stamps.attach()
        self._running = True
        self._thread = threading.get_native_id()
        self._edges_ns.append(self._session.clock())

    def step(self) -> None:
        """End a step and begin the next."""
        self._stamps.next_step()
        self._edges_ns.append(self._session.clock())

    def stop(self) -> None:
        """Synchronize the GPU and stop tracing; work since the last `step` is dropped."""
        if self._running:
            self._running = False
            self._stamps.remove()
            self._session.stop()

    def trace(self) -> dict[str, Any]:
        """Return the Chrome trace of the stopped tracer; its key `cupti` counts lost records."""
        edges_ns = self._edges_ns[TRACER_WARMUP_STEPS:] or self._edges_ns[-1:]
        session = self._session
        builder = TraceBuilder(
            session.records,
            [*self._stamps.spans, *self._steps()],
            os.getpid(),
            session.callback_name,
            Window(edges_ns[0], edges_ns[-1]),
        )
        trace = builder.trace(_devices())
        trace["cupti"] |= {"dropped_records": session.dropped_records, "package": cupti_version()}
        return trace

    def _steps(self) -> list[Span]:
        return [
            Span(ANNOTATION, f"ProfilerStep#{number}", self._thread, begin_ns, end_ns)
            for number, (begin_ns, end_ns) in enumerate(zip(self._edges_ns, self._edges_ns[1:], strict=False))
        ]


def _devices() -> list[dict[str, Any]]:
    """Describe the GPUs in Kineto's format."""
    found: list[Any] = [GPU.properties(index) for index in range(GPU.count())]
    return [
        {
            "id": index,
            "name": properties.name,
            "totalGlobalMem": properties.total_memory,
            "computeMajor": properties.major,
            "computeMinor": properties.minor,
            "numSms": properties.multi_processor_count,
        }
        for index, properties in enumerate(found)
    ]
