"""Read a PyTorch Kineto trace (Chrome trace JSON, plain or gzip) into columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from whatif.ingest.events import Events
from whatif.ingest.file_bytes import FileBytes
from whatif.ingest.json_chunks import EventArray
from whatif.ingest.kineto_columns import ColumnBuilder
from whatif.ingest.kineto_fields import RawEvent
from whatif.ingest.scanned import LOOPS
from whatif.ingest.scanned_columns import ScannedColumns

# Key in the header: the number of duration events of each category that this reader does not know.
FOREIGN_CATEGORIES = "_whatif_foreign_categories"


def read_kineto(path: Path, *, progress: Callable[[int, int], None] | None = None) -> Events:
    """Return the duration events of one trace file, sorted by (start_ns, -duration_ns).

    Times are whole nanoseconds of the trace's own clock, exact; ``baseTimeNanoseconds`` stays in the header and is not
    added. Damaged events are left out and counted by reason in ``Events.dropped``; a file that ends early is read
    up to there, and counts one. The header has under "_whatif_foreign_categories" the number of duration events of each
    unknown category. ``progress`` is called with (bytes of the file read, bytes in all).

    Raises WhatifError if there is no such file or no permission, or it holds no JSON array of trace events.
    """
    dropped: Counter[str] = Counter()
    columns = ColumnBuilder(dropped)
    # Uncompiled, the scanner is slower than decoding.
    take = ScannedColumns(columns).take if LOOPS.compiled else None
    array = EventArray(FileBytes(path, progress), RawEvent, dropped, take)
    for events in array:
        columns.add(events)
    return columns.build(array.header | {FOREIGN_CATEGORIES: dict(columns.foreign)}, array.ends_early_at)
