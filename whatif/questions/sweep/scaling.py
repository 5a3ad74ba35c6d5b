"""A step on growing numbers of workers: what each number gains, and where it stops paying off.

Weak scaling keeps each worker's batch, strong scaling the batch of all of them together. Efficiency is the throughput
as a share of that of as many single workers. Of equal workers one is simulated, with the cost that the others add.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from whatif.models.exchange.collective_tasks import communicates
from whatif.models.exchange.network_options import MOST_WORKERS
from whatif.prediction.baseline import Baseline
from whatif.prediction.composition import compose, in_order, spelled
from whatif.prediction.predict import Prediction, apply
from whatif.prediction.ranges import shares_beside
from whatif.prediction.transform import LOADERS, SETTING_BATCH, Transform, load_transform
from whatif.questions.sweep.spread import predicted, spread
from whatif.questions.sweep.values import listed_values
from whatif.runtime.errors import WhatifError
from whatif.runtime.notebook_view import plot
from whatif.runtime.progress import Progress, reported

OPTION = "workers"
# What-ifs whose workers hold parts of one model, so that they share the batch in any case.
SHARING = ("tensor_parallel", "dts")
# Below this efficiency most of the money for another worker is lost: our choice for the verdict.
WORTH_PCT = 80.0


class Workers(Struct, frozen=True):
    """The step of one of ``count`` workers; times in ms, None if the what-ifs do not apply to that many."""

    count: int
    step_ms: float | None
    low_ms: float | None = None
    high_ms: float | None = None
    communication_ms: float | None = None  # that no computation hides
    devices: int | None = None
    samples_per_s: float | None = None  # of all workers; None if the batch or the steps are unknown
    energy_j: float | None = None
    reason: str = ""

    @property
    def range_ms(self) -> tuple[float, float, float] | None:
        """The step and the ends of its range, ms; None if there is none."""
        if not self.step_ms or not self.low_ms or not self.high_ms:
            return None
        return self.step_ms, self.low_ms, self.high_ms

    @property
    def computing(self) -> float:
        """The share of the step in which it does not only communicate."""
        return 1 - (self.communication_ms or 0.0) / self.step_ms if self.step_ms else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the step as a JSON object."""
        return {
            "workers": self.count,
            "predicted_ms": self.step_ms,
            "low_ms": self.low_ms,
            "high_ms": self.high_ms,
            "communication_ms": self.communication_ms,
            "devices": self.devices,
            "samples_per_s": self.samples_per_s,
            "energy_j": self.energy_j,
            **({"reason": self.reason} if self.reason else {}),
        }


