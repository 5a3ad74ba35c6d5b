"""Try what-ifs on one baseline: their effect on the step in numbers, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cached_property

import numpy as np
from msgspec import Struct

from whatif.graph.memory import Memory
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import TaskKind
from whatif.models.durations.estimator import described
from whatif.prediction.baseline import Baseline, bounds_ns
from whatif.prediction.composition import (
    Applied,
    copied_pipeline,
    in_order,
    is_without_effect,
    new_notes,
    single_schedule,
    spelled,
    spelled_together,
    with_copies,
)
from whatif.prediction.peak_fit import doubt_of, fits, high_peak_bytes
from whatif.prediction.totals import samples_factor, workers_factor
from whatif.prediction.transform import Transform
from whatif.questions.advice.effort import Effort
from whatif.questions.explain import Explanation, explain
from whatif.runtime.errors import WhatifError
from whatif.simulation.simulator import simulate
from whatif.simulation.timeline import Timeline

# Graphs of compositions that are kept for longer ones, in tasks of all of them together.
KEPT_TASKS = 4_000_000


# The tasks that occupy each resource.
GPU, COPIES, COMMUNICATION = (TaskKind.KERNEL, TaskKind.MEMSET), (TaskKind.MEMCPY,), (TaskKind.COMMUNICATION,)
CPU, LOADING = (TaskKind.CPU_OP, TaskKind.RUNTIME, TaskKind.GAP), (TaskKind.DATA_LOADING,)


class Work(Struct, frozen=True):
    """The work in a step by resource, ms; concurrent work counts once for each resource."""

    gpu_ms: float  # kernels and memsets
    copies_ms: float
    communication_ms: float
    cpu_ms: float
    loading_ms: float  # data loading in the training process

    @property
    def host_ms(self) -> float:
        """CPU time including data loading, ms."""
        return self.cpu_ms + self.loading_ms

    @property
    def device_ms(self) -> float:
        """Time of the GPU and its links, ms."""
        return self.gpu_ms + self.copies_ms + self.communication_ms

    @staticmethod
    def of(timeline: Timeline, clock: str) -> Work:
        """Sum up the tasks of the period that ``clock`` times: the median of the steady steps, or the whole span."""
        graph, work_ns = timeline.graph, timeline.graph.duration_ns
        first, last = graph.info.steady
        step = graph.step
        if clock == "span" or last <= first:
            first, last, step = 0, 1, np.zeros_like(step)
        if clock == "span" and not graph.info.ranks:  # the CPU works before the span, too; each rank has another one
            work_ns = timeline.within_ns(*timeline.window_ns(clock))
        counted = np.flatnonzero((step >= first) & (step < last))
        n_kinds = len(TaskKind)
        place = (step[counted] - first) * n_kinds + graph.kind[counted]
        sums_ns = np.bincount(place, weights=work_ns[counted], minlength=(last - first) * n_kinds)

        def worked_ms(kinds: tuple[TaskKind, ...]) -> float:
            return float(np.median(sums_ns.reshape(-1, n_kinds)[:, kinds].sum(axis=1))) / 1e6

        return Work(
            gpu_ms=worked_ms(GPU),
            copies_ms=worked_ms(COPIES),
            communication_ms=worked_ms(COMMUNICATION),
            cpu_ms=worked_ms(CPU),
            loading_ms=worked_ms(LOADING),
        )


class Refusal(Enum):
    """Why there is no trial of a what-if."""

    NOT_APPLICABLE = "does not apply"  # or changes nothing here
    ELSEWHERE = "changes where the model is trained"
    IN_PART = "is done already in part"
    FAILED = "failed"


class Refused(Struct, frozen=True):
    """What-ifs that gave no trial, and why in one sentence."""

    spelled: tuple[str, ...]
    transforms: tuple[Transform, ...]  # empty if it cannot be loaded
    why: Refusal
    reason: str

    @property
    def label(self) -> str:
        """The what-ifs in a sentence, joined by plus signs."""
        return " + ".join(self.spelled)


class Trial(Struct, frozen=True):
    """The effect of some what-ifs together on a step."""

    transforms: tuple[Transform, ...]
    baseline_ms: float
    predicted_ns: float
    samples: float  # per step, as a multiple of the recorded step's
    workers: float  # that train together, as a multiple of the recorded ones
    work: Work
    waiting_ms: float  # waiting of the recorded step that nothing in the recording explains
    n_tasks: int  # of the changed graph
    memory: Memory | None  # of the changed step; None if not recorded
    peak_bytes: int | None
    notes: tuple[str, ...]
    estimates: dict[str, int]  # number of durations from each source other than the recording

    @property
    def predicted_ms(self) -> float:
        """The predicted step, ms."""
        return self.predicted_ns / 1e6

    @property
    def gain_pct(self) -> float:
        """The reduction of the step time, percent; if the batch changes, of the time for a recorded step's samples."""
        return self.gain_at_pct(self.predicted_ms)

    @property
    def same_training(self) -> bool:
        """Whether the step still trains on as many samples."""
        return self.samples == 1

    @property
    def recorded_samples_ms(self) -> float:
        """The time for the samples of a recorded step, ms; that of the step itself if the batch stays."""
        return self._for_recorded_samples_ms(self.predicted_ms, self.waiting_ms)

    def gain_at_pct(self, step_ms: float, *, waiting: bool = True) -> float:
        """Return the gain of a step of ``step_ms``, percent; with ``waiting=False`` without unexplained waiting."""
        after_ms = self._for_recorded_samples_ms(step_ms, self.waiting_ms if waiting else 0.0)
        return 100.0 * (1 - after_ms / self.baseline_ms) if self.baseline_ms else 0.0

    def _for_recorded_samples_ms(self, step_ms: float, waiting_ms: float) -> float:
        # It is unknown whether a worker's waiting comes once a step, so more samples are not assumed to share it.
        return (step_ms + (self.samples / self.workers - 1) * waiting_ms) / self.samples

    def is_like(self, other: Trial) -> bool:
        """Whether another form of the same what-ifs has the same result."""
        return (self.names, self.predicted_ms, self.work) == (other.names, other.predicted_ms, other.work)

    @property
    def spelled(self) -> tuple[str, ...]:
        """The what-ifs as on a command line."""
        return tuple(spelled(t) for t in self.transforms)

    @property
    def label(self) -> str:
        """The what-ifs in a sentence, joined by plus signs."""
        return spelled_together(self.transforms)

    @property
    def names(self) -> frozenset[str]:
        """The names of the what-ifs, without options."""
        return frozenset(t.name for t in self.transforms)

    @property
    def effort(self) -> Effort:
        """The largest effort among the what-ifs, and how to get each."""
        efforts = [Effort.of(t.doc) for t in self.transforms]
        how = "; ".join(e.how.rstrip(".") for e in efforts if e.how)
        return Effort(max(e.size for e in efforts), f"{how}." if how else "")


