"""Records some steps of a training loop: first their time without the profiler, then their events."""

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from whatif.ingest.busy import machine_doubts
from whatif.ingest.recorded import recorded_of
from whatif.runtime.errors import WhatifError

from .execution import describe_execution
from .flops import forward_flops
from .gpu import GPU
from .gpu_clocks import describe_clocks
from .gpu_events import require_gpu_events
from .layers import describe_layers
from .messages import tell
from .metadata import describe_environment, describe_optimizer, zero_share
from .profiler_cost import ProfilerCost
from .rates import measure_rates
from .recording_file import cannot_write, check_writable, of_this_rank, scratch_file, write_recording
from .script_profilers import recording_begins, recording_ends
from .steptimer import StepTimer
from .tracer import Tracer, check_backend, check_session, make_tracer
from .watchers import WarmupWatchers
from .whole_steps import STEPS_BEFORE_LINES, TRACER_WARMUP_STEPS, keep_whole_steps, line_steps_needed

# Readers warn about a recording with an unknown version.
METADATA_VERSION = 1

# Readers drop the first recorded step, and a median needs two more.
FEWEST_STEPS = 3

# Quartiles need two times.
FEWEST_UNTRACED_STEPS = 2


class Recording:
    """A context manager that records `steps` training steps into `path`; call its `step()` at the end of each.

    The steps are used in this order: `warmup_steps` run unchanged, `untraced_steps` are timed without the profiler,
    3 run with the profiler to warm it up, `steps` are recorded. With `lines`, `steps` + 1 more follow, in which the
    lines of your code are traced (kineto only). Then the file is written; later steps run unchanged.
    With several ranks (`torch.distributed`, or RANK and WORLD_SIZE as torchrun sets them) each writes its own file,
    `run.rank0.json.gz`, ...
    Data loading belongs to the step that uses the data. On a GPU the peak memory statistics are reset once.
    `backend` is "kineto" (torch.profiler) or "cupti" (cupti-python, on an NVIDIA GPU); `memory` keeps every allocation
    in the trace; `say` is called with each warning; `other_optimizers` step before `optimizer` in a step (as
    in a GAN), and their state is memory as well. docs/recording.md lists the contents of a recording.

    Raises WhatifError for too few steps, a path that cannot be written, a backend that does not work here, a second
    profiler that is running, a second recording in a process that uses a GPU, and at the end of the block if fewer than
    3 steps were recorded, or no kernel of a GPU (NoGpuEventsError). If the block raises, nothing is written and a
    message is printed on stderr.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        path: str | os.PathLike[str],
        *,
        steps: int = 5,
        warmup_steps: int = 5,
        untraced_steps: int = 20,
        backend: str = "kineto",
        memory: bool = False,
        lines: bool = False,
        say: Callable[[str], None] = tell,
        other_optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        # The gradient order needs one warm-up step.
        for name, value, fewest in (
            ("steps", steps, FEWEST_STEPS),
            ("warmup_steps", warmup_steps, 1),
            ("untraced_steps", untraced_steps, FEWEST_UNTRACED_STEPS),
        ):
            if value < fewest:
                raise WhatifError(f"expected {name} of at least {fewest}, got {value}: increase it.")
        path = of_this_rank(Path(path))
        check_writable(path)
        check_backend(backend, memory=memory, lines=lines)
        self.path = path
        self._model = model
        self._optimizer = optimizer
        self._other_optimizers = other_optimizers
        self._warmup_steps = warmup_steps
        self._untraced_steps = untraced_steps
        self._recorded_steps = steps
        self._backend = backend
        self._memory = memory
        self._lines = lines
        self._say = say
        self._count = 0  # steps ended so far
        self._done = False
        self._written = False
        self._device: torch.device | None = None  # the GPU that the model is on, if any
        self._metadata: dict[str, Any] = {}
        self._watchers: WarmupWatchers | None = None
        self._timer: StepTimer | None = None  # first of the untraced, then of the recorded steps
        self._traced: dict[str, Any] = {}  # times and load of the recorded steps
        self._retries: list[int] = []  # the allocator's total before the first recorded step and after each
        self._tracer: Tracer | None = None
        self._cost = ProfilerCost()

    @property
    def done(self) -> bool:
        """Whether the file is written or abandoned: further steps change nothing."""
        return self._done

    @property
    def written(self) -> bool:
        """Whether the complete file was written."""
        return self._written

    @property
    def tracing(self) -> bool:
        """Whether the tracer is running."""
        return self._tracer is not None

    @property
    def steps_needed(self) -> int:
        """Number of calls of `step` in a complete recording."""
        return self._last_recorded + (line_steps_needed(self._recorded_steps) if self._lines else 0)

    @property
    def fewest_steps(self) -> int:
        """Number of calls of `step` after which `finish` can write a file."""
        return self._last_recorded + STEPS_BEFORE_LINES + 1 if self._lines else self._steps_before + FEWEST_STEPS

    @property
    def _last_recorded(self) -> int:
        """Number of calls of `step` up to the end of the last recorded step."""
        return self._steps_before + self._recorded_steps

    @property
    def _steps_before(self) -> int:
        """Number of steps before the first recorded one."""
        return self._warmup_steps + self._untraced_steps + TRACER_WARMUP_STEPS

    @property
    def enough(self) -> bool:
        """Whether `finish` can write a file, or has done so."""
        return self.done or self._count >= self.fewest_steps

    @property
    def next_stage(self) -> str:
        """A sentence for the user on the stage that the next call of `step` begins; empty if none does."""
        stages = {
            self._warmup_steps: f"timing {self._untraced_steps} steps without the profiler.",
            self._warmup_steps + self._untraced_steps: f"starting the profiler: {TRACER_WARMUP_STEPS} steps of warm-up,"
            f" then {self._recorded_steps} steps to record.",
            **({self._last_recorded: "recording the lines of your code."} if self._lines else {}),
            self.steps_needed: f"writing {self.path.name}.",
        }
        return stages.get(self._count + 1, "")

    @property
    def writes_next(self) -> bool:
        """Whether the next call of `step` writes the file."""
        return self._count + 1 == self.steps_needed

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.finish()
        elif not self.written:
            self.abandon()
            tell(
                f"no recording was written: the training raised {describe_error(error)} in step {self._count + 1} of"
                f" {self.steps_needed}."
            )

    def start(self) -> None:
        """Start with the warm-up steps."""
        recording_begins()
        check_session(self._backend, cuda=GPU.of_model(self._model) is not None, lines=self._lines)
        self._watchers = WarmupWatchers(self._model, self._optimizer, self._other_optimizers)

    def step(self) -> None:
        """End a training step; writes the file at the end of the last recorded one."""
        if self.done:
            return
        self._count += 1
        if self._timer is not None:
            self._timer.mark()
        if self._tracer is not None:
            self._tracer.step()
            if self._timer is not None:
                self._record_retries()
        if self._count == 1 and self._warmup_steps > 1 and self._watchers is not None:
            self._watchers.after_first_step(cuda=GPU.of_model(self._model) is not None)
        if self._count == self._warmup_steps:
            self._begin_untraced()
        elif self._count == self._warmup_steps + self._untraced_steps:
            self._begin_traced()
        elif self._count == self._steps_before:
            self._record_retries()
            self._timer = StepTimer(self._device)
        elif self._count == self._last_recorded:
            self._end_recorded()
        if self._count == self.steps_needed:
            self.finish()

    def finish(self) -> None:
        """Write the recording, unless it is written; raises WhatifError for fewer than 3 recorded steps."""
        if self.done:
            return
        tracer, enough = self._tracer, self.enough
        if tracer is not None and enough and self._timer is not None:
            self._end_recorded()
        self._stop()
        if tracer is None or not enough:
            raise WhatifError(
                f"{self.path}: expected at least {self.fewest_steps} training steps ({self.steps_needed} for a whole"
                f" recording), got {self._count}: train for longer or record fewer steps."
            )
        recorded = min(self._count - self._steps_before, self._recorded_steps)
        self._write(tracer, recorded)
        if recorded < self._recorded_steps:
            self._say(f"warning: the training ended after {recorded} of the {self._recorded_steps} steps to record")

    def _record_retries(self) -> None:
        if self._device is not None:
            with GPU.on(self._device):
                self._retries.append(GPU.retries())

    def _end_recorded(self) -> None:
        """Summarize the recorded steps; measure the profiler's overhead while it runs and before lines are traced."""
        assert self._timer is not None
        self._traced, self._timer = self._timer.summaries("traced"), None
        if self._backend == "kineto":
            self._cost.measure()

    def abandon(self) -> None:
        """Remove all hooks from the program and write nothing."""
        # After an error on the GPU stopping raises as well, which would hide the first error.
        with suppress(Exception):
            self._stop()

    def _stop(self) -> None:
        self._done = True
        recording_ends()
        self._stop_watching()
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            # The tracer synchronizes the current GPU, which need not be the model's.
            with GPU.on(self._device):
                tracer.stop()

    def _stop_watching(self) -> None:
        if self._watchers is not None:
            self._watchers.remove()

    def _begin_untraced(self) -> None:
        if self._watchers is not None:
            self._watchers.before_untraced()
        self._device = GPU.of_model(self._model)
        if self._device is not None:
            GPU.reset_peak(self._device)
        self._timer = StepTimer(self._device)

    def _begin_traced(self) -> None:
        # The tracer runs last: later steps in the same process are slower even once it is off.
        assert self._timer is not None
        self._stop_watching()
        with GPU.on(self._device):
            self._metadata = self._describe(self._timer)
        self._timer = None
        self._tracer = make_tracer(
            self._backend,
            self._model,
            self._optimizer,
            cuda=self._device is not None,
            steps=self._recorded_steps,
            memory=self._memory,
            lines=self._lines,
            scratch=scratch_file(self.path),
        )
        self._tracer.start()

    def _describe(self, timer: StepTimer) -> dict[str, Any]:
        """Return the metadata known before the tracer starts; the current GPU must be the model's."""
        assert self._watchers is not None
        cuda = self._device is not None
        untraced = timer.summaries("untraced")
        # Immediately: the clocks of an idle GPU drop.
        clocks, driver = describe_clocks() if cuda else (None, None)
        optimizer = describe_optimizer(self._optimizer, self._other_optimizers)
        watched = self._watchers.summary(self._warmup_steps)
        return {
            "version": METADATA_VERSION,
            "backend": self._backend,
            **untraced,
            **watched,
            "layers": describe_layers(self._model, watched["grad_ready_order"]),
            "optimizer": optimizer and {**optimizer, "zero_share": zero_share(self._optimizer)},
            "peak_memory_bytes": GPU.peak_bytes()[0] if cuda else None,
            **describe_environment(cuda),
            "clocks": clocks,
            "driver": driver,
            "rates": measure_rates(cuda),
        }

    def _write(self, tracer: Tracer, steps: int) -> None:
        try:
            trace = tracer.trace()
        except OSError as error:
            raise cannot_write(self.path, error) from error
        events = keep_whole_steps(trace["traceEvents"], TRACER_WARMUP_STEPS, steps)
        if self._device is not None:
            require_gpu_events(events, self.path)
        metadata = {
            **self._metadata,
            **self._traced,
            "allocator_retries": [after - before for before, after in itertools.pairwise(self._retries)] or None,
            "profiler_cost_ns": self._cost.summary(trace["traceEvents"]),
            "execution": describe_execution(events, self._model),
            "flops": forward_flops(events, steps),
        }
        write_recording({**trace, "traceEvents": events}, self.path, metadata)
        self._written = True
        for doubt in machine_doubts(recorded_of(metadata)[0]):
            self._say(f"warning: {doubt}")


# For calls such as `with record(model, optimizer, "run.json.gz") as recording`.
record = Recording


def describe_error(error: BaseException) -> str:
    """Return the exception's type and message on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__} ({message})" if message else type(error).__name__
