"""Measures operators in another process, and restarts it without the operator that crashed it."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whatif.runtime.errors import WhatifError

from ..line_process import EndedError, MeasuringProcess
from .recording import Operator

# The job number of the optimizer's update.
UPDATES = -1
CRASHED = "ended the measuring process"
TRANSFERS = "copies between host and GPU"
NO_TIME = "no time left"


@dataclass
class Measured:
    """Results: times by number of the operator, update times (None: none), and reasons for skipped jobs."""

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
    """Measure the optimizer's update and then each operator alone, in order, in a separate process.

    `on_job` is called with the number of each finished job. Raises WhatifError on another machine than the recording's.
    """
    measured = Measured()
    jobs = [UPDATES]
    for number, operator in enumerate(operators):
        if operator.transfers:  # The device of each tensor is not recorded.
            measured.skipped[number] = TRANSFERS
        else:
            jobs.append(number)
    threads = metadata.get("threads")
    usable = threads if type(threads) is int and 0 < threads <= (os.cpu_count() or 1) else None
    setup = {
        "metadata": metadata,
        "operators": [operator.call for operator in operators],
        "variants": list(variants),
        "cuda": bool(metadata.get("gpu")),
        "threads": usable,
    }
    remaining = jobs[::-1]
    while remaining:
        with MeasuringProcess(f"{__package__}.worker", setup, threads=usable) as process:
            _check_machine(metadata, process.ready)
            end_s = time.monotonic() + budget_s
            crashed = False
            while remaining and not crashed:
                job = remaining.pop()
                try:
                    in_time = job == UPDATES or time.monotonic() <= end_s
                    answer = process.measure({"job": job}) if in_time else {"skipped": NO_TIME}
                except EndedError:
                    answer, crashed = {"skipped": CRASHED}, True
                _keep(measured, job, answer)
                on_job(job)
    return measured


def _keep(measured: Measured, job: int, answer: dict[str, Any]) -> None:
    if "skipped" in answer:
        measured.skipped[job] = answer["skipped"]
    elif job == UPDATES:
        measured.update_times_ns = answer["ns"] or None
    else:
        measured.times[job] = answer


def _check_machine(metadata: dict[str, Any], machine: dict[str, Any]) -> None:
    """Raise WhatifError on another machine than the recording's, whose times would not apply."""
    kind = "gpu" if metadata.get("gpu") else "cpu"
    if metadata.get(kind) != machine.get(kind):
        raise WhatifError(
            f"expected the machine of the recording ({metadata.get(kind)}), got {machine.get(kind) or 'none'}: measure"
            " its operators there."
        )
