"""Text of a trace made harmless for a terminal."""

from __future__ import annotations

import unicodedata

# Control characters move the cursor and set colors, format characters reverse the direction, surrogates cannot be
# encoded, line separators break tables.
_HARMFUL = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def printable(text: str) -> str:
    """Return ``text`` on one line, with every character that a terminal would interpret replaced by "�"."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        " " if c in "\n\t" else "�" if unicodedata.category(c) in _HARMFUL else c  # a tab or line end is a space
        for c in text
    )


def drawn(name: str, longest: int) -> str:
    """Return a name of a trace for drawing: on one line, not too long."""
    shown = printable(name)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
