"""Rate sharing: what is refused, and what edits and scenarios keep."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import STREAM, Build
from tests.rate_sharing import NCCL, H, Schedule, Y, simulate, using
from whatif import Frontier, TaskGraph, WhatifError, simulate_scenarios
from whatif.simulation.sharing import (
    USES,
    uses_of,
)


def _two() -> TaskGraph:
    build = Build(STREAM, NCCL)
    build.task(0, 10, "k")
    build.task(1, 10, "c")
    return using(build.graph(), k={"role": Y, "compute": 1.0}, c={"role": H, "compute": 0.2})


@pytest.mark.parametrize("schedule", [None, Frontier.earliest])
def test_a_cycle_is_named(schedule: Schedule | None) -> None:
    graph = _two()
    edges = [(0, 1), (1, 0)]
    d = type(graph.dependencies).of([a for a, _ in edges], [b for _, b in edges], 7)  # type: ignore[arg-type]
    graph = graph.replace(dependencies=d)
    with pytest.raises(WhatifError, match="2 tasks wait for one another in a cycle"):
        simulate(graph, schedule)


def test_a_schedule_that_picks_what_is_not_ready_is_reported() -> None:
    with pytest.raises(WhatifError, match=r"expected a task of the frontier \(2 are ready\), got 7"):
        simulate(_two(), lambda _: 7)
    with pytest.raises(WhatifError, match="ZeroDivisionError"):
        simulate(_two(), lambda _: 1 // 0)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("device", 9, "uses the device of a thread outside 0..1"),
        ("link", -1, "uses the link of a thread outside 0..1"),
        ("compute", -0.5, "expected compute of 0 or more"),
        ("memory", float("nan"), "expected memory of 0 or more"),
        ("lead_ns", -1, "expected lead_ns of 0 or more"),
    ],
)
def test_a_row_that_cannot_be_is_refused(field: str, value: float, sentence: str) -> None:
    graph = _two()
    uses = uses_of(graph)
    uses[field][1] = value
    with pytest.raises(WhatifError, match=sentence):
        simulate(graph.attach(**{USES: uses}))


def test_a_column_of_another_kind_is_refused() -> None:
    with pytest.raises(WhatifError, match=r"'uses' is not one of whatif\.simulation\.sharing"):
        simulate(_two().attach(uses=np.zeros(2)))


def test_scenarios_are_simulated_one_by_one() -> None:
    with pytest.raises(WhatifError, match="simulate scenarios one by one"):
        simulate_scenarios(_two(), np.zeros(2), [0.0])


def test_groups_made_faster_are_simulated_with_what_they_share() -> None:
    """Without the collective (a factor of 0) k takes the 10 it takes alone; as it is, 8 of them beside it for 10."""
    from whatif.simulation.group_scenarios import simulate_groups

    graph = _two()
    group, counted = np.array([[-1, 0]], dtype=np.int32), np.ones(2, dtype=np.bool_)
    found = simulate_groups(graph, group, 1, [0.0, 1.0], observed=np.array([0]), counted=counted)
    assert found.end_ns.ravel().tolist() == [10, 12]


def test_edits_keep_what_tasks_use_and_new_tasks_use_nothing() -> None:
    from whatif import NewTasks, TaskKind

    graph = _two().insert(NewTasks([0], "new", TaskKind.KERNEL, 5)).graph.split(np.array([0]), 2)
    uses = uses_of(graph)
    by_name = dict(zip([graph.names[code] for code in graph.name.tolist()], uses["role"].tolist(), strict=True))
    assert by_name == {"k": Y, "new": 0, "c": H}
    assert uses["role"].tolist().count(Y) == 2
