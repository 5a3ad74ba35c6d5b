"""The measuring process from outside: one question, one answer; ended where it falls silent."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from types import TracebackType
from typing import Any, NamedTuple

from whatif.errors import WhatifError

from ..kept_memory import KEEP_FREED_MEMORY
from ..operators.measure import SILENCE_S, copy_lines, last_line


class Way(NamedTuple):
    """How operators are measured: on which device of torch, with how many threads of a CPU, and in what state.

    ``ranks``: over how many processes, for collectives; 0 for operators of one device.
    """

    device: str
    threads: int
    cache: str
    method: str
    ranks: int = 0


class EndedError(Exception):
    """The process ended, or was ended because it fell silent; the message is the last that it printed."""


class MeasuringProcess:
    """A process that measures calls in one way; a context manager, so that it never outlives its parent.

    ``module`` of this package is what it runs; ``setup`` is the first line that it reads.
    """

    def __init__(
        self, setup: dict[str, Any], *, threads: int = 1, module: str = "worker", silence_s: float = SILENCE_S
    ) -> None:
        self._setup = setup
        self._threads = threads
        self._module = f"{__package__}.{module}"
        self._silence_s = silence_s

    def __enter__(self) -> MeasuringProcess:
        self._log = tempfile.TemporaryFile()
        # As in a training loop that has warmed up: otherwise an operator would pay for the page faults of its results.
        environment = {**os.environ, **KEEP_FREED_MEMORY, "OMP_NUM_THREADS": str(self._threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, env=environment, text=True,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=copy_lines, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()
        try:
            self.ask(self._setup)
            self.answer()
        except EndedError as error:
            self._end()
            raise WhatifError(
                "opdb profile: expected a process that measures, got one that ended before its first answer; its last "
                f"line: {error}."
            ) from None
        except BaseException:  # Ctrl-C while torch is loaded
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        """Give the answer to one job: ``ns``, a list, or ``skipped``, a reason. Raises EndedError."""
        self.ask(job)
        return self.answer()

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
            raise EndedError(last_line(self._log) or "none")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=1)
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # What was not read any more.
                if stream is not None:
                    stream.close()
        self._log.close()
