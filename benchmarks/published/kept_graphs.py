"""A cache of the benchmarks' operator graphs in the user's cache folder."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable

from whatif.from_module.operations import Operation, OperatorGraph
from whatif.runtime.files import cache_home


def kept(key: str, take_down: Callable[[], OperatorGraph | None]) -> OperatorGraph | None:
    """Return the cached graph of a key, capturing it if it is missing; None is cached as well.

    The cache is a pickle: the folder is the user's own, and nobody else may write there.
    """
    folder = cache_home().with_name("whatif-published")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The fields are part of the key: a pickle of another version is useless.
    identity = [key, *OperatorGraph.__struct_fields__, *Operation.__struct_fields__]
    path = folder / hashlib.sha256(" ".join(identity).encode()).hexdigest()[:16]
    if path.exists():
        found = pickle.loads(path.read_bytes())
        return found if isinstance(found, OperatorGraph) else None
    graph = take_down()
    path.write_bytes(pickle.dumps(graph))
    return graph
