"""Detects profilers that the program itself starts: a process that runs two at once crashes."""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import profiler

# Functions that every torch profiler calls: for its warm-up, its start and its end.
_BEGINNINGS, _END = ("_prepare_profiler", "_enable_profiler"), "_disable_profiler"


class ScriptProfilers:
    """Watches for the program's own profilers until `remove`; `on_begin` is called before one starts."""

    def __init__(self, on_begin: Callable[[], None]) -> None:
        global _watch
        _watch = self
        self.running = torch._C._autograd._profiler_enabled()
        self.begun = int(self.running)  # number so far
        self._on_begin = on_begin
        self._process = os.getpid()
        self._our_thread: int | None = None  # set while it works for the recording
        self._replaced: list[tuple[str, Any, Any]] = []
        for name in _BEGINNINGS:
            self._replace(name, before=self.begin)
        self._replace(_END, after=self.end)

    @contextmanager
    def ignore_this_thread(self) -> Iterator[None]:
        """Ignore profilers that this thread starts in the block."""
        outer, self._our_thread = self._our_thread, threading.get_ident()
        try:
            yield
        finally:
            self._our_thread = outer

    def remove(self) -> None:
        """Stop watching."""
        global _watch
        if _watch is self:
            _watch = None
        for name, watched, original in self._replaced:
            if getattr(profiler, name) is watched:
                setattr(profiler, name, original)

    def begin(self) -> None:
        """Record that the program starts a profiler, unless one is running."""
        if self._is_programs() and not self.running:
            self.running = True
            self.begun += 1
            self._on_begin()

    def end(self) -> None:
        """Record that the program's profiler is off."""
        if self._is_programs():
            self.running = False

    def _is_programs(self) -> bool:
        return threading.get_ident() != self._our_thread and os.getpid() == self._process

    def _replace(
        self, name: str, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
    ) -> None:
        original = getattr(profiler, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before()
            try:
                return original(*args, **kwargs)
            finally:
                after()

        setattr(profiler, name, watched)
        self._replaced.append((name, watched, original))


def recording_begins() -> None:
    """Report a recording, which will start a profiler: `collect` gives way to the program's own recordings."""
    if _watch is not None:
        _watch.begin()


def recording_ends() -> None:
    """Report the end of a recording."""
    if _watch is not None:
        _watch.end()


_watch: ScriptProfilers | None = None
