"""Quantities as people write them, with their unit: ``25Gbps`` (bits), ``3.2GB/s`` (bytes), ``4MB``, ``512KiB``.

They are types of a transform's options. A number without a unit is refused: bits and bytes differ by eight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from whatif.runtime.errors import WhatifError

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_NUMBER = r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*"
_PREFIX = r"([kKmMgGtT]i?)?"
# A small b is a bit and a large B a byte, as everybody writes them.
_BANDWIDTH = re.compile(rf"{_NUMBER}{_PREFIX}(?:(bps|b/s|bit/s)|(Bps|B/s))\s*")
_SIZE = re.compile(rf"{_NUMBER}{_PREFIX}B\s*")
_KIB = 1024
# Values beyond these are implausible for a link or a message.
_LEAST_BYTE_S, _MOST_BYTE_S, _MOST_BYTES = 1 / 8, 1e15, 1e15


def counted(number: int, thing: str, things: str = "") -> str:
    """Return a number with its noun: 1 task, 2,000 tasks; ``things`` is the plural if it does not just add an "s"."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def size(size_bytes: float) -> str:
    """Return a number of bytes as people read it: 1.25 GiB, 1 byte."""
    value, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= _KIB and len(units) > 1:
        value, units = value / _KIB, units[1:]
    return counted(round(value), "byte") if units[0] == "bytes" else f"{value:,.2f} {units[0]}"


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """A rate from text: ``Bandwidth("25Gbps").byte_s`` is 3.125e9. Raises WhatifError on anything without its unit."""

    text: str = field(compare=False)
    byte_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Read the text."""
        found = _BANDWIDTH.fullmatch(str(self.text))
        byte_s = float(found[1]) * _factor(found[2]) / (8 if found[3] else 1) if found else 0.0
        if not _LEAST_BYTE_S <= byte_s <= _MOST_BYTE_S:
            raise WhatifError(
                f"expected a bandwidth above 0 with its unit, as 25Gbps (bits) or 3.2GB/s (bytes), "
                f"{'' if byte_s <= _MOST_BYTE_S else 'of at most 1 PB/s, '}got {self.text!r}."
            )
        object.__setattr__(self, "byte_s", byte_s)

    def __str__(self) -> str:
        """Return the text that it was read from."""
        return str(self.text)


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes from text: ``Size("4MB").size_bytes`` is 4,000,000, ``512KiB`` is 524,288."""

    text: str = field(compare=False)
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Read the text."""
        found = _SIZE.fullmatch(str(self.text))
        size = float(found[1]) * _factor(found[2]) if found else 0.0
        if not 1 <= size <= _MOST_BYTES:
            raise WhatifError(
                f"expected a size of 1 byte or more with its unit, as 4MB (a million bytes each) or 512KiB (1,024 "
                f"each), {'' if size <= _MOST_BYTES else 'of at most 1 PB, '}got {self.text!r}."
            )
        object.__setattr__(self, "size_bytes", round(size))

    def __str__(self) -> str:
        """Return the text that it was read from."""
        return str(self.text)


QUANTITIES = (Bandwidth, Size)


def _factor(prefix: str | None) -> float:
    letters = (prefix or "").lower()
    return _BINARY[letters] if letters in _BINARY else _DECIMAL[letters]
