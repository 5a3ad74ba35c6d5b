"""Records the events of the steps: the interface of tracers, and the choice between the two."""

import importlib.util
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from whatif.runtime.errors import WhatifError

from .gpu import GPU

BACKENDS = ("kineto", "cupti")

_gpu_recorded = False  # whether this process has begun a recording on a GPU

_CUPTI_INSTALL = '`pip install cupti-python` (beside torch 2.11: `pip install --no-deps "cupti-python==13.2.0"`)'


class Tracer(Protocol):
    """Records the events of this process between `start` and `stop`, once.

    Steps are numbered from 0, the first `TRACER_WARMUP_STEPS` included, and marked by annotations `ProfilerStep#N`.
    Warm-up steps may be missing from the trace; a step that has begun when `stop` is called may be in it.
    """

    def start(self) -> None:
        """Start with step 0."""

    def step(self) -> None:
        """End a training step; the next one begins."""

    def stop(self) -> None:
        """End the recording and remove all hooks from the model."""

    def trace(self) -> dict[str, Any]:
        """Return the events as a Chrome trace in Kineto's format: `traceEvents` with times in microseconds, ..."""


def check_backend(backend: str, *, memory: bool, lines: bool = False) -> None:
    """Raise WhatifError, before any step has run, if this machine cannot record with the backend."""
    if backend not in BACKENDS:
        raise WhatifError(f"expected a backend among {', '.join(BACKENDS)}, got {backend!r}: name one of them.")
    if backend == "kineto":
        return
    if memory:
        raise WhatifError("expected backend kineto for the memory timeline, got cupti: drop one of the two.")
    if lines:
        raise WhatifError("expected backend kineto for the lines of your code, got cupti: drop one of the two.")
    if not (GPU.is_nvidia() and GPU.available()):
        raise WhatifError("expected an NVIDIA GPU for backend cupti, got none: use backend kineto.")
    if importlib.util.find_spec("cupti") is None:
        raise WhatifError(f"expected the package cupti-python for backend cupti, got none: {_CUPTI_INSTALL}.")


def check_session(backend: str, *, cuda: bool, lines: bool = False) -> None:
    """Raise WhatifError if a profiler or trace function runs, torch cannot trace the GPU, or it is a second session.

    Steps on a GPU are slower after a first session, and CUPTI 13.0 reports wrong times and correlations in a second.
    """
    if torch._C._autograd._profiler_enabled():
        raise WhatifError(
            "expected no other profiler in the recorded steps, got a running torch.profiler: switch it off."
        )
    if lines and sys.gettrace() is not None:  # A thread can have only one.
        raise WhatifError(
            "expected no trace function besides --lines, got that of a debugger or coverage tool: switch it off, or"
            " record without lines."
        )
    if cuda and backend == "kineto" and not GPU.traced_by_torch():
        raise WhatifError(
            "expected a torch.profiler that sees the GPU, got one built without CUPTI: install torch from its own"
            " wheels, or use backend cupti."
        )
    if cuda and _gpu_recorded:
        raise WhatifError("expected one GPU recording per process, got a second: record it in a new process.")


def make_tracer(
    backend: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    cuda: bool,
    steps: int,
    memory: bool,
    scratch: Path,
    lines: bool = False,
) -> Tracer:
    """Return the tracer of a backend, which is to record `steps` after its warm-up.

    `scratch` is the path of a temporary file, which is removed. Raises WhatifError as `check_session` does, and for
    cupti without a model on a GPU.
    """
    global _gpu_recorded
    check_session(backend, cuda=cuda, lines=lines)
    tracer: Tracer
    if backend == "kineto":
        from .kineto_tracer import KinetoTracer

        tracer = KinetoTracer(model, cuda=cuda, steps=steps, memory=memory, scratch=scratch, lines=lines)
    elif cuda:
        from .cupti.tracer import CuptiTracer

        tracer = CuptiTracer(model, optimizer)
    else:
        raise WhatifError("expected a model on the GPU for backend cupti, got one on the CPU: use backend kineto.")
    _gpu_recorded |= cuda
    return tracer
