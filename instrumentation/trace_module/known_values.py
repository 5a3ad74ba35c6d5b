"""Values that follow from the program alone (positions, masks): a program that reads them back gets them.

Tensors on meta have no values. Integers and truths that are made of nothing but sizes and constants are computed beside
them, on the CPU, so that a program that looks at its own positions takes the branch that it would take.
"""

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

# Larger ones are masks over scores, which no program reads back; computing them would take longer than all the rest.
_MOST_BYTES = 2**24


class KnownValues:
    """Twins with values of the meta tensors that have known ones, by their memory."""

    def __init__(self) -> None:
        self._twins: dict[int, torch.UntypedStorage] = {}

    def twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor with the values of ``tensor``; None where they are not known."""
        if not tensor.is_meta:
            return tensor
        storage = self._twins.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Compute what an operator that gave ``result`` makes of known values; forget what it makes unknown."""
        made = [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
        if not made or not all(t.is_meta for t in made):
            return
        if func.is_view:  # the same memory, and the same twin
            return
        twins = self._on_twins(func, args, kwargs) if all(map(_is_small, made)) else None
        for place, tensor in enumerate(made):
            key = tensor.untyped_storage()._cdata
            if twins is None:
                self._twins.pop(key, None)
            elif key not in self._twins:
                self._remember(tensor, twins[place])

    def _remember(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        memory: Any = torch.UntypedStorage  # untyped
        self._twins[storage._cdata] = memory(storage.nbytes(), device="cpu")
        weakref.finalize(storage, self._twins.pop, storage._cdata, None).atexit = False
        twin = self.twin(tensor)
        assert twin is not None  # made on the line above
        twin.copy_(value)

    def _on_twins(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Run an operator on twins; an operator in place changes the twin itself. None where an input is not known."""
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
            return None
        flat, spec = tree_flatten((args, kwargs))
        known: list[Any] = []
        for value in flat:
            if isinstance(value, torch.Tensor):
                value = self.twin(value)
                if value is None:
                    return None
            elif isinstance(value, torch.device):
                value = torch.device("cpu")
            known.append(value)
        args, kwargs = tree_unflatten(known, spec)
        try:
            found = func(*args, **kwargs)
        except Exception:  # what the CPU cannot do is not known
            return None
        return list(found) if isinstance(found, list | tuple) else [found]


def _is_small(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.untyped_storage().nbytes() <= _MOST_BYTES
