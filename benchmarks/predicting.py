"""One what-if on a graph that has been read, in process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from inputs import trace
from measure import Row, candidate, least_cpu_s
from rivals import hta_python

from whatif import TaskGraph, load_transform, read
from whatif.prediction.predict import Baseline, apply
from whatif.prediction.transform import Transform
from whatif.simulation.simulator import simulate
from whatif.simulation.timeline import Timeline

SCALE = "scale:kind=gpu,factor=0.5"


def _transform_and_simulate(transform: Transform, graph: TaskGraph) -> Timeline:
    return simulate(transform(graph))


def what_if(rounds: int, quick: bool, large: bool) -> Iterator[Row]:
    """Predict on the 123,000-event recording."""
    path = trace("v100-50")
    graph = read(path)
    baseline = Baseline.of(graph)
    transforms = {"scale": load_transform(SCALE), "amp": load_transform("amp")}
    calls: dict[str, Callable[[], Any]] = {}
    for name, transform in transforms.items():
        calls[f"{name}, prediction with its range"] = partial(apply, baseline, transform)
        calls[f"{name}, baseline simulated as well"] = partial(apply, graph, transform)
        calls[f"{name}, transform and one simulation"] = partial(_transform_and_simulate, transform, graph)
    cpu_s = least_cpu_s(calls, rounds)
    for what, seconds in cpu_s.items():
        yield Row("what-if", f"{len(graph):,} tasks: {what}", 1e3 * seconds, "ms", 20, 5, True)
    hta = hta_python()
    rival: dict[str, Any] = candidate("hta_recompute", path, hta) if hta else {"error": "not installable"}
    if "error" in rival:
        yield Row("what-if", "HTA finds its critical path again", None, "ms", note=rival["error"])
        return
    yield Row("what-if", f"HTA finds its critical path again ({rival['nodes']:,} nodes)", 1e3 * rival["cpu_s"], "ms")
    ours_s = cpu_s["scale, prediction with its range"]
    yield Row("what-if", "scale with its range, faster than HTA's path again", rival["cpu_s"] / ours_s, "x")
