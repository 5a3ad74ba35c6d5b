"""What a parameter may do to an operation's time, and the complexity functions that follow (Tianshu, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import product

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Float64, Int8, Int64


class Role(IntEnum):
    """How time follows a parameter; the number is its exponent in the complexity function, but for MODE."""

    INVERSE = -1
    NULL = 0
    LINEAR = 1
    MODE = 2


# "If a parameter only has no more than 5 possible values, we regard it as a mode selection parameter."
MOST_MODE_VALUES = 5
# More functions are not tried one by one: ten parameters of two roles each.
MOST_CANDIDATES = 1024


@dataclass(frozen=True)
class Parameter:
    """One parameter of n calls: ``values``, shape (n,), numbers or texts; ``dimension`` where a shape has it."""

    name: str
    values: npt.NDArray[np.generic]
    dimension: bool = False

    @property
    def text(self) -> bool:
        """Whether its values are texts."""
        return self.values.dtype.kind in "US"


def roles_of(parameter: Parameter) -> tuple[Role, ...]:
    """Return the roles that the pruning rules leave a parameter (Tianshu, section 3.2.2, step 1)."""
    if len(np.unique(parameter.values)) <= MOST_MODE_VALUES:
        return (Role.MODE,)
    if parameter.text:
        return (Role.NULL, Role.MODE)
    if parameter.dimension:
        return (Role.LINEAR, Role.NULL)
    return (Role.LINEAR, Role.INVERSE, Role.NULL, Role.MODE)


def candidates(parameters: Sequence[Parameter]) -> Int8:
    """Return the exponents of every complexity function that is left, shape (candidates, parameters).

    A mode has none: the functions of MODE and of NULL are one, and each value of a mode gets a network of its own. The
    first candidate is the empty function: no principal component. Raises ValueError above ``MOST_CANDIDATES``.
    """
    exponents = [sorted({int(r) % 2 * int(r) for r in roles_of(p)}, key=abs) for p in parameters]
    if np.prod([float(len(e)) for e in exponents]) > MOST_CANDIDATES:
        raise ValueError(f"expected at most {MOST_CANDIDATES} complexity functions, got {exponents}")
    return np.array(list(product(*exponents)), dtype=np.int8).reshape(-1, len(parameters))


def modes_of(parameters: Sequence[Parameter]) -> tuple[tuple[int, ...], Int64]:
    """Return the places of the parameters that choose a network, and which combination of them each call is, (n,).

    Those are the parameters that can only be modes, and texts: what a text says is never a size, and an operator's name
    distinguishes operations, however many there are.
    """
    places = tuple(i for i, p in enumerate(parameters) if roles_of(p) == (Role.MODE,) or p.text)
    return places, combinations([parameters[i] for i in places], len(parameters[0].values) if parameters else 0)


def combinations(parameters: Sequence[Parameter], calls: int) -> Int64:
    """Return which combination of values each of the calls has, numbered in their order, shape (calls,)."""
    if not parameters:
        return np.zeros(calls, dtype=np.int64)
    codes = np.stack([np.unique(p.values, return_inverse=True)[1].reshape(-1) for p in parameters], axis=1)
    return np.unique(codes, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def told(parameters: Sequence[Parameter], exponents: npt.NDArray[np.integer]) -> str:
    """Return a complexity function as people write it: ``m * n * k / stride_h``."""

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
