"""Holds signals back while a recording is written, and lets it be written before a signal ends the process."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# With these people and schedulers end programs; not every system has all of them.
_ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def signals_wait(held: Callable[[str], None]) -> Iterator[None]:
    """Deliver a signal that comes in the block at its end, to the program's own handler; a second one at once.

    `held` is called with the name of the first one. Only the main thread can hold signals back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None: a handler that Python did not install, and could not install again.
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    handlers = {number: own for number, own in handlers.items() if own not in (None, signal.SIG_IGN)}
    waiting: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        waiting.append(number)
        if len(waiting) == 1:
            held(signal.Signals(number).name)
        else:
            _deliver(waiting, handlers)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        _deliver(waiting, handlers)


def work_first(work: Callable[[str], None]) -> Callable[[], None]:
    """Call `work` with the signal's name before a signal ends the process by its default action; return what undoes it.

    Signals with a handler stay as they are. Only the main thread can ask for this: elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    process = os.getpid()
    ours = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(number) is not end:  # The script's own handler calls the one that it found.
            return
        undo()  # a second signal ends the process at once
        try:
            if os.getpid() == process:  # else the script has forked
                work(signal.Signals(number).name)
        finally:
            signal.raise_signal(number)

    def undo() -> None:
        if threading.current_thread() is threading.main_thread():
            for number in ours:
                if signal.getsignal(number) is end:  # The script may have set its own.
                    signal.signal(number, signal.SIG_DFL)

    for number in ours:
        signal.signal(number, end)
    return undo


def _deliver(waiting: list[int], handlers: dict[int, Any]) -> None:
    """Put the program's handlers back and raise each signal that waits once, unless a handler raises before."""
    for number, own in handlers.items():
        signal.signal(number, own)
    numbers = list(dict.fromkeys(waiting))
    waiting.clear()
    for number in numbers:
        signal.raise_signal(number)
