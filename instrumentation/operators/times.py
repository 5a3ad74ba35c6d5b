"""Measures a recording's operators alone, each also in the forms that a what-if asks about, and adds the times to it.

Writes the metadata keys "operator_times" and "update_times_ns" (see docs/operators.md); the events do not change.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whatif.runtime.errors import WhatifError
from whatif.runtime.files import output_file

from ..recording_file import read_recording, rewrite_recording
from .measure import Measured, measure_operators
from .recording import Operator, distinct_operators, most_expensive
from .variants import RECORDED, VARIANTS

# The rest is many small operators that affect no what-if.
SHARE = 0.99
# Measuring may take this many times a recorded step: 60 s for one of 100 ms; within bounds.
BUDGET_STEPS = 600
BUDGET_BOUNDS_S = (30.0, 600.0)


def add_operator_times(recording: Path, variants: Sequence[str] = VARIANTS, budget_s: float | None = None) -> int:
    """Measure the operators of a recording on this machine, write the times into it, return the number of operators.

    Measures those that take 99 % of the operator time of forward and backward passes, the most expensive first, for
    about `budget_s` seconds at most (by default 600 steps). Prints progress and skipped operators on stderr. Raises
    WhatifError without input shapes, for a recording of another machine, and if the file cannot be written.
    """
    path = output_file(recording)
    unknown = sorted(set(variants) - set(VARIANTS))
    if unknown:
        raise WhatifError(f"expected variants among {', '.join(VARIANTS)}, got {', '.join(unknown)}.")
    trace, compressed = read_recording(path)
    metadata = trace["whatif"]
    operators = distinct_operators(trace)
    chosen = most_expensive(operators, SHARE)
    total_ns = sum(operator.recorded_ns for operator in operators)
    measured = _measure_with_progress(chosen, metadata, variants, _budget_s(metadata) if budget_s is None else budget_s)
    rows = [_row(chosen[number], times) for number, times in sorted(measured.times.items())]
    metadata["operator_times"] = rows
    metadata["update_times_ns"] = measured.update_times_ns
    rewrite_recording(trace, path, compress=compressed)
    print(_summary(chosen, measured, total_ns), file=sys.stderr)
    return len(rows)


def _budget_s(metadata: dict[str, Any]) -> float:
    step = metadata.get("untraced_step_ms")
    median_ms = step.get("median") if isinstance(step, dict) else None
    least_s, most_s = BUDGET_BOUNDS_S
    if not isinstance(median_ms, int | float) or not median_ms > 0:
        return least_s
    return min(most_s, max(least_s, BUDGET_STEPS * median_ms / 1e3))


def _measure_with_progress(
    operators: Sequence[Operator], metadata: dict[str, Any], variants: Sequence[str], budget_s: float
) -> Measured:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("operators", total=len(operators) + 1)
        return measure_operators(operators, metadata, variants, budget_s, lambda _: progress.advance(task))


def _row(operator: Operator, times: dict[str, Any]) -> dict[str, Any]:
    return {
        "op": operator.call.name,
        "dims": operator.call.dims,
        "types": operator.call.types,
        "concrete": operator.call.concrete,
        "calls_per_step": operator.calls_per_step,
        **times,
    }


def _summary(operators: Sequence[Operator], measured: Measured, total_ns: float) -> str:
    """Return the share of measured time, its comparison with the recorded time, and what was skipped and why."""
    recorded_ns = sum(operators[number].recorded_ns for number in measured.times)
    alone_ns = sum(operators[number].calls_per_step * times["ns"][RECORDED] for number, times in measured.times.items())
    lines = [
        f"{len(measured.times)} operators measured: {_share(recorded_ns, total_ns)} of the operators' time in a"
        f" recorded step; alone they take {alone_ns / 1e6:.1f} ms, in the recording {recorded_ns / 1e6:.1f} ms."
    ]
    reasons: dict[str, list[float]] = defaultdict(list)
    for number, reason in measured.skipped.items():
        if number >= 0:
            reasons[reason].append(operators[number].recorded_ns)
        else:
            lines.append(f"Update not measured: {reason}.")
    lines += [
        f"{len(times)} not measured ({_share(sum(times), total_ns)}): {reason}." for reason, times in reasons.items()
    ]
    return "\n".join(lines)


def _share(part: float, total: float) -> str:
    return f"{part / total:.1%}" if total else "0 %"
