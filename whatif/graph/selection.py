"""A selection of tasks, tied to the order of ids for which it was made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Array, Bool, Int64
from whatif.runtime.errors import WhatifError

_COMPOSE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert, np.logical_and, np.logical_or, np.logical_not)


class TaskOrder:
    """An identity that graphs share while a task id means the same task in each of them."""

    __slots__ = ()


class Selection:
    """Some tasks of a graph, in one order of its tasks.

    Composes with ``& | ^ ~``, also with bare masks of shape (n_tasks,). ``len`` is the number of selected tasks, and
    iteration yields their ids. As an index of a column (``graph.duration_ns[selection]``) and in numpy functions it is
    its ``mask``. An edit that changes ids (``insert``, ``remove``, ``split``, ``add_dependencies`` where it re-orders)
    makes another order: methods of the edited graph raise WhatifError for an earlier selection. Neither
    ``mask`` nor ``ids`` nor an index of a column is checked in this way.
    """

    __slots__ = ("_ids", "mask", "order")

    mask: Bool  # shape (n_tasks,), read-only
    order: TaskOrder

    def __init__(self, mask: Bool, order: TaskOrder) -> None:
        mask.flags.writeable = False
        self.mask, self.order = mask, order
        self._ids: Int64 | None = None

    @property
    def ids(self) -> Int64:
        """The ids of the selected tasks, ascending, read-only."""
        if self._ids is None:
            self._ids = np.flatnonzero(self.mask)
            self._ids.flags.writeable = False
        return self._ids

    # numpy's bool, as in a mask: ``~`` of Python's bool is a number.
    def any(self) -> np.bool_:
        """Return whether a task is selected."""
        return self.mask.any()

    def all(self) -> np.bool_:
        """Return whether every task is selected."""
        return self.mask.all()

    def sum(self) -> int:
        """Return the number of selected tasks, as ``len``; for code that counts with a mask."""
        return len(self)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.mask)) if self._ids is None else len(self._ids)

    def __bool__(self) -> bool:
        return bool(self.any())

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __getitem__(self, tasks: Any) -> Any:
        """Return for each of ``tasks`` (ids, a mask or a slice) whether it is selected."""
        return self.mask[tasks.mask if isinstance(tasks, Selection) else tasks]

    def __setitem__(self, tasks: Any, value: Any) -> None:
        raise WhatifError("expected a mask to write into, got a selection, which is read-only; use its .mask.copy().")

    def __and__(self, other: Selection | Bool | bool) -> Selection:
        return self._composed(np.bitwise_and, self, other)

    def __or__(self, other: Selection | Bool | bool) -> Selection:
        return self._composed(np.bitwise_or, self, other)

    def __xor__(self, other: Selection | Bool | bool) -> Selection:
        return self._composed(np.bitwise_xor, self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> Selection:
        return Selection(~self.mask, self.order)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if dtype is not None and np.issubdtype(dtype, np.integer):
            raise WhatifError("expected ids, got a selection, which numpy reads as a mask; use its .ids.")
        return self.mask.astype(self.mask.dtype if dtype is None else dtype, copy=bool(copy))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and ufunc in _COMPOSE and not kwargs:
            return self._composed(ufunc, *inputs)
        return getattr(ufunc, method)(*(_plain(each) for each in inputs), **kwargs)

    def __repr__(self) -> str:
        return f"Selection({len(self):,} of {len(self.mask):,} tasks)"

    def _composed(self, ufunc: np.ufunc, *inputs: Any) -> Selection:
        for each in inputs:
            if isinstance(each, Selection):
                if each.order is not self.order:
                    raise WhatifError(
                        "expected selections of one graph, got two of graphs whose tasks have different ids; select "
                        "both again on the edited graph."
                    )
            elif np.asarray(each).dtype != np.bool_ or np.shape(each) not in ((), self.mask.shape):
                raise WhatifError(
                    f"expected a selection or a mask of {len(self.mask)} tasks to combine, got an array of "
                    f"{np.asarray(each).dtype} with shape {np.shape(each)}."
                )
        return Selection(ufunc(*(_plain(each) for each in inputs)), self.order)


# Tasks as an edit takes them: a selection of its graph, a mask of shape (n_tasks,), or ids.
Tasks = Selection | Array


def mask_of(tasks: Selection, order: TaskOrder) -> Bool:
    """Return the mask of a selection. Raises WhatifError if it was made for another order of tasks."""
    if tasks.order is not order:
        raise WhatifError(
            "expected a selection of this graph, got one of a graph whose tasks have other ids, which an edit changed; "
            "select again on the edited graph, or make the edits that keep ids (scale, with_duration, attach) first."
        )
    return tasks.mask


def _plain(value: Any) -> Any:
    return value.mask if isinstance(value, Selection) else value
