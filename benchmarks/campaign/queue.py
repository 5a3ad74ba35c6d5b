"""Run the campaign's jobs one after the other within a time budget; a failing run does not stop the others."""

import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from whatif.runtime.errors import WhatifError

from .records import Record
from .variants import EMULATED_TIER, Job, baseline_of
from .worker import Outcome, Request, Worker

# Estimated seconds of parts without a measurement; compiling and a baseline in turn are added.
FIRST_GUESS_S = {"time": 15.0, "trace": 20.0, "operators": 90.0, "update": 10.0}
COMPILE_S = 90.0
IN_TURN_S = 60.0
# Safety factor of an estimate: runs of a kind differ.
SLACK = 1.3

# Recordings that what-ifs start from, and whether these need the times of all operators or only of the update.
MEASURED = {"baseline": "operators", "adam_for": "operators", "adam_foreach": "update"}
# Starting points of what-ifs: without their traces no pair is complete.
STARTS = frozenset(
    {"baseline", "adam_for", "adam_foreach", "adam_capturable", "default_precision", "loader_0", "math_attention"}
)


@dataclass(frozen=True)
class Plan:
    """The scope, device, folder and time budget of a campaign."""

    out: Path
    full: bool
    device: str  # cpu | cuda
    rounds: int = 1
    budget_s: float = float("inf")
    timeout_s: float = 180.0  # of one part of a run; compiling doubles it
    trace_bytes: int = 3_000_000
    measure_operators: bool = False
    # Time each run in turn with its baseline until the ± of their ratio is below this, percent; None: time it alone.
    goal_pct: float | None = None
    # Whether the next process imports and builds its model during a measurement: with a GPU, cores are idle.
    ahead: bool = False


@dataclass(frozen=True)
class Task:
    """One part of a job; a job is timed once per round."""

    job: Job
    part: str
    round: int = 1


@dataclass(frozen=True)
class Progress:
    """The report after each task."""

    task: Task
    text: str
    done: int
    total: int


