"""The provenance of each number of the page: measured, simulated, predicted or estimated."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from whatif.graph.task_graph import TaskGraph
from whatif.report.html.markup import Html, tag
from whatif.report.text import SOURCE_LABELS


class Made(Enum):
    """The provenance of a number; the value describes it in a sentence."""

    MEASURED = "Read from the recording, or timed by the recorder."
    SIMULATED = "Simulated from the recording's tasks and their dependencies; the replay error says how well."
    PREDICTED = "Simulated after a what-if changed the tasks; ranges are nominal 90 %."
    ESTIMATED = "From a cost model, because the recording does not contain it; the source is given next to it."


def read_off(graph: TaskGraph) -> Made:
    """The provenance of a recording's own numbers: it may be a predicted or a simulated step."""
    return Made.MEASURED if graph.info.is_recorded else Made[graph.info.made.upper()]


def badge(made: Made) -> Html:
    """Return the small label of a number or of a whole table."""
    name = made.name.lower()
    return tag("abbr", name, class_=f"made made-{name}", title=made.value)


def answered_by(estimates: Mapping[str, int]) -> str:
    """Return the number of estimated durations of a prediction, by source."""
    counts = [f"{count:,} {SOURCE_LABELS.get(source, source)}" for source, count in estimates.items()]
    return ", ".join(counts) or "recorded durations only"
