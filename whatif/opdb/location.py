"""Where the database of a person lies, and where the index that is built from it does."""

from __future__ import annotations

import os
from pathlib import Path

from whatif.runtime.files import cache_home, data_home

# Names another database than the person's own, for all commands of a shell.
DATABASE_VARIABLE = "WHATIF_OPDB"


def default_database() -> Path:
    """Return the folder of the database where no option names one."""
    named = os.environ.get(DATABASE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return data_home() / "opdb"


def cache_folder() -> Path:
    """Return the folder in which indexes are kept; they can be built again at any time."""
    return cache_home() / "opdb" / "index"
