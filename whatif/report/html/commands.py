"""Shell commands, in the recording's folder, that print the same as the page."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from whatif.prediction.baseline import Baseline
from whatif.prediction.composition import spelled
from whatif.prediction.transform import Transform, load_transform
from whatif.prediction.trust import trust_of
from whatif.report.html.markup import Html, paragraph, tag
from whatif.report.printable import printable
from whatif.runtime.errors import WhatifError
from whatif.simulation.steps import default_clock

# Placeholder of the trace in a command.
TRACE = object()


def command(baseline: Baseline, *words: str | object) -> Html:
    """Return the command that prints the same: ``words`` after ``whatif``, and the options that give ``baseline``."""
    shown, remark = _traced(baseline)
    typed = [shown if word is TRACE else shlex.quote(str(word)) for word in (*words, *_options(baseline))]
    code = tag("code", " ".join(["whatif", *typed]))
    return paragraph("The same in a terminal: ", code, remark, class_="command")


def typed(transform: Transform) -> str:
    """Return a what-if as a command argument: one from a file by the file's name, without its folder."""
    try:
        known = load_transform(transform.name).source == transform.source
    except WhatifError:
        known = False
    return spelled(transform if known else replace(transform, name=f"./{Path(transform.source).name}"))


def _traced(baseline: Baseline) -> tuple[str, str]:
    """The trace as a command argument, or a placeholder and its explanation."""
    info = baseline.graph.info
    if info.ranks:
        return "FOLDER", " (FOLDER: the folder of the ranks' files)"
    if printable(info.path) != info.path:
        return "TRACE", " (TRACE: the recording, whose name cannot be shown as it is)"
    # A leading dash would make it an option.
    return shlex.quote(f"./{info.path}" if info.path.startswith("-") else info.path), ""


def _options(baseline: Baseline) -> list[str]:
    graph = baseline.graph
    clock = ["--clock", baseline.clock] if baseline.clock != default_clock(graph) else []
    corrects = graph.info.untraced_step_ns is not None or graph.info.profiler is not None
    as_recorded = baseline.calibration is None and corrects
    void = trust_of(baseline).refusal(graph.info.path) is not None
    return [
        *graph.info.step_option, *clock, *(["--as-recorded"] if as_recorded else []), *(["--force"] if void else [])
    ]  # fmt: skip
