"""Records an unmodified script or module, which runs as `python` would run it.

Output, exit status, signals, `finally` blocks and `atexit` handlers are unchanged. The script runs to its end, unless
it is to be stopped: then a subclass of SystemExit is raised in it, and its `finally` blocks run.
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
    """How a script ended, and its recording; `failure` is the reason if there is none."""

    status: int
    recording: Path | None
    failure: str | None
    steps: int
    stopped: bool = False  # ended by `stop` once the recording was written
    caught: bool = False  # the script caught the stop and kept running
    together: bool = False  # other processes trained with it
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
    """Run the script, or the module of that name, with `args`; record some of its steps into `output`.

    The file is written as soon as the steps are recorded; with `stop` the script is then ended. A script that ends
    earlier leaves a file if 3 steps were recorded. The script's uncaught exception is printed as Python prints it.
    `options` are passed to `Collector`. Raises WhatifError before the script runs if it does not exist or if the
    options are invalid.
    """
    run = _module_runner(script, args) if module else _script_runner(script, args)
    if not module and Path(output).exists() and Path(output).samefile(script):
        raise WhatifError(f"{output}: expected another file than the script itself, got the script: name a new file.")
    collector = Collector(Path(output), stop=stop, say=say, **options)
    if say is not None:
        say(_plan(script, collector, stop))
    process = os.getpid()
    with collector, _quiet_threads() as cut_threads:
        ended = _run(run)
        _replace_closed_streams()
        if os.getpid() != process:
            _end_forked(_status(ended))
        # A signal that was held back while the file was written ends the script as well.
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
        return f"running {script} for {steps} steps to write {output}; --stop then ends the script early."
    return f"running {script} to its end; {output} is written after {steps} steps."


def _script_runner(script: str, args: list[str]) -> Callable[[], object]:
    """Return a function that runs the file as `python script args` does. Raises WhatifError if it does not exist."""
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
    """Put the folder first on the module search path, in place of the entry from whatif's own start."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _compiled(path: str) -> CodeType:
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _module_runner(module: str, args: list[str]) -> Callable[[], object]:
    """Return a function that runs the module as `python -m module args` does. Raises WhatifError if it is not found."""
    folder = str(Path.cwd())
    _look_first_in(folder)
    # The outermost package only: finding a submodule would run the package.
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
    """Return the exception that ended the script, None if it ran to its last line."""
    try:
        run()
    except BaseException as error:
        return error
    return None


def _replace_closed_streams() -> None:
    """Discard what is printed from now on if the script closed the stream or set it to None, as daemons do."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _was_cut(ended: BaseException | None) -> bool:
    """Whether the stop, or Ctrl-C, ended the script; the script may have caught it and raised another exception."""
    while ended is not None and not isinstance(ended, RecordingWrittenError | KeyboardInterrupt):
        ended = ended.__context__
    return ended is not None


def _status(ended: BaseException | None) -> int:
    """Return the exit status that Python would end with, and print what Python would print."""
    if ended is None:
        return 0
    if isinstance(ended, SystemExit):
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr, flush=True)
        return 1
    sys.stdout.flush()
    ended = ended.with_traceback(_script_frames(ended.__traceback__))
    sys.excepthook(type(ended), ended, ended.__traceback__)
    return 1


def _end_forked(status: int) -> NoReturn:
    """End a process that the script forked the way Python does; its parent writes the recording."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Its copy of the profiler has no threads: tearing it down would wait for them forever.
    os._exit(status)


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this file and of runpy, which enclose those of the script."""
    wrappers = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in wrappers:
        trace = trace.tb_next
    return trace


def _free_gpu_memory() -> None:
    """Free the script's GPU memory: the process that measures its operators next needs it."""
    if GPU.in_use():
        gc.collect()
        GPU.empty_cache()


@contextmanager
def _quiet_threads() -> Iterator[list[threading.Thread | None]]:
    """Let a thread that trains end without a traceback: Python ignores SystemExit, but not its subclasses.

    Yields a list to which each thread that a stop ends is appended.
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
