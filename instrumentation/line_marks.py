"""Traces the lines of the user's code that run, as events to add to the profiler's trace."""

import os
import sys
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

# Code with more events than this in the traced steps is not worth a view line by line.
MOST_EVENTS = 500_000
NS_PER_US = 1000

_LIBRARIES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep, "<")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STARTED_IN = os.getcwd()  # before the program changes it


class RanLine(NamedTuple):
    """A line that ran, ns since the epoch, including the functions that it calls."""

    start_ns: int
    end_ns: int
    file: str
    line: int
    function: str


class LineMarks:
    """Traces the lines of the thread that calls `start`, until `stop`: only files outside Python's libraries.

    It adds half a microsecond to a line and makes all Python code two or three times slower, including libraries: it
    shows the order in which lines ran, not their times.
    """

    def __init__(self) -> None:
        self._users: dict[str, str] = {}  # by file, its path to report; "" for libraries
        self.ran: list[RanLine] = []
        self.thread = 0
        self._open: dict[FrameType, tuple[int, int]] = {}
        self._standard = os.path.dirname(os.__file__) + os.sep

    def start(self) -> None:
        """Start tracing, also in the functions that are already running."""
        self.thread = threading.get_native_id()
        frame: FrameType | None = sys._getframe(1)
        now = time.time_ns()
        while frame is not None:
            if self._is_users(frame.f_code.co_filename):
                frame.f_trace = self._on_line
                self._open[frame] = now, frame.f_lineno
            frame = frame.f_back
        sys.settrace(self._on_call)

    def stop(self) -> None:
        """Stop tracing; lines that are running end now."""
        sys.settrace(None)
        now = time.time_ns()
        for frame in list(self._open):
            frame.f_trace = None
            self._close(frame, now)

    def event(self, line: RanLine, start_us: float, end_us: float) -> dict[str, Any]:
        """Return a line as the event of a Python function from `start_us` to `end_us`."""
        return {
            "ph": "X", "cat": "python_function", "name": f"{self._users[line.file]}({line.line}): {line.function}",
            "pid": os.getpid(), "tid": self.thread, "ts": start_us, "dur": end_us - start_us,
        }  # fmt: skip

    def _is_users(self, file: str) -> bool:
        name = self._users.get(file)
        if name is None:
            path = os.path.abspath(file)
            name = self._users[file] = "" if self._of_library(file, path) else _relative_path(path)
        return bool(name)

    def _of_library(self, file: str, path: str) -> bool:
        folders = (self._standard, os.path.join(_OWN, "whatif"), os.path.dirname(__file__))
        return any(part in file for part in _LIBRARIES) or path.startswith(folders)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "call" or not self._is_users(frame.f_code.co_filename):
            return None
        self._open[frame] = time.time_ns(), frame.f_lineno
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            now = time.time_ns()
            self._close(frame, now)
            self._open[frame] = now, frame.f_lineno
        elif event == "return":
            self._close(frame, time.time_ns())
        return self._on_line

    def _close(self, frame: FrameType, now: int) -> None:
        started = self._open.pop(frame, None)
        if started is not None and len(self.ran) < MOST_EVENTS:
            code = frame.f_code
            self.ran.append(RanLine(started[0], now, code.co_filename, started[1], code.co_name))


def _relative_path(path: str) -> str:
    """Return a file's path relative to the folder where the program started, or to an entry of Python's module path."""
    folders = (os.path.join(os.path.abspath(folder), "") for folder in (_STARTED_IN, *sys.path))
    return next((path.removeprefix(folder) for folder in folders if path.startswith(folder)), os.path.basename(path))
