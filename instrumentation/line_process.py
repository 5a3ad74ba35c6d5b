"""A process that measures for this one: questions and answers are lines of JSON; both of its sides."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any, Self

from .kept_memory import KEEP_FREED_MEMORY

# Nothing takes so long between two answers: the slowest start loads CUDA's libraries, the slowest operator is
# given up after its second call.
SILENCE_S = 90.0


class EndedError(Exception):
    """The process ended, or was ended because it fell silent; the message is the last that it printed."""


class LineProcess:
    """A module that runs in a process of its own; a context manager, so that it never outlives its parent.

    ``threads``: of a CPU, for libraries that read it when they are loaded; None leaves it to them.
    """

    def __init__(self, module: str, *, threads: int | None = None, silence_s: float = SILENCE_S) -> None:
        self._module = module
        self._threads = threads
        self._silence_s = silence_s

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        # As in a training loop that has warmed up: otherwise an operator would pay for the page faults of its results.
        environment = {**os.environ, **KEEP_FREED_MEMORY}
        if self._threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._threads)
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, env=environment, text=True,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_copy_lines, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=1)
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # What was not read any more.
                if stream is not None:
                    stream.close()
        self._log.close()

    def ask(self, message: dict[str, Any]) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # It has ended: the answer will tell.
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for one line. Raises EndedError where none comes."""
        try:
            line = self._lines.get(timeout=self._silence_s)
        except queue.Empty:
            line = ""
        if not line:
            self._process.kill()
            self._process.wait()
            raise EndedError(self._last_printed() or "none")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_printed(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")


def _copy_lines(source: Any, lines: queue.SimpleQueue[str]) -> None:
    for line in source:
        if line.endswith("\n"):  # Else the process ended while it wrote.
            lines.put(line)
    lines.put("")


def answering() -> Callable[[dict[str, Any]], None]:
    """Return what a measuring process answers with. From then on whatever libraries print goes elsewhere."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    return lambda message: print(json.dumps(message), file=answers, flush=True)
