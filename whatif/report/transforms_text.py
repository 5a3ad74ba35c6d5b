"""The output of ``whatif transforms``: the list of what-ifs, or the options, source and model of one."""

from __future__ import annotations

import re
import shlex
import textwrap
import types
import typing
from typing import Any

from rich.text import Text

from whatif.prediction.plug_ins import PlugIn, plug_ins
from whatif.prediction.transform import (
    Transform,
    built_in_names,
    built_in_summaries,
    load_transform,
    plug_in_names,
)
from whatif.report.layout import plain, report
from whatif.runtime.errors import WhatifError
from whatif.units import QUANTITIES

# The sections of a transform's docstring, and the indentation of their continuation lines.
_LABEL = re.compile(r"(Source|Model|Effort):")
SECTION_INDENT = 8


def listing() -> dict[str, Any]:
    """Return every built-in and plug-in transform with its summary line, or the error on loading it."""
    built_in = [
        {"name": name, "origin": "built-in", "summary": summary, "source": source}
        for name, summary, source in built_in_summaries()
    ]
    plug_in = [_plug_in(name) for name in plug_in_names()]
    return {"transforms": built_in + plug_in + [_hidden(p) for p in plug_ins() if p.name in built_in_names()]}


def _hidden(plug_in: PlugIn) -> dict[str, Any]:
    """A plug-in hidden by a built-in: built-in names must not depend on installed packages."""
    reason = f"the package {plug_in.package!r} gives it the name of a built-in transform, which takes precedence"
    return {"name": plug_in.name, "origin": "plug-in", "summary": None, "error": reason}


def _plug_in(name: str) -> dict[str, Any]:
    try:
        transform = load_transform(name)
    except WhatifError as error:
        return {"name": name, "origin": "plug-in", "summary": None, "error": str(error)}
    except Exception as error:  # one broken plug-in must not hide all the others
        return {"name": name, "origin": "plug-in", "summary": None, "error": f"{type(error).__name__}: {error}"}
    return {"name": name, "origin": "plug-in", "summary": transform.summary, "source": transform.source}


def describe(transform: Transform) -> dict[str, Any]:
    """Return the details of one transform: summary, docstring, options with types and defaults, its file."""
    return {
        "name": transform.name,
        "summary": transform.summary,
        "doc": transform.doc,
        "source": transform.source,
        "overrides_schedule": transform.schedule is not None,
        "options": [
            {"name": name, "type": type_text(p.annotation), "default": _plain_value(p.default)}
            for name, p in transform.parameters.items()
        ],
    }


def type_text(annotation: Any) -> str:
    """Return an option's type in readable form: "float", "gpu | cpu", "int | none"."""
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(repr(a) if a == "" else str(a) for a in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(type_text(a) for a in typing.get_args(annotation))
    if annotation is type(None):
        return "none"
    if annotation is str:
        return "text"
    if annotation in QUANTITIES:
        return str(annotation.__name__).lower()
    return getattr(annotation, "__name__", str(annotation))


def _plain_value(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def print_listing(found: dict[str, Any]) -> None:
    """Print the list."""
    rows: list[tuple[str | Text, ...]] = []
    for entry in found["transforms"]:
        name = entry["name"] + (" (plug-in)" if entry["origin"] == "plug-in" else "")
        broken = entry["summary"] is None
        rows.append((name, plain(f"cannot be used: {entry['error']}", "red") if broken else entry["summary"]))
    with report() as out:
        if rows:
            out.table(None, ["", " "], rows, gives_way=1)
        else:
            out.say("no transforms are installed")
        out.say()
        out.say("whatif transforms NAME   shows the options of one, its source, and what it assumes", "dim")


def print_transform(found: dict[str, Any]) -> None:
    """Print one transform."""
    with report() as out:
        for number, line in enumerate(fitted(found["doc"], out.width)):
            out.say(line, "bold" if number == 0 else "", soft_wrap=True)
        out.title("Options")
        rows = [(o["name"], o["type"], _default_text(o["default"])) for o in found["options"]]
        if rows:
            out.table(None, ["option", "type", "default"], rows, text_columns=3, gives_way=1)
        else:
            out.say("  none")
        if found["overrides_schedule"]:
            out.say()
            out.say("It overrides the schedule; a composition can hold only one such what-if.")
        out.say()
        out.say(f"whatif apply {_example(found)} TRACE", soft_wrap=True)
        out.say(f"source: {found['source']}", "dim", soft_wrap=True)


def fitted(doc: str, width: int) -> list[str]:
    """Return the lines of a docstring, with overlong lines of its sections ("Model:  ...") refilled."""
    lines = doc.splitlines()
    if all(len(line) <= width for line in lines):
        return lines
    filled: list[str] = []
    for section in re.split(r"\n(?=\S|\n)", doc):
        head, *rest = section.split("\n")
        label = _LABEL.match(head)
        indent = " " * (SECTION_INDENT if label else len(head) - len(head.lstrip()))
        is_section = label is not None and all(line.startswith("  ") for line in rest)
        paragraphs = [" ".join([head, *(line.strip() for line in rest)])] if is_section else [head, *rest]
        for paragraph in paragraphs:
            filled += textwrap.wrap(
                paragraph, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            ) or [""]
    return filled


def _default_text(value: Any) -> str:
    if value is None:
        return "none"
    return repr(value) if value == "" else str(value)


def _example(found: dict[str, Any]) -> str:
    """An example command line, with the path of a script."""
    name = found["name"]
    if name not in {*built_in_names(), *plug_in_names()} or load_transform(name).source != found["source"]:
        name = found["source"]
    options = [o for o in found["options"] if o["default"] not in (None, "")]
    spelled = ",".join(f"{o['name']}={o['default']}" for o in options[:2])
    return shlex.quote(f"{name}:{spelled}" if spelled else str(name))
