"""HTML that is escaped unless it was made here: what a trace calls things is text wherever it stands."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterable

from whatif.graph import GraphInfo
from whatif.report.printable import printable

# A name longer than this is cut: nobody reads on, and some templates' names are whole pages.
LONGEST = 600

_VOID = frozenset(("meta", "rect", "input", "br"))


class Html(str):
    """Markup that is safe as it is."""

    __slots__ = ()


Content = str | Html | Iterable["str | Html"]


def text(content: Content) -> Html:
    """Give content as markup: text is made harmless and escaped, markup stays, a list of both is put together."""
    if isinstance(content, Html):
        return content
    if not isinstance(content, str):
        return Html("".join(text(part) for part in content))
    shown = printable(content)
    return Html(html.escape(shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"))


def tag(name: str, /, *contents: Content, **attributes: str | float | bool | None) -> Html:
    """Give an element. ``class_`` and ``data_value`` are written class and data-value; None and False are left out."""
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        written.append(f" {attribute}" if value is True else f' {attribute}="{text(str(value))}"')
    inner = "".join(text(content) for content in contents)
    return Html(f"<{name}{''.join(written)}>" if name in _VOID else f"<{name}{''.join(written)}>{inner}</{name}>")


def paragraph(*contents: Content, class_: str | None = None) -> Html:
    """Give a paragraph."""
    return tag("p", *contents, class_=class_)


def items(sentences: Iterable[Content]) -> Html:
    """Give a list of points."""
    return tag("ul", [tag("li", sentence) for sentence in sentences])


def section(ident: str, title: str, *contents: Content) -> Html:
    """Give a part of the page that a link can lead to."""
    return tag("section", tag("h2", title, id=f"{ident}-title"), *contents, id=ident, aria_labelledby=f"{ident}-title")


def traced(info: GraphInfo) -> str:
    """Give the trace as a command takes it: its quoted name, or, of several ranks, a word for their folder."""
    return "FOLDER" if info.ranks else shlex.quote(info.path)


def command(*words: str) -> Html:
    """Say how a terminal shows the same."""
    where = " (FOLDER: where the files of the ranks lie)" if "FOLDER" in words else ""
    return paragraph("The same in a terminal: ", tag("code", " ".join(words)), where, class_="command")
