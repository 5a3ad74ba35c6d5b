"""A drawn step and what-ifs of one line, to give advice on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import whatif
from tests.helpers import CPU, STREAM, Build
from whatif import TaskGraph, Transform
from whatif.graph.info import GraphInfo
from whatif.prediction.predict import Baseline
from whatif.questions.advice.advise import Advice, Ranked, advise
from whatif.questions.advice.candidates import (
    Candidates,
)

MS = 1_000_000


GIB = 2**30


def drawn(**info: Any) -> Baseline:
    """Times in ms; the span begins with the first kernel and takes 10.

    ::

        ms      0       4       8  10  12  14
        CPU     |call a-|call b-|
        stream          |a----------|b------|
                                    10      14
    """
    build = Build(CPU, STREAM)
    build.launch(4 * MS, 6 * MS, "a")
    build.launch(4 * MS, 4 * MS, "b")
    graph = build.graph()
    span_ns = whatif.simulate(graph).step_times_ns("span")
    return Baseline.of(graph.replace(info=GraphInfo(path="hand.json", measured_step_ns={"span": span_ns}, **info)))


def script(name: str, function: Callable[[TaskGraph], TaskGraph], effort: str = "small: turn it on.") -> Transform:
    return Transform(name, name, f"{name}\n\nEffort: {effort}", function)


def advice(*transforms: Transform, top: int = 10, **info: Any) -> Advice:
    return advise(drawn(**info), Candidates(transforms), top=top)


def gains(entries: tuple[Ranked, ...]) -> dict[str, float]:
    return {" + ".join(entry.trial.spelled): round(entry.trial.gain_pct, 9) for entry in entries}
