"""Records a training script that knows nothing of `whatif`.

The script runs in this process, as `python script.py args` would run it. Its training step is found by watching torch's
optimizers (a step ends when `optimizer.step()` returns), its model by what they optimize.
When the recording is written the script is stopped by an exception that is a SystemExit: its `finally` blocks run.
"""

import functools
import gc
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from whatif.errors import WhatifError

from .find_model import OutermostModules, choose_model
from .gpu import GPU
from .recorder import Recording, describe_error, record

# Steps spent on finding the model and all optimizers of a step, before the recording's own warm-up.
_SEARCH_STEPS = 2

# A script that reaches its third stop is not about to end by itself.
_WARNS_AT_STOP = 3


class _RecordingWritten(SystemExit):
    """Stops the script; `except Exception` in it lets this pass."""


def collect(
    script: str,
    args: list[str],
    output: Path,
    *,
    steps: int = 5,
    untraced_steps: int = 20,
    backend: str = "kineto",
    memory: bool = False,
    lines: bool = False,
) -> Path:
    """Run the script with its arguments, record `steps` of its training steps into `output`, and return that path.

    The script is stopped as soon as the file is written; one that ends earlier leaves a file if 3 steps were recorded.
    The options are those of `record`. Raises WhatifError when the script does not exist, fails, or trains too few steps
    or in no step that can be found.
    """
    global _active
    if not Path(script).is_file():
        raise WhatifError(f"{script}: expected a Python script, got no such file: check the path.")
    if Path(output).exists() and Path(output).samefile(script):
        raise WhatifError(f"{output}: expected another file than the script itself, got the same: name another.")
    # The script may change the working directory before the recording is written.
    path = Path(os.path.abspath(output))
    new_recording = functools.partial(
        record, path=path, steps=steps, untraced_steps=untraced_steps, backend=backend, memory=memory, lines=lines
    )
    collector = _Collector(Path(output), new_recording)
    _active = collector
    try:
        _run(script, args, collector)
        collector.finish(script)
    finally:
        _active = None
        collector.close()
    written = collector.written
    del collector  # It holds the model.
    _free_gpu_memory()
    return written


def _free_gpu_memory() -> None:
    """Return back what the script held on a GPU: the process that measures its operators next needs room."""
    if GPU.in_use():
        gc.collect()
        GPU.empty_cache()


def _run(script: str, args: list[str], collector: "_Collector") -> None:
    """Run the script until it ends or is stopped; raises WhatifError when it fails before the recording is written."""
    try:
        # As if Python had been started with the script.
        path = [str(Path(script).resolve().parent), *sys.path]
        with patch.object(sys, "argv", [script, *args]), patch.object(sys, "path", path), _quiet_threads():
            runpy.run_path(script, run_name="__main__")
    except _RecordingWritten:
        return
    except KeyboardInterrupt:
        if not collector.done:  # Otherwise it ends a script that would not be stopped.
            raise
    except WhatifError:
        raise
    except SystemExit as error:
        if error.code and not collector.done:
            raise WhatifError(
                f"{script}: expected the script to train, got its exit with status {error.code} after"
                f" {collector.steps_seen} steps: run it by itself first."
            ) from error
    except Exception as error:
        if not collector.done:
            raise WhatifError(
                f"{script}: expected the script to train, got {describe_error(error)}{_line_of(error, script)}"
                f" after {collector.steps_seen} steps: run it by itself first."
            ) from error


def step() -> None:
    """End a training step of a script that `whatif collect` runs; in any other run this does nothing.

    Only scripts without a torch optimizer need it. Once it was called, optimizers no longer end steps.
    """
    if _active is not None:
        _active.explicit_step()


