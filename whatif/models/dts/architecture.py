"""Load an architecture: a built-in one, or a user's script with ``roles`` and ``play`` (DTS §III-F)."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

from whatif.models.dts.built_in import BUILT_IN, Architecture
from whatif.runtime.errors import WhatifError

SHAPES = {
    "roles": ("dnn", "training"),
    "play": ("plan", "training"),
    "cuts": ("dnn", "training", "machines"),
    "allocate": ("roles", "machines"),
}
_OPTIONAL = ("cuts", "allocate")
_SIGNATURES = {name: f"{name}({', '.join(parameters)})" for name, parameters in SHAPES.items()}


def load_architecture(name: str) -> Architecture:
    """Return a built-in architecture by name, or run a ``.py`` file that defines one (name only files that you trust).

    Raises WhatifError if there is none, or if its functions do not have the signatures that the message shows.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not name.endswith(".py"):
        raise WhatifError(f"dts: expected an architecture of {', '.join(BUILT_IN)} or a .py file, got {name!r}.")
    path = Path(name)
    if not path.is_file():
        raise WhatifError(f"{name}: expected the script of an architecture, got no such file.")
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(f"whatif_user_architecture_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise WhatifError(f"{path}: the architecture could not be run: {type(error).__name__}: {error}") from error
    return architecture_of(module, path.stem)


def architecture_of(module: ModuleType, name: str) -> Architecture:
    """Check a module's functions and return the architecture that they define."""
    where = getattr(module, "__file__", None) or name
    found = {}
    for function, parameters in SHAPES.items():
        value = getattr(module, function, None)
        if value is None and function in _OPTIONAL:
            continue
        if not callable(value):
            wanted = f"{_SIGNATURES['roles']} and {_SIGNATURES['play']}"
            raise WhatifError(f"{where}: expected functions {wanted}, got no {function}().")
        signature = inspect.signature(value)
        plain = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in signature.parameters.values())
        if not plain or len(signature.parameters) != len(parameters):
            raise WhatifError(f"{where}: expected {_SIGNATURES[function]}, got {function}{signature}.")
        found[function] = value
    doc = inspect.getdoc(module) or name
    return Architecture(
        name, doc.splitlines()[0], found["roles"], found["play"], found.get("cuts"), found.get("allocate")
    )