class Scaling(Struct, frozen=True):
    """The steps of all numbers of workers, ascending, and the step of one worker alone."""

    baseline: Baseline
    transforms: tuple[Transform, ...]
    strong: bool
    single: Workers  # one worker that trains the whole batch alone
    rows: tuple[Workers, ...]
    notes: tuple[str, ...]
    share: float = 1.0  # if ranks have different batches: their mean over that of the one that trains alone

    plot = plot

    @property
    def single_ms(self) -> float:
        """The step of one worker alone, ms."""
        return self.single.step_ms or 0.0

    def throughput(self, row: Workers) -> float | None:
        """Return the samples a second of this many workers over those of one; None without a step."""
        if not row.step_ms:
            return None
        workers = 1 if self.strong or row.count == 1 else row.count * self.share
        return workers * self.single_ms / row.step_ms

    def efficiency_pct(self, row: Workers) -> float | None:
        """Return the throughput as a share of that of as many single workers, percent."""
        throughput = self.throughput(row)
        return None if throughput is None else 100.0 * throughput / row.count

    def efficiency_range_pct(self, row: Workers) -> tuple[float, float] | None:
        """Return the ends of the nominal 90 % range of the efficiency, percent.

        Errors of one worker's step are those of the others' too and cancel. None if there is no step. One worker alone
        is the reference: its efficiency is certain.
        """
        found = self.more_throughput(row, self.single)
        return None if found is None else (100.0 * found[1] / row.count, 100.0 * found[2] / row.count)

    def more_throughput(self, row: Workers, now: Workers) -> tuple[float, float, float] | None:
        """Return a row's throughput over that of ``now``, and the ends of its nominal 90 % range; None without steps.

        Errors of the computation of one step are those of the other's too and cancel.
        """
        step, reference, before = row.range_ms, now.range_ms, self.throughput(now)
        if step is None or reference is None or not before:
            return None
        times = (self.throughput(row) or 0.0) / before
        if row.count == now.count:
            return times, times, times
        share = min(row.computing / now.computing, 1.0) if now.computing else 1.0
        below, above = shares_beside(step, reference, on_gpu=self.baseline.graph.has_gpu, share=share)
        return times, times / (1 + above), times / (1 - below)

    @property
    def worth(self) -> Workers | None:
        """The largest number of several workers with an efficiency of at least ``WORTH_PCT``; None if there is none."""
        found = [row for row in self.rows if row.count > 1 and (self.efficiency_pct(row) or 0.0) >= WORTH_PCT]
        return found[-1] if found else None

    @property
    def verdict(self) -> str:
        """State up to how many workers scaling pays."""
        worth, last = self.worth, next(row for row in reversed(self.rows) if row.step_ms)
        workers = "1 worker trains" if last.count == 1 else f"{last.count:,} workers train"
        at_last = f"{workers} {self.throughput(last):,.2f} times as much as one"
        if last.count == 1:
            return at_last
        if worth is None:
            return f"efficiency is below {WORTH_PCT:.0f} % for more than one worker: {at_last}"
        if worth is last:
            return f"{at_last}: an efficiency of {self._efficiency(last)}"
        return (
            f"efficiency is at least {WORTH_PCT:.0f} % up to {worth.count:,} workers: {self._efficiency(worth)}; "
            f"{at_last}"
        )

    def _efficiency(self, row: Workers) -> str:
        ends = self.efficiency_range_pct(row)
        interval = f" ({ends[0]:.0f} to {ends[1]:.0f} %)" if ends else ""
        return f"{self.efficiency_pct(row):.0f} %{interval}"

    def to_dict(self) -> dict[str, Any]:
        """Return the curve as a JSON object with the keys that scripts rely on."""
        return {
            "trace": self.baseline.graph.info.path,
            "transforms": [spelled(transform) for transform in self.transforms],
            "scaling": "strong" if self.strong else "weak",
            "step_clock": self.baseline.clock,
            "baseline_ms": self.baseline.step_ms,
            "replay_error_pct": self.baseline.known_error_pct,
            "rows": [
                {
                    **row.to_dict(),
                    "throughput": self.throughput(row),
                    "efficiency_pct": self.efficiency_pct(row),
                    "efficiency_low_pct": (self.efficiency_range_pct(row) or (None, None))[0],
                    "efficiency_high_pct": (self.efficiency_range_pct(row) or (None, None))[1],
                }
                for row in self.rows
            ],
            "verdict": self.verdict,
            "warnings": list(self.notes),
        }


def parse_workers(text: str) -> tuple[int, ...]:
    """Read numbers of workers: ``1,2,4`` or ``1..1024:11`` (11 numbers, each the same multiple of the one before)."""
    found = []
    for value in listed_values(text, "--workers"):
        if not (value.isdecimal() and 1 <= int(value[:8]) <= MOST_WORKERS and len(value) < 8):
            raise WhatifError(f"--workers: expected numbers from 1 to {MOST_WORKERS:,}, as in 1,2,4,8, got {value!r}.")
        found.append(int(value))
    return tuple(sorted(set(found)))