class _Collector:
    """Finds the steps and the model of a running script, and drives its recording."""

    def __init__(
        self, output: Path, new_recording: Callable[[nn.Module, torch.optim.Optimizer | None], Recording]
    ) -> None:
        self.output = output
        self.steps_seen = 0
        self._new_recording = new_recording
        self._plan = new_recording(nn.Module(), None)  # Raises now what is wrong with the output or the options.
        self._recording: Recording | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._explicit = False
        self._stops = 0  # how often the script was stopped
        self._failure: WhatifError | None = None  # why there is no recording, which the script may have caught
        self._search_steps_left = _SEARCH_STEPS
        self._modules: OutermostModules | None = None
        self._handle = register_optimizer_step_post_hook(self._after_any_step)

    @property
    def done(self) -> bool:
        """Whether the recording is over: written, or failed for a reason that `finish` raises."""
        return self._failure is not None or (self._recording is not None and self._recording.done)

    def explicit_step(self) -> None:
        """End a step because the script says so; the first one only tells that it will."""
        if self._explicit:
            self._end_step()
            return
        self._explicit = True
        self.steps_seen += not self._optimizers
        if not self._optimizers:
            self._modules = OutermostModules()

    @property
    def written(self) -> Path:
        """The recording's file: of several ranks each has its own."""
        return self.output.with_name(self._recording.path.name) if self._recording is not None else self.output

    def finish(self, script: str) -> None:
        """Write what there is after the script's end; raises WhatifError when that is too little, or what failed."""
        if self._failure is not None:
            raise self._failure
        if self._recording is not None and self._recording.enough:
            self._recording.finish()
            return
        if self.steps_seen == 0:
            raise WhatifError(
                f"{script}: expected calls of a torch optimizer's step(), got none: call whatif.instrumentation.step()"
                " at the end of each training step."
            )
        # The first step is how it is found that there are any, so no step of the recording ends there.
        before = _SEARCH_STEPS + 1
        fewest, whole = before + self._plan.fewest_steps, before + self._plan.steps_needed
        raise WhatifError(
            f"{script}: expected at least {fewest} training steps ({whole} for a whole recording),"
            f" got {self.steps_seen}: train for longer or record fewer steps."
        )

    def close(self) -> None:
        """Take everything off the program."""
        if self._modules is not None:
            self._modules.remove()
        self._handle.remove()
        if self._recording is not None:
            self._recording.abandon()

    def _after_any_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take note of an optimizer that was not seen before."""
        if any(optimizer is known for known in self._optimizers) or torch.compiler.is_compiling():
            return
        self._optimizers.append(optimizer)
        self.steps_seen += len(self._optimizers) == 1
        # This hook runs inside torch's own mark of the optimizer's step: a step that ended here would cut that mark in
        # two. From the next call on the step ends after the whole call.
        inner = optimizer.step

        @functools.wraps(inner)
        def step_and_end(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            ends = _active is self and not self._explicit and optimizer is self._optimizers[-1]
            if ends and not torch.compiler.is_compiling():
                self._end_step()
            return result

        optimizer.step = step_and_end  # type: ignore[method-assign]
        if self._explicit or (self._recording is not None and self._recording.tracing):
            return
        # Several optimizers make one step: it ends with the one whose first call came last. Begin again with it.
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None
        self._search_steps_left = _SEARCH_STEPS

    def _stop_script(self) -> NoReturn:
        self._stops += 1
        if self._stops == _WARNS_AT_STOP:
            became = "is written" if self._failure is None else "cannot be written"
            print(
                f"whatif: {self.output} {became}, but the script catches what stops it (SystemExit) and goes on;"
                " end it with Ctrl-C.",
                file=sys.stderr,
                flush=True,
            )
        raise _RecordingWritten(0)

    def _end_step(self) -> None:
        if self._failure is not None:
            self._stop_script()
        try:
            self._advance()
        except WhatifError as error:
            self._failure = error
            raise

    def _advance(self) -> None:
        self.steps_seen += 1
        if self._recording is not None:
            self._recording.step()
            if self._recording.done:
                self._stop_script()
            return
        self._search_steps_left -= 1
        if self._search_steps_left == 0:
            called = []
            if self._modules is not None:
                self._modules.remove()
                called = self._modules.found
            model = choose_model(self._optimizers, called)
            self._recording = self._new_recording(model, self._optimizers[-1] if self._optimizers else None)
            self._recording.start()


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Let a thread that trains end without a traceback: Python is quiet about SystemExit, but not its subclasses."""
    before = threading.excepthook

    def quiet(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, _RecordingWritten):
            before(args)

    threading.excepthook = quiet
    try:
        yield
    finally:
        if threading.excepthook is quiet:  # The script may have set its own.
            threading.excepthook = before


def _line_of(error: Exception, script: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    return f" in line {lines[-1]}" if lines else ""


_active: _Collector | None = None
