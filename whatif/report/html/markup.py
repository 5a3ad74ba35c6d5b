"""HTML that is escaped unless it was made here: names from a trace are always text."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable

from whatif.report.printable import drawn

# Longer names are cut: some template names fill whole pages.
LONGEST = 600
# A sentence may hold several names.
LONGEST_SENTENCE = 4 * LONGEST

_VOID = frozenset(("meta", "input", "wbr"))
# Line breaks in names, after separators of their parts, and only in words that are too long for a column.
_LONG_WORD = re.compile(r"\S{16,}")
_JOINT = re.compile(r"(?<=[:=,;._<>(){}\[\]/+&*-])(?=[^:=,;._<>(){}\[\]/+&*-])")
_CODE = re.compile(r"`([^`]+)`")


class Html(str):
    """Markup that is already safe."""

    __slots__ = ()


Content = str | Html | Iterable["str | Html"]


def text(content: Content) -> Html:
    """Return content as markup: text is made harmless and escaped, markup stays, lists are joined."""
    if isinstance(content, Html):
        return content
    if not isinstance(content, str):
        return Html("".join(text(part) for part in content))
    return Html(html.escape(drawn(content, LONGEST)))


def name(content: str) -> Html:
    """Return a name of a trace or of a what-if, with line breaks allowed between its parts."""

    def broken(word: re.Match[str]) -> str:
        return "<wbr>".join(html.escape(part) for part in _JOINT.split(word[0]))

    return _marked_up(_LONG_WORD, drawn(content, LONGEST), broken)


def prose(sentence: str) -> Html:
    """Return a sentence of the library, with text between backticks as code."""
    return _marked_up(_CODE, drawn(sentence, LONGEST_SENTENCE), lambda code: tag("code", code[1]))


def _marked_up(pattern: re.Pattern[str], shown: str, marked: Callable[[re.Match[str]], str]) -> Html:
    """Escape text, marking up the matches of a pattern."""
    parts, end = [], 0
    for found in pattern.finditer(shown):
        parts += [html.escape(shown[end : found.start()]), marked(found)]
        end = found.end()
    return Html("".join([*parts, html.escape(shown[end:])]))


def tag(name: str, /, *contents: Content, **attributes: str | float | bool | None) -> Html:
    """Return an element. ``class_`` and ``data_value`` are written class and data-value; None and False are omitted."""
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        written.append(f" {attribute}" if value is True else f' {attribute}="{text(str(value))}"')
    inner = "".join(text(content) for content in contents)
    return Html(f"<{name}{''.join(written)}>" if name in _VOID else f"<{name}{''.join(written)}>{inner}</{name}>")


def paragraph(*contents: Content, class_: str | None = None) -> Html:
    """Return a paragraph."""
    return tag("p", *contents, class_=class_)


def items(sentences: Iterable[str]) -> Html:
    """Return sentences of the library as a list of points."""
    return tag("ul", [tag("li", prose(sentence)) for sentence in sentences])


def section(ident: str, title: str, *contents: Content) -> Html:
    """Return a section of the page with an id for links."""
    return tag("section", tag("h2", title, id=f"{ident}-title"), *contents, id=ident, aria_labelledby=f"{ident}-title")
