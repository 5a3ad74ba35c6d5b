"""Read a trace for a command, with a progress bar on a terminal; show the result and its warnings."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from whatif.cli.options import read_options

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

    from whatif.graph.task_graph import TaskGraph

# Files of this run that were cut off, with the sentence that says where.
_cut: dict[str, str] = {}
# Whether to print only results and errors; set once per run by the command line.
_quiet = False

# Smaller files load too fast for a progress bar.
PROGRESS_BYTES = 20_000_000
# Seconds after which people wonder whether the program hangs.
PATIENCE_S = 2.0


def be_quiet(quiet: bool) -> None:
    """Switch warnings and progress off, or on again, at the beginning of a run."""
    global _quiet
    _quiet = quiet
    _cut.clear()


def quiet() -> bool:
    """Whether warnings and progress are switched off."""
    return _quiet


def remember_cut(graph: TaskGraph) -> TaskGraph:
    """Return the graph; if its file was cut off, later errors begin with that."""
    from whatif.ingest.events import CUT

    for info in graph.info.ranks or (graph.info,):
        if info.findings and info.findings[0].check == CUT:
            _cut[info.path] = info.findings[0].sentence.partition(":")[0]
    return graph


def first_reason(message: str) -> str:
    """Return an error's message, after the reason that precedes any other: that a file was cut off."""
    for path, sentence in _cut.items():
        if sentence not in message:
            detail = message.removeprefix(f"{path}: ")
            return f"{path}: {sentence}; copy or record it again (error in the rest: {detail})"
    return message


def read_trace(path: str, args: argparse.Namespace) -> TaskGraph:
    """Return the task graph of a trace, with a progress bar on a terminal's stderr if the file is large.

    ``args`` has the options of ``options.add_steps``.
    """
    from whatif.ingest.read import read

    with progress_bar("reading", file=path) as progress:
        return remember_cut(read(path, progress=progress, **read_options(args)))


def _watched() -> bool:
    """Whether stderr can show a progress bar: a dumb terminal cannot rewrite a line."""
    return not _quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress_bar(label: str, *, file: str | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """Return a function that shows (done, total) as a bar on stderr; None if no terminal shows it or the work is short.

    It counts the bytes of ``file`` if that is large, and items if no file is named.
    """
    is_small = file is not None and (os.path.getsize(file) if os.path.isfile(file) else 0) < PROGRESS_BYTES
    if is_small or not _watched():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = MofNCompleteColumn() if file is None else DownloadColumn()
    columns = (TextColumn(label), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def patience(label: str) -> Iterator[None]:
    """Show elapsed time on a terminal's stderr during long work of unknown length."""
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
                columns = SpinnerColumn(), TextColumn(label), TimeElapsedColumn()
                shown = Progress(*columns, console=Console(stderr=True), transient=True)
                shown.add_task(label, total=None)
                shown.start()

    # Most work ends before this, and then nothing is shown.
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


def show(
    args: argparse.Namespace,
    as_dict: Callable[[], Mapping[str, Any]],
    print_text: Callable[[], None],
    *,
    figure: Callable[[], Figure] | None = None,
    warnings: Iterable[str] | None = None,
    notes: Iterable[str] = (),
) -> int:
    """Show the result of a command: the plot into its file, then one JSON object, or the text, warnings and notes.

    Those ``warnings`` that the object does not contain already are added to it; it contains the ``notes``, those of the
    what-ifs. Returns the exit status.
    """
    plot = getattr(args, "plot", None)
    if plot and figure is not None:
        from whatif.report.plots import save

        save(figure(), plot)
    if args.json:
        from whatif.report.as_json import print_json

        trust = getattr(args, "trust", None)
        found = {**as_dict(), **({} if trust is None else {"trust": trust.to_dict()})}
        if warnings is not None:
            known = {*found.get("warnings", ()), *found.get("notes", ())}
            found["warnings"] = [*(text for text in warnings if text not in known), *found.get("warnings", ())]
        print_json({**found, **({"plot": plot} if plot else {})})
        return 0
    print_text()
    print_plot(plot)
    warn(warnings or ())
    warn(notes, "note")
    return 0


def print_plot(path: str | None) -> None:
    """Print the plot's file name at the end of a report, if a plot was requested."""
    if path is None:
        return
    from whatif.report.printable import printable

    print(f"\n  {printable(path)}: written")


def warn(sentences: Iterable[str], kind: str = "warning") -> None:
    """Print each sentence to stderr as a warning, or as another ``kind`` of remark, unless --quiet is set."""
    if _quiet:
        return
    from whatif.report.printable import printable

    sys.stdout.flush()  # the result comes first if both go to one terminal
    for sentence in sentences:
        print(f"whatif: {kind}: {printable(sentence)}", file=sys.stderr)
