"""What files hold that people write: read up to a bound, and patterns in them only where they cannot take long."""

from __future__ import annotations

import re
from pathlib import Path

from whatif.errors import WhatifError

# An atom, a bracket of a group, an alternative or a quantifier; anything else (look-around, a reference) is refused.
_TOKEN = re.compile(
    r"(?P<atom>\\[^\d]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[\](){}*+?|])"
    r"|(?P<open>\((?:\?:)?(?!\?))|(?P<close>\))|(?P<bar>\|)|(?P<times>(?:[*+]|\{\d*,?\d*\})[?+]?)|(?P<maybe>\?[?+]?)",
    re.DOTALL,
)
# Ways to match one text that a matcher may have to try: a tenth of a second of work.
MOST_TRIES = 5e6
# Names of kernels get as long.
LONGEST_NAME = 2000


def read_at_most(path: str | Path, most_bytes: int) -> bytes:
    """Return what a file holds. Raises WhatifError where that is more, OSError or ValueError where it is unreadable."""
    with Path(path).open("rb") as file:  # a device says that it is empty, and never ends
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise WhatifError(
            f"{path}: expected a file of at most {most_bytes / 1e6:,.0f} MB, got a larger one; name another."
        )
    return content


def check_file_pattern(pattern: str, where: str, longest: int | None = None) -> None:
    """Refuse a pattern of a file that may take long: a repeated group, or too many ways to match.

    ``longest`` bounds the texts that it has to match as a whole; without it, it may match anywhere in any name.
    Matching tries one alternative after another and one length of a repeat after another, so that "(a+)+b" takes years.
    Raises WhatifError.
    """
    tries, place, after_group = (1.0 if longest else LONGEST_NAME), 0, False
    bars = [0]  # alternatives of each open group; the outermost first
    why = ""
    while place < len(pattern) and not why:
        token = _TOKEN.match(pattern, place)
        if token is None:
            why = f"{pattern[place : place + 12]!r}"
            break
        kind, place = token.lastgroup, token.end()
        if kind == "times" and after_group:
            why = "a repeated group"
        elif kind == "times":
            tries *= longest or LONGEST_NAME
        elif kind == "maybe":
            tries *= 2
        elif kind == "bar":
            bars[-1] += 1
        elif kind == "open":
            bars.append(0)
        elif kind == "close" and len(bars) > 1:
            tries *= 1 + bars.pop()
        after_group = kind == "close"
    if not why and tries > MOST_TRIES:
        why = "too many repeats or alternatives"
    if why:
        raise WhatifError(
            f"{where}: expected a pattern that cannot take long (letters, classes, one or two repeats of these, groups "
            f"without repeats), got {pattern[:60]!r} with {why}; write the names."
        )
