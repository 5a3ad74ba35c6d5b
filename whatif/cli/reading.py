"""Reading a trace for a command: a progress bar where someone waits, warnings beside the result."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whatif.graph import TaskGraph

# Smaller files are read before a progress bar could be read.
PROGRESS_BYTES = 20_000_000


def read_trace(path: str) -> TaskGraph:
    """Give the task graph of a trace, with a progress bar on a terminal's stderr where the file is large."""
    from whatif.ingest.read import read

    size_bytes = os.path.getsize(path) if os.path.isfile(path) else 0
    if size_bytes < PROGRESS_BYTES or not sys.stderr.isatty():
        return read(path)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=size_bytes)
        return read(path, progress=lambda done, total: bar.update(task, completed=done, total=total))


def warn(sentences: Iterable[str]) -> None:
    """Print each sentence to stderr as a warning."""
    from whatif.report.printable import printable

    sys.stdout.flush()  # the result comes first where both go to one terminal
    for sentence in sentences:
        print(f"whatif: warning: {printable(sentence)}", file=sys.stderr)
