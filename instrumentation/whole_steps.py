"""Cuts a trace to the recorded steps: drops warm-up steps, incomplete steps and events after the last step."""

import re
from collections.abc import Iterable
from typing import Any

# Steps under the tracer whose events are dropped: they include the tracer's start-up.
TRACER_WARMUP_STEPS = 3
# Between the recorded steps and those with line tracing is one in which the profiler's overhead is measured.
STEPS_BEFORE_LINES = 1

_STEP_MARK = re.compile(r"ProfilerStep#(\d+)")

# Events on the GPU's clock: they belong to the step that launched them, whenever they run.
_GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync", "overhead"})

_CALL_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})


def line_steps_needed(steps: int) -> int:
    """Return the number of steps that tracing the lines of `steps` steps adds."""
    return STEPS_BEFORE_LINES + steps


def keep_whole_steps(events: list[dict[str, Any]], first: int, count: int) -> list[dict[str, Any]]:
    """Return the events of the first `count` steps with numbers from `first` on, in order.

    CPU events are assigned to steps by their start, GPU events by the call that launched them. If a trace has no
    earlier steps, events before the first kept one stay.
    """
    numbers = [step_number(event) for event in events]
    all_numbers = {number for number in numbers if number is not None}
    kept = set(sorted(number for number in all_numbers if number >= first)[:count])
    marks = [
        event
        for event, number in zip(events, numbers, strict=True)
        if number in kept and event.get("ph") == "X" and event.get("cat") not in _GPU_CATEGORIES
    ]
    if not marks:
        return events
    begin_us = min(mark["ts"] for mark in marks) if all_numbers and min(all_numbers) < first else float("-inf")
    end_us = max(mark["ts"] + mark.get("dur", 0) for mark in marks)

    def outside(event: dict[str, Any]) -> bool:
        return event.get("ph") != "M" and not begin_us <= event.get("ts", begin_us) < end_us

    on_cpu = [event.get("cat") not in _GPU_CATEGORIES for event in events]
    dropped = [event for event, cpu in zip(events, on_cpu, strict=True) if cpu and outside(event)]
    launches = _values((event for event in dropped if event.get("cat") in _CALL_CATEGORIES), "correlation")
    operators = _values(dropped, "External id")

    def keep(event: dict[str, Any], cpu: bool, number: int | None) -> bool:
        if number is not None and number not in kept:
            return False
        if event.get("cat") == "ac2g":  # the arrow from a launch to its kernel
            return event.get("id") not in launches
        if cpu:
            return not outside(event)
        args = event.get("args", {})
        return args.get("correlation") not in launches and args.get("External id") not in operators

    return [event for event, cpu, number in zip(events, on_cpu, numbers, strict=True) if keep(event, cpu, number)]


def step_number(event: dict[str, Any]) -> int | None:
    """Return the number of the step that an event marks; None for other events."""
    match = _STEP_MARK.fullmatch(str(event.get("name", "")))
    return int(match[1]) if match else None


def _values(events: Iterable[dict[str, Any]], key: str) -> set[Any]:
    return {event["args"][key] for event in events if key in event.get("args", {})}
