"""Where the database of a person lies, and where the index that is built from it does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Names another database than the person's own, for all commands of a shell.
DATABASE_VARIABLE = "WHATIF_OPDB"


def default_database() -> Path:
    """Return the folder of the database where no option names one."""
    named = os.environ.get(DATABASE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return _folder("XDG_DATA_HOME", ".local/share", "LOCALAPPDATA", "Application Support")


def cache_folder() -> Path:
    """Return the folder in which indexes are kept; they can be built again at any time."""
    return _folder("XDG_CACHE_HOME", ".cache", "LOCALAPPDATA", "Caches") / "index"


def _folder(variable: str, on_linux: str, on_windows: str, on_macos: str) -> Path:
    """The person's folder by the rules of the system: the XDG base directories, Windows' and macOS' own."""
    folder = os.environ.get(variable, "")
    if os.path.isabs(folder):  # the XDG specification: a relative path is to be ignored
        base = Path(folder)
    elif sys.platform == "win32":
        base = Path(os.environ.get(on_windows) or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / on_macos
    else:
        base = Path.home() / on_linux
    return base / "whatif" / "opdb"
