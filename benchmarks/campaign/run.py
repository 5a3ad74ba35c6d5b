"""One part of one run of the campaign, in this process: time steps, record a trace, or measure its operators.

`python -m benchmarks.campaign.run REQUEST` prepares, waits for a line on standard input, and writes its
result, or the reason for its absence, to the file that the request names.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from whatif.instrumentation.gpu_events import NoGpuEventsError
from whatif.instrumentation.metadata import describe_environment
from whatif.instrumentation.recorder import record

from whatif.runtime.files import replacing

from .memory import measure_memory
from .timing import time_in_turn, time_steps
from .training import Training
from .trim import trim
from .variants import pair_clock
from .worker import Request

# Memory that the process acquires before timing: more than a twin ever needs.
TOUCHED_BYTES = 384 << 20

RECORDED_STEPS = 5
UNTRACED_STEPS = {"cpu": 8, "cuda": 20}
# The update's times come first; operators get the rest of the time.
UPDATE_BUDGET_S = 2.0
WARMUP_STEPS = {"cpu": 3, "cuda": 8}


def main() -> None:
    """Execute the request and exit immediately: loaders and CUDA graphs can hang an orderly shutdown."""
    request = Request.from_json(sys.argv[1])
    try:
        result = PARTS[request.part](request)
    except NoGpuEventsError as error:  # No other run's trace would have any either.
        result = {"failure": str(error), "ends_campaign": True}
    except BaseException as error:
        traceback.print_exc()
        result = {"failure": _one_line(error)}
    _write(Path(request.result), result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit("failure" in result)


def _time(request: Request) -> dict[str, Any]:
    trainings = _start(request)
    training = trainings[-1]
    result: dict[str, Any] = {
        "samples": training.samples,
        "checkpointed": training.checkpointed,
        "machine": {"device": request.device, **describe_environment(request.device == "cuda")},
    }
    if request.beside is None:
        result["rounds"] = [time_steps(training, request.device)]
    else:
        clock = pair_clock(request.beside, request.options)
        baseline, result["rounds"] = time_in_turn(
            trainings[0], training, request.device, clock=clock, goal_pct=request.goal_pct
        )
        result["beside"] = {"name": request.beside_name, "clock": clock, "rounds": baseline}
    if request.first_round:
        training.resume()
        try:
            result["memory"] = measure_memory(training, request.device)
        except Exception as error:  # The times matter most.
            result["memory"] = {"peak_allocated_bytes": None, "failure": _one_line(error)}
    training.close()
    return result


def _trace(request: Request) -> dict[str, Any]:
    (training,) = _start(request)
    path = Path(request.trace)
    with record(
        training.model,
        training.optimizer,
        path,
        steps=RECORDED_STEPS,
        warmup_steps=WARMUP_STEPS[request.device],
        untraced_steps=UNTRACED_STEPS[request.device],
    ) as recording:
        while not recording.done:
            training.step()
            recording.step()
    training.close()
    steps = trim(path, request.trace_bytes)
    return {"bytes": path.stat().st_size, "steps": steps}


def _operators(request: Request) -> dict[str, Any]:
    from whatif.instrumentation.operators.times import add_operator_times

    _wait_for_go()
    return {"rows": add_operator_times(Path(request.trace))}


def _update(request: Request) -> dict[str, Any]:
    from whatif.instrumentation.operators.times import add_operator_times

    _wait_for_go()
    return {"rows": add_operator_times(Path(request.trace), variants=(), budget_s=UPDATE_BUDGET_S)}


PARTS = {"time": _time, "trace": _trace, "operators": _operators, "update": _update}


def _start(request: Request) -> list[Training]:
    """The trainings of the request: first the baseline it is timed against, if any, then its own."""
    asked = [options for options in (request.beside, request.options) if options is not None]
    if request.device == "cpu":
        torch.set_num_threads(1)
        # Forked workers would share the pages, and each later write would copy one.
        if all(options.loader_workers <= 0 for options in asked):
            touched = [b"\1" * (16 << 20) for _ in range(TOUCHED_BYTES >> 24)]
            del touched
    trainings = [Training(request.model, options, full=request.full) for options in asked]
    _wait_for_go()
    for training in trainings:
        training.start(torch.device(request.device))
    return trainings


def _wait_for_go() -> None:
    """Wait for the previous run to finish: only one process at a time uses the device."""
    if not sys.stdin.readline():
        raise SystemExit("the campaign ended before this run began")


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in "".join(traceback.format_exception_only(error)).splitlines()]
    return next((line for line in lines if line), type(error).__name__)[:400]


def _write(path: Path, result: dict[str, Any]) -> None:
    with replacing(path) as part:
        part.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
