"""Time of one what-if on a graph in memory, in process."""

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
# What-ifs for each recording; p3 and vdnn need one that exchanges no gradients and has convolutions.
QUESTIONS = {
    "v100-50": (
        SCALE, "amp", "cuda_graph", "fused_adam", "batch_size:factor=2", "bandwidth:factor=2", "straggler",
        "contention", "compile:mode=reduce-overhead", "distributed:workers=8,bandwidth=25Gbps",
        "device:to=A100-SXM-80",
    ),
    "resnet50": (SCALE, "amp", "p3:workers=4", "vdnn", "channels_last", "device:to=A100-SXM-80"),
}  # fmt: skip


def _transform_and_simulate(transform: Transform, graph: TaskGraph) -> Timeline:
    return simulate(transform(graph))


def _range_of(baseline: Baseline | TaskGraph, transform: Transform) -> tuple[float, float]:
    return apply(baseline, transform).ends_ns


def what_if(rounds: int, quick: bool, large: bool) -> Iterator[Row]:
    """Predict on graphs in memory: whole predictions with their ranges, with caches from the first round."""
    for name, questions in QUESTIONS.items():
        baseline = Baseline.of(read(trace(name)))
        asked = {question: partial(_range_of, baseline, load_transform(question)) for question in questions}
        for question, seconds in least_cpu_s(asked, max(rounds, 2)).items():
            title = f"{len(baseline.graph):,} tasks: {question.partition(':')[0]}, prediction with its range"
            yield Row("what-if", title, 1e3 * seconds, "ms", 20, 5, True)
    yield from _beside_a_rival(rounds)


def _beside_a_rival(rounds: int) -> Iterator[Row]:
    path = trace("v100-50")
    graph = read(path)
    baseline, transform = Baseline.of(graph), load_transform(SCALE)
    calls: dict[str, Callable[[], Any]] = {
        "scale with its range": partial(_range_of, baseline, transform),
        "scale, baseline simulated as well": partial(_range_of, graph, transform),
        "scale, transform and one simulation": partial(_transform_and_simulate, transform, graph),
    }
    cpu_s = least_cpu_s(calls, rounds)
    for title, seconds in list(cpu_s.items())[1:]:
        yield Row("what-if", f"{len(graph):,} tasks: {title}", 1e3 * seconds, "ms", 20, 5, True)
    hta = hta_python()
    rival: dict[str, Any] = candidate("hta_recompute", path, hta) if hta else {"error": "not installable"}
    if "error" in rival:
        yield Row("what-if", "HTA finds its critical path again", None, "ms", note=rival["error"])
        return
    yield Row("what-if", f"HTA finds its critical path again ({rival['nodes']:,} nodes)", 1e3 * rival["cpu_s"], "ms")
    ours_s = cpu_s["scale with its range"]
    yield Row("what-if", "scale with its range, faster than HTA's path again", rival["cpu_s"] / ours_s, "x")
