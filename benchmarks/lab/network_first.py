"""Prioritize the kernel's network processing during a measurement."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Above the lab's workers: in a cluster no worker's program delays a switch.
PRIORITY = 30


@contextmanager
def network_first() -> Iterator[None]:
    """Give the kernel's threads for deferred work, which forward packets, real-time priority within the block."""
    threads = _deferred_work()
    for thread in threads:
        _schedule(thread, os.SCHED_FIFO, PRIORITY)
    try:
        yield
    finally:
        for thread in threads:
            _schedule(thread, os.SCHED_OTHER, 0)


def _schedule(thread: int, policy: int, priority: int) -> None:
    # Without it the times are only noisier.
    with suppress(OSError):
        os.sched_setscheduler(thread, policy, os.sched_param(priority))


def _deferred_work() -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdecimal() and (folder / "comm").read_text().startswith("ksoftirqd/"):
                found.append(int(folder.name))
    return found
