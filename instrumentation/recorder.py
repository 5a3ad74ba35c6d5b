"""Records some steps of a training loop: first their time without the profiler, then their events."""

import enum
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from whatif.errors import WhatifError

from .layers import GradientOrder, LayerMarks, describe_layers
from .metadata import FirstInput, describe_environment, describe_optimizer, describe_precision
from .rates import measure_cpu_rates
from .recording_file import check_writable, write_recording
from .steptimer import StepTimer

# Readers warn of a recording whose version they do not know.
METADATA_VERSION = 1

# Steps with the profiler running whose events are thrown away: its first steps pay for its own start-up.
PROFILER_WARMUP_STEPS = 3

# Fewer recorded steps are not worth a file: the first one is dropped by readers, and a median needs two more.
FEWEST_STEPS = 3


class _Phase(enum.Enum):
    WARMUP = enum.auto()
    UNTRACED = enum.auto()
    TRACED = enum.auto()
    DONE = enum.auto()


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | os.PathLike[str],
    *,
    steps: int = 5,
    warmup_steps: int = 5,
    untraced_steps: int = 20,
) -> "Recording":
    """Return a context manager that records `steps` training steps into `path`; call its `step()` at the end of each.

    The steps are used in this order: `warmup_steps` run as they are, `untraced_steps` are timed without the profiler,
    3 run with the profiler to warm it up, `steps` are recorded. Then the file is written; later steps run as they are.
    Data loading belongs to the step that uses the data. On a GPU the peak memory statistics are reset once.

    Raises WhatifError for a number of steps that is too small, for a path that cannot be written, and at the end of the
    block when fewer than 3 steps were recorded. When the block raises, nothing is written and stderr says so.
    """
    return Recording(
        model, optimizer, Path(path), steps=steps, warmup_steps=warmup_steps, untraced_steps=untraced_steps
    )


