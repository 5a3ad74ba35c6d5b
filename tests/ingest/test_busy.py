"""A busy machine and page faults, by the recorder's counters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import facts_of
from whatif.ingest.busy import machine_doubts


def said(untraced: dict[str, Any], traced: dict[str, Any], steps_ms: tuple[float, float] = (10.0, 11.0)) -> list[str]:
    load = {"steps": 10, "wall_s": 1.0, "cpu_s": 1.0, "load": 1.0, "involuntary_switches": 4, "minor_faults": 100}
    times = [{"median": ms, "q25": ms, "q75": ms} for ms in steps_ms]
    return machine_doubts(
        facts_of({
            "cpu_cores": 2, "untraced_load": {**load, **untraced}, "traced_load": {**load, **traced},
            "untraced_step_ms": times[0], "traced_step_ms": times[1],
        })
    )  # fmt: skip


def test_a_machine_of_its_own_is_not_busy() -> None:
    assert said({}, {}) == []
    assert machine_doubts(facts_of({})) == []


def test_a_shared_core_is_said() -> None:
    """Measured: 261 and 254 times a second on two cores under load 6.7, up to 317 beside three programs."""
    (sentence,) = said({"involuntary_switches": 221, "cpu_s": 0.846, "load": 6.67}, {})
    assert sentence == (
        "busy machine, record again: per second of CPU time the program was preempted 261 times "
        "without the profiler; load average 6.7 on 2 cores"
    )
    assert "with it" in said({}, {"involuntary_switches": 51, "cpu_s": 0.2})[0]
    # A short recording: what shares its core is found, and a switch or two by chance is not.
    assert "preempted 250 times with it" in said({}, {"involuntary_switches": 5, "cpu_s": 0.02})[0]
    assert said({"involuntary_switches": 2, "cpu_s": 0.02}, {"involuntary_switches": 2, "cpu_s": 0.03}) == []
    # Waiting is not being taken off: a loader that waits for a disk has little CPU time, and no verdict.
    assert said({"involuntary_switches": 5, "cpu_s": 0.01}, {}) == []


@pytest.mark.parametrize(("faults", "traced_ms", "storm"), [
    (200_000, 20.0, True), (200_000, 14.0, False), (1_000, 20.0, False),
])  # fmt: skip
def test_page_faults_are_said_where_they_take_the_time(faults: int, traced_ms: float, storm: bool) -> None:
    found = said({}, {"minor_faults": faults}, (10.0, traced_ms))
    assert bool(found) == storm
    assert all(text.startswith("page faults: the recorded step is 2.0 times") for text in found)


def test_damaged_counters_say_nothing() -> None:
    assert (
        said({"involuntary_switches": -3, "cpu_s": "much"}, {"involuntary_switches": 10**30, "minor_faults": []}) == []
    )
