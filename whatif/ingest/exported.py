"""Timeline files of whatif: reads the graph after their events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from whatif.graph.task_graph import TaskGraph
from whatif.ingest.file_bytes import FileBytes, cut_first, ends_early
from whatif.ingest.saved_graph import GRAPH_FIELD, graph_of_text
from whatif.runtime.errors import WhatifError

# The begin of every such file, and the field before its graph.
EXPORTED_BEGIN = b'{"displayTimeUnit":"ms","otherData":{"tool": "whatif",'
_FIELD = GRAPH_FIELD.encode("ascii")


def is_exported(path: Path) -> bool:
    """Whether a file begins as a timeline of whatif; False if it cannot be read twice (a pipe) or at all."""
    try:
        return path.is_file() and next(iter(FileBytes(path)), b"").startswith(EXPORTED_BEGIN)
    except (WhatifError, OSError, ValueError):  # the reader of traces reports the error
        return False


def read_exported(path: Path, progress: Callable[[int, int], None] | None) -> TaskGraph:
    """Return the graph after the events. Raises WhatifError if the file ends before it, or if it is damaged."""
    file = FileBytes(path, progress)
    tail = b""
    graph: list[bytes] = []
    for piece in file:
        if graph:
            graph.append(piece)
            continue
        tail = tail[-len(_FIELD) :] + piece
        place = tail.find(_FIELD)
        if place >= 0:
            graph.append(tail[place + len(_FIELD) :])
    text = b"".join(graph).rstrip()
    is_cut = file.is_cut or not (text or tail.rstrip()).endswith(b"}")
    if not text.endswith(b"}"):
        got = ends_early(file.size_bytes) + ": " if is_cut else ""
        raise WhatifError(
            f"{path}: {got}expected a timeline with its graph after the events, got {file.damage or 'no graph'}; "
            "export it again from its recording."
        )
    try:
        return graph_of_text(text[:-1], str(path))
    except WhatifError as error:
        if not is_cut and "truncated" not in str(error):  # a cut after an inner bracket
            raise
        raise cut_first(path, file.size_bytes, error) from error
