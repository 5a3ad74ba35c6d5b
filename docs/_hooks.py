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
import whatif.models
from whatif.cli.main import COMMANDS, parser_of
from whatif.prediction.transform import built_in_names, load_transform
from whatif.report.transforms_text import describe

# argparse wraps its help to the terminal; the site's is as wide as its code blocks.
HELP_COLUMNS = "90"
# What is asked of a graph from Python, one function a question, and what they take: not names of `whatif` itself.
QUESTIONS = (
    "whatif.prediction.baseline.Baseline",
    "whatif.questions.explain.explain",
    "whatif.questions.sensitivity.sensitivity",
    "whatif.questions.sensitivity.at_speedups",
    "whatif.questions.advice.advise.advise",
    "whatif.questions.sweep.sweep.sweep",
    "whatif.questions.sweep.scaling.scaling",
    "whatif.questions.memory_summary.memory_summary",
    "whatif.questions.comparison.two_recordings.TwoRecordings",
    "whatif.questions.comparison.compare.compare",
    "whatif.questions.comparison.regression.check_regression",
    "whatif.questions.validate.validate.validate",
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
    parts = [
        "# Commands\n",
        "The output of `whatif COMMAND --help`. `whatif` without a command lists the questions and their commands.\n",
    ]
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
        "Write options as `NAME:option=value,option=value`. Several names compose from left to right.\n",
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
    parts = ["# Python\n", "These names are in `whatif` itself: `import whatif; whatif.read(...)`.\n"]
    parts += [f"::: {whatif._HOME[name]}.{name}\n" for name in whatif.__all__]
    parts += ["## For what-ifs {#models}\n", "These names are in `whatif.models`, for scripts of your own.\n"]
    parts += [
        f"::: {whatif.models._HOME[name]}.{name}\n    options: {{heading_level: 3}}\n" for name in whatif.models.__all__
    ]
    parts += ["## Questions {#questions}\n", "The functions behind the commands. Import each from the module shown.\n"]
    parts += [f"::: {name}\n    options: {{heading_level: 3, show_root_full_path: true}}\n" for name in QUESTIONS]
    parts += [
        "## Recording {#recording}\n",
        "These names are in `whatif.instrumentation`, the only part that needs torch.\n",
    ]
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
