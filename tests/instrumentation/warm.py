"""Processes of Python that find torch imported: forks of one that did it, which alone takes four seconds of CPU.

``python(words, ...)`` is ``subprocess.run([sys.executable, *words], ...)``: the same working folder, environment,
arguments, streams and exit status, in a ``__main__`` of its own. What differs: torch and torch._dynamo are there before
the program asks for them, and the traceback of an uncaught error begins in this file.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import site
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def python(words: Sequence[str], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`, one thread of OpenMP, and return how it ended."""
    assert env["OMP_NUM_THREADS"] == "1"  # read as torch is imported
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, "out"), Path(folder, "err")]
        asked = {"words": words, "cwd": str(cwd), "env": env, "streams": list(map(str, streams))}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        out, err = (stream.read_text(encoding="utf-8") for stream in streams)
    return subprocess.CompletedProcess(words, status, out, err)


@cache
def _server() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one, which holds the other end of its stdin."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _serve() -> None:
    """Answer each line of stdin with the exit status of a fork; the forks return, with what they are to do."""
    importlib.import_module("torch._dynamo")  # as any optimizer does

    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the forks"
    gc.collect()
    gc.freeze()  # a collection in a fork would copy what it looks at
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            _become(json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(asked: dict[str, Any]) -> None:
    """Take over what a new process has of its own, and run the program in a new ``__main__``, as Python does."""
    for number, path in enumerate((os.devnull, *asked["streams"])):
        stream = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    *option, program = asked["words"][: 1 + (asked["words"][0] == "-m")]
    sys.argv[:] = [program, *asked["words"][1 + len(option) :]]
    sys.path[:1] = [asked["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if "PYTHONPATH" in os.environ:
        site.execsitecustomize()
    main = sys.modules["__main__"] = ModuleType("__main__")
    if option:
        runpy._run_module_as_main(program)  # type: ignore[attr-defined]
    else:
        vars(main).update(__file__=str(Path(program).absolute()), __builtins__=__builtins__)
        exec(compile(Path(program).read_bytes(), vars(main)["__file__"], "exec", dont_inherit=True), vars(main))


if __name__ == "__main__":
    _serve()