class Trier:
    """Tries compositions on one baseline; keeps the graphs of a few short ones, which longer ones begin with.

    What-ifs that move the step to other machines are refused, unless ``may_move``: the user asked for these.
    """

    def __init__(self, baseline: Baseline, *, may_move: bool = False) -> None:
        self.baseline = baseline
        self.work = Work.of(baseline.timeline, baseline.clock)
        self.peak_bytes = baseline.graph.info.peak_bytes
        self._may_move = may_move
        self._stays = not may_move and not (baseline.graph.kind == TaskKind.COMMUNICATION).any()
        self._kept: dict[tuple[str, ...], tuple[TaskGraph, tuple[Applied, ...]]] = {}

    @cached_property
    def explanation(self) -> Explanation:
        """What limits the baseline."""
        return explain(self.baseline, top=1)

    def attempt(self, transforms: Sequence[Transform]) -> Trial | Refused:
        """Return the trial of ``transforms``, in the order of ``in_order``, without a range: one simulation."""
        chosen = tuple(transforms)
        written = tuple(spelled(t) for t in chosen)
        try:
            schedule = single_schedule(chosen)
            changed, applied = self._applied(chosen)
        except WhatifError as error:
            # An error of another type comes from the script, and Transform reports it as the cause.
            unexpected = error.__cause__ is not None and not isinstance(error.__cause__, WhatifError | OSError)
            why = Refusal.FAILED if unexpected else Refusal.NOT_APPLICABLE
            return Refused(written, chosen, why, _without_name(str(error), chosen))
        before = self.baseline.graph
        notes = new_notes(before, changed)
        if is_without_effect(before, changed, applied) and before.info.memory == changed.info.memory:
            sentence = _without_name(notes[-1], chosen) if notes else "it changes nothing here"
            return Refused(written, chosen, Refusal.NOT_APPLICABLE, sentence)
        if self._stays and (changed.kind == TaskKind.COMMUNICATION).any():
            return Refused(
                written,
                chosen,
                Refusal.ELSEWHERE,
                "it adds communication with other workers, which this run does not have",
            )
        if not self._may_move and workers_factor(before, changed) != 1:
            sentence = f"it trains on {workers_factor(before, changed):g} times as many workers"
            return Refused(written, chosen, Refusal.ELSEWHERE, sentence)
        try:
            timeline = simulate(changed.check(), schedule)
        except WhatifError as error:
            return Refused(written, chosen, Refusal.FAILED, str(error))
        return Trial(
            transforms=chosen,
            baseline_ms=self.baseline.step_ms,
            predicted_ns=timeline.step_ns_by(self.baseline.clock),
            samples=samples_factor(before, changed),
            workers=workers_factor(before, changed),
            waiting_ms=self.explanation.critical_path_ms.get("wait", 0.0),
            work=Work.of(timeline, self.baseline.clock),
            n_tasks=len(changed),
            memory=changed.info.memory,
            peak_bytes=changed.info.peak_bytes,
            notes=notes,
            estimates=described(changed),
        )

    def peak_bytes_of(self, transforms: Sequence[Transform]) -> int:
        """Return the peak under ``transforms``, bytes, without a simulation.

        Raises WhatifError if one does not apply, or if memory is unknown.
        """
        found = self._applied(tuple(transforms))[0].info.peak_bytes
        if found is None:
            raise WhatifError("memory: expected a recording that shows what a step keeps, got one that does not.")
        return found

    def capacity_bytes_of(self, transforms: Sequence[Transform]) -> int | None:
        """Return the memory of the device on which ``transforms`` put the step, bytes; None if it is unknown."""
        return self._applied(tuple(t for t in transforms if t.place == "device"))[0].info.gpu_memory_bytes

    def devices_of(self, transforms: Sequence[Transform]) -> int:
        """Return the number of devices that train together under ``transforms``."""
        return self._applied(tuple(transforms))[0].info.devices

    def fits(self, trial: Trial | None = None) -> bool:
        """Whether a trial's step, or the baseline's without one, fits into the recorded device, if known."""
        peak_bytes = self.peak_bytes if trial is None else trial.peak_bytes
        return fits(peak_bytes, None, self.baseline.graph.info.gpu_memory_bytes) is not False

    def doubt(self, trial: Trial) -> str:
        """Return a sentence if the trial's peak fits but the end of its range does not; else ""."""
        if trial.peak_bytes is None:
            return ""
        info = self.baseline.graph.info
        high_bytes = high_peak_bytes(info, trial.peak_bytes, trial.transforms)
        return doubt_of(trial.label, trial.peak_bytes, high_bytes, info.gpu_memory_bytes)

    def range_ms(self, trial: Trial) -> tuple[float, float]:
        """Return the ends of the nominal 90 % range of a trial's step, ms: two simulations."""
        changed, schedule = self._applied(trial.transforms)[0], single_schedule(trial.transforms)
        low_ns, high_ns = bounds_ns(self.baseline, changed, trial.predicted_ns, schedule)
        return min(low_ns / 1e6, trial.predicted_ms), max(high_ns / 1e6, trial.predicted_ms)

    def _applied(self, transforms: tuple[Transform, ...]) -> tuple[TaskGraph, tuple[Applied, ...]]:
        """The graph under ``transforms`` and the effect of each; starts from the longest prefix that is kept."""
        transforms = in_order(transforms)
        if not transforms:
            return self.baseline.graph, ()
        copied = copied_pipeline(transforms)
        if copied is not None:
            transforms = with_copies(transforms, copied, self._applied(transforms[:copied])[0])
        key = tuple(spelled(t) for t in transforms)
        found = self._kept.pop(key, None)
        if found is None:
            before, parts = self._applied(transforms[:-1])
            changed = transforms[-1](before)
            found = changed, (*parts, Applied.between(before, changed, transforms[-1]))
        while self._kept and sum(len(graph) for graph, _ in self._kept.values()) + len(found[0]) > KEPT_TASKS:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = found  # the last of the dictionary is the one used last
        return found


def _without_name(sentence: str, transforms: tuple[Transform, ...]) -> str:
    """A transform's sentence without its name, which every list shows next to it."""
    return sentence.removeprefix(f"{transforms[0].name}: ") if len(transforms) == 1 else sentence
