"""Writes a page with `whatif report` and reads it back."""

from __future__ import annotations

from pathlib import Path

from tests.report_page import Page
from whatif.cli.main import main


def written(folder: Path, *words: str | Path) -> Page:
    """The page that a command writes."""
    out = folder / "page.html"
    assert main(["report", *map(str, words), "-o", str(out), "--quiet"]) == 0
    return Page(out)
