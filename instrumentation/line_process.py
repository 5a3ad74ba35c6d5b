"""A process that measures for this one: jobs and answers are lines of JSON; parent's and child's side."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self

from whatif.runtime.errors import WhatifError

from .kept_memory import KEEP_FREED_MEMORY

# Longer than any answer takes: the slowest start loads CUDA's libraries, the slowest operator is given up after its
# second call.
SILENCE_S = 90.0


class EndedError(Exception):
    """The process ended, or was killed because it stopped answering; the message is the last line that it printed."""


class MeasuringProcess:
    """A module that measures in a separate process; a context manager, so that it never outlives its parent.

    ``setup`` is the first line that it reads, and ``ready`` its answer. ``threads`` is the number of CPU threads for
    libraries that read it when they are loaded; None leaves it to them.
    """

    def __init__(self, module: str, setup: dict[str, Any], *, threads: int | None = None) -> None:
        self._module, self._setup, self._threads = module, setup, threads
        self._silence_s = SILENCE_S

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        # As in a training loop after warm-up: otherwise operators would include page faults of their results.
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
        try:
            self.ready = self.measure(self._setup)
        except EndedError as error:
            self.__exit__()
            raise WhatifError(
                "expected a running measuring process, got one that ended before its first answer; its last "
                f"line: {error}."
            ) from None
        except BaseException:  # Ctrl-C while torch is being imported
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=1)
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # It may hold unread data.
                if stream is not None:
                    stream.close()
        self._log.close()

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one job. Raises EndedError if none comes."""
        self.ask(job)
        return self.answer()

    def ask(self, message: dict[str, Any]) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # It has ended: `answer` raises.
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for one line. Raises EndedError if none comes."""
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
        if line.endswith("\n"):  # Else the process ended in the middle of a line.
            lines.put(line)
    lines.put("")


def connect() -> tuple[Callable[[dict[str, Any]], None], Iterator[dict[str, Any]]]:
    """Return the measuring process's function to send an answer, and its input: the setup, then the jobs.

    Redirects what libraries print on stdout to stderr. Ignores Ctrl-C, which reaches the whole process group: the
    parent ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    return lambda message: print(json.dumps(message), file=answers, flush=True), map(json.loads, sys.stdin)
