"""Operator graphs that a benchmark takes down once and keeps, in the cache folder of whoever runs it."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable

from whatif.from_module.operations import Operation, OperatorGraph
from whatif.runtime.files import cache_home


def kept(key: str, take_down: Callable[[], OperatorGraph | None]) -> OperatorGraph | None:
    """Return the graph of a key, taken down where none is kept; None is kept as well.

    What is kept is a pickle: the folder is the user's own, and no one else may write there.
    """
    folder = cache_home().with_name("whatif-published")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A pickle of another version's fields is of no use.
    told = [key, *OperatorGraph.__struct_fields__, *Operation.__struct_fields__]
    path = folder / hashlib.sha256(" ".join(told).encode()).hexdigest()[:16]
    if path.exists():
        found = pickle.loads(path.read_bytes())
        return found if isinstance(found, OperatorGraph) else None
    graph = take_down()
    path.write_bytes(pickle.dumps(graph))
    return graph
