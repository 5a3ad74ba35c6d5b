"""Records some steps of a training loop: first their time without the profiler, then their events."""

import itertools
import os
from collections.abc import Callable
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
from .script_profilers import a_recording_begins, a_recording_ends
from .steptimer import StepTimer
from .tracer import Tracer, check_backend, check_session, make_tracer
from .watchers import WarmupWatchers
from .whole_steps import STEPS_BEFORE_LINES, TRACER_WARMUP_STEPS, keep_whole_steps, lines_take

# Readers warn of a recording whose version they do not know.
METADATA_VERSION = 1

# Fewer recorded steps are not worth a file: the first one is dropped by readers, and a median needs two more.
FEWEST_STEPS = 3

# Quartiles need two times.
FEWEST_UNTRACED_STEPS = 2


class Recording:
    """A context manager that records `steps` training steps into `path`; call its `step()` at the end of each.

    The steps are used in this order: `warmup_steps` run as they are, `untraced_steps` are timed without the profiler,
    3 run with the profiler to warm it up, `steps` are recorded. With `lines` as many and one follow, in which is noted
    which line of your code runs (kineto). Then the file is written; later steps run as they are.
    Of several ranks (`torch.distributed`, or RANK and WORLD_SIZE as torchrun sets them) each writes a file of its own,
    `run.rank0.json.gz`, ...
    Data loading belongs to the step that uses the data. On a GPU the peak memory statistics are reset once.
    `backend` is "kineto" (torch.profiler) or "cupti" (cupti-python, on an NVIDIA GPU); `memory` keeps every allocation
    in the trace; `say` is called with each warning. docs/recording.md lists what a recording holds.

    Raises WhatifError for a number of steps that is too small, for a path that cannot be written, for a backend that
    cannot work here, where another profiler runs, for the second recording of a process that uses a GPU, and at the end
    of the block when fewer than 3 steps were recorded, or none of a GPU's kernels (NoGpuEventsError). When the block
    raises, nothing is written and stderr says so.
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
    ) -> None:
        # The gradient order needs one warm-up step.
        for name, value, fewest in (
            ("steps", steps, FEWEST_STEPS),
            ("warmup_steps", warmup_steps, 1),
            ("untraced_steps", untraced_steps, FEWEST_UNTRACED_STEPS),
        ):
            if value < fewest:
                raise WhatifError(f"expected {name} of at least {fewest}, got {value}: ask for more.")
        path = of_this_rank(Path(path))
        check_writable(path)
        check_backend(backend, memory=memory, lines=lines)
        self.path = path
        self._model = model
        self._optimizer = optimizer
        self._warmup_steps = warmup_steps
        self._untraced_steps = untraced_steps
        self._recorded_steps = steps
        self._backend = backend
        self._memory = memory
        self._lines = lines
        self._say = say
        self._count = 0  # steps so far
        self._done = False
        self._written = False
        self._device: torch.device | None = None  # the GPU that the model is on, if any
        self._metadata: dict[str, Any] = {}
        self._watchers: WarmupWatchers | None = None
        self._timer: StepTimer | None = None  # of the untraced, then of the recorded steps
        self._traced: dict[str, Any] = {}  # what it measured of the recorded steps
        self._retries: list[int] = []  # of the allocator so far, at each end of a recorded step and before the first
        self._tracer: Tracer | None = None
        self._cost = ProfilerCost()

    @property
    def done(self) -> bool:
        """Whether the file is written (or given up): further steps change nothing."""
        return self._done

    @property
    def written(self) -> bool:
        """Whether the file is there, whole."""
        return self._written

    @property
    def tracing(self) -> bool:
        """Whether the tracer is running."""
        return self._tracer is not None

    @property
    def steps_needed(self) -> int:
        """How many calls of `step` a whole recording takes."""
        return self._last_recorded + (lines_take(self._recorded_steps) if self._lines else 0)

    @property
    def fewest_steps(self) -> int:
        """How many calls of `step` it takes until `finish` has enough to write."""
        return self._last_recorded + STEPS_BEFORE_LINES + 1 if self._lines else self._steps_before + FEWEST_STEPS

    @property
    def _last_recorded(self) -> int:
        """How many calls of `step` end the last recorded step."""
        return self._steps_before + self._recorded_steps

    @property
    def _steps_before(self) -> int:
        """How many steps end before the first recorded one begins."""
        return self._warmup_steps + self._untraced_steps + TRACER_WARMUP_STEPS

    @property
    def enough(self) -> bool:
        """Whether `finish` has enough to write, or has written it."""
        return self.done or self._count >= self.fewest_steps

    @property
    def next_stage(self) -> str:
        """What the next call of `step` begins, as a sentence for people; empty where it goes on as before."""
        stages = {
            self._warmup_steps: f"timing {self._untraced_steps} steps without the profiler.",
            self._warmup_steps + self._untraced_steps: f"starting the profiler: {TRACER_WARMUP_STEPS} steps of warm-up,"
            f" then {self._recorded_steps} steps to record.",
            **({self._last_recorded: "noting lines of your code."} if self._lines else {}),
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
        """Begin with the warm-up steps."""
        a_recording_begins()
        check_session(self._backend, cuda=GPU.of_model(self._model) is not None, lines=self._lines)
        self._watchers = WarmupWatchers(self._model, self._optimizer)

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
                self._note_retries()
        if self._count == 1 and self._warmup_steps > 1 and self._watchers is not None:
            self._watchers.first_over(cuda=GPU.of_model(self._model) is not None)
        if self._count == self._warmup_steps:
            self._begin_untraced()
        elif self._count == self._warmup_steps + self._untraced_steps:
            self._begin_traced()
        elif self._count == self._steps_before:
            self._note_retries()
            self._timer = StepTimer(self._device)
        elif self._count == self._last_recorded:
            self._end_recorded()
        if self._count == self.steps_needed:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded, unless that is done; raises WhatifError when that is fewer than 3 steps."""
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

    def _note_retries(self) -> None:
        if self._device is not None:
            with GPU.on(self._device):
                self._retries.append(GPU.retries())

    def _end_recorded(self) -> None:
        """Measure what the profiler cost while it still runs, and no lines are noted."""
        assert self._timer is not None
        self._traced, self._timer = self._timer.summaries("traced"), None
        if self._backend == "kineto":
            self._cost.measure()

    def abandon(self) -> None:
        """Take everything off the program and write nothing."""
        # After an error on the GPU stopping raises as well, and would hide what went wrong first.
        with suppress(Exception):
            self._stop()

    def _stop(self) -> None:
        self._done = True
        a_recording_ends()
        self._stop_watching()
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            # Not every program makes its model's GPU the current one, which is the one that is waited for.
            with GPU.on(self._device):
                tracer.stop()

    def _stop_watching(self) -> None:
        if self._watchers is not None:
            self._watchers.remove()

    def _begin_untraced(self) -> None:
        self._stop_watching()
        self._device = GPU.of_model(self._model)
        if self._device is not None:
            GPU.reset_peak(self._device)
        self._timer = StepTimer(self._device)

    def _begin_traced(self) -> None:
        # The tracer comes last: what runs after it in the same process is slower even when it is off.
        assert self._timer is not None
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
        """Everything that is known before the tracer starts; the current GPU is the model's."""
        assert self._watchers is not None
        cuda = self._device is not None
        untraced = timer.summaries("untraced")
        # At once: the GPU's clocks sink while it rests.
        clocks, driver = describe_clocks() if cuda else (None, None)
        optimizer = describe_optimizer(self._optimizer)
        return {
            "version": METADATA_VERSION,
            "backend": self._backend,
            **untraced,
            **self._watchers.summary(self._warmup_steps),
            "layers": describe_layers(self._model),
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


# As a call reads: `with record(model, optimizer, "run.json.gz") as recording`.
record = Recording


def describe_error(error: BaseException) -> str:
    """Return the exception's type and message on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__} ({message})" if message else type(error).__name__
