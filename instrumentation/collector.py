"""Finds the steps and the model of a program that is already running, and drives its recording.

A training step ends when the optimizer's `step()` returns, an inference step when the model's forward call returns.
Failures here do not reach the program: it continues as it would without a recording.
"""

import functools
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from whatif.runtime.errors import WhatifError

from .find_model import OutermostModules, choose_model
from .gpu import GPU
from .late_signals import call_before_exit, signals_wait
from .layers import HookHere
from .messages import trains_with_others
from .recorder import FEWEST_STEPS, FEWEST_UNTRACED_STEPS, Recording, describe_error, record
from .script_profilers import ScriptProfilers

# Steps spent on finding the model and all optimizers of a step, before the warm-up of the recording.
_SEARCH_STEPS = 2
# CPU time of child processes above which they probably did the training; data loaders of a script without steps use
# less. Our choice.
_CHILDREN_S = 1.0

# A script that is stopped a third time keeps catching the exception.
_WARNS_AT_STOP = 3


class RecordingWrittenError(SystemExit):
    """Stops the script; its `except Exception` does not catch this."""


class Collector:
    """A context manager that records the first steps of the program that runs in its block into `output`.

    `finish` returns the file, or sets `failure`. With `stop` the program is ended by a SystemExit once the recording is
    written; with `inference` forward calls are the steps. `say` is called with progress messages. The other options are
    those of `record` and are checked at once: raises WhatifError if they are invalid.
    """

    def __init__(
        self,
        output: Path,
        *,
        steps: int = 5,
        untraced_steps: int = 20,
        backend: str = "kineto",
        memory: bool = False,
        lines: bool = False,
        stop: bool = False,
        inference: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.output = output
        self.steps_seen = 0
        self.failure: str | None = None  # why there is no recording
        self.stopped = False  # whether the program was asked to end
        self.together = False  # whether other processes train with this one
        self._stops = 0
        self._stop, self._inference = stop, inference
        self._say = say or (lambda sentence: None)
        self._new_recording: Callable[..., Recording] = functools.partial(
            record,
            # The program may change the working directory before the recording is written.
            path=Path(os.path.abspath(output)),
            steps=steps,
            untraced_steps=untraced_steps,
            backend=backend,
            memory=memory,
            lines=lines,
            say=self._say,
        )
        self._plan = self._new_recording(nn.Module(), None)  # Raises if the output or the options are invalid.
        self._steps, self._untraced_steps = steps, untraced_steps
        self._recording: Recording | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._stepping: list[torch.optim.Optimizer] = []  # those of them that stepped since the search began
        self._detach: list[Callable[[], None]] = []
        self._children_s = 0.0
        self._process = os.getpid()
        self._lock = threading.RLock()  # A thread may train: the main one waits at its end until the file is written.
        self._explicit = False
        self._search_steps_left = _SEARCH_STEPS
        self._modules: OutermostModules | None = None
        self._called: list[nn.Module] = []  # outermost modules that `_modules` found
        self._profilers: ScriptProfilers | None = None
        self._gave_way_after = 0  # steps up to the last one that ran under the program's own profiler
        self._began_after = 0  # steps before the first step of the optimizer or model found last
        self._models = 0  # models called in one inference step
        self.written: Path | None = None  # the recording's file, once it is written

    def __enter__(self) -> Self:
        global _active
        _active = self
        self._children_s = os.times().children_user  # of processes started before
        self._profilers = ScriptProfilers(self._give_way)
        if self._inference:
            self._modules = OutermostModules(self._after_outermost)
        else:
            self._detach.append(register_optimizer_step_post_hook(self._after_any_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._detach_all()
        if self._recording is not None:
            self._recording.abandon()

    @property
    def done(self) -> bool:
        """Whether the recording is over: written, or failed."""
        return self.failure is not None or self.written is not None

    @property
    def planned(self) -> Path:
        """The file that will be written, as far as known in advance: each of several ranks has its own."""
        return self.output.with_name(self._plan.path.name)

    @property
    def steps_needed(self) -> int:
        """Number of steps that the program has to run for a complete recording."""
        return _SEARCH_STEPS + 1 + self._plan.steps_needed

    def explicit_step(self) -> None:
        """End a step that the program marks; the first call only switches from optimizer steps to marked ones."""
        if self._explicit:
            self._end_step()
            return
        self._explicit = True
        self.steps_seen += not self._optimizers
        if not self._optimizers and self._modules is None:
            self._modules = OutermostModules()

    def finish(self) -> Path | None:
        """Write the steps recorded so far when the program has ended; return the file, or None with `failure` set."""
        with self._signals_wait(writes=self._recording is not None and self._recording.enough):
            self._write()
        return self.written

    def _write(self) -> None:
        try:
            if self._recording is not None and self._recording.enough:
                self._guarded(self._recording.finish)
        finally:
            if not self.done:
                interrupted = self._recording is not None and self._recording.done
                self.failure = "interrupted while writing." if interrupted else self._too_few_steps()

    def _signals_wait(self, *, writes: bool) -> AbstractContextManager[None]:
        """Hold signals back while the file is written, or at the end of a step once there are enough for a file."""
        if self._recording is None or not (writes or self._recording.enough):
            return nullcontext()
        if not writes:
            return signals_wait(lambda signal: None)
        name = self._recording.path.name
        rule = f"passed on to the script once {name} is written; a second signal is passed on immediately."
        return signals_wait(lambda signal: self._say(f"{signal}: {rule}"))

    def _write_before_exit(self, signal: str) -> None:
        """Write the steps recorded so far before a signal ends the process."""
        if self._recording is not None and self._recording.enough:
            self._write()
            outcome = "written;" if self.failure is None else f"not written: {self.failure}"
            self._say(f"{self.planned}: {outcome} {signal} ends the script.")

    def _too_few_steps(self) -> str:
        if self.steps_seen == 0 and self._inference:
            return "expected forward calls of a model with parameters, got none."
        if self.steps_seen == 0 and os.times().children_user - self._children_s > _CHILDREN_S:
            return (
                "expected calls of a torch optimizer's step() in this process, got none: processes that the script "
                "started did the work; call whatif.instrumentation.record() in the function that they run, or start "
                "them with `whatif collect torchrun`."
            )
        if self.steps_seen == 0:
            return (
                "expected calls of a torch optimizer's step(), got none: add --inference if the script only runs a "
                "model, or call whatif.instrumentation.step() at the end of each step, for example if torch.compile "
                "compiles the optimizer's step()."
            )
        needed, got = self.steps_needed, self.steps_seen - max(self._gave_way_after, self._began_after)
        to_share = got - (needed - self._steps - self._untraced_steps)
        advice = "run more steps"
        if to_share >= FEWEST_STEPS + FEWEST_UNTRACED_STEPS:
            steps = min(self._steps, to_share - FEWEST_UNTRACED_STEPS)
            advice += f", or try `--steps {steps} --untraced-steps {min(self._untraced_steps, to_share - steps)}`"
        if self._gave_way_after > self._began_after:
            return f"expected {needed} steps without the script's own profiler, got {got}: switch it off, or {advice}."
        if self._began_after:
            return f"expected {needed} steps with the script's newest {self._ends_steps}, got {got}: {advice}."
        return f"expected {needed} steps, got {got}: {advice}."

    def _detach_all(self) -> None:
        """Remove all hooks from the program."""
        global _active
        if _active is self:
            _active = None
        if self._profilers is not None:
            self._profilers.remove()
        if self._modules is not None:
            self._modules.remove()
            self._modules = None
        while self._detach:
            self._detach.pop()()
        self._optimizers.clear()
        self._called = []

    def _after_any_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Register an optimizer at its first step."""
        if any(optimizer is known for known in self._optimizers) or torch.compiler.is_compiling():
            return
        self._optimizers.append(optimizer)
        self.steps_seen += len(self._optimizers) == 1
        # This hook runs inside torch's annotation of the optimizer's step: a step that ended here would cut the
        # annotation in two. From the next call on the step ends after the whole call.
        inner, on_instance = optimizer.step, "step" in vars(optimizer)

        @functools.wraps(inner)
        def step_and_end(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            if not any(optimizer is known for known in self._stepping):
                self._stepping.append(optimizer)
            ends = _active is self and not self._explicit and optimizer is self._optimizers[-1]
            if ends and not torch.compiler.is_compiling():
                self._end_step()
            return result

        def restore() -> None:
            if vars(optimizer).get("step") is not step_and_end:
                return  # Something else, for example a scheduler, has wrapped it since.
            if on_instance:
                optimizer.step = inner  # type: ignore[method-assign]
            else:
                del optimizer.step

        optimizer.step = step_and_end  # type: ignore[method-assign]
        self._detach.append(restore)
        if not self._explicit:
            self._restart_search()

    def _after_outermost(self, module: nn.Module) -> None:
        """End an inference step after the model whose first call came last; `module` is an outermost one."""
        if self._explicit or self._modules is None:
            return
        models = [found for found in self._modules.found if next(found.parameters(), None) is not None]
        if not models or module is not models[-1]:
            return
        if len(models) > self._models:
            self._models = len(models)
            self.steps_seen += len(models) == 1
            self._restart_search()
            return
        self._end_step()

    def _restart_search(self) -> None:
        """Restart the search: a step may have several optimizers or models; the one first called last ends it."""
        if self._recording is not None and self._recording.tracing and GPU.in_use():  # One GPU session per process.
            self._say(f"warning: the script has a new {self._ends_steps}: the recorded steps do different work")
            return
        if self._recording is not None:
            self._say(f"the script has a new {self._ends_steps}: the recording begins again.")
        self._began_after = self.steps_seen - 1
        self._abandon()

    @property
    def _ends_steps(self) -> str:
        return "model" if self._inference else "optimizer"

    def _abandon(self) -> None:
        if self._recording is not None:
            with self._own_work():
                self._recording.abandon()
            self._recording = None
        self._stepping = []
        self._search_steps_left = _SEARCH_STEPS

    def _give_way(self) -> None:
        """Stop for a profiler that the program starts; restart the search once it is off."""
        self._abandon()
        if self._profilers is not None and self._profilers.begun == 1:
            self._say("the script starts its own profiler: the recording begins when that one stops.")
        self._gave_way_after = self.steps_seen

    def _own_work(self) -> AbstractContextManager[None]:
        return nullcontext() if self._profilers is None else self._profilers.ignore_this_thread()

    def _end_step(self) -> None:
        if os.getpid() != self._process:  # A forked child: its steps are not recorded.
            self._detach_all()
            return
        if not self.done:
            with self._signals_wait(writes=self._recording is not None and self._recording.writes_next):
                self._guarded(self._advance)
                self._say_outcome()
        if self._stop and self.written is not None:
            self._stop_program()
        if self.done:
            self._detach_all()

    def _say_outcome(self) -> None:
        if self.written is not None:
            then = "--stop ends the script" if self._stop else "the script keeps running"
            self._say(f"{self.written}: written after {self.steps_seen} steps; {then}.")
        elif self.failure is not None:
            self._say(f"{self.planned}: not written, the script keeps running: {self.failure}")

    def _stop_program(self) -> NoReturn:
        self.stopped = True
        self._stops += 1
        if self._stops == _WARNS_AT_STOP:
            self._say("the script catches SystemExit and keeps running; end it with Ctrl-C.")
        raise RecordingWrittenError(0)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run `work` for the recording; if it fails, abandon the recording without disturbing the program."""
        try:
            with self._lock, self._own_work():
                work()
        except Exception as error:
            failure = str(error) if isinstance(error, WhatifError) else f"{describe_error(error)}."
            # The messages around it name the file.
            self.failure = failure.removeprefix(f"{self._recording.path}: " if self._recording else "")
            self._abandon()
        else:
            if self._recording is None or not self._recording.written:
                return
            self.written = self.output.with_name(self._recording.path.name)
        self._recording = None  # Free the model that it refers to.

    def _advance(self) -> None:
        self.steps_seen += 1
        if self._profilers is not None and self._profilers.running:
            self._gave_way_after = self.steps_seen
        elif self._recording is None:
            self._search_steps_left -= 1
            if self._search_steps_left == 0:
                self._start_recording()
        else:
            if stage := self._recording.next_stage:
                self._say(stage)
            self._recording.step()
            if self._recording.enough and not self._recording.done:
                self._detach.append(call_before_exit(self._write_before_exit))

    def _start_recording(self) -> None:
        if self._modules is not None:
            self._called = self._modules.found
        model = choose_model(self._optimizers, self._called)
        if self._modules is not None:
            self._modules.remove()
            self._modules = None
            if self._inference and not self._explicit:
                last = [module for module in self._called if next(module.parameters(), None) is not None][-1]
                self._end_steps_with(last)
        if self._profilers is not None and self._profilers.begun and GPU.of_model(model) is not None:
            raise WhatifError(
                "expected no profiler before the recording on a GPU, got the script's own, after which the recording "
                "would be slower and wrong: switch it off."
            )
        optimizer = self._optimizers[-1] if self._optimizers else None
        self._recording = self._new_recording(model, optimizer, other_optimizers=self._stepping)
        self._recording.start()
        self.together = trains_with_others()

    def _end_steps_with(self, model: nn.Module) -> None:
        """End each inference step in one hook on the model itself, in place of the hooks on every module."""

        handles: list[RemovableHandle] = []

        def after(*_: Any) -> None:
            before = self._recording is not None and self._recording.tracing
            self._end_step()
            if self._recording is not None and self._recording.tracing != before:
                # The tracer has just added its hooks to the model: run after them, or this would cut its marks in two.
                handles.pop().remove()
                handles.append(model.register_forward_hook(HookHere(after)))

        handles.append(model.register_forward_hook(HookHere(after)))
        self._detach.append(lambda: handles.pop().remove())


def step() -> None:
    """End a step of a program that `whatif collect` runs; in any other run this does nothing.

    Only programs without a torch optimizer need it. Once it was called, optimizers no longer end steps.
    """
    if _active is not None:
        _active.explicit_step()


_active: Collector | None = None
