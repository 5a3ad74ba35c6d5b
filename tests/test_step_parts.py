"""Parts of a step are corrected each by its own share of the time without the profiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import Event, mark, op, read_events, with_metadata
from whatif import Phase, TaskGraph
from whatif.prediction.calibrate import calibrate
from whatif.prediction.step_parts import PARTS

STEPS = 5


def recorded(folder: Path, more: Sequence[Event] = (), shift_us: int = 0, **metadata: Any) -> TaskGraph:
    """Steps of 100 us in which the parts take 20, 30, 40 and 10 us; ten operators lie outside, one in each other part.

    The last two steps come ``shift_us`` later.

    ::

        us      0        20             50                  90     100
        step    |--------------------------------------------------|
        part     outside |forward       |backward            |update|
    """
    events = []
    for number in range(STEPS):
        at, sequence = 100 * number + shift_us * (number > 2), {"Sequence number": number}
        events += [mark(f"ProfilerStep#{number}", at, 100)]
        events += [op("aten::add", at + 2 * k, 2) for k in range(10)]
        events += [mark("whatif::layer::fc", at + 20, 30), op("aten::mm", at + 20, 30, **sequence)]
        events += [
            op("autograd::engine::evaluate_function: MmBackward0", at + 50, 40, **sequence, **{"Fwd thread id": 1})
        ]
        events += [mark("Optimizer.step#SGD.step", at + 90, 10), op("aten::add_", at + 90, 10)]
    graph = read_events(folder, [*events, *more])
    step = {"median": 0.05}
    return with_metadata(graph, **{"threads": 1, "untraced_step_ms": step, "untraced_cpu_ms": step, **metadata})


def parts_us(graph: TaskGraph) -> list[float]:
    """The four parts of the third step, as the simulation has them."""
    mine = graph.step == 2
    layer, update = graph.layer[mine] > 0, graph.in_optimizer[mine]
    time_us = graph.duration_ns[mine] / 1e3
    backward = np.array([graph.names[name].startswith("autograd") for name in graph.name[mine]])
    outside = ~(layer | update | backward)
    return [float(time_us[of].sum()) for of in (outside, layer & ~backward, backward, update)]


def by_part(*ms: float) -> dict[str, float]:
    """Times of the parts in their order; loading is the last one and may be left out."""
    return dict(zip(PARTS, ms, strict=False))


def test_each_part_meets_its_share(tmp_path: Path) -> None:
    """Twice as slow in all; what was slow is the forward and the backward pass."""
    graph = recorded(tmp_path, parts_ms=by_part(0.019, 0.011, 0.011, 0.009))
    found = calibrate(graph, "mark")
    assert found.by_parts
    assert found.met
    assert parts_us(found.graph) == pytest.approx([19, 12, 16, 9], abs=4.5)
    outside, forward, backward, update = parts_us(found.graph)
    assert outside > 0.8 * 19
    assert update > 0.8 * 9
    assert forward + backward < 30


def test_a_pause_has_the_mean_pace(tmp_path: Path) -> None:
    """A collection of garbage after the third step is as long for any pace of the short work around it."""
    pause = [op("aten::add", 300, 400)]
    found = []
    for outside_ms in (0.005, 0.040):
        graph = recorded(tmp_path, pause, shift_us=500, parts_ms=by_part(outside_ms, 0.018, 0.018, 0.005))
        corrected = calibrate(graph, "mark").graph
        found.append(int(corrected.duration_ns[graph.duration_ns.argmax()]))
    assert found[0] == pytest.approx(found[1], rel=0.2)


def test_loading_is_a_part_of_its_own(tmp_path: Path) -> None:
    """The first half of what is outside is a loader's: without the profiler it takes most of that part."""
    loader = [mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100 * k, 10) for k in range(STEPS)]
    times = 0.018, 0.012, 0.016, 0.004
    whole = calibrate(recorded(tmp_path, parts_ms=by_part(*times), more=loader), "mark")
    apart = calibrate(recorded(tmp_path, parts_ms=by_part(*times, 0.015), more=loader), "mark")
    assert whole.by_parts
    assert apart.by_parts

    def loading_us(graph: TaskGraph) -> float:
        return float(graph.duration_ns[(graph.step == 2) & (graph.phase == Phase.DATA)].sum() / 1e3)

    assert loading_us(apart.graph) == pytest.approx(15, abs=1.5)
    assert loading_us(whole.graph) < 12
    # Without a loader's tasks, or with more than all that is outside, it is part of that.
    for parts, more in (((*times, 0.015), []), ((*times, 0.019), loader)):
        found = calibrate(recorded(tmp_path, parts_ms=by_part(*parts), more=more), "mark")
        assert parts_us(found.graph)[0] == pytest.approx(18, abs=0.5)


def test_without_parts_all_work_has_one_pace(tmp_path: Path) -> None:
    found = calibrate(recorded(tmp_path), "mark")
    assert not found.by_parts
    assert found.met


def test_the_bounds_are_of_the_whole_pace_whatever_others_took(tmp_path: Path) -> None:
    """The thread ran for 30 of 100 us. Bounds on the parts leave 25 us, and all work at 0.8 of that meets the step."""
    graph = recorded(
        tmp_path, parts_ms=by_part(0.0005, 0.001, 0.018, 0.0005), profiler_cost_ns={"per_event": 1},
        untraced_step_ms={"median": 0.1}, untraced_cpu_ms={"median": 0.02},
        traced_step_ms={"median": 0.1}, traced_cpu_ms={"median": 0.03},
    )  # fmt: skip
    found = calibrate(graph, "mark")
    assert found.by_parts
    assert found.met
    assert found.pace == pytest.approx(0.2, abs=0.01)
    # Where no pace within the bounds does, the sentence states the whole one.
    longer = with_metadata(graph, parts_ms=by_part(0.015, 0.015, 0.02, 0.01), untraced_cpu_ms={"median": 0.06})
    bounded = calibrate(longer, "mark")
    assert bounded.by_parts
    assert "with the CPU's work at 0.45 of its recorded time, the limit" in bounded.reason


@pytest.mark.parametrize(
    "parts",
    [
        by_part(0.2, 0.2, 0.2, 0.2),  # of another program
        {"outside": 0.05},
        by_part(0.02, 0.01, -1, 0.01),
        {**by_part(0.02, 0.01, 0.01, 0.01), "more": 0.01},
        by_part(0.02, 0.01, 0.01, float("nan")),
        "0.05",
    ],
)
def test_parts_of_no_such_step_are_not_used(tmp_path: Path, parts: Any) -> None:
    found = calibrate(recorded(tmp_path, parts_ms=parts), "mark")
    assert not found.by_parts
    assert found.met


def test_a_wall_clock_is_not_divided(tmp_path: Path) -> None:
    graph = recorded(tmp_path, parts_ms=by_part(0.02, 0.01, 0.01, 0.01), threads=2)
    assert not calibrate(graph, "mark").by_parts
