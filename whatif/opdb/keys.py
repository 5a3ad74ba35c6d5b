"""The key of an operator: 64 bits, the same on every machine, computed for a whole table at once.

A stored key is never trusted: it is recomputed from the row, and operators with colliding keys are found
when the index is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Int64

UInt64 = npt.NDArray[np.uint64]

# The finalizer of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GAMMA, _MIX_1, _MIX_2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mixed(values: UInt64) -> UInt64:
    """Mix the bits of 64-bit numbers, one to one, keeping the shape."""
    z = values + _GAMMA  # arrays overflow without a warning
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


@lru_cache(maxsize=4096)
def text_code(text: str) -> int:
    """Return a 64-bit hash of a text: the first eight bytes of its SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def op_keys(family: str, texts: Mapping[str, UInt64], integers: Mapping[str, Int64]) -> UInt64:
    """Return the keys of n operators, shape (n,), from their family, the hashes of their texts and their integers.

    Columns, shape (n,), are hashed with their names, so their order does not matter.
    """
    columns = dict(texts)
    columns |= {name: np.asarray(column, dtype=np.int64).view(np.uint64) for name, column in integers.items()}
    key = np.full(len(next(iter(columns.values()))), text_code(f"family {family}"), dtype=np.uint64)
    names = sorted(columns)
    codes = np.array([text_code(f"column {name}") for name in names], dtype=np.uint64)
    for column in mixed(np.stack([columns[name] for name in names]) ^ codes[:, None]):
        key = mixed(key ^ column)
    return key


def held_out(keys: UInt64, seed: int, share: float) -> npt.NDArray[np.bool_]:
    """Return a mask, shape (n,), of the held-out operators: ``share`` of all keys, chosen by ``seed``.

    It depends only on the operator: a shape is held out on every device, or on none.
    """
    scattered = mixed(keys ^ mixed(np.array([seed], dtype=np.uint64)))
    return np.asarray(scattered < np.uint64(int(share * 2.0**64)), dtype=np.bool_)
