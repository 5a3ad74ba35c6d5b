"""Possible effects of a parameter on an operation's time, and the resulting complexity functions (Tianshu, 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import product

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Float64, Int8, Int64


class Role(IntEnum):
    """How time depends on a parameter; the number is its exponent in the complexity function, except for MODE."""

    INVERSE = -1
    NULL = 0
    LINEAR = 1
    MODE = 2


# "If a parameter only has no more than 5 possible values, we regard it as a mode selection parameter."
MOST_MODE_VALUES = 5
# The most functions to try: ten parameters of two roles each.
MOST_CANDIDATES = 1024


@dataclass(frozen=True)
class Parameter:
    """One parameter of n calls: ``values``, shape (n,), numbers or texts; ``dimension`` if it is a size in a shape."""

    name: str
    values: npt.NDArray[np.generic]
    dimension: bool = False

    @property
    def text(self) -> bool:
        """Whether its values are texts."""
        return self.values.dtype.kind in "US"


def roles_of(parameter: Parameter) -> tuple[Role, ...]:
    """Return the roles of a parameter after pruning (Tianshu, section 3.2.2, step 1)."""
    if len(np.unique(parameter.values)) <= MOST_MODE_VALUES:
        return (Role.MODE,)
    if parameter.text:
        return (Role.NULL, Role.MODE)
    if parameter.dimension:
        return (Role.LINEAR, Role.NULL)
    return (Role.LINEAR, Role.INVERSE, Role.NULL, Role.MODE)


def candidates(parameters: Sequence[Parameter]) -> Int8:
    """Return the exponents of every remaining complexity function, shape (candidates, parameters).

    A mode has exponent 0, like NULL; each of its values gets its own network. The first candidate is the empty
    function: no principal component. Raises ValueError above ``MOST_CANDIDATES``.
    """
    exponents = [sorted({int(r) % 2 * int(r) for r in roles_of(p)}, key=abs) for p in parameters]
    if np.prod([float(len(e)) for e in exponents]) > MOST_CANDIDATES:
        raise ValueError(f"expected at most {MOST_CANDIDATES} complexity functions, got {exponents}")
    return np.array(list(product(*exponents)), dtype=np.int8).reshape(-1, len(parameters))


def modes_of(parameters: Sequence[Parameter]) -> tuple[tuple[int, ...], Int64]:
    """Return the positions of the parameters that select a network, and each call's combination of their values, (n,).

    These are the parameters that can only be modes, and texts: a text is never a size, and an operator's name
    distinguishes operations, whatever their number.
    """
    positions = tuple(i for i, p in enumerate(parameters) if roles_of(p) == (Role.MODE,) or p.text)
    return positions, combinations([parameters[i] for i in positions], len(parameters[0].values) if parameters else 0)


def combinations(parameters: Sequence[Parameter], calls: int) -> Int64:
    """Return the number of each call's combination of values, in sorted order, shape (calls,)."""
    if not parameters:
        return np.zeros(calls, dtype=np.int64)
    codes = np.stack([np.unique(p.values, return_inverse=True)[1].reshape(-1) for p in parameters], axis=1)
    return np.unique(codes, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def formula(parameters: Sequence[Parameter], exponents: npt.NDArray[np.integer]) -> str:
    """Return a complexity function as a formula: ``m * n * k / (stride_h)``."""

    def side(sign: int) -> str:
        return " * ".join(p.name for p, e in zip(parameters, exponents.tolist(), strict=True) if e == sign)

    above, below = side(1) or "1", side(-1)
    return f"{above} / ({below})" if below else above


def as_numbers(parameters: Sequence[Parameter]) -> Float64:
    """Return the parameters' values as numbers, texts as 0, shape (n, parameters)."""
    columns: Mapping[int, Float64] = {
        i: np.zeros(len(p.values)) if p.text else p.values.astype(np.float64) for i, p in enumerate(parameters)
    }
    return np.stack(list(columns.values()), axis=1)
