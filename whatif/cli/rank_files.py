"""Several recordings on a command line: the ranks of one run, file by file or as their folder."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whatif.cli.options import add_jobs, is_trace, names_then_trace, trace_then_names
from whatif.cli.reading import progress_bar, read_trace, remember_cut
from whatif.cli.status import UsageError
from whatif.runtime.files import is_address, is_folder

if TYPE_CHECKING:
    from whatif.graph.task_graph import TaskGraph
    from whatif.ingest.ranks.read import Ranks

_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6})(?::([0-9]{1,6}))?)?")


def add_traces(parser: argparse.ArgumentParser) -> None:
    """Add the positional TRACE, of which there may be several."""
    help_text = (
        "a recording, a Kineto / Chrome trace (.json, .json.gz) or a report that nsys exported to SQLite; for a "
        "distributed run, the files of several ranks, or their folder; or their addresses, as s3://bucket/run"
    )
    parser.add_argument("traces", metavar="TRACE", nargs="+", help=help_text)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add --ranks, which selects some of a folder's ranks, and --jobs, which distributes reading them."""
    add_only(parser)
    add_jobs(parser, "read the ranks of a run", "as many as there are cores, for large runs")


def add_only(parser: argparse.ArgumentParser) -> None:
    """Add --ranks alone, for a command that has --jobs already."""
    parser.add_argument(
        "--ranks", type=_numbers, metavar="NUMBERS", help="read only these ranks of a run: 0,8,16 or 0-63 or 0-255:8"
    )


def _numbers(text: str) -> list[int]:
    """The ranks that ``0,8``, ``0-63`` or ``0-255:8`` (every eighth) mean, for argparse."""
    found: list[int] = []
    for part in text.split(","):
        numbers = _RANGE.fullmatch(part.strip())
        first, last, by = (int(n) if n else None for n in numbers.groups()) if numbers else (None, None, None)
        if first is None or by == 0 or (last is not None and last < first):
            raise argparse.ArgumentTypeError(f"expected ranks as 0,8,16 or 0-63 or 0-255:8, got {text[:40]!r}")
        found += range(first, (first if last is None else last) + 1, by or 1)
    return list(dict.fromkeys(found))


def names_then_traces(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``NAME [NAME ...] TRACE [TRACE ...]``. Raises UsageError if the order is wrong or one is missing."""
    first = len(words)
    while first and _is_recording(words[first - 1]):
        first -= 1
    names, traces = list(words[:first]), list(words[first:])
    if len(traces) < 2 and not (traces and is_folder(traces[0])):
        names, trace = names_then_trace(list(words))
        return names, [trace]
    if not names:
        raise UsageError(
            f"apply: expected NAME and the traces of the ranks, got only traces, {traces[0]!r} first; "
            "`whatif transforms` lists names."
        )
    early = [name for name in names if _is_recording(name)]
    if early:
        raise UsageError(f"apply: expected the traces last, after all names, got {early[0]!r} before {names[-1]!r}.")
    return names, traces


def traces_then_names(words: Sequence[str], command: str) -> tuple[list[str], list[str]]:
    """Split ``TRACE [TRACE ...] [NAME ...]`` of a command. Raises UsageError if the order is wrong."""
    others = 0
    if _is_recording(words[0]):
        # A folder after the first word may mean a what-if; the files of several ranks are adjacent.
        while others + 1 < len(words) and not os.path.isdir(words[others + 1]) and _is_recording(words[others + 1]):
            others += 1
    trace, names = trace_then_names([words[0], *words[1 + others :]], command)
    return [trace, *words[1 : 1 + others]], names


def _is_recording(word: str) -> bool:
    return is_trace(word) or (os.path.isdir(word) and not _is_name(word))


def _is_name(word: str) -> bool:
    """Whether a word that is also a folder means a what-if: it has no slash, and a what-if has that name."""
    from whatif.prediction.transform import built_in_names, plug_in_names

    return os.sep not in word and (word in built_in_names() or word in plug_in_names())


def read_traces(paths: Sequence[str], args: argparse.Namespace) -> tuple[TaskGraph, Ranks | None]:
    """Return the graph of a recording, or that of several ranks with the findings about them."""
    if len(paths) == 1 and args.ranks is None and not is_folder(paths[0]):
        graph = read_trace(paths[0], args)
        if is_address(paths[0]) or not graph.info.ranks:
            return graph, None
        from whatif.ingest.read_events import is_sqlite

        if not is_sqlite(Path(paths[0])):
            return graph, None
    from whatif.ingest.ranks.read import read_ranks

    with progress_bar("reading ranks") as progress:
        steps = {"step_count": args.step_count, "step_mark": args.step_mark}
        ranks = read_ranks(paths, only=args.ranks, jobs=args.jobs, progress=progress, **steps)
    return remember_cut(ranks.graph), ranks if len(ranks.numbers) > 1 else None
