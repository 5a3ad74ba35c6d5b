"""The commands that print the same as the page, as typed into a shell in the recording's folder."""

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

# Where the trace stands among the words of a command.
TRACE = object()


def command(baseline: Baseline, *words: str | object) -> Html:
    """Say how a terminal shows the same: ``words`` after ``whatif``, and what ``baseline`` needs to be found again."""
    shown, remark = _traced(baseline)
    typed = [shown if word is TRACE else shlex.quote(str(word)) for word in (*words, *_options(baseline))]
    code = tag("code", " ".join(["whatif", *typed]))
    return paragraph("The same in a terminal: ", code, remark, class_="command")


def typed(transform: Transform) -> str:
    """Return a what-if as a command finds it: one of a file by that file, without its folder."""
    try:
        known = load_transform(transform.name).source == transform.source
    except WhatifError:
        known = False
    return spelled(transform if known else replace(transform, name=f"./{Path(transform.source).name}"))


def _traced(baseline: Baseline) -> tuple[str, str]:
    """The trace as a command takes it, or a word for it, and what the word stands for."""
    info = baseline.graph.info
    if info.ranks:
        return "FOLDER", " (FOLDER: the folder of the ranks' files)"
    if printable(info.path) != info.path:
        return "TRACE", " (TRACE: the recording, whose name cannot be shown as it is)"
    # What begins with a dash would be taken for an option.
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
