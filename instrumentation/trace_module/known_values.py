"""Values that do not depend on data (positions, masks), for programs that read them back.

Meta tensors have no values. What is computed only from sizes and constants is computed on the CPU as well, so that a
program that branches on its positions, or on its mask (nn.Transformer), takes the same branch as on a device.
"""

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

# Larger tensors, such as masks of all heads' scores, are rarely read back, and would dominate the time.
_MOST_BYTES = 2**24


class KnownValues:
    """CPU twins of the meta tensors with known values, by storage."""

    def __init__(self) -> None:
        self._twins: dict[int, torch.UntypedStorage] = {}

    def twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor with the values of ``tensor``; None if they are unknown."""
        if not tensor.is_meta:
            return tensor
        storage = self._twins.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Run an operator that returned ``result`` on known values; drop the values that it makes unknown."""
        outputs = [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
        if not outputs or not all(t.is_meta for t in outputs):
            return
        if func.is_view:  # the same storage, and so the same twin
            return
        twins = self._on_twins(func, args, kwargs) if all(map(_is_small, outputs)) else None
        for index, tensor in enumerate(outputs):
            key = tensor.untyped_storage()._cdata
            if twins is None:
                self._twins.pop(key, None)
            elif key not in self._twins:
                self._remember(tensor, twins[index])

    def _remember(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        memory: Any = torch.UntypedStorage  # untyped
        self._twins[storage._cdata] = memory(storage.nbytes(), device="cpu")
        weakref.finalize(storage, self._twins.pop, storage._cdata, None).atexit = False
        twin = self.twin(tensor)
        assert twin is not None  # made on the line above
        twin.copy_(value)

    def _on_twins(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Run an operator on twins, in place if it works in place. None if an input is unknown."""
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
        except Exception:  # not supported on the CPU: unknown
            return None
        return list(found) if isinstance(found, list | tuple) else [found]


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= _MOST_BYTES
