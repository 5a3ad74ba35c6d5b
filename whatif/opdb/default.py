"""The default estimator: the user's own database, if there is one, and the models that ship."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from whatif.hardware.gpu import gpu_names
from whatif.opdb.chain import Estimator
from whatif.opdb.devices import device_called
from whatif.opdb.index import Index, open_index
from whatif.opdb.learned import LearnedModel, models_in, shipped_models
from whatif.opdb.location import default_database
from whatif.opdb.store import MARKER, Store
from whatif.runtime.errors import WhatifError
from whatif.runtime.progress import Progress

# The folder of the user's own models inside a database.
MODELS = "models"


def estimator(device: str, *, database: str | Path | None = None) -> Estimator:
    """Return the chain for ``device``, by any of its names: a database, its models, shipped models, the data sheet.

    Without a database (or without pyarrow to index one) the models and the data sheet answer. Times are of kernels
    alone, as for the tasks of a trace: launches are subtracted from models fitted to times with launches. Raises
    WhatifError if ``database`` is given and is not one.
    """
    index, database_models = opened(database)
    # Recordings use our name of a board (MI250X) for one die, so a name of ours is not looked up among theirs.
    name = device if device in gpu_names() else device_called(device).name
    return Estimator(index, name, models=(*database_models, *shipped_models()), kernels_alone=True)


def opened(database: str | Path | None = None, *, progress: Progress | None = None) -> tuple[Index, list[LearnedModel]]:
    """Return the index and the models of a database; an empty index if none is given and the user has none.

    A damaged model is left out, with a warning in the index.
    """
    folder = Path(database) if database is not None else default_database()
    models, damaged = models_in(folder / MODELS)
    if database is None and not (folder / MARKER).is_file():
        return Index({}, {}, (), tuple(damaged)), models
    try:
        index = open_index(Store.open(folder), progress=progress)
    except WhatifError:
        # Without pyarrow the user's database cannot be indexed; the shipped models still answer.
        if database is not None or importlib.util.find_spec("pyarrow") is not None:
            raise
        sentence = f"{folder}: measured operators are not used: pyarrow is missing (whatif-profiler[opdb])."
        return Index({}, {}, (), (sentence, *damaged)), models
    return Index(index.families, index.groups, index.contributions, (*index.warnings, *damaged)), models
