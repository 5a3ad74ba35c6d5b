"""The usable CPU cores, and large arrays in several threads: numpy copies and gathers them without Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
# Copying fewer values than this takes less time than to start threads: our measurement.
WORTH = 1_000_000
# More threads wait for memory, not for cores: our choice.
MOST = 4


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_large(work: Callable[[T], R], items: Iterable[T], n_values: int) -> list[R]:
    """Return ``work(item)`` for each item, in order; in threads if each handles many values (``n_values``)."""
    threads = min(usable_cores(), MOST)
    if n_values < WORTH or threads == 1:
        return [work(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