class Queue:
    """The tasks of a campaign in the order of their value, and their outcomes."""

    def __init__(self, jobs: list[Job], plan: Plan, tell: Callable[[Progress], None]) -> None:
        self._plan, self._tell = plan, tell
        self._began_s = time.monotonic()
        self._work, self._logs = plan.out / ".work", plan.out / "logs"
        self._records = {job.name: Record(plan.out, job, full=plan.full) for job in jobs}
        self._jobs = [job for job in jobs if not job.reason]
        self._skipped = [job for job in jobs if job.reason]
        self._beside = {job.name: baseline_of(job, jobs) if plan.goal_pct else None for job in jobs}
        self._seconds: dict[str, list[float]] = {}
        self._next: tuple[Task, Worker] | None = None
        self.left_out: list[Task] = []  # for want of time

    def run(self) -> None:
        """Run every task that is not done yet; an interrupt ends the worker and keeps the results.

        Raises WhatifError at the first GPU trace without kernels: all others would lack them too.
        """
        for folder in (self._work, self._logs):
            folder.mkdir(parents=True, exist_ok=True)
        for job in self._skipped:
            self._records[job.name].skip(job.reason)
        tasks = [task for task in self.tasks() if not self._is_done(task)]
        try:
            for number, task in enumerate(tasks, start=1):
                following = tasks[number] if number < len(tasks) else None
                text = self._run(task, following)
                self._tell(Progress(task, text, number, len(tasks)))
        finally:
            if self._next:
                self._next[1].end()
            shutil.rmtree(self._work, ignore_errors=True)

    def tasks(self) -> Iterator[Task]:
        """All tasks, the most valuable first, in case the budget ends early.

        Times of a tier and the traces that its what-ifs start from, then those of the next one; then all other traces,
        then operators; second rounds come after all first ones. Later rounds time all runs of a model in
        turn, because the speed of shared machines changes from one minute to the next. Runs of emulated types
        come last.
        """
        slow = [job for job in self._jobs if job.tier >= EMULATED_TIER]
        for jobs in ([job for job in self._jobs if job not in slow], slow):
            for tier in sorted({job.tier for job in jobs}):
                part = [job for job in jobs if job.tier == tier]
                yield from (Task(job, "time") for job in part)
                yield from (Task(job, "trace") for job in part if job.variant in STARTS)
            yield from (Task(job, "trace") for job in jobs if job.variant not in STARTS)
            if self._plan.measure_operators:
                yield from (Task(job, MEASURED[job.variant]) for job in jobs if job.variant in MEASURED)
            models = list(dict.fromkeys(job.model for job in jobs))
            for number, model in itertools.product(range(2, self._plan.rounds + 1), models):
                yield from (Task(job, "time", number) for job in jobs if job.model == model)

    def _is_done(self, task: Task) -> bool:
        """Whether the task is done, or has failed too often, or its prerequisite has."""
        record = self._records[task.job.name]
        builds_on: tuple[str, ...] = ()
        if task.part == "time":
            done = record.rounds >= task.round
        elif task.part == "trace":
            done, builds_on = record.traced, () if record.rounds else ("time",)
        else:
            done, builds_on = task.part in record.data, () if record.traced else ("time", "trace")
        return done or any(record.gave_up(part) for part in (task.part, *builds_on))

    def _run(self, task: Task, following: Task | None) -> str:
        """Run one task, or record why it was not run."""
        record = self._records[task.job.name]
        if task.part == "trace" and not record.rounds:
            return f"no trace: the run {'could not be' if record.gave_up('time') else 'is not yet'} timed"
        if task.part in MEASURED.values() and not self._trace_path(task).exists():
            return "no operators: there is no trace"
        if not self._fits(task):
            self.left_out.append(task)
            return "left out: the time budget is too short"
        worker = self._prepared(task)
        worker.go()
        try:
            if following and self._plan.ahead and self._fits(following):
                self._next = (following, self._start(following))
            outcome = worker.wait(self._timeout_s(task), self._began_s + self._plan.budget_s)
        finally:
            worker.end()
        return self._take(task, record, outcome)

    def _take(self, task: Task, record: Record, outcome: Outcome) -> str:
        if outcome.cut_off:
            self.left_out.append(task)
            return f"{outcome.failure}; the time budget is used up"
        failure = outcome.failure
        if outcome.ends_campaign:
            # Not a failure of the run: it is tried again once the machine is repaired.
            raise WhatifError(f"{task.job.name}: the campaign ends here; run the same command to continue: {failure}")
        if not failure:
            try:
                if task.part == "trace":
                    self._trace_path(task).replace(self._plan.out / f"{task.job.name}.trace.json.gz")
                record.add(task.part, outcome.result, outcome.seconds)
            except (OSError, WhatifError) as error:
                failure = str(error)
        if failure:
            record.fail(task.part, failure)
            return f"failed: {failure}"
        self._seconds.setdefault(task.part, []).append(outcome.seconds)
        return f"{_describe(task, record)} ({outcome.seconds:.1f} s)"

    def _prepared(self, task: Task) -> Worker:
        """The worker that was started in advance for the task, or a new one."""
        if self._next is not None:
            (planned, worker), self._next = self._next, None
            if planned == task:
                return worker
            worker.end()
        return self._start(task)

    def _start(self, task: Task) -> Worker:
        stem = f"{task.job.name}.{task.part}.{task.round}"
        result = self._work / f"{stem}.json"
        result.unlink(missing_ok=True)
        beside = self._beside[task.job.name] if task.part == "time" else None
        request = Request(
            part=task.part,
            model=task.job.model,
            options=task.job.options,
            full=self._plan.full,
            device=self._plan.device,
            result=str(result.resolve()),
            trace=str(self._trace_path(task).resolve()),
            trace_bytes=self._plan.trace_bytes,
            first_round=task.round == 1,
            beside_name=beside.name if beside else "",
            beside=beside.options if beside else None,
            goal_pct=self._plan.goal_pct or 0.0,
        )
        return Worker(request, self._work.resolve(), self._logs / f"{stem}.log")

    def _trace_path(self, task: Task) -> Path:
        """The path of a new trace, or of the finished one."""
        folder = self._work if task.part == "trace" else self._plan.out
        return folder / f"{task.job.name}.trace.json.gz"

    def _fits(self, task: Task) -> bool:
        left_s = self._plan.budget_s - (time.monotonic() - self._began_s)
        return self._expected_s(task) <= left_s

    def _expected_s(self, task: Task) -> float:
        own_s = self._records[task.job.name].expected_s(task.part)
        if own_s is not None:
            return own_s * SLACK
        known = self._seconds.get(task.part)
        typical_s = statistics.mean(known) * SLACK if known else FIRST_GUESS_S[task.part]
        in_turn_s = IN_TURN_S if task.part == "time" and self._beside[task.job.name] else 0.0
        return typical_s + in_turn_s + (COMPILE_S if task.job.options.execution == "compile" else 0.0)

    def _timeout_s(self, task: Task) -> float:
        return self._plan.timeout_s * (2 if task.job.options.execution == "compile" else 1)


def _describe(task: Task, record: Record) -> str:
    """One readable line about the measurement."""
    if task.part == "trace":
        return f"{record.data['trace']['steps']} steps in {record.data['trace']['bytes'] / 1e3:.0f} kB"
    if task.part in MEASURED.values():
        return f"update and {record.data[task.part]['rows']} operators measured"
    untraced = record.data["untraced"]
    beside = record.data.get("beside")
    note = f", {len(beside['rounds'])} rounds beside {beside['name']}: ± {beside['spread_pct']:.1f} %" if beside else ""
    slowed = "".join(f", {reason} in {count} blocks" for reason, count in untraced.get("throttled", {}).items())
    return f"{untraced['median_ms']:.2f} ms (CPU {min(untraced['cpu_thread_ms']):.2f} ms){note}{slowed}"
