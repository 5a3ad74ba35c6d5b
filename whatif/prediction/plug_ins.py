"""Transforms that other installed packages offer: entry points in the group ``whatif.transforms``.

A package declares them in its pyproject.toml::

    [project.entry-points."whatif.transforms"]
    halve_attention = "my_package.halve_attention"

Users type the name; its value is a module of the same form as every transform. A package is imported only when one of
its names is used or listed.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from msgspec import Struct

from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "whatif.transforms"


class PlugIn(Struct, frozen=True):
    """A transform's name, and the package that offers it."""

    name: str
    package: str
    point: EntryPoint

    def load(self) -> types.ModuleType:
        """Import the transform's module. Raises WhatifError if that fails or gives something else."""
        try:
            loaded = self.point.load()
        except (Exception, SystemExit) as error:
            raise WhatifError(f"it cannot be imported: {type(error).__name__}: {error}") from error
        if not isinstance(loaded, types.ModuleType):
            raise WhatifError(f"expected its entry point to name a module, got {type(loaded).__name__}.")
        return loaded


def plug_ins() -> list[PlugIn]:
    """Return the plug-ins of other packages, sorted by name, including unusable ones."""
    from importlib.metadata import entry_points  # loads the mail package, 15 ms

    found = [PlugIn(point.name, _package(point), point) for point in entry_points(group=ENTRY_POINT_GROUP)]
    return sorted(found, key=lambda plug_in: (plug_in.name, plug_in.package))


def find_plug_in(name: str) -> PlugIn | None:
    """Return the plug-in of the given name, or None. Raises WhatifError if several packages offer it."""
    found = [plug_in for plug_in in plug_ins() if plug_in.name == name]
    if len(found) > 1:
        packages = " and ".join(repr(plug_in.package) for plug_in in found)
        raise WhatifError(f"transform {name!r}: the packages {packages} offer one of this name; uninstall all but one.")
    return found[0] if found else None


def _package(point: EntryPoint) -> str:
    """The name of an entry point's package, or of its module if the package is unknown."""
    distribution = getattr(point, "dist", None)
    return str(distribution.name) if distribution is not None else str(getattr(point, "value", point.name))
