"""Holds signals back while a recording is written: a file that is half written helps nobody."""

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


def _deliver(waiting: list[int], handlers: dict[int, Any]) -> None:
    """Put the program's handlers back and raise each signal that waits once, unless a handler raises before."""
    for number, own in handlers.items():
        signal.signal(number, own)
    numbers = list(dict.fromkeys(waiting))
    waiting.clear()
    for number in numbers:
        signal.raise_signal(number)
