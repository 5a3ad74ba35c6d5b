"""Pages of the site that are made from the code: commands, what-ifs, the public API. mkdocs runs it (mkdocs.yml)."""

from __future__ import annotations

import argparse
import html
import importlib
import os
import re
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import whatif
from whatif.cli.main import COMMANDS, parser_of
from whatif.report.transforms_text import describe
from whatif.transform import built_in_names, load_transform

# argparse wraps its help to the terminal; the site's is as wide as its code blocks.
HELP_COLUMNS = "90"
# What is asked of a graph from Python, one function a question, and what they take: not names of `whatif` itself.
QUESTIONS = (
    "whatif.baseline.Baseline",
    "whatif.explain.explain",
    "whatif.sensitivity.sensitivity",
    "whatif.sensitivity.at_speedups",
    "whatif.advice.advise.advise",
    "whatif.sweep.sweep.sweep",
    "whatif.sweep.scaling.scaling",
    "whatif.memory_summary.memory_summary",
    "whatif.comparison.two_recordings.TwoRecordings",
    "whatif.comparison.compare.compare",
    "whatif.comparison.regression.check_regression",
    "whatif.validate.validate",
)
# `whatif.instrumentation`, by the folder in which it lies.
RECORDING = ("instrumentation.recorder.record", "instrumentation.recorder.Recording", "instrumentation.collect.step")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference that are made from the code."""
    for path, text in (
        ("reference/commands.md", commands()),
        ("reference/what-ifs.md", what_ifs()),
        ("reference/python.md", api()),
    ):
        files.append(File.generated(config, path, content=text))
    return files


def commands() -> str:
    """Every command and its options, as ``--help`` prints them."""
    parts = ["# Commands\n", "What `whatif COMMAND --help` prints. `whatif` alone shows which command answers what.\n"]
    kept = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = HELP_COLUMNS
    try:
        for name in COMMANDS:
            parser = parser_of(name, importlib.import_module(f"whatif.cli.{name}"))
            parts += [f"## {name}\n", _block(parser.format_help())]
            parts += [part for word, sub in _subcommands(parser) for part in (f"### {name} {word}\n", _block(sub))]
    finally:
        if kept is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = kept
    return "\n".join(parts)


def _subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                yield word, sub.format_help()


def what_ifs() -> str:
    """Every built-in what-if: summary, options, source and model, as ``whatif transforms NAME`` has them."""
    parts = [
        "# What-ifs\n",
        "Options are spelled `NAME:option=value,option=value`; several names compose, left to right.\n",
    ]
    for name in built_in_names():
        known = describe(load_transform(name))
        parts += [f"## {name}\n", html.escape(known["summary"]) + "\n"]
        if known["options"]:
            parts += ["| option | type | default |", "|---|---|---|"]
            for option in known["options"]:
                kind = option["type"].replace("|", "or")
                parts.append(f"| `{option['name']}` | {kind} | {_default(option['default'])} |")
            parts.append("")
        parts += _sections(known["doc"].split("\n", 1)[-1])
    return "\n".join(parts)


def _default(value: object) -> str:
    return "" if value in ("", None) else f"`{value}`"


def api() -> str:
    """The public names of the package, from their docstrings."""
    parts = ["# Python\n", "The first are names of `whatif` itself: `import whatif; whatif.read(...)`.\n"]
    parts += [f"::: {whatif._HOME[name]}.{name}\n" for name in whatif.__all__]
    parts += ["## Questions {#questions}\n", "What the commands ask. Each is imported from the module that is named.\n"]
    parts += [f"::: {name}\n    options: {{heading_level: 3, show_root_full_path: true}}\n" for name in QUESTIONS]
    parts += ["## Recording {#recording}\n", "Names of `whatif.instrumentation`, the only part that needs torch.\n"]
    parts += [f"::: {name}\n    options: {{heading_level: 3}}\n" for name in RECORDING]
    return "\n".join(parts)


def _sections(doc: str) -> Iterator[str]:
    """A docstring's sections (``Source: ...``) as paragraphs: it was wrapped for an editor's width."""
    joined = re.sub(r"\n[ \t]+(?=\S)", " ", doc.strip())
    for line in filter(None, joined.splitlines()):
        text = html.escape(line).replace("*", "&#42;")
        yield re.sub(r"^([A-Z]\w+): +", r"**\1.** ", text) + "\n"


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"
