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

# A person's own models lie in this folder of a database.
MODELS = "models"


def estimator(device: str, *, database: str | Path | None = None) -> Estimator:
    """Return the chain for ``device``, whatever it is called: a database, own models, shipped models, the data sheet.

    Without a database (or without pyarrow to index one) the models and the data sheet answer. Kernels are
    meant alone, as tasks of a trace are: launches are taken out of what models learned of times with launches. Raises
    WhatifError where ``database`` is named and is none.
    """
    index, own = opened(database)
    # Recordings call one die what we call the board (MI250X): a name of ours is not looked up among theirs.
    name = device if device in gpu_names() else device_called(device).name
    return Estimator(index, name, models=(*own, *shipped_models()), kernels_alone=True)


def opened(database: str | Path | None = None, *, progress: Progress | None = None) -> tuple[Index, list[LearnedModel]]:
    """Return the index and the models of a database; an empty index where none is named and the person has none.

    A model that is damaged is left out, with a sentence among the index's warnings.
    """
    folder = Path(database) if database is not None else default_database()
    models, wrong = models_in(folder / MODELS)
    if database is None and not (folder / MARKER).is_file():
        return Index({}, {}, (), tuple(wrong)), models
    try:
        index = open_index(Store.open(folder), progress=progress)
    except WhatifError:
        # Without pyarrow your own database cannot be indexed; the one that ships still answers.
        if database is not None or importlib.util.find_spec("pyarrow") is not None:
            raise
        sentence = f"{folder}: measured operators are not used: pyarrow is missing (whatif-profiler[opdb])."
        return Index({}, {}, (), (sentence, *wrong)), models
    return Index(index.families, index.groups, index.contributions, (*index.warnings, *wrong)), models
