"""What each transform of a composition contributes: by hand, as sums on random graphs, and on a real trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import whatif
from tests.advice_by_hand import drawn
from tests.helpers import replace
from tests.test_edit import traced
from whatif import TaskGraph, Transform, WhatifError
from whatif.graph.info import GraphInfo
from whatif.prediction import composition
from whatif.prediction.composition import is_unchanged, spelled
from whatif.prediction.predict import Baseline, apply
from whatif.report.text import print_prediction
from whatif.simulation.simulator import Frontier

MS = 1_000_000


def with_span(graph: TaskGraph) -> Baseline:
    span_ns = whatif.simulate(graph).step_times_ns("span")
    return Baseline.of(graph.replace(info=GraphInfo(path="hand.json", measured_step_ns={"span": span_ns})))


def faster_cpu(graph: TaskGraph) -> TaskGraph:
    """A CPU that is twice as fast."""
    return graph.scale(graph.on_cpu, 0.5)


def faster_gpu(graph: TaskGraph) -> TaskGraph:
    """A GPU that is twice as fast."""
    return graph.scale(graph.on_gpu, 0.5)


def second_half(graph: TaskGraph) -> TaskGraph:
    """Applies to what is faster already."""
    if not (graph.on_gpu & (graph.duration_ns < 4 * MS)).any():
        raise WhatifError("second_half: expected short kernels, got long ones.")
    return faster_gpu(graph)


def nothing(graph: TaskGraph) -> TaskGraph:
    """Changes nothing."""
    return graph.unchanged("nothing: nothing changes")


def gains(*transforms: Any) -> tuple[list[tuple[float | None, float]], float, float | None]:
    found = apply(drawn(), *transforms).composition
    parts = [(part.alone_ms, part.added_ms) for part in found.contributions]
    return parts, found.together_ms, found.interaction_ms


def test_one_opens_the_way_for_another() -> None:
    """A faster CPU alone: a from 2 to 8, b to 12, still 10 ms. A faster GPU: a from 4 to 7, b from 8 to 10, 6 ms.

    Both: a from 2 to 5, b to 7, 5 ms: one millisecond more than the gains alone add up to.
    """
    assert gains(faster_cpu, faster_gpu) == ([(0, 0), (4, 5)], 5, -1)
    assert gains(faster_gpu, faster_cpu) == ([(4, 4), (0, 1)], 5, -1)


def test_two_save_the_same_time() -> None:
    """Kernels at a quarter: a from 4 to 5.5, b from 8 to 9, 5 ms; half of them alone 6 ms."""
    assert gains(faster_gpu, faster_gpu) == ([(4, 4), (4, 1)], 5, 3)


def test_what_does_not_apply_alone_says_why() -> None:
    found = apply(drawn(), faster_gpu, second_half).composition
    assert [part.alone_ms for part in found.contributions] == [4, None]
    assert [part.added_ms for part in found.contributions] == [4, 1]
    assert found.contributions[1].reason == "second_half: expected short kernels, got long ones."
    assert found.interaction_ms is None


def test_one_transform_has_its_own_gain_and_no_interaction() -> None:
    assert gains(faster_gpu) == ([(4, 4)], 4, 0)
    assert gains() == ([], 0, 0)


def latest(frontier: Frontier) -> int:
    return max(frontier.ready_ns)


def test_a_schedule_counts_from_its_own_transform_on() -> None:
    with_schedule = Transform("late", "Late", "Late", nothing, schedule=latest)
    found = apply(drawn(), faster_gpu, with_schedule, faster_cpu).composition
    assert [(part.alone_ms, part.added_ms) for part in found.contributions] == [(4, 4), (0, 0), (0, 1)]
    with pytest.raises(WhatifError, match="both override the schedule"):
        apply(drawn(), with_schedule, with_schedule)


@pytest.mark.parametrize(
    ("transforms", "simulations"),
    [
        ((faster_cpu,), 0),
        ((faster_cpu, faster_gpu), 2),  # the first alone, and the second alone
        ((faster_cpu, faster_gpu, faster_cpu), 4),
        ((nothing, faster_gpu), 1),  # what changes nothing is not simulated
        ((faster_gpu, second_half), 1),  # what does not apply neither
    ],
)
def test_no_step_is_simulated_twice(
    transforms: tuple[Any, ...], simulations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prediction = apply(drawn(), *transforms)
    counted = []

    def counting(*args: Any) -> Any:
        counted.append(args)
        return whatif.simulate(*args)

    monkeypatch.setattr(composition, "simulate", counting)
    for _ in range(2):
        assert prediction.composition.contributions
    assert len(counted) == simulations


@given(graph=traced(), factors=st.lists(st.tuples(st.booleans(), st.floats(0.1, 3.0)), min_size=1, max_size=4))
def test_what_is_added_makes_up_the_gain(graph: TaskGraph, factors: list[tuple[bool, float]]) -> None:
    baseline = with_span(graph)

    def scaling(on_gpu: bool, factor: float) -> Any:
        return lambda graph: graph.scale(graph.on_gpu if on_gpu else graph.on_cpu, factor)

    transforms = [scaling(*pair) for pair in factors]
    prediction = apply(baseline, *transforms)
    found = prediction.composition
    assert sum(part.added_ms for part in found.contributions) == pytest.approx(found.together_ms, abs=1e-9)
    assert found.together_ms == pytest.approx(prediction.baseline_ms - prediction.predicted_ms, abs=1e-9)
    for transform, part in zip(transforms, found.contributions, strict=True):
        alone = apply(baseline, transform)
        assert part.alone_ms == pytest.approx(alone.baseline_ms - alone.predicted_ms, abs=1e-9)
    assert found.contributions[0].alone_ms == found.contributions[0].added_ms


def test_only_notes_and_facts_may_differ_where_nothing_changes() -> None:
    graph = drawn().graph
    assert is_unchanged(graph, graph.note("a word"))
    assert not is_unchanged(graph, faster_cpu(graph))
    assert not is_unchanged(graph, graph.add_dependencies([0], [3]))
    assert not is_unchanged(graph, graph.replace(info=GraphInfo(queue_depth=1)))


def picks(frontier: Frontier) -> int:
    return frontier.earliest()


def fewer_samples(graph: TaskGraph) -> TaskGraph:
    """Changes a fact that every rate depends on."""
    return graph.replace(info=replace(graph.info, batch_size=2))


def speaks(graph: TaskGraph) -> TaskGraph:
    """Leaves a note that is no statement about itself."""
    return graph.note("speaks: nothing changes")


def test_each_transform_states_whether_it_changed_anything() -> None:
    found = apply(drawn(), faster_cpu, nothing, speaks, fewer_samples)
    assert [part.changed for part in found.applied] == [True, False, False, True]
    assert [part.notes for part in found.applied[1:3]] == [("nothing: nothing changes",), ("speaks: nothing changes",)]
    assert [part["changed"] for part in found.to_dict()["transforms"]] == [True, False, False, True]
    assert found.notes == ("nothing: nothing changes", "speaks: nothing changes")


@pytest.mark.parametrize(("function", "changed"), [(nothing, False), (speaks, True), (lambda graph: graph, True)])
def test_a_schedule_alone_is_a_change_unless_its_transform_says_otherwise(function: Any, changed: bool) -> None:
    transform = Transform("t", "t", "t", function, schedule=picks)
    assert [part.changed for part in apply(drawn(), transform).applied] == [changed]


def test_options_are_spelled_as_one_would_type_them() -> None:
    loaded = whatif.load_transform("scale:factor=2.0,kind=gpu,name=a|b")
    assert spelled(loaded) == "scale:factor=2,kind=gpu,name=a|b"
    assert whatif.load_transform(spelled(loaded)).options == loaded.options
    assert spelled(whatif.load_transform("scale")) == "scale"


def test_the_report_shows_them_for_several(capsys: pytest.CaptureFixture[str]) -> None:
    print_prediction(apply(drawn(), faster_cpu, faster_gpu))
    text = capsys.readouterr().out
    block = text[text.index("Gain of each, ms") :].splitlines()
    assert block[1].split() == ["alone", "added", "to", "those", "above"]
    assert [line.split() for line in block[2:5]] == [
        ["faster_cpu", "0.00", "0.00"], ["faster_gpu", "4.00", "5.00"], ["sum", "4.00", "5.00"],
    ]  # fmt: skip
    assert block[5].strip() == "alone they add up to 1.00 ms less than together: one makes another more effective"
    print_prediction(apply(drawn(), faster_gpu, second_half))
    text = capsys.readouterr().out
    assert "alone it does not apply: second_half: expected short kernels, got long ones." in text
    assert ["sum", "–", "5.00"] in [line.split() for line in text.splitlines()]
    print_prediction(apply(drawn(), faster_gpu))
    assert "What each takes off" not in capsys.readouterr().out


def test_json_has_them_for_several(own_traces: Path) -> None:
    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    found = apply(baseline, "amp", "fused_adam:to=fused").to_dict()
    assert [(part["name"], part["options"]) for part in found["contributions"]] == [
        ("amp", {}), ("fused_adam", {"to": "fused"}),
    ]  # fmt: skip
    alone = [part["alone_ms"] for part in found["contributions"]]
    saved_ms = found["baseline_ms"] - found["predicted_ms"]
    assert found["interaction_ms"] == pytest.approx(sum(alone) - saved_ms)
    assert sum(part["added_ms"] for part in found["contributions"]) == pytest.approx(saved_ms)
    assert min(alone) > 0
    assert "contributions" not in apply(baseline, "amp").to_dict()