class Recording:
    """One recording in the making; `step` moves it on."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        path: Path,
        *,
        steps: int,
        warmup_steps: int,
        untraced_steps: int,
    ) -> None:
        # Quartiles need two times; the gradient order needs one warm-up step.
        for name, value, fewest in (
            ("steps", steps, FEWEST_STEPS),
            ("warmup_steps", warmup_steps, 1),
            ("untraced_steps", untraced_steps, 2),
        ):
            if value < fewest:
                raise WhatifError(f"expected {name} of at least {fewest}, got {value}: ask for more.")
        check_writable(path)
        self.path = path
        self._model = model
        self._optimizer = optimizer
        self._warmup_steps = warmup_steps
        self._untraced_steps = untraced_steps
        self._traced_steps = PROFILER_WARMUP_STEPS + steps
        self._count = 0  # steps of all phases
        self._phase_count = 0
        self._phase = _Phase.WARMUP
        self._cuda = False
        self._metadata: dict[str, Any] = {}
        self._input: FirstInput | None = None
        self._gradients: GradientOrder | None = None
        self._marks: LayerMarks | None = None
        self._timer: StepTimer | None = None
        self._profiler: profile | None = None

    @property
    def done(self) -> bool:
        """Whether the file is written (or given up): further steps change nothing."""
        return self._phase is _Phase.DONE

    @property
    def tracing(self) -> bool:
        """Whether the profiler is running."""
        return self._phase is _Phase.TRACED

    @property
    def steps_needed(self) -> int:
        """How many calls of `step` a whole recording takes."""
        return self._warmup_steps + self._untraced_steps + self._traced_steps

    @property
    def fewest_steps(self) -> int:
        """How many calls of `step` it takes until `finish` has enough to write."""
        return self._warmup_steps + self._untraced_steps + PROFILER_WARMUP_STEPS + FEWEST_STEPS

    @property
    def enough(self) -> bool:
        """Whether `finish` has enough to write, or has written it."""
        return self.done or self._count >= self.fewest_steps

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif not self.done:
            self.abandon()
            print(
                f"whatif: no recording was written: the training raised {describe_error(error)} in step"
                f" {self._count + 1} of {self.steps_needed}.",
                file=sys.stderr,
            )

    def start(self) -> None:
        """Begin with the warm-up steps."""
        self._input = FirstInput(self._model)
        self._gradients = GradientOrder(self._model)

    def step(self) -> None:
        """End a training step; writes the file at the end of the last recorded one."""
        if self._phase is _Phase.DONE:
            return
        self._count += 1
        self._phase_count += 1
        if self._phase is _Phase.WARMUP:
            if self._phase_count == self._warmup_steps:
                self._begin_untraced()
        elif self._phase is _Phase.UNTRACED:
            assert self._timer is not None
            self._timer.mark()
            if self._phase_count == self._untraced_steps:
                self._begin_traced()
        else:
            assert self._profiler is not None
            self._profiler.step()
            if self._phase_count == self._traced_steps:
                self.finish()

    def finish(self) -> None:
        """Write what was recorded, unless that is done; raises WhatifError when that is fewer than 3 steps."""
        if self._phase is _Phase.DONE:
            return
        profiler, enough = self._profiler, self.enough
        self.abandon()
        if profiler is None or not enough:
            raise WhatifError(
                f"{self.path}: expected at least {self.fewest_steps} training steps ({self.steps_needed} for a whole"
                f" recording), got {self._count}: train for longer or record fewer steps."
            )
        write_recording(profiler, self.path, self._metadata, self._phase_count - PROFILER_WARMUP_STEPS)

    def abandon(self) -> None:
        """Take everything off the program and write nothing."""
        self._phase = _Phase.DONE
        self._stop_watching()
        if self._marks is not None:
            self._marks.remove()
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler = None

    def _stop_watching(self) -> None:
        for watcher in (self._input, self._gradients):
            if watcher is not None:
                watcher.remove()

    def _begin_untraced(self) -> None:
        self._stop_watching()
        self._cuda = _runs_on_cuda(self._model)
        self._phase, self._phase_count = _Phase.UNTRACED, 0
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        self._timer = StepTimer(self._cuda)

    def _begin_traced(self) -> None:
        # The profiler comes last: what runs after it in the same process is slower even when it is off.
        assert self._timer is not None
        self._metadata = self._describe(self._timer)
        self._phase, self._phase_count = _Phase.TRACED, 0
        self._marks = LayerMarks(self._model)
        self._profiler = _make_profiler(self._cuda, self._traced_steps - PROFILER_WARMUP_STEPS)
        self._profiler.start()

    def _describe(self, timer: StepTimer) -> dict[str, Any]:
        assert self._input is not None
        assert self._gradients is not None
        return {
            "version": METADATA_VERSION,
            **timer.summaries(),
            "layers": describe_layers(self._model),
            "optimizer": describe_optimizer(self._optimizer),
            "batch_size": self._input.shape[0] if self._input.shape else None,
            "input_shape": self._input.shape,
            "input_dtype": self._input.dtype,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if self._cuda else None,
            "precision": describe_precision(self._model, self._input.autocast),
            "grad_ready_order": self._gradients.rows(),
            "rates": None if self._cuda else measure_cpu_rates(),
            **describe_environment(self._cuda),
        }


def _runs_on_cuda(model: nn.Module) -> bool:
    """Whether the model lives on a GPU; a model without parameters goes where the program has gone."""
    parameter = next(model.parameters(), None)
    if parameter is not None:
        return parameter.is_cuda
    cuda: Any = torch.cuda  # Partly untyped.
    return bool(cuda.is_initialized())


def _make_profiler(cuda: bool, steps: int) -> profile:
    return profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=PROFILER_WARMUP_STEPS, active=steps, repeat=1),
        record_shapes=True,
        # Without the synchronisation events nobody can tell which GPU work a waiting CPU thread waits for.
        experimental_config=_ExperimentalConfig(enable_cuda_sync_events=cuda),
    )


def describe_error(error: BaseException) -> str:
    """Return the exception's type and message on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__} ({message})" if message else type(error).__name__
