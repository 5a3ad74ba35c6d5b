"""Has operators measured by another process, and starts it again without the operator that ended it."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from whatif.errors import WhatifError

from ..line_process import EndedError, LineProcess
from .recording import Operator

# The job that is no operator.
UPDATES = -1
CRASHED = "ended the measuring process"
TRANSFERS = "copies between host and GPU"


@dataclass
class Measured:
    """What came back: times by number of the operator, update times (None: none), and reasons for what has none."""

    times: dict[int, dict[str, Any]] = field(default_factory=dict)
    update_times_ns: dict[str, float] | None = None
    skipped: dict[int, str] = field(default_factory=dict)


def measure_operators(
    operators: Sequence[Operator],
    metadata: dict[str, Any],
    variants: Sequence[str],
    budget_s: float,
    on_job: Callable[[int], None],
) -> Measured:
    """Measure the optimizer's update and each operator alone, in a process of its own, the first operators first.

    `on_job` gets the number of each job that is done. Raises WhatifError where this machine is not the recording's.
    """
    # Which side a tensor was on is not recorded.
    apart = {number: TRANSFERS for number, operator in enumerate(operators) if operator.transfers}
    measured = Measured(skipped=apart)
    jobs = [UPDATES, *(number for number in range(len(operators)) if number not in apart)]
    request = {
        "metadata": metadata,
        "operators": [
            [operator.name, operator.dims, operator.types, operator.concrete, operator.strides, operator.backward]
            for operator in operators
        ],
        "variants": list(variants),
        "budget_s": budget_s,
        "cuda": bool(metadata.get("gpu")),
    }
    while jobs:
        begun: int | None = None
        waiting = len(jobs)
        try:
            for message in _answers({**request, "jobs": jobs}):
                if "machine" in message:
                    _check_machine(metadata, message["machine"])
                elif "begin" in message:
                    begun = message["begin"]
                elif "job" in message:
                    begun = None
                    jobs.remove(message["job"])
                    _keep(measured, message)
                    on_job(message["job"])
                elif "end" in message:
                    return measured
        except EndedError as error:
            said = str(error)
        if begun is None and len(jobs) < waiting:  # A device that had failed ended it between two jobs.
            continue
        if begun is None:
            raise WhatifError(
                "expected a process that measures operators, got one that ended or fell silent before the first;"
                f" its last line: {said}."
            )
        jobs.remove(begun)
        measured.skipped[begun] = CRASHED
        on_job(begun)
    return measured


def _keep(measured: Measured, message: dict[str, Any]) -> None:
    job = message["job"]
    if "skipped" in message:
        measured.skipped[job] = message["skipped"]
    elif job == UPDATES:
        measured.update_times_ns = message["ns"] or None
    else:
        measured.times[job] = {"ns": message["ns"], "spread": message["spread"]}


def _check_machine(metadata: dict[str, Any], machine: dict[str, Any]) -> None:
    """Times of another machine would say nothing about this recording."""
    kind = "gpu" if metadata.get("gpu") else "cpu"
    if metadata.get(kind) != machine.get(kind):
        raise WhatifError(
            f"expected the machine of the recording ({metadata.get(kind)}), got {machine.get(kind) or 'none'}: measure"
            " its operators there."
        )


def _answers(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run one process and yield what it tells. Raises EndedError where it ends or falls silent."""
    threads = request["metadata"].get("threads")
    usable = type(threads) is int and 0 < threads <= (os.cpu_count() or 1)
    with LineProcess(f"{__package__}.worker", threads=threads if usable else None) as process:
        process.ask(request)
        while True:
            yield process.answer()
