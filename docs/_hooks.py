"""Pages of the site that are made from the code: commands, what-ifs, the public API. mkdocs runs it (mkdocs.yml)."""

from __future__ import annotations

import argparse
import contextlib
import functools
import html
import importlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import whatif
import whatif.models
from whatif.cli.main import COMMANDS, main, parser_of
from whatif.prediction.transform import built_in_names, load_transform
from whatif.questions.advice.effort import Effort
from whatif.report.transforms_text import describe

# Help and reports wrap at the terminal's width; the site's are as wide as its code blocks.
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
# Steps for examples; the second where the first has nothing that the what-if changes.
PREDICTED = tuple(f"traces/predicted/{step}_predicted.json.gz" for step in ("resnet50_a100", "gpt2_h100"))
# Examples of what-ifs that answer with options, behind others, or for other recordings only.
_EIGHT = "distributed:workers=8,bandwidth=25Gbps"
EXAMPLES = {
    "balance_ranks": ("balance_ranks", ("traces/ranks_cpu/sleeping",)),
    "bandwidth": (f"{_EIGHT} bandwidth:factor=2", PREDICTED),
    "batch_size": ("batch_size:factor=2", PREDICTED),
    "blueconnect": (f"{_EIGHT} blueconnect", PREDICTED),
    "cpu": ("cpu:speedup=2", ("traces/transformer_cpu.json.gz",)),
    "data_loading": ("data_loading:workers=2", ("traces/resnet18_cifar_cpu_loader0.json.gz",)),
    "device": ("device:to=H100-SXM-80", PREDICTED),
    "dgc": (f"{_EIGHT} dgc", PREDICTED),
    "distributed": (_EIGHT, PREDICTED),
    "fused_adam": ("fused_adam", ("traces/transformer_cpu.json.gz",)),
    "scale": ("scale:kind=gpu,factor=0.5", PREDICTED),
    "straggler": (f"{_EIGHT} straggler", PREDICTED),
}
NEEDS_A_FILE = ("kernels", "metaflow")
# The tables of published.md, by heading, and the what-ifs in their rows.
PUBLISHED = {
    "timm, training steps on an RTX 3090": ("amp", "channels_last"),
    "NVIDIA DeepLearningExamples, weak-scaling efficiency, each model left out": ("distributed",),
    "NVIDIA DeepLearningExamples, AMP over FP32 or TF32 on one GPU": (
        "amp", "channels_last", "fused_adam", "rebatchnorm",
    ),
    "Megatron-LM on 8 to 512 A100s": (
        "tensor_parallel", "pipeline", "distributed", "activation_checkpoint", "gradient_accumulation",
    ),
    "SimuMax's Llama 3 on eight B200s": ("tensor_parallel", "pipeline", "zero"),
    "GPU pairs": ("device", "cuda_graph", "compile"),
}  # fmt: skip
# `whatif.instrumentation`, by the folder in which it lies.
RECORDING = ("instrumentation.recorder.record", "instrumentation.recorder.Recording", "instrumentation.collect.step")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference that are made from the code."""
    os.environ["COLUMNS"] = HELP_COLUMNS  # this process builds the site and nothing else
    for path, text in (
        ("reference/commands.md", commands()),
        ("reference/what-ifs.md", what_ifs()),
        *((f"reference/what-ifs/{name}.md", what_if(name)) for name in built_in_names()),
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
    for name in COMMANDS:
        parser = parser_of(name, importlib.import_module(f"whatif.cli.{name}"))
        parts += [f"## {name}\n", _block(parser.format_help())]
        parts += [part for word, sub in _subcommands(parser) for part in (f"### {name} {word}\n", _block(sub))]
    return "\n".join(parts)


def _subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                yield word, sub.format_help()


def what_ifs() -> str:
    """Every built-in what-if with its summary and its effort, each a link to its own page."""
    parts = [
        "# What-ifs\n",
        "Write options as `NAME:option=value,option=value`. Several names compose; "
        "[their order](../estimates.md#the-order-of-what-ifs) is explained with the estimates.\n",
        "| what-if | what it does | effort |",
        "|---|---|---|",
    ]
    for name in built_in_names():
        transform = load_transform(name)
        effort = Effort.of(transform.doc).size.name.lower()
        parts.append(f"| [{name}](what-ifs/{name}.md) | {html.escape(transform.summary)} | {effort} |")
    return "\n".join(parts)


def what_if(name: str) -> str:
    """One what-if: summary, a real example, how accurate it was so far, options, source and model."""
    known = describe(load_transform(name))
    parts = [f"# {name}\n", html.escape(known["summary"]) + "\n", *_example(name), "## Accuracy so far\n"]
    rows = [row for row in _scores() if name in re.findall(r"\w+", row.split("|")[1])]
    if rows:
        parts += ["| what-if | scored pairs | median error | largest | inside the range | width of the range |"]
        parts += ["|---|---|---|---|---|---|", *rows, "", "Every pair is in [accuracy](../../accuracy.md).\n"]
    else:
        parts.append("No pair on the accuracy page is about this what-if.\n")
    if rows := [row for heading, names in PUBLISHED.items() if name in names for row in _published(heading)]:
        parts += ["Measurements that others published, alone or with other what-ifs:\n"]
        parts += ["| table | rows | median error, % | mean error, % | bias, % | inside the range, % | high over low |"]
        parts += ["|---|---|---|---|---|---|---|", *rows, "", "The tables are in [published](../../published.md).\n"]
    if known["options"]:
        parts += ["## Options\n", "| option | type | default |", "|---|---|---|"]
        for option in known["options"]:
            kind = option["type"].replace("|", "or")
            parts.append(f"| `{option['name']}` | {kind} | {_default(option['default'])} |")
        parts.append("")
    return "\n".join([*parts, "## Model\n", *_sections(known["doc"].split("\n", 1)[-1])])


def _example(name: str) -> Iterator[str]:
    """A command that applies it to a recording that ships, with what it prints."""
    words, traces = EXAMPLES.get(name, (name, PREDICTED))
    for trace in traces:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            status = main(["apply", *words.split(), trace])
        if status == 0:
            yield "## Example\n"
            yield _block(f"$ whatif apply {words} {trace}\n{out.getvalue()}")
            if trace in PREDICTED:
                yield "This step is predicted, not recorded: it shows how to ask, not what a GPU took.\n"
            return
    if name not in NEEDS_A_FILE:
        raise PluginError(f"{name}: expected an example that can be run, got status {status}; add one to EXAMPLES.")


@functools.cache
def _scores() -> list[str]:
    """The rows of the accuracy page's table of what-ifs."""
    page = (Path(__file__).parent / "accuracy.md").read_text(encoding="utf-8")
    table = page.partition("| what-if | scored | median error |")[2].partition("\n\n")[0]
    return table.splitlines()[2:]


@functools.cache
def _published(heading: str) -> list[str]:
    """The rows of a table of published.md, each with the table's name."""
    page = (Path(__file__).parent / "published.md").read_text(encoding="utf-8")
    lines = page.partition(f"## {heading}\n\n")[2].partition("\n<!--")[0].splitlines()[2:]
    if not lines:
        raise PluginError(f"published.md: expected a table under the heading {heading!r}, got none.")
    return [f"| {heading}: {line.removeprefix('| ')}" for line in lines]


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
