"""Import measurements into a database: read by the importer of their kind, checked, written as contributions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from whatif.opdb.importers.found import Found
from whatif.opdb.merging import Merged
from whatif.opdb.provenance import Method
from whatif.opdb.store import Store, in_shards
from whatif.runtime.errors import WhatifError

# The kinds that `whatif opdb import` reads: the importer's module, its function, and its options.
_IMPORTERS = {
    "neusight": ("neusight", "read_neusight", ("author",)),
    "nccl-tests": ("nccl_tests", "read_nccl_tests", ("operator", "device", "author")),
    "recording": ("recording", "read_recording", ("device", "author")),
    "csv": ("generic_csv", "read_csv", ("device", "method", "author", "licence")),
    "aiconfigurator": ("aiconfigurator", "read_aiconfigurator", ("author",)),
    "deepbench": ("deepbench", "read_deepbench", ("device", "author")),
}
KINDS = tuple(_IMPORTERS)


def read_foreign(
    kind: str,
    path: Path,
    *,
    device: str | None = None,
    operator: str | None = None,
    method: Method | None = None,
    author: str | None = None,
    licence: str | None = None,
) -> Found:
    """Read measurements of a ``kind`` (one of ``KINDS``). Raises WhatifError if ``path`` holds no usable ones."""
    if not path.exists():
        raise WhatifError(f"{path}: expected measurements to import, got no such file or folder.")
    if not path.is_file() and not path.is_dir():  # a pipe or a device may never end
        raise WhatifError(f"{path}: expected a file or folder of measurements, got something else; copy it to a file.")
    given = {"device": device, "operator": operator, "method": method, "author": author, "licence": licence}
    for text in (device, operator, author, licence):
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise WhatifError(f"opdb: expected valid Unicode, got {text!r}; use other characters.") from error
    module, function, options = _IMPORTERS[kind]
    # Imported on use: an importer may need pandas or pyarrow.
    read = getattr(importlib.import_module(f"whatif.opdb.importers.{module}"), function)
    found: Found = read(path, **{name: given[name] for name in options})
    if not found.contributions:
        reasons = "; ".join(found.warnings()) or "it is empty"
        raise WhatifError(f"{path}: expected usable measurements, got none: {reasons}.")
    return found


def add_found(found: Found, store: Store, progress: Callable[[int, int], None] | None = None) -> Merged:
    """Write the contributions of a reader. Raises WhatifError if all are refused, or a file cannot be written."""
    done = Merged()
    known = store.devices_by_times()
    for place, (rows, origin) in enumerate(found.contributions):
        if progress:
            progress(place, len(found.contributions))
        for part in in_shards(rows):
            with done.refusing():
                outcome, name = store.add(part, origin, known=known)
                done.keep(name, outcome, len(part))
    done.check()
    return done
