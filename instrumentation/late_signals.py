"""Holds signals back while a recording is written, and writes it before a signal ends the process."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# The signals with which users and schedulers end programs; not every system has all of them.
_ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def signals_wait(on_signal: Callable[[str], None]) -> Iterator[None]:
    """Deliver a signal that arrives inside the block to the program's handler at its end; a second one at once.

    `on_signal` is called with the first one's name. Only the main thread can hold signals back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None: a handler that was not installed from Python, which could not restore it.
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    handlers = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    pending: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        pending.append(number)
        if len(pending) == 1:
            on_signal(signal.Signals(number).name)
        else:
            _deliver(pending, handlers)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        _deliver(pending, handlers)


def call_before_exit(work: Callable[[str], None]) -> Callable[[], None]:
    """Call `work` with the signal's name before a signal ends the process by its default action; return an undo.

    Signals with a handler are left alone. Only the main thread can set handlers: elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    process = os.getpid()
    defaults = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(number) is not end:  # Called by a handler that the script installed later.
            return
        undo()  # a second signal ends the process at once
        try:
            if os.getpid() == process:  # else the script has forked
                work(signal.Signals(number).name)
        finally:
            signal.raise_signal(number)

    def undo() -> None:
        if threading.current_thread() is threading.main_thread():
            for number in defaults:
                if signal.getsignal(number) is end:  # The script may have set its own.
                    signal.signal(number, signal.SIG_DFL)

    for number in defaults:
        signal.signal(number, end)
    return undo


def _deliver(pending: list[int], handlers: dict[int, Any]) -> None:
    """Restore the program's handlers and raise each held signal once, unless a handler raises first."""
    for number, handler in handlers.items():
        signal.signal(number, handler)
    numbers = list(dict.fromkeys(pending))
    pending.clear()
    for stream in (sys.stdout, sys.stderr) if numbers else ():
        with suppress(Exception):  # the script may have closed it
            stream.flush()  # the default action ends a process with what it has printed still in memory
    for number in numbers:
        signal.raise_signal(number)
