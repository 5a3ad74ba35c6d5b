"""Notes which line of the user's own code runs, as events that a trace holds beside the profiler's own."""

import os
import sys
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

# A line that runs more often than this in the recorded steps is no place to look at line by line.
MOST_EVENTS = 500_000
NS_PER_US = 1000

_LIBRARIES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep, "<")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STARTED_IN = os.getcwd()  # before the program goes elsewhere


class RanLine(NamedTuple):
    """A line that ran, ns since the epoch; what it calls lies in it."""

    start_ns: int
    end_ns: int
    file: str
    line: int
    function: str


class LineMarks:
    """Traces the lines of the thread that starts it, from `start` to `stop`: files outside Python's libraries only.

    It makes a line half a microsecond longer, and all Python code two or three times as long, libraries' too: what
    ran in which order is what it tells, and not how long.
    """

    def __init__(self) -> None:
        self._users: dict[str, str] = {}  # by file, the name to report; "" for libraries
        self.ran: list[RanLine] = []
        self.thread = 0
        self._open: dict[FrameType, tuple[int, int]] = {}
        self._standard = os.path.dirname(os.__file__) + os.sep

    def start(self) -> None:
        """Begin, also in the functions that run already."""
        self.thread = threading.get_native_id()
        frame: FrameType | None = sys._getframe(1)
        now = time.time_ns()
        while frame is not None:
            if self._is_users(frame.f_code.co_filename):
                frame.f_trace = self._inside
                self._open[frame] = now, frame.f_lineno
            frame = frame.f_back
        sys.settrace(self._called)

    def stop(self) -> None:
        """End; lines that run at that moment end with it."""
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
            whole = os.path.abspath(file)
            name = self._users[file] = "" if self._of_library(file, whole) else _told(whole)
        return bool(name)

    def _of_library(self, file: str, whole: str) -> bool:
        folders = (self._standard, os.path.join(_OWN, "whatif"), os.path.dirname(__file__))
        return any(part in file for part in _LIBRARIES) or whole.startswith(folders)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "call" or not self._is_users(frame.f_code.co_filename):
            return None
        self._open[frame] = time.time_ns(), frame.f_lineno
        return self._inside

    def _inside(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            now = time.time_ns()
            self._close(frame, now)
            self._open[frame] = now, frame.f_lineno
        elif event == "return":
            self._close(frame, time.time_ns())
        return self._inside

    def _close(self, frame: FrameType, now: int) -> None:
        begun = self._open.pop(frame, None)
        if begun is not None and len(self.ran) < MOST_EVENTS:
            code = frame.f_code
            self.ran.append(RanLine(begun[0], now, code.co_filename, begun[1], code.co_name))


def _told(whole: str) -> str:
    """Return a file's path in the folder that the program was started in, or that Python imports from."""
    folders = (os.path.join(os.path.abspath(folder), "") for folder in (_STARTED_IN, *sys.path))
    return next((whole.removeprefix(folder) for folder in folders if whole.startswith(folder)), os.path.basename(whole))
