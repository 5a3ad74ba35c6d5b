"""Where a file that is to be written really goes: only ever a regular file, and never through a link in its place."""

from __future__ import annotations

import os
from pathlib import Path

from whatif.errors import WhatifError

# What lies there is the kernel's: a file renamed onto one of its names would take the place of a device or a link.
NO_STORAGE = (Path("/dev"), Path("/proc"))


def output_file(path: str | Path) -> Path:
    """Give the regular file, new or old, that ``path`` stands for, with every symbolic link followed.

    A file is written beside its target and then renamed, so without this a link would be replaced instead of written
    through. Raises WhatifError where ``path`` leads to a folder, a device, a pipe or nowhere.
    """
    named = Path(os.path.abspath(path))
    target = Path(os.path.realpath(named))
    if any(file.is_relative_to(folder) for file in (named, target) for folder in NO_STORAGE):
        raise WhatifError(
            f"{path}: expected the name of a file to write, got something that is no file (a device or a stream); "
            "name another."
        )
    # What is still a link once all are followed is a link that leads back to itself.
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise WhatifError(f"{path}: expected the name of a file to write, got something that is no file; name another.")
    if not target.parent.is_dir():
        raise WhatifError(f"{path}: expected a folder to write into, got none at {target.parent}; create it first.")
    if not os.access(target.parent, os.W_OK):
        raise WhatifError(
            f"{path}: expected a folder that can be written to, got a read-only one at {target.parent}; choose another."
        )
    return target
