"""Predict what a change would do to your DNN training, before you make it: a trace-driven what-if profiler.

    graph = whatif.read("trace.json.gz")
    print(whatif.apply(graph, "amp").speedup)

The public names load on first use, so that ``import whatif`` costs nothing.
"""

from __future__ import annotations

import importlib
import os.path
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from whatif.runtime.notebook_view import FIGURES, VIEWS

# In the root of a clone Python finds this folder before an installed package; two subpackages are next to it.
_CLONE = os.path.dirname(__path__[0])
if os.path.isfile(os.path.join(_CLONE, "pyproject.toml")):
    __path__.append(_CLONE)

if TYPE_CHECKING:
    from whatif.graph.info import GraphInfo
    from whatif.graph.insert import NewTasks
    from whatif.graph.selection import Selection
    from whatif.graph.task_graph import TaskGraph
    from whatif.graph.types import (
        Anchor,
        Change,
        Dependencies,
        DependencyKind,
        Phase,
        TaskKind,
        Thread,
        ThreadKind,
    )
    from whatif.ingest.ranks.read import read_ranks
    from whatif.ingest.read import read
    from whatif.prediction.predict import Prediction, apply
    from whatif.prediction.transform import Transform, load_transform
    from whatif.runtime.errors import WhatifError
    from whatif.simulation.simulator import ByPriority, Frontier, simulate, simulate_scenarios
    from whatif.simulation.timeline import Timeline

_HOME = {
    "read": "whatif.ingest.read",
    "read_ranks": "whatif.ingest.ranks.read",
    "simulate": "whatif.simulation.simulator",
    "simulate_scenarios": "whatif.simulation.simulator",
    "load_transform": "whatif.prediction.transform",
    "apply": "whatif.prediction.predict",
    "Prediction": "whatif.prediction.predict",
    "TaskGraph": "whatif.graph.task_graph",
    "GraphInfo": "whatif.graph.info",
    "Timeline": "whatif.simulation.timeline",
    "Transform": "whatif.prediction.transform",
    "ByPriority": "whatif.simulation.simulator",
    "Frontier": "whatif.simulation.simulator",
    "NewTasks": "whatif.graph.insert",
    "Selection": "whatif.graph.selection",
    "TaskKind": "whatif.graph.types",
    "Phase": "whatif.graph.types",
    "DependencyKind": "whatif.graph.types",
    "Dependencies": "whatif.graph.types",
    "Anchor": "whatif.graph.types",
    "Change": "whatif.graph.types",
    "Thread": "whatif.graph.types",
    "ThreadKind": "whatif.graph.types",
    "WhatifError": "whatif.runtime.errors",
}

__all__ = [
    "read", "read_ranks", "simulate", "simulate_scenarios", "load_transform", "apply", "Prediction", "TaskGraph",
    "GraphInfo", "Timeline", "Transform", "Frontier", "ByPriority", "NewTasks", "TaskKind", "Phase", "DependencyKind",
    "Dependencies", "Anchor", "Thread", "ThreadKind", "Change", "Selection", "WhatifError",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from whatif.runtime.files import VERSION

        return VERSION
    if name not in _HOME:
        raise AttributeError(f"module 'whatif' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def load_ipython_extension(shell: Any) -> None:
    """Register ``%whatif`` and ``%%whatif collect``; IPython calls this for ``%load_ext whatif``."""
    importlib.import_module("whatif.cli.notebook").load(shell)


def _draw(module: str, function: str, shown: Any) -> Any:
    draw: Callable[[Any], Any] = getattr(importlib.import_module(f"whatif.report.{module}"), function)
    return draw(shown)


# These are drawn by whatif.report, which nothing below it may import.
VIEWS.update(
    TaskGraph=partial(_draw, "notebook", "graph_html"),
    Timeline=partial(_draw, "notebook", "timeline_html"),
    Prediction=partial(_draw, "notebook", "prediction_html"),
    Sweep=partial(_draw, "notebook", "sweep_html"),
)
FIGURES.update(
    Timeline=partial(_draw, "plot_timeline", "timeline_figure"),
    Prediction=partial(_draw, "plot_breakdown", "prediction_figure"),
    Sweep=partial(_draw, "plot_sweep", "sweep_figure"),
    Scaling=partial(_draw, "plot_sweep", "scaling_figure"),
)
