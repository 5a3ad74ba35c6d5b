"""Locations of the user's database and of the index built from it."""

from __future__ import annotations

import os
from pathlib import Path

from whatif.runtime.files import cache_home, data_home

# Environment variable that replaces the user's default database.
DATABASE_VARIABLE = "WHATIF_OPDB"


def default_database() -> Path:
    """Return the folder of the default database."""
    named = os.environ.get(DATABASE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return data_home() / "opdb"


def cache_folder() -> Path:
    """Return the folder for indexes, which can be rebuilt at any time."""
    return cache_home() / "opdb" / "index"
