"""Reading a trace for a command: a progress bar where someone waits, warnings beside the result."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whatif.graph import TaskGraph

# Whether only results and errors are wanted; the command line says so once a run.
_quiet = False

# Smaller files are read before a progress bar could be read.
PROGRESS_BYTES = 20_000_000
# People wonder whether anything happens after some seconds.
PATIENCE_S = 2.0


def be_quiet(quiet: bool) -> None:
    """Leave warnings and progress out from now on, or no longer."""
    global _quiet
    _quiet = quiet


def read_trace(path: str) -> TaskGraph:
    """Give the task graph of a trace, with a progress bar on a terminal's stderr where the file is large."""
    from whatif.ingest.read import read

    with progress_bar("reading", file=path) as progress:
        return read(path, progress=progress)


def _watched() -> bool:
    """Whether somebody sees what moves on stderr: a dumb terminal cannot take a line back."""
    return not _quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress_bar(what: str, *, file: str | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """Give a function that shows (done, total) as a bar on a terminal's stderr; None where nobody would see or need it.

    It counts the bytes of ``file`` where that is large, and things where no file is named.
    """
    is_small = file is not None and (os.path.getsize(file) if os.path.isfile(file) else 0) < PROGRESS_BYTES
    if is_small or not _watched():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = MofNCompleteColumn() if file is None else DownloadColumn()
    columns = (TextColumn(what), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Show on a terminal's stderr that something takes long, and since when: how long it will take nobody knows."""
    if not _watched():
        yield
        return
    lock, shown, over = threading.Lock(), None, False

    def show() -> None:
        nonlocal shown
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with lock:
            if not over:
                columns = SpinnerColumn(), TextColumn(what), TimeElapsedColumn()
                shown = Progress(*columns, console=Console(stderr=True), transient=True)
                shown.add_task(what, total=None)
                shown.start()

    # Most is done before anybody wonders, and costs nothing then.
    timer = threading.Timer(PATIENCE_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
            if shown is not None:
                shown.stop()


def print_plot(path: str | None) -> None:
    """Say at the end of a report where its plot is, if one was asked for."""
    if path is None:
        return
    from whatif.report.printable import printable

    print(f"\n  {printable(path)}: written")


def warn(sentences: Iterable[str], kind: str = "warning") -> None:
    """Print each sentence to stderr as a warning, or as another ``kind`` of remark, unless told to be quiet."""
    if _quiet:
        return
    from whatif.report.printable import printable

    sys.stdout.flush()  # the result comes first where both go to one terminal
    for sentence in sentences:
        print(f"whatif: {kind}: {printable(sentence)}", file=sys.stderr)
