"""Records a script or module that knows nothing of `whatif`, while it runs as `python` would run it.

Output, exit status, signals, `finally` blocks and `atexit` handlers are the script's own. It runs to its end, unless it
is to be stopped: then an exception that is a SystemExit ends it, and its `finally` blocks run.
"""

import atexit
import gc
import importlib.util
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from whatif.runtime.errors import WhatifError

from .collector import Collector, RecordingWrittenError
from .collector import step as step  # the name under which scripts have imported it
from .gpu import GPU
from .recorder import describe_error


@dataclass(frozen=True)
class Collected:
    """How a script ended, and its recording: `failure` says why there is none."""

    status: int
    recording: Path | None
    failure: str | None
    steps: int
    stopped: bool = False  # before its end, as it was to be
    caught: bool = False  # the script caught the stop and went on
    together: bool = False  # whether other processes trained with it
    interrupted: bool = False


def collect(
    script: str,
    args: list[str],
    output: Path,
    *,
    module: bool = False,
    stop: bool = False,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Collected:
    """Run the script, or the module of that name, with its arguments; record some of its steps into `output`.

    The file is written as soon as the steps are recorded, and with `stop` the script is ended then; a script that ends
    earlier leaves a file if 3 steps were recorded. The script's uncaught exception is printed as Python prints it.
    Other options are those of `Collector`. Raises WhatifError, before the script runs, when it does not exist or
    options cannot work.
    """
    run = _module_runner(script, args) if module else _script_runner(script, args)
    if not module and Path(output).exists() and Path(output).samefile(script):
        raise WhatifError(f"{output}: expected another file than the script itself, got the same: name another.")
    collector = Collector(Path(output), stop=stop, say=say, **options)
    if say is not None:
        say(_plan(script, collector, stop))
    process = os.getpid()
    with collector, _quiet_threads() as cut_threads:
        ended = _run(run)
        if os.getpid() != process:
            _end_forked(_status(ended))
        # A signal that was held back while the rest was written ends the script as well.
        ended = _run(collector.finish) or ended
    _free_gpu_memory()
    cut = stop and collector.written is not None and (_was_cut(ended) or bool(cut_threads))
    failure = collector.failure
    if failure is not None and isinstance(ended, Exception):
        failure = f"expected {collector.steps_needed} steps, got {describe_error(ended)} after {collector.steps_seen}."
        if isinstance(ended, ImportError) and "no known parent package" in str(ended):
            failure += " A script with relative imports is run as a module: `whatif collect -m PACKAGE.MODULE`."
    return Collected(
        status=_status(ended),
        recording=collector.written,
        failure=failure,
        steps=collector.steps_seen,
        stopped=cut,
        caught=collector.stopped and not cut,
        together=collector.together,
        interrupted=isinstance(ended, KeyboardInterrupt),
    )


def _plan(script: str, collector: Collector, stop: bool) -> str:
    output, steps = collector.planned, collector.steps_needed
    if stop:
        return f"running {script} for {steps} steps, to write {output}; --stop then ends it, before its own end."
    return f"running {script} to its end; {output} is written after {steps} steps."


def _script_runner(script: str, args: list[str]) -> Callable[[], object]:
    """Return what runs the file as `python script args` does. Raises WhatifError where there is none."""
    if not Path(script).is_file():
        is_module = not script.endswith((".py", ".ipynb")) and all(map(str.isidentifier, script.split(".")))
        hint = f", or run a module with `whatif collect -m {script}`" if is_module else ""
        got = "a folder: name the script in it" if Path(script).is_dir() else f"no such file: check the path{hint}"
        raise WhatifError(f"{script}: expected a Python script, got {got}.")

    def run() -> None:
        sys.argv[:] = [script, *args]
        _look_first_in(str(Path(script).resolve().parent))
        main = ModuleType("__main__")
        # As Python sets them for a script. The module stays in place: threads and atexit handlers outlive the script.
        absolute = str(Path(script).absolute())
        vars(main).update(__file__=absolute, __builtins__=__builtins__, __cached__=None, __annotations__={})
        sys.modules["__main__"] = main
        exec(_compiled(absolute), vars(main))

    return run


def _look_first_in(folder: str) -> None:
    """Make the folder the first in which modules are looked for, in place of the one of whatif's own start."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _compiled(path: str) -> CodeType:
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _module_runner(module: str, args: list[str]) -> Callable[[], object]:
    """Return what runs the module as `python -m module args` does. Raises WhatifError where there is none."""
    folder = str(Path.cwd())
    _look_first_in(folder)
    # The outermost package only: to find what is inside would run it.
    if not module or importlib.util.find_spec(module.partition(".")[0]) is None:
        raise WhatifError(
            f"{module}: expected a module that Python finds from {folder}, got none: check the name, or give the"
            " script's path without -m."
        )

    def run() -> object:
        sys.argv[:] = [module, *args]
        return runpy.run_module(module, run_name="__main__", alter_sys=True)

    return run


def _run(run: Callable[[], object]) -> BaseException | None:
    """Return what ended the script, None where it ran to its last line."""
    try:
        run()
    except BaseException as error:
        return error
    return None


def _was_cut(ended: BaseException | None) -> bool:
    """Whether the stop ended the script, or Ctrl-C before it; a script may catch it and end in its own way."""
    while ended is not None and not isinstance(ended, RecordingWrittenError | KeyboardInterrupt):
        ended = ended.__context__
    return ended is not None


def _status(ended: BaseException | None) -> int:
    """Return the exit status that Python would end with; print what it would print."""
    if ended is None:
        return 0
    if isinstance(ended, SystemExit):
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr, flush=True)
        return 1
    sys.stdout.flush()
    ended = ended.with_traceback(_of_the_script(ended.__traceback__))
    sys.excepthook(type(ended), ended, ended.__traceback__)
    return 1


def _end_forked(status: int) -> NoReturn:
    """End a process that the script forked as Python does; the recording is its parent's."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Its copy of the profiler has no threads: to tear it down would wait for them without end.
    os._exit(status)


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this file and of runpy, which lie around the script's own."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _free_gpu_memory() -> None:
    """Return back what the script held on a GPU: the process that measures its operators next needs room."""
    if GPU.in_use():
        gc.collect()
        GPU.empty_cache()


@contextmanager
def _quiet_threads() -> Iterator[list[threading.Thread | None]]:
    """Let a thread that trains end without a traceback: Python is quiet about SystemExit, but not its subclasses.

    Returns a list of the threads that a stop ended, which grows.
    """
    before = threading.excepthook
    ended: list[threading.Thread | None] = []

    def quiet(args: threading.ExceptHookArgs) -> None:
        if issubclass(args.exc_type, RecordingWrittenError):
            ended.append(args.thread)
        else:
            before(args)

    threading.excepthook = quiet
    try:
        yield ended
    finally:
        if threading.excepthook is quiet:  # The script may have set its own.
            threading.excepthook = before
