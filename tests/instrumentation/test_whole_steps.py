"""Cutting a trace to its whole steps: what belongs to a step on the GPU's clock is what the step launched."""

from typing import Any

import pytest

from tests.helpers import need

need("torch")
keep_whole_steps = need("whatif.instrumentation.whole_steps").keep_whole_steps

#  µs      0         10        20        30        40        50
#  CPU     |#2 a     |#3 b     |#4 c     |#5 d     |#6 e     | (behind the steps) f
#  GPU           A       B           C         D                 E   F
EVENTS: list[dict[str, Any]] = [{"ph": "M", "name": "thread_name", "ts": 99.0, "args": {"name": "python"}}]
for _number, _name in enumerate("abcdef"):
    _at = 10.0 * _number
    if _name != "f":
        EVENTS.append(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{_number + 2}", "ts": _at, "dur": 10.0}
        )
    EVENTS += [
        {"ph": "X", "cat": "cpu_op", "name": _name, "ts": _at + 3, "dur": 2.0, "args": {"External id": _number}},
        {"ph": "X", "cat": "cuda_runtime", "name": f"{_name} call", "ts": _at + 4, "dur": 1.0}
        | {"args": {"correlation": 100 + _number, "External id": _number}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 100 + _number, "ts": _at + 4},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 100 + _number, "ts": _at + 17},
        {"ph": "X", "cat": "kernel", "name": _name.upper(), "ts": _at + 17, "dur": 3.0}
        | {"args": {"correlation": 100 + _number, "External id": _number}},
    ]


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in events if event["name"] not in ("ac2g", "thread_name")]


def of_steps(letters: str) -> list[str]:
    return [n for letter in letters for n in (f"ProfilerStep#{'abcdef'.index(letter) + 2}", letter, f"{letter} call")]


@pytest.mark.parametrize(("count", "letters"), [(1, "b"), (3, "bcd"), (9, "bcde")])
def test_a_kernel_stays_with_its_launch(count: int, letters: str) -> None:
    kept = keep_whole_steps(EVENTS, first=3, count=count)
    on_cpu = [name for name in names(kept) if name.lower() == name or name.startswith("Profiler")]
    assert on_cpu == of_steps(letters)
    assert [name for name in names(kept) if name in "ABCDEF"] == list(letters.upper())
    arrows = [event["id"] for event in kept if event["name"] == "ac2g"]
    assert arrows == [100 + "abcdef".index(letter) for letter in letters for _ in "sf"]
    assert kept[0]["name"] == "thread_name"


def test_what_lies_before_the_first_step_stays_where_no_step_is_dropped_there() -> None:
    early = {"ph": "X", "cat": "kernel", "name": "early", "ts": -5.0, "dur": 1.0, "args": {"correlation": 7}}
    kept = names(keep_whole_steps([early, *EVENTS], first=0, count=9))
    assert kept[0] == "early"
    assert "A" in kept
    assert "F" not in kept  # launched behind the last step


def test_a_trace_without_steps_stays_as_it_is() -> None:
    events = [event for event in EVENTS if not event["name"].startswith("ProfilerStep#")]
    assert keep_whole_steps(events, first=3, count=5) == events
