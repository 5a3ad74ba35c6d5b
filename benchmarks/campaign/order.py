"""The results of a GPU campaign that ends early: python -m benchmarks.campaign.order [--measure-operators].

Prints the number of complete pairs (a changed run timed, and the run its what-ifs start from timed and traced)
after one, two and three commands of 540 s. Step times are guesses for an H100, from no recording; the order is the
campaign's own.
"""

import sys
import tempfile
from pathlib import Path

from .queue import FIRST_GUESS_S, Plan, Queue, Task
from .variants import Job, all_jobs, baseline_of

COMMAND_S, COMMANDS = 540.0, 3
# ms of a baseline's step.
STEP_MS = {
    "resnet50": 50, "bert-base": 65, "gnmt": 95, "vgg19": 175, "densenet121": 85, "bert-large": 125, "gpt2-small": 100,
    "transformer": 10,
}  # fmt: skip
START_S, COMPILE_S, REPLAY_S = 5.0, 75.0, 12.0  # a process with its model; Inductor; reading and packing a trace


def seconds(task: Task) -> float:
    """Estimate the duration of a task: its process, its steps, and compiling."""
    options = task.job.options
    step_s = STEP_MS[task.job.model] / 1e3 * options.batch_factor * options.accumulate
    step_s *= (0.4 if options.amp or options.precision == "tf32" else 1.0) * (3.0 if options.offload else 1.0)
    own_s = START_S + (COMPILE_S if options.execution == "compile" else 0.0)
    if task.part == "time":
        return own_s + (22 + 3 * min(50, max(10, int(1.5 / step_s)))) * step_s
    return own_s + 36 * step_s + REPLAY_S if task.part == "trace" else FIRST_GUESS_S[task.part]


def complete_pairs(*, measure_operators: bool = False) -> list[tuple[int, list[str]]]:
    """Return, for the end of each command, the seconds so far and the names of the runs with a complete pair."""
    jobs = [job for job in all_jobs(full=True, device="cuda") if not job.reason]
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(Path(folder), True, "cuda", measure_operators=measure_operators)
        tasks = list(Queue(jobs, plan, lambda progress: None).tasks())
    done: set[tuple[str, str]] = set()
    used_s = 0.0
    found: list[tuple[int, list[str]]] = []
    beside = {job.name: baseline_of(job, jobs) for job in jobs}

    def complete(job: Job) -> bool:
        start = beside[job.name]
        return start is not None and {(job.name, "time"), (start.name, "time"), (start.name, "trace")} <= done

    for task in tasks:
        used_s += seconds(task)
        while len(found) < COMMANDS and used_s > COMMAND_S * (len(found) + 1):
            found.append((int(COMMAND_S * (len(found) + 1)), [job.name for job in jobs if complete(job)]))
        done.add((task.job.name, task.part))
    return found


if __name__ == "__main__":
    for so_far_s, names in complete_pairs(measure_operators="--measure-operators" in sys.argv):
        print(f"after {so_far_s:,} s: {len(names)} pairs; the last ones: {', '.join(names[-4:])}")
