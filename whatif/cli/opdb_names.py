"""Look up what the arguments of ``whatif opdb`` name: a database, a device, a family of operators."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whatif.opdb.store import Store


def the_store(args: argparse.Namespace, *, create: bool = False) -> Store:
    """The database that --db names, or the user's own."""
    from whatif.opdb.location import default_database
    from whatif.opdb.store import Store

    return Store.open(args.db or default_database(), create=create)


def device_name(name: str | None) -> str | None:
    """The database's name of a device; None stays None."""
    from whatif.opdb.devices import device_called

    return device_called(name).name if name is not None else None


def family_name(name: str | None) -> str | None:
    """The name of a family of operators; raises WhatifError if there is no such family."""
    from whatif.graph.described import FAMILIES
    from whatif.runtime.errors import WhatifError

    if name is not None and name not in FAMILIES:
        raise WhatifError(f"opdb: expected a family ({', '.join(FAMILIES)}), got {name!r}.")
    return name