def scaling(
    baseline: Baseline,
    transforms: Sequence[Transform],
    workers: Sequence[int],
    *,
    strong: bool = False,
    jobs: str | int = 1,
    progress: Progress | None = None,
) -> Scaling:
    """Predict the step on each number of workers; ``jobs`` as of ``sweep``.

    Every what-if of the composition that has an option ``workers`` gets the number, unless it sets that itself; one
    worker alone runs without them, and without those that then do not apply. The collectives of a recording of
    several workers are issued again for each number, including one. ``strong``: the recorded batch is shared by all
    workers. Raises WhatifError if no what-if has the option, if a recording of several workers shows no collectives,
    if one sets the batch that is to be shared, or if they apply to no number.
    """
    spreading = _spreading(transforms)
    together = any(t.name in SHARING for t, spreads in zip(transforms, spreading, strict=True) if spreads)
    setting = next((t for t in transforms if SETTING_BATCH.get(t.name) in t.options), None)
    if strong and not together and setting:
        raise WhatifError(
            f"scaling: expected --strong to divide the batch among the workers, got {spelled(setting)}, which sets it; "
            f"leave out {SETTING_BATCH[setting.name]}=."
        )
    from whatif.models.parallel.other_workers import recorded_on_several  # loads what merges ranks: not for `apply`

    several = recorded_on_several(baseline.graph)
    if communicates(baseline.graph) and not several:
        raise WhatifError(
            f"scaling: expected a recording that shows its collectives, got {baseline.graph.info.path} of one of "
            "several workers, which shows none: name the recordings of all ranks."
        )
    if several and strong:
        raise WhatifError("scaling: expected weak scaling of a recording of several workers, got --strong.")
    alone, left_out = _applicable(baseline, _on(1, transforms, spreading, several=several))
    one = apply(baseline, *alone)
    single = Workers(1, one.predicted_ms, one.low_ms, one.high_ms)
    samples = one.graph.info.samples
    chosen = []
    for count in workers:
        # The step is that of the worker with the most samples.
        share = -(-samples // count) / samples if samples else 1 / count
        shared = [load_transform("batch_size", factor=share)] if strong and not together and share < 1 else []
        chosen.append(alone if count == 1 else (*shared, *_on(count, transforms, spreading, several=several)))
    rows: list[Workers] = []
    notes: tuple[str, ...] = ()
    answers = spread(partial(predicted, _facts), baseline, chosen, jobs=jobs)
    for count, (fields, point_notes) in zip(reported(workers, progress), answers, strict=True):
        if strong and not together and samples and count > samples:
            fields = {
                "step_ms": None,
                "reason": f"scaling: expected no more workers than the batch has samples ({samples}).",
            }
            point_notes = ()  # of a step that is not shown
        elif strong and not together and samples and fields["step_ms"]:  # not all have as many
            fields = {**fields, "samples_per_s": 1e3 * samples / fields["step_ms"]}
        rows.append(Workers(count, **fields))
        notes = point_notes or notes
    spread_out = [row for row in rows if row.count > 1]  # one alone goes without the what-ifs, so it always has a step
    if spread_out and all(row.step_ms is None for row in spread_out):
        raise WhatifError(spread_out[0].reason)
    mean = baseline.graph.info.samples if baseline.graph.info.ranks else None
    share = mean / (baseline.graph.info.workers or 1) / samples if mean and samples else 1.0
    return Scaling(baseline, tuple(transforms), strong or together, single, tuple(rows), (*notes, *left_out), share)


def _spreading(transforms: Sequence[Transform]) -> list[bool]:
    """Whether each what-if gets the number of workers."""
    able = [OPTION in transform.parameters and transform.name not in LOADERS for transform in transforms]
    names = ", ".join(transform.name for transform in transforms) or "none"
    if not any(able):
        raise WhatifError(f"scaling: expected a what-if with the option workers, as distributed or fsdp, got {names}.")
    spreading = [can and OPTION not in t.options for can, t in zip(able, transforms, strict=True)]
    if not any(spreading):
        raise WhatifError(f"scaling: expected a what-if without workers=, for --workers to set, got {names} with it.")
    # Those with a network: two of them would make groups of groups, the square of the number.
    chosen = [
        t.name for t, spreads in zip(transforms, spreading, strict=True) if spreads and "bandwidth" in t.parameters
    ]
    shared = next((name for name in chosen if name in SHARING), None)
    if shared and len(chosen) > 1:
        raise WhatifError(
            f"scaling: expected {shared}:workers=2 or the like where other what-ifs take --workers, got "
            f"{' and '.join(chosen)} without."
        )
    return spreading


def _on(
    count: int, transforms: Sequence[Transform], spreading: Sequence[bool], *, several: bool
) -> tuple[Transform, ...]:
    """The composition for ``count`` workers; a recording of ``several`` also needs the option set for one worker."""
    return tuple(
        transform.with_options({OPTION: count}) if spreads else transform
        for transform, spreads in zip(transforms, spreading, strict=True)
        if count > 1 or several or not spreads
    )


def _applicable(baseline: Baseline, transforms: Sequence[Transform]) -> tuple[tuple[Transform, ...], tuple[str, ...]]:
    """The what-ifs that apply to a single worker, which communicates with none, and a sentence on each other one."""
    graph, kept, left_out = baseline.graph, [], []
    for transform in in_order(transforms):
        try:
            graph = compose(graph, [transform])
            kept.append(transform)
        except WhatifError as error:
            why = str(error).removeprefix(f"{transform.name}: ")
            left_out.append(f"one worker alone goes without {spelled(transform)}: {why}")
    return tuple(kept), tuple(left_out)


def _facts(prediction: Prediction) -> dict[str, Any]:
    return {"communication_ms": prediction.breakdown.communication_ms, **prediction.totals.to_dict()}
