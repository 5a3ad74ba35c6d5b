"""Processes of Python that find torch imported: forks of one that did it, which alone takes four seconds of CPU.

``python(words, ...)`` is ``subprocess.run([sys.executable, *words], ...)``: the same working folder, environment,
arguments, streams and exit status, in a ``__main__`` of its own. What differs: torch and torch._dynamo are there before
the program asks for them, the garbage collector passes over them, and the traceback of an uncaught error begins in this
file. ``executable(folder)`` is a program to start in place of Python: it ends as its fork does, and the fork and its
process group end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a process of `executable` would import in vain
    import subprocess

# Of one request: its words and the environment.
MOST_BYTES = 1 << 17


def python(words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`, one thread of OpenMP, and return how it ended."""
    import subprocess
    import tempfile

    assert env["OMP_NUM_THREADS"] == "1"  # read as torch is imported
    with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status = _ask(_server(), words, str(cwd), env, [nothing.fileno(), out.fileno(), err.fileno()])
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read().decode())
    return subprocess.CompletedProcess(words, status, *said)


def executable(folder: Path) -> str:
    """Write a program into a folder that takes the words of Python, and return its path."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{__file__}" as "{_server()}" "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def _ask(server: str, words: Sequence[str], cwd: str, env: Mapping[str, str], streams: Sequence[int]) -> int:
    """Let a fork run `python WORDS`; return its exit status, -N where signal N ended it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(server)
        request = json.dumps({"words": words, "cwd": cwd, "env": dict(env)}).encode()
        socket.send_fds(connection, [request], streams)
        return int(connection.recv(16))


@cache
def _server() -> str:
    """Start the process that forks; return its address. It ends with this one, which holds the other end of a pipe."""
    import atexit
    import subprocess
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="warm")  # a short name: an address has 107 bytes
    address = f"{folder.name}/socket"
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", address], env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    return address


def _serve(address: str) -> None:
    """Fork for each request; the forks return, as the program that they are to run, and the processes beside them."""
    import gc
    import importlib
    import select

    importlib.import_module("torch._dynamo")  # as any optimizer does
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the forks"
    gc.collect()
    gc.freeze()  # a collection in a fork would copy what it looks at
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while 0 not in select.select([0, listener.fileno()], [], [])[0]:
            with listener.accept()[0] as asker:
                if not os.fork():
                    listener.close()
                    return _attend(asker)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    return None


def _attend(asker: socket.socket) -> None:
    """Answer one request with how its fork ended; end the fork's group once the asker is gone."""
    import select

    request, streams, *_ = socket.recv_fds(asker, MOST_BYTES, 3)
    program = os.fork()
    if not program:
        os.setpgid(0, 0)
        asker.close()
        return _become(json.loads(request), streams)
    ended = os.pidfd_open(program)
    if ended not in select.select([ended, asker.fileno()], [], [])[0]:
        os.killpg(program, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        asker.send(str(status).encode())
    os._exit(0)


def _become(asked: dict[str, Any], streams: Sequence[int]) -> None:
    """Take over what a new process has of its own, and run the program in a new ``__main__``, as Python does."""
    import runpy
    import site

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # The server's remember whether they can be sought.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    words = asked["words"][asked["words"][0] == "-u" :]
    *option, program = words[: 1 + (words[0] == "-m")]
    sys.argv[:] = [program, *words[1 + len(option) :]]
    sys.path[:1] = [asked["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if "PYTHONPATH" in os.environ:
        site.execsitecustomize()
    main = sys.modules["__main__"] = ModuleType("__main__")
    if option:
        runpy._run_module_as_main(program)  # type: ignore[attr-defined]
    else:
        vars(main).update(__file__=str(Path(program).absolute()), __builtins__=__builtins__)
        exec(compile(Path(program).read_bytes(), vars(main)["__file__"], "exec", dont_inherit=True), vars(main))


def _as_python(address: str, *words: str) -> None:
    """End as a fork does that has this process's streams, folder and environment."""
    status = _ask(address, words, os.getcwd(), os.environ, (0, 1, 2))
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    {"serve": _serve, "as": _as_python}[sys.argv[1]](*sys.argv[2:])
