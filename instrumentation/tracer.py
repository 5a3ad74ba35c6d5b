"""What records the events of the steps: one interface, and torch's own profiler behind it."""

import importlib.util
import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from whatif.runtime.errors import WhatifError

from .gc_pauses import GcMarks
from .gpu import GPU
from .layers import LayerMarks
from .line_marks import LineMarks

BACKENDS = ("kineto", "cupti")

# Steps with the tracer running whose events are thrown away: its first steps pay for its own start-up.
TRACER_WARMUP_STEPS = 3

_gpu_recorded = False  # whether a recording on a GPU was begun in this process

_CUPTI_INSTALL = '`pip install cupti-python` (beside torch 2.11: `pip install --no-deps "cupti-python==13.2.0"`)'


class Tracer(Protocol):
    """Records the events of this process between `start` and `stop`, once.

    Steps are numbered from 0, the first `TRACER_WARMUP_STEPS` included, and marked by annotations `ProfilerStep#N`.
    Warm-up steps may be missing from the trace; a step that has begun when `stop` is called may be in it.
    """

    def start(self) -> None:
        """Begin with step 0."""

    def step(self) -> None:
        """End a training step; the next one begins."""

    def stop(self) -> None:
        """End the recording and take everything off the model."""

    def trace(self) -> dict[str, Any]:
        """Return what was recorded, shaped as Kineto's chrome trace: `traceEvents` with times in microseconds, ..."""


def check_backend(backend: str, *, memory: bool, lines: bool = False) -> None:
    """Raise WhatifError, before any step has run, where this machine cannot record with that backend."""
    if backend not in BACKENDS:
        raise WhatifError(f"expected a backend among {', '.join(BACKENDS)}, got {backend!r}: name one of them.")
    if backend == "kineto":
        return
    if memory:
        raise WhatifError("expected backend kineto for the memory timeline, got cupti: leave one of the two away.")
    if lines:
        raise WhatifError("expected backend kineto for the lines of your code, got cupti: leave one of the two away.")
    if not (GPU.is_nvidia() and GPU.available()):
        raise WhatifError("expected an NVIDIA GPU for backend cupti, got none: use backend kineto.")
    if importlib.util.find_spec("cupti") is None:
        raise WhatifError(f"expected the package cupti-python for backend cupti, got none: {_CUPTI_INSTALL}.")


def check_session(backend: str, *, cuda: bool) -> None:
    """Raise WhatifError where a profiler runs already, or cannot see the GPU, or has recorded on one before.

    Steps on a GPU are slower behind a first session, and CUPTI 13.0 mistakes times and correlations in a second one.
    """
    if torch._C._autograd._profiler_enabled():
        raise WhatifError(
            "expected no other profiler in the recorded steps, got a running torch.profiler: switch it off."
        )
    if cuda and backend == "kineto" and not GPU.traced_by_torch():
        raise WhatifError(
            "expected a torch.profiler that sees the GPU, got one built without CUPTI: install torch from its own"
            " wheels, or use backend cupti."
        )
    if cuda and _gpu_recorded:
        raise WhatifError(
            "expected one recording on a GPU in a process, got a second: record it in a process of its own."
        )


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
    """Return the tracer of a backend; `steps` are to be recorded after the warm-up.

    `scratch` is a file that may be written and is removed again. Raises WhatifError as `check_session` does, and for
    cupti without a model on a GPU.
    """
    global _gpu_recorded
    check_session(backend, cuda=cuda)
    tracer: Tracer
    if backend == "kineto":
        tracer = KinetoTracer(model, cuda=cuda, steps=steps, memory=memory, scratch=scratch, lines=lines)
    elif cuda:
        from .cupti.tracer import CuptiTracer

        tracer = CuptiTracer(model, optimizer)
    else:
        raise WhatifError("expected a model on the GPU for backend cupti, got one on the CPU: use backend kineto.")
    _gpu_recorded |= cuda
    return tracer


class KinetoTracer:
    """Records with torch.profiler: operators with shapes, GPU work and its calls, and the layers' marks."""

    def __init__(
        self, model: nn.Module, *, cuda: bool, steps: int, memory: bool, scratch: Path, lines: bool = False
    ) -> None:
        self._model = model
        self._scratch = scratch
        self._marks: LayerMarks | None = None
        self._pauses: GcMarks | None = None
        self._lines = LineMarks() if lines else None
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU],
            # One step more, so that the profiler still runs when the last one has ended: its own cost is measured then.
            schedule=schedule(wait=0, warmup=TRACER_WARMUP_STEPS, active=steps + 1, repeat=1),
            record_shapes=True,
            profile_memory=memory,
            # Without these events a trace does not say which GPU work a waiting CPU thread waits for.
            experimental_config=_ExperimentalConfig(enable_cuda_sync_events=cuda),
        )

    def start(self) -> None:
        """Mark the layers and the pauses, and start the profiler."""
        self._marks = LayerMarks(self._model)
        self._pauses = GcMarks()
        self._profiler.start()
        if self._lines is not None:
            self._lines.start()

    def step(self) -> None:
        """End a training step; the next one begins."""
        self._profiler.step()

    def stop(self) -> None:
        """Stop the profiler and take the marks off the model."""
        if self._lines is not None and self._marks is not None:
            self._lines.stop()
        if self._pauses is not None:
            self._pauses.remove()
        if self._marks is not None:
            self._marks.remove()
            self._profiler.stop()
        self._marks = self._pauses = None

    def trace(self) -> dict[str, Any]:
        """Return the profiler's own chrome trace; raises WhatifError where that cannot be read, OSError on disk."""
        try:
            self._profiler.export_chrome_trace(str(self._scratch))
            # Names come from the user's program: they may hold bytes that are no text and control characters.
            trace = json.loads(self._scratch.read_text(encoding="utf-8", errors="replace"), strict=False)
        except ValueError as error:
            raise WhatifError(
                f"expected valid JSON from torch.profiler, got {error}: record again with fewer steps, or another"
                " torch."
            ) from error
        finally:
            self._scratch.unlink(missing_ok=True)
        assert isinstance(trace, dict)
        if self._lines is not None:
            trace["traceEvents"] += self._lines.events(trace.get("baseTimeNanoseconds", 0))
        return trace
