"""The content of the page, all from the library: the results of its commands for one recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, structs

from whatif.graph.task_graph import TaskGraph
from whatif.ingest.ranks.read import Ranks
from whatif.prediction.baseline import Baseline
from whatif.prediction.predict import Prediction, apply
from whatif.prediction.transform import Transform
from whatif.questions.advice.advise import Advice, advise
from whatif.questions.advice.trial import Trial, Trier
from whatif.questions.efficiency import Efficiency, efficiency
from whatif.questions.explain import Explanation, explain
from whatif.questions.flame import Flame, flame
from whatif.questions.memory_summary import MemorySummary, memory_summary
from whatif.questions.sensitivity import Sensitivity, sensitivity
from whatif.questions.stragglers import RankReport, report
from whatif.questions.summary import Summary, summarize
from whatif.questions.sweep.defaults import bandwidths_of, spread_of
from whatif.questions.sweep.scaling import Scaling, scaling
from whatif.questions.sweep.sweep import Sweep, sweep
from whatif.questions.uneven_steps import UnevenSteps, uneven_steps
from whatif.runtime.errors import WhatifError
from whatif.runtime.progress import Progress
from whatif.simulation.steps import RECORDED

# Rows of a table of layers or kernels; the smallest are omitted, and the page shows their number.
MOST_ROWS = 400
# A range costs two simulations per what-if, so only the best of each table have one.
RANGED = 10
PARTS = 10
WORKERS = (1, 2, 4, 8, 16, 32, 64)

Answer = TypeVar("Answer")


class Facts(Struct, frozen=True):
    """The results of every command for one recording; a string is the reason for a missing result."""

    baseline: Baseline
    asked: tuple[Transform, ...]  # the user's what-ifs; empty: the first recommendation is shown
    summary: Summary
    explanation: Explanation
    efficiency: Efficiency
    flame: Flame
    advice: Advice
    prediction: Prediction | None  # of ``asked``, else of the first recommendation; None if nothing gains
    unchanged: Prediction  # without what-ifs: the range of another run
    faster: Prediction | None  # of a GPU twice as fast, else of a CPU twice as fast; None if neither works
    sensitivity: Sensitivity
    memory: MemorySummary | str
    scaling: Scaling | str
    bandwidth: Sweep | str
    assumed: tuple[str, ...]  # for the last two
    trial: Trial | None = None  # the prediction for the samples of a recorded step, which may be of another batch
    steps: UnevenSteps | None = None  # if the graph as read is available
    ranks: RankReport | None = None  # if recordings of several ranks were read

    @property
    def as_fast(self) -> str:
        """The speed-up of the predicted step; if its batch differs, of the recorded samples.

        In that case ``for_whom`` says so.
        """
        if self.prediction is None:
            return ""
        if self.trial is None or self.trial.same_training:
            return f"{self.prediction.speedup:.2f}× as fast"
        after_ms = self.trial.recorded_samples_ms
        times = self.prediction.baseline_ms / after_ms if after_ms else float("inf")
        return f"{times:.2f}× as fast"

    @property
    def as_fast_ms(self) -> tuple[float, float] | None:
        """The ends of the nominal 90 % range of the time that ``as_fast`` compares, ms; None without a prediction."""
        shown, trial = self.prediction, self.trial
        if shown is None or trial is None or trial.same_training:
            return None if shown is None else (shown.low_ms, shown.high_ms)
        gains = trial.gain_at_pct(shown.low_ms, waiting=False), trial.gain_at_pct(shown.high_ms)
        return shown.baseline_ms * (1 - gains[0] / 100), shown.baseline_ms * (1 - gains[1] / 100)

    @property
    def for_whom(self) -> str:
        """The samples to which ``as_fast`` refers, as the end of a sentence; empty if the batch stays."""
        same = self.trial is None or self.trial.same_training
        return "" if same else f" for the samples of {RECORDED[self.baseline.clock]}"


def gather(
    baseline: Baseline,
    asked: Sequence[Transform] = (),
    *,
    recorded: TaskGraph | None = None,
    path: Path | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Facts:
    """Compute everything that the page shows. Raises WhatifError if a requested what-if does not apply.

    ``recorded`` is the graph as read, whose steps are compared; ``path`` is its file, for call stacks, if the
    graph has only its name; ``ranks`` is the report on the recordings
    of several ranks; ``progress(done, total)`` counts the what-ifs that were tried.
    """
    prediction = apply(baseline, *asked) if asked else None
    advice = advise(baseline, top=RANGED, path=path, progress=progress)
    first = None if asked or advice.first is None else advice.first.trial.transforms
    if first is not None:
        prediction = apply(baseline, *first)
    trial = Trier(baseline, may_move=True).attempt(asked) if asked else advice.first and advice.first.trial
    workers, assumed = spread_of(baseline.graph, asked)
    faster, varied, assumed_faster = bandwidths_of(baseline.graph, asked)
    return Facts(
        baseline=baseline,
        asked=tuple(asked),
        summary=summarize(baseline),
        explanation=explain(baseline, top=MOST_ROWS),
        efficiency=efficiency(baseline, PARTS),
        flame=flame(baseline, path),
        advice=advice,
        prediction=prediction,
        unchanged=apply(baseline),
        faster=_twice_as_fast(baseline),
        sensitivity=sensitivity(baseline, top=PARTS),
        memory=_or_why_not(lambda: memory_summary(baseline, None)),
        scaling=_or_why_not(lambda: scaling(baseline, workers, WORKERS)),
        bandwidth=_or_why_not(lambda: sweep(baseline, faster, [varied])),
        assumed=tuple(dict.fromkeys((*assumed, *assumed_faster))),
        trial=trial if isinstance(trial, Trial) else None,
        steps=None if recorded is None else uneven_steps(recorded, baseline),
        ranks=None if ranks is None else _ranks(ranks, baseline),
    )


def _twice_as_fast(baseline: Baseline) -> Prediction | None:
    side = "gpu" if baseline.graph.has_gpu else "cpu"
    found = _or_why_not(lambda: apply(baseline, f"scale:kind={side},factor=0.5"))
    return found if isinstance(found, Prediction) else None


def without_folders(graph: TaskGraph) -> TaskGraph:
    """Return the graph with only the file name of its recording, without folders: pages are shared with others."""
    ranks = tuple(replace(info, path=Path(info.path).name) for info in graph.info.ranks)
    return graph.replace(info=replace(graph.info, path=Path(graph.info.path).name, ranks=ranks))


def _ranks(ranks: Ranks, baseline: Baseline) -> RankReport:
    found = report(ranks, baseline)
    return structs.replace(found, rows=tuple(structs.replace(row, path=Path(row.path).name) for row in found.rows))


def _or_why_not(ask: Callable[[], Answer]) -> Answer | str:
    """Return a result, or the reason why the recording has none."""
    try:
        return ask()
    except WhatifError as error:
        return str(error)
