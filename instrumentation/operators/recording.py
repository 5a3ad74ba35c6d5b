"""Operators of a recording, with counts and times: the outermost ones of forward and backward passes."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from whatif.runtime.errors import WhatifError

from .calls import RecordedCall

# Work inside these marks belongs to the update and to data loading, which other what-ifs cover.
_OTHER_WORK = ("Optimizer.step#", "Optimizer.zero_grad#", "enumerate(DataLoader)#")
# Autograd's spans: everything inside one is the backward pass.
_BACKWARD = "autograd::engine::"
_STEP_MARK = re.compile(r"ProfilerStep#\d+")
_GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_TRANSFERS = ("Memcpy HtoD", "Memcpy DtoH")


@dataclass(frozen=True)
class Operator:
    """All calls of one operator with the same inputs.

    `recorded_ns` is time per step, GPU time on a GPU, else CPU time. `transfers`: it copies between host and GPU.
    """

    call: RecordedCall
    calls_per_step: float
    recorded_ns: float
    transfers: bool


@dataclass
class _Group:
    event: dict[str, Any]
    calls: int = 0
    backward_calls: int = 0
    microseconds: float = 0.0
    transfers: bool = False


@dataclass
class _Open:
    """An open span of a thread: its end, and what the spans inside it inherit."""

    end: float
    backward: bool
    other_work: bool
    group: _Group | None


def distinct_operators(trace: dict[str, Any], through: frozenset[str] = frozenset()) -> list[Operator]:
    """Return the distinct outermost `aten::` operators inside the recorded steps, the most expensive first.

    An operator named in `through` is replaced by the operators inside it. Operators of optimizers' steps and of data
    loading are left out. On a GPU an operator's time is that of the GPU work launched by it and the operators inside
    it. Raises WhatifError if the trace has no steps or no such operator.
    """
    events = [event for event in _listed(trace.get("traceEvents")) if _is_span(event)]
    steps = [event for event in events if _STEP_MARK.fullmatch(event["name"])]
    steps = [event for event in steps if event.get("cat") == "user_annotation"]
    if not steps:
        raise WhatifError("expected a recording with ProfilerStep# marks, got none: record it with whatif collect.")
    window = (min(step["ts"] for step in steps), max(step["ts"] + step["dur"] for step in steps))
    gpu_work = _gpu_work(events)
    groups: dict[str, _Group] = {}
    for spans in _by_thread(events).values():
        _walk(spans, window, gpu_work, groups, through)
    if not groups:
        raise WhatifError(
            "expected operators with input shapes in the recording, got none: record it with whatif collect, or with"
            " torch.profiler and record_shapes=True."
        )
    operators = [_operator(group, len(steps)) for group in groups.values()]
    return sorted(operators, key=lambda operator: -operator.recorded_ns)


def most_expensive(operators: Sequence[Operator], share: float) -> list[Operator]:
    """Return the most expensive operators (sorted so) that together take at least this share of the total time."""
    missing_ns = share * sum(operator.recorded_ns for operator in operators)
    chosen = []
    for operator in operators:
        if missing_ns <= 0:
            break
        chosen.append(operator)
        missing_ns -= operator.recorded_ns
    return chosen


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_span(event: Any) -> bool:
    """Whether the event is a complete event with a name and times; a trace may contain anything."""
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and isinstance(event.get("name"), str)
        and all(isinstance(event.get(key), int | float) for key in ("ts", "dur"))
        and isinstance(event.get("args", {}), dict)
    )


def _gpu_work(events: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return GPU work by the "External id" of the operator that launched it; empty on a CPU."""
    found = defaultdict(list)
    for event in events:
        if event.get("cat") in _GPU_WORK:
            found[_external_id(event)].append(event)
    return found


def _external_id(event: dict[str, Any]) -> str:
    return str(event.get("args", {}).get("External id"))


def _by_thread(events: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads[f"{event.get('pid')}/{event.get('tid')}"].append(event)
    for spans in threads.values():
        spans.sort(key=lambda event: (event["ts"], -event["dur"]))
    return threads


def _walk(
    spans: Iterable[dict[str, Any]],
    window: tuple[float, float],
    gpu_work: dict[str, list[dict[str, Any]]],
    groups: dict[str, _Group],
    through: frozenset[str],
) -> None:
    """Add one thread's operators to the groups."""
    outside = _Open(float("inf"), backward=False, other_work=False, group=None)
    stack = [outside]
    for event in spans:
        while stack[-1].end <= event["ts"]:
            stack.pop()
        parent, name = stack[-1], event["name"]
        entry = _Open(
            event["ts"] + event["dur"],
            backward=parent.backward or name.startswith(_BACKWARD),
            other_work=parent.other_work or name.startswith(_OTHER_WORK),
            group=parent.group,
        )
        stack.append(entry)
        if event.get("cat") != "cpu_op" or entry.other_work or not window[0] <= event["ts"] < window[1]:
            continue
        if entry.group is None and name.startswith("aten::") and name not in through:
            entry.group = groups.setdefault(json.dumps([name, *_inputs(event)]), _Group(event))
            entry.group.calls += 1
            entry.group.backward_calls += entry.backward
            if not gpu_work:
                entry.group.microseconds += event["dur"]
        if entry.group is not None:
            for work in gpu_work.get(_external_id(event), ()):
                entry.group.microseconds += work["dur"]
                entry.group.transfers |= work["name"].startswith(_TRANSFERS)


def _inputs(event: dict[str, Any]) -> list[Any]:
    return [event.get("args", {}).get(key) for key in ("Input Dims", "Input type", "Concrete Inputs")]


def _operator(group: _Group, steps: int) -> Operator:
    event = group.event
    backward = 2 * group.backward_calls > group.calls
    dims, types, concrete = _inputs(event)
    return Operator(
        RecordedCall(event["name"], dims, types, concrete, event.get("args", {}).get("Input Strides"), backward),
        calls_per_step=round(group.calls / steps, 3),
        recorded_ns=group.microseconds * 1e3 / steps,
        transfers=group.transfers,
    )
