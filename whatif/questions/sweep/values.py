"""Which option of which what-if is varied, and over what values: ``bandwidth=1Gbps..400Gbps:100``, ``workers=2,4``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from whatif.prediction.transform import Transform
from whatif.runtime.errors import WhatifError, closest
from whatif.units import Bandwidth, Size

# Two numbers with their units, and the number of values from the first to the second.
_RANGE = re.compile(r"([0-9.eE+-]+?)([A-Za-z/]*)\.\.([0-9.eE+-]+?)([A-Za-z/]*):(\d+)")
# A larger table answers no question.
MOST_VALUES = 100_000


class Varied(Struct, frozen=True):
    """An option of some of the what-ifs of a composition, and its values as text."""

    option: str
    of: tuple[int, ...]  # positions of the what-ifs that take it
    values: tuple[str, ...]

    def put(self, transforms: Sequence[Transform], value: str) -> tuple[Transform, ...]:
        """Return the what-ifs with the option set. Raises WhatifError on a value that does not fit."""
        return tuple(
            transform.with_options({self.option: value}) if place in self.of else transform
            for place, transform in enumerate(transforms)
        )

    def number(self, transforms: Sequence[Transform], value: str) -> float | None:
        """Return a value as a number (bytes, bytes a second if it has such a unit); None if it is no number."""
        return as_number(self.put(transforms, value)[self.of[0]].options[self.option])


def as_number(value: Any) -> float | None:
    """Return an option's value as a number; None if it is none, or is not finite."""
    if isinstance(value, Bandwidth):
        return value.byte_s
    if isinstance(value, Size):
        return float(value.size_bytes)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def parse_vary(text: str, transforms: Sequence[Transform]) -> Varied:
    """Read ``option=a,b,c`` or ``option=a..b:n`` (n values, each the same multiple of the one before).

    An option without a name before it (unlike ``distributed.workers=2,4``) is set in all what-ifs that take it. Raises
    WhatifError if none does, if a value does not fit it, or if there is no value.
    """
    named, equals, listed = text.partition("=")
    name, dot, option = named.strip().rpartition(".")
    if not equals or not option or not listed.strip():
        raise WhatifError(f"--vary: expected option=a,b,c or option=a..b:n, got {text!r}.")
    of = tuple(
        place
        for place, transform in enumerate(transforms)
        if option in transform.parameters and (not dot or transform.name == name)
    )
    if not of:
        raise WhatifError(_unknown(named.strip(), name if dot else "", option, transforms))
    varied = Varied(option, of, listed_values(listed.strip(), "--vary"))
    for value in varied.values:
        varied.put(transforms, value)
    return varied


def _unknown(named: str, name: str, option: str, transforms: Sequence[Transform]) -> str:
    names = [transform.name for transform in transforms]
    if name and name not in names:
        return f"--vary: expected an option of {' or '.join(names)}, got {named!r}."
    options = sorted({key for t in transforms for key in t.parameters if not name or t.name == name})
    hint = closest(option, options, f"there is: {', '.join(options) or 'none'}.")
    return f"--vary: expected an option of {name or ' or '.join(names)}, got {option!r}; {hint}"


def listed_values(listed: str, name: str) -> tuple[str, ...]:
    """Return the values of ``a,b,c`` or ``a..b:n``, each once, in their order. Raises WhatifError, naming ``name``."""
    found = _RANGE.fullmatch(listed)
    values = _between(listed, found, name) if found else [value.strip() for value in listed.split(",")]
    if len(values) > 1 and any(_RANGE.fullmatch(value) for value in values):
        raise WhatifError(f"{name}: expected either values a,b,c or one range a..b:n, got both in {listed[:60]!r}.")
    if not all(values):
        raise WhatifError(f"{name}: expected values between the commas, got {listed[:60]!r}.")
    if len(values) > MOST_VALUES:
        raise WhatifError(f"{name}: expected at most {MOST_VALUES:,} values, got {len(values):,}.")
    return tuple(dict.fromkeys(values))


def _between(listed: str, found: re.Match[str], name: str) -> list[str]:
    unit, last_unit, count = found[2], found[4], int(found[5][:9])
    try:
        first, last = float(found[1]), float(found[3])
        if unit != last_unit:  # as 100Mbps..10Gbps: in bits or bytes
            kind, unit = (Bandwidth, "bps") if last_unit.lower().endswith(("ps", "/s")) else (Size, "B")
            first, last = (as_number(kind(found[k] + found[k + 1])) or 0.0 for k in (1, 3))
            first, last = (8 * first, 8 * last) if kind is Bandwidth else (first, last)
    except (ValueError, WhatifError):
        first = last = 0.0
    if not (0 < first < math.inf and 0 < last < math.inf and 0 < last / first < math.inf and 2 <= count <= MOST_VALUES):
        raise WhatifError(
            f"{name}: expected a..b:n with two numbers above 0 in one kind of unit and n from 2 to {MOST_VALUES:,}, as "
            f"in 1Gbps..100Gbps:20, got {listed[:60]!r}."
        )
    integral = not unit and all("." not in found[k] and float(found[k]).is_integer() for k in (1, 3))
    steps = (first * (last / first) ** (place / (count - 1)) for place in range(count))
    return [str(round(value)) if integral else _with_unit(value, unit) for value in steps]


def _with_unit(value: float, unit: str) -> str:
    """A number with its unit, with a prefix if it has none and is large."""
    if unit in ("bps", "B") and value >= 1e6:
        value, unit = (value / 1e9, f"G{unit}") if value >= 1e9 else (value / 1e6, f"M{unit}")
    return f"{value:.6g}{unit}"
