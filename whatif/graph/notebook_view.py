"""How objects show themselves in a notebook: by the views that ``import whatif`` registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# From a class's name to the function that draws an object of it as HTML.
VIEWS: dict[str, Callable[[Any], str]] = {}


def notebook_view(self: Any) -> str:
    """Return the HTML that a notebook shows for an object; assigned to ``_repr_html_``."""
    return VIEWS[type(self).__name__](self)
