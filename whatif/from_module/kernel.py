"""A kernel of a predicted step, and the operator that stands for it."""

from __future__ import annotations

from msgspec import Struct

from whatif.graph.described import Described


class Kernel(Struct, frozen=True):
    """One kernel: its name, and the database operator whose time, times ``share``, is its own.

    ``also`` is an alternative operator for the same work: a library has kernels of both, and runs the faster one.
    ``low`` and ``high`` multiply the ends of the range. ``published_ns`` is the time of a kernel that no operator
    represents; ``low`` and ``high`` are then its whole range.
    """

    name: str
    what: Described
    share: float = 1.0
    known: bool = True
    also: Described | None = None
    low: float = 1.0
    high: float = 1.0
    published_ns: float | None = None


def named(kind: str, name: str, what: Described, share: float = 1.0) -> Kernel:
    """Return the kernel of an operator ``name``; ``kind`` in its name determines the kernel family."""
    return Kernel(f"predicted_{kind}_{name.strip('_')}_{what.dtype}", what, share)
