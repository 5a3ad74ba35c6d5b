"""Remembers Ctrl-C, because a C library may report it as another error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def remembered() -> Iterator[Callable[[], bool]]:
    """Return a function that reports whether Ctrl-C was pressed within the block."""
    pressed = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(number, frame)

    # Elsewhere a notebook or a server handles it; and only the main thread may install a handler.
    installs = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if installs:
        signal.signal(signal.SIGINT, handler)
        _handlers.append(handler)
    try:
        yield lambda: pressed
    finally:
        if installs:
            forget()
            _handlers.pop()


def forget() -> None:
    """Restore Python's handling of Ctrl-C for a user's program that runs here; a handler that it installed stays."""
    if _handlers and signal.getsignal(signal.SIGINT) is _handlers[-1]:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_handlers: list[Callable[[int, FrameType | None], None]] = []
