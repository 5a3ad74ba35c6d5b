"""Says what a change would do to your DNN training before you make it: a trace-driven what-if profiler.

    graph = whatif.read("trace.json.gz")
    print(whatif.apply(graph, "amp").speedup)

The public names load on first use, so that ``import whatif`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whatif.errors import WhatifError
    from whatif.graph import GraphInfo, TaskGraph
    from whatif.ingest.read import read
    from whatif.insert import NewTasks
    from whatif.predict import Prediction, apply
    from whatif.ranks.read import read_ranks
    from whatif.simulator import Frontier, simulate, simulate_scenarios
    from whatif.timeline import Timeline
    from whatif.transform import Transform, load_transform
    from whatif.types import Anchor, Dependencies, DependencyKind, Phase, TaskKind, Thread, ThreadKind

_HOME = {
    "read": "whatif.ingest.read",
    "read_ranks": "whatif.ranks.read",
    "simulate": "whatif.simulator",
    "simulate_scenarios": "whatif.simulator",
    "load_transform": "whatif.transform",
    "apply": "whatif.predict",
    "Prediction": "whatif.predict",
    "TaskGraph": "whatif.graph",
    "GraphInfo": "whatif.graph",
    "Timeline": "whatif.timeline",
    "Transform": "whatif.transform",
    "Frontier": "whatif.simulator",
    "NewTasks": "whatif.insert",
    "TaskKind": "whatif.types",
    "Phase": "whatif.types",
    "DependencyKind": "whatif.types",
    "Dependencies": "whatif.types",
    "Anchor": "whatif.types",
    "Thread": "whatif.types",
    "ThreadKind": "whatif.types",
    "WhatifError": "whatif.errors",
}

__all__ = [
    "read", "read_ranks", "simulate", "simulate_scenarios", "load_transform", "apply", "Prediction", "TaskGraph",
    "GraphInfo", "Timeline", "Transform", "Frontier", "NewTasks", "TaskKind", "Phase", "DependencyKind", "Dependencies",
    "Anchor", "Thread", "ThreadKind", "WhatifError",
]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'whatif' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
