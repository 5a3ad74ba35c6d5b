"""Restores Python's own settings while a user's script runs."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from whatif.cli.interrupts import forget

# Error handlers of stdout and stderr, as Python set them; the command line replaces what a terminal cannot show.
_errors: dict[str, str] = {}


def never_fail_on_a_character() -> None:
    """Print a question mark for a character that the terminal cannot encode, instead of failing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            _errors.setdefault(name, stream.errors)
            reconfigure(errors="replace")


@contextmanager
def as_python() -> Iterator[None]:
    """Run a user's program in the block; settings stay changed: its threads and exit handlers run after the block."""
    for name, errors in _errors.items():
        with suppress(AttributeError, ValueError):
            getattr(sys, name).reconfigure(errors=errors)
    forget()
    # Registered first, so it runs last.
    atexit.register(_die_of_the_interrupt)
    yield


def interrupt_at_exit() -> None:
    """Make this process end by SIGINT, as Python ends a script that does not catch Ctrl-C."""
    global _interrupted
    _interrupted = True


def _die_of_the_interrupt() -> None:
    if not _interrupted:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


_interrupted = False
