"""A cached property that graphs of the same structure share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from threading import Lock
from typing import Any, Generic, TypeVar, overload

import numpy as np

from whatif.graph.types import Array, Dependencies, Waits

T = TypeVar("T")

_CACHE, _OWN, _UNREAD = "_of_structure", "_of_graph", "_unread"


class Later:
    """A column of an edited graph, computed when it is first read, once for all graphs that have it."""

    __slots__ = ("_column", "_compute", "_lock")

    def __init__(self, compute: Callable[[], Array]) -> None:
        self._compute: Callable[[], Array] | None = compute
        self._column: Array
        self._lock = Lock()

    def read(self) -> Array:
        """Return the column, read-only: the same array in every thread."""
        with self._lock:
            if self._compute is not None:
                self._column, self._compute = self._compute(), None
                freeze(self._column)
        return self._column


def unread(owner: object) -> dict[str, Later]:
    """Return the columns that a graph has not computed yet, by name."""
    columns: dict[str, Later] = owner.__dict__.get(_UNREAD, {})
    return columns


class shared_property(Generic[T]):  # noqa: N801 -- used as a decorator, like functools.cached_property
    """Computed once for all objects joined by ``share``; like ``functools.cached_property`` for a single one."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> shared_property[T]: ...
    @overload
    def __get__(self, owner: object, kind: type | None = None) -> T: ...
    def __get__(self, owner: object | None, kind: type | None = None) -> T | shared_property[T]:
        if owner is None:
            return self
        return found(owner, self._name, self._compute)


def found(owner: object, name: str, compute: Callable[[Any], T]) -> T:
    """Return ``compute(owner)``, cached under ``name`` for it and all that share with it."""
    cache: dict[str, T] = owner.__dict__.setdefault(_CACHE, {})
    if name not in cache:
        cache[name] = compute(owner)
        freeze(cache[name])
    return cache[name]


def newest(owner: object, name: str, key: tuple[object, ...], compute: Callable[[], T]) -> T:
    """Return ``compute()``, cached under ``name`` as above, but only for the last ``key``: the same objects."""
    cache: dict[str, tuple[tuple[object, ...], T]] = owner.__dict__.setdefault(_CACHE, {})
    kept = cache.get(name)
    if kept is None or any(old is not new for old, new in zip(kept[0], key, strict=True)):
        kept = cache[name] = key, compute()
        freeze(kept[1])
    return kept[1]


def of_columns(*columns: str) -> Callable[[Callable[[Any], T]], Callable[[Any], T]]:
    """Decorate a function of a graph's structure and of ``columns`` or tables: as ``newest``, for that graph's."""

    def decorated(compute: Callable[[Any], T]) -> Callable[[Any], T]:
        @wraps(compute)
        def kept(graph: Any) -> T:
            key = tuple(getattr(graph, column) for column in columns)
            return newest(graph, f"{compute.__module__}.{compute.__name__}", key, lambda: compute(graph))

        return kept

    return decorated


def of_graph(compute: Callable[[Any], T]) -> Callable[[Any], T]:
    """Decorate a function of a whole graph: computed once for each graph, and for no edited one."""

    @wraps(compute)
    def kept(graph: Any) -> T:
        cache: dict[str, T] = graph.__dict__.setdefault(_OWN, {})
        name = f"{compute.__module__}.{compute.__name__}"
        if name not in cache:
            cache[name] = compute(graph)
            freeze(cache[name])
        return cache[name]

    return kept


def changed(old: T, attributes: Mapping[str, Any]) -> T:
    """Return ``old``, a dataclass, with other attributes and no caches: eight times faster than its ``replace``.

    Raises TypeError if it has no such attribute.
    """
    known = old.__dict__.keys() | unread(old).keys()
    if unknown := attributes.keys() - known:
        raise TypeError(f"{type(old).__name__} has no {', '.join(sorted(unknown))}")
    new = object.__new__(type(old))
    columns = {**unread(old), **attributes}
    new.__dict__.update(old.__dict__, **attributes)
    new.__dict__[_UNREAD] = {name: column for name, column in columns.items() if isinstance(column, Later)}
    for name in new.__dict__[_UNREAD].keys() & attributes.keys():
        del new.__dict__[name]
    for cache in (_CACHE, _OWN):
        new.__dict__.pop(cache, None)
    return new


def share(old: object, new: object) -> None:
    """Let ``old`` and ``new`` share their caches."""
    new.__dict__[_CACHE] = old.__dict__.setdefault(_CACHE, {})


def keep(old: object, new: object, names: Iterable[str]) -> None:
    """Let ``new`` start with what ``old`` has cached under ``names``."""
    cache = old.__dict__.get(_CACHE, {})
    new.__dict__[_CACHE] = {name: cache[name] for name in names if name in cache}


def freeze(*values: object) -> None:
    """Make arrays read-only, and those in tuples and in tables of columns (``Dependencies``, ``Waits``)."""
    for value in values:
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        elif isinstance(value, tuple):
            freeze(*value)
        elif isinstance(value, Dependencies | Waits):
            freeze(*(getattr(value, name) for name in value.__slots__))
