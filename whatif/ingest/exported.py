"""Timeline files that whatif wrote itself: the graph that stands behind their events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from whatif.errors import WhatifError
from whatif.graph.task_graph import TaskGraph
from whatif.ingest.file_bytes import FileBytes, ends_early
from whatif.ingest.saved_graph import GRAPH_FIELD, graph_of_text

# How every such file begins, and where the graph begins in it.
EXPORTED_BEGIN = b'{"displayTimeUnit":"ms","otherData":{"tool": "whatif",'
_FIELD = GRAPH_FIELD.encode("ascii")


def is_exported(path: Path) -> bool:
    """Say whether a file begins as a timeline of whatif's; False for what cannot be read twice (a pipe) or at all."""
    try:
        return path.is_file() and next(iter(FileBytes(path)), b"").startswith(EXPORTED_BEGIN)
    except (WhatifError, OSError, ValueError):  # the reader of traces says what is wrong with it
        return False


def read_exported(path: Path, progress: Callable[[int, int], None] | None = None) -> TaskGraph:
    """Return the graph behind the events. Raises WhatifError where the file ends before it, or where it is damaged."""
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
    if not text.endswith(b"}"):
        why = f"expected a timeline with its graph behind the events, got {file.damage}"
        raise WhatifError(
            f"{path}: {why if file.damage and not file.is_cut else ends_early(file.size_bytes)}; export it again from "
            "its recording."
        )
    return graph_of_text(text[:-1], str(path))
