"""Notebook views and plots of objects, by functions that ``import whatif`` registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By class name, the function that renders an object as HTML, and the one that draws it as a figure.
VIEWS: dict[str, Callable[[Any], str]] = {}
FIGURES: dict[str, Callable[[Any], Any]] = {}


def notebook_view(self: Any) -> str:
    """Return the HTML that a notebook shows for an object; assigned to ``_repr_html_``."""
    return VIEWS[type(self).__name__](self)


def plot(self: Any) -> Figure:
    """Return a matplotlib figure of this object, as the command with ``--plot`` draws it.

    Raises WhatifError if matplotlib is not installed.
    """
    figure: Figure = FIGURES[type(self).__name__](self)
    return figure
