"""Read a recording: from a path to a checked task graph, or one sentence on why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from whatif.graph.task_graph import TaskGraph
from whatif.ingest.events import SeveralProcessesError
from whatif.ingest.find_steps import StepRule
from whatif.ingest.kept import entry_of, keep, recall
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import is_address, is_folder, local_copy
from whatif.runtime.progress import Progress


def read(
    path: str | Path,
    *,
    progress: Progress | None = None,
    step_count: int | None = None,
    step_mark: str | None = None,
    cache: bool = False,
) -> TaskGraph:
    """Return the task graph of a recording: a Kineto / Chrome trace (.json, .json.gz) or an nsys report (.sqlite).

    For a timeline that ``whatif export`` wrote, return the graph of its prediction, or of its baseline without one.
    For a folder with the recordings of a run's ranks, or an nsys report of several processes, return one graph of all
    ranks (``whatif.ingest.ranks``). An address that fsspec reaches (``s3://bucket/trace.json.gz``) is copied first.
    ``progress(done_bytes, total_bytes)`` is called periodically. Steps are found by marks or by repetition, unless
    ``step_count`` says how many of equal work there are, or ``step_mark``, a regular expression, which annotations or
    operators begin them (of each rank, if several). With ``cache`` the graph of a large file is kept in the user's
    cache folder, and a second reading takes it from there. Raises WhatifError, one sentence, if the file
    cannot be read, holds neither operators nor kernels, or comes from an unsupported device or another tool.
    """
    if not str(path):  # as a path it would be this folder
        raise WhatifError("expected the path of a trace, got an empty string; name a file or a folder.")
    try:
        local = Path(path)
    except TypeError:
        given = type(path).__name__
        raise WhatifError(f"expected the path of a trace, got {given}; read_ranks takes a list of ranks.") from None
    address, rule = is_address(path), StepRule(step_count, step_mark)
    named = path if address else local
    entry = entry_of(local, rule) if cache and not address else None
    known = recall(entry) if entry else None
    if known is not None:
        return known
    # These modules take a tenth of a second to load.
    from whatif.ingest.exported import is_exported, read_exported
    from whatif.ingest.graph_of_events import graph_of_events
    from whatif.ingest.ranks.gloo import with_gloo
    from whatif.ingest.ranks.read import read_ranks
    from whatif.ingest.read_events import read_events

    several = is_folder(path)
    if several:
        return read_ranks([named], step_count=step_count, step_mark=step_mark).graph
    if rule != StepRule() and is_exported(local):
        raise WhatifError(
            f"{named}: expected a trace for --step-count and --step-mark, got a timeline that whatif exported; "
            "leave them out."
        )
    if address:
        with local_copy(path) as copy:
            graph = read(copy, progress=progress, step_count=step_count, step_mark=step_mark)
        return graph.replace(info=replace(graph.info, path=str(path)))
    if is_exported(local):
        return read_exported(local, progress)
    try:
        events = read_events(local, progress)
        graph = graph_of_events(events, str(local), rule)
    except SeveralProcessesError:
        return read_ranks([local], step_count=step_count, step_mark=step_mark).graph
    if not graph.has_gpu:
        graph, _ = with_gloo(graph, events)
    if entry:
        keep(entry, graph)
    return graph
