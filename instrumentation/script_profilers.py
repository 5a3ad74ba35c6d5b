"""Notices the profilers that a program starts itself: a process that runs two at once crashes."""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import profiler

# What every profiler of torch goes through: its warm-up, its start and its end.
_BEGINNINGS, _END = ("_prepare_profiler", "_enable_profiler"), "_disable_profiler"


class ScriptProfilers:
    """Watches for profilers of the program's own until `remove`; `begins` is called before one starts."""

    def __init__(self, begins: Callable[[], None]) -> None:
        global _watch
        _watch = self
        self.running = torch._C._autograd._profiler_enabled()
        self.begun = int(self.running)  # how many so far
        self._begins = begins
        self._process = os.getpid()
        self._our_thread: int | None = None  # while it does our work
        self._replaced: list[tuple[str, Any, Any]] = []
        for name in _BEGINNINGS:
            self._replace(name, before=self.begin)
        self._replace(_END, after=self.end)

    @contextmanager
    def not_ours(self) -> Iterator[None]:
        """Overlook what this thread does in the block."""
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
        for name, watched, own in self._replaced:
            if getattr(profiler, name) is watched:
                setattr(profiler, name, own)

    def begin(self) -> None:
        """Take note that the program starts a profiler, unless one runs already."""
        if self._is_theirs() and not self.running:
            self.running = True
            self.begun += 1
            self._begins()

    def end(self) -> None:
        """Take note that the program's profiler is off."""
        if self._is_theirs():
            self.running = False

    def _is_theirs(self) -> bool:
        return threading.get_ident() != self._our_thread and os.getpid() == self._process

    def _replace(
        self, name: str, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
    ) -> None:
        own = getattr(profiler, name)

        @functools.wraps(own)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before()
            try:
                return own(*args, **kwargs)
            finally:
                after()

        setattr(profiler, name, watched)
        self._replaced.append((name, watched, own))


def a_recording_begins() -> None:
    """Say that a recording begins, which starts a profiler later: `collect` gives way to one of the program's own."""
    if _watch is not None:
        _watch.begin()


def a_recording_ends() -> None:
    """Say that a recording is over."""
    if _watch is not None:
        _watch.end()


_watch: ScriptProfilers | None = None
