"""What fits into a device's memory: the largest batch under some what-ifs, and the fewest workers that share a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from msgspec import Struct

from whatif.graph.memory import Memory, peak
from whatif.models.layers.memory_effects import with_batch
from whatif.prediction.composition import spelled
from whatif.prediction.transform import AXES, SETTING_BATCH, Transform, load_transform
from whatif.questions.advice.trial import Refused, Trial, Trier
from whatif.runtime.errors import WhatifError

Asked = Literal["batch", "workers"]
# Batches are searched up to this many times the recorded one: larger steps cannot be predicted from it.
MOST_TIMES = 2**16
# Workers are searched up to the number of GPUs in the largest published runs of one model, as a power of two.
MOST_WORKERS = 2**16
# Shapes miss copies that libraries make in other layouts. In 79 of the 81 runs in docs/memory.md the measured peak is
# at most this many times that from shapes, and in none clearly less. Chosen on these; two recordings of GPUs agree.
SHAPES_MISS = 1.06
# The same for steps shared by several devices: twelve published peaks of two sources (docs/published.md) lie within
# these times the predicted one. Chosen on them.
SHARED_MISS = (0.95, 1.08)
_BATCH = "batch_size"


class LargestBatch(Struct, frozen=True):
    """The largest batch that fits: in samples if its size is recorded, as a factor of the recorded one, and its peak.

    At a factor of ``MOST_TIMES`` the search ended: a larger batch may fit as well.
    """

    what_ifs: tuple[str, ...]  # as written on a command line; the batch is changed before them
    samples: int | None
    factor: float  # 0 if not even the smallest fits; the peak is then that of the smallest
    peak_bytes: int
    high_bytes: int  # the upper end of the peak's range, which may be more than fits
    capacity_bytes: int  # of the device under the what-ifs
    step: Trial | Refused | None  # None if not even the smallest fits
    smallest: int = 1  # the smallest batch tried: a pipeline has no fewer samples than micro-batches

    def to_dict(self) -> dict[str, Any]:
        """Return it as one JSON object; sizes in bytes, times in ms."""
        return {
            "batch_size": self.samples,
            "factor": self.factor,
            "peak_bytes": self.peak_bytes,
            "high_bytes": self.high_bytes,
            "capacity_bytes": self.capacity_bytes,
            "step_ms": step_ms(self.step),
            "transforms": list(self.what_ifs),
        }


class FewestWorkers(Struct, frozen=True):
    """The fewest workers whose peak fits; None if the most that were tried do not, with the peak of those."""

    what_ifs: tuple[str, ...]  # as written on a command line, with that number of workers
    workers: int | None
    peak_bytes: int
    capacity_bytes: int
    step: Trial | Refused

    @property
    def high_bytes(self) -> int:
        """The upper end of the peak's range, bytes, which may be more than fits."""
        return peak_range_bytes(self.peak_bytes, self.step.transforms)[1]

    def to_dict(self) -> dict[str, Any]:
        """Return it as one JSON object; sizes in bytes, times in ms."""
        return {
            "workers": self.workers,
            "peak_bytes": self.peak_bytes,
            "high_bytes": self.high_bytes,
            "capacity_bytes": self.capacity_bytes,
            "step_ms": step_ms(self.step),
            "transforms": list(self.what_ifs),
        }


def peak_range_bytes(predicted_bytes: int, transforms: Sequence[Transform] = ()) -> tuple[int, int]:
    """Return the ends of the range of a peak that was predicted under ``transforms``, bytes."""
    shared = any(transform.axis >= 0 and AXES[transform.axis] != "passes" for transform in transforms)
    low, high = SHARED_MISS if shared else (1.0, SHAPES_MISS)
    return round(low * predicted_bytes), round(high * predicted_bytes)


def step_ms(step: Trial | Refused | None) -> float | None:
    """Return the time of a step that could be tried, ms."""
    return step.predicted_ms if isinstance(step, Trial) else None


def first_number(holds: Callable[[int], bool | None], start: int, most: int) -> int | None:
    """Return the least number from 1 to ``most`` for which ``holds`` is true, as it is for all larger; None if none.

    Doubles ``start``, then bisects. Numbers for which ``holds`` returns None are skipped.
    """
    below, above = 0, start
    while not (found := holds(above)):
        if above == most:
            return None
        below = below if found is None else above
        above = min(2 * above, most)
    least = above
    while above - below > 1:
        middle = tried = (below + above) // 2
        while (found := holds(tried)) is None and tried + 1 < above:
            tried += 1
        if found:
            least = above = tried
        elif found is None:
            above = middle
        else:
            below = tried
    return least


def largest_batch(
    trier: Trier, memory: Memory, batch: int | None, what_ifs: Sequence[Transform], capacity_bytes: int
) -> LargestBatch:
    """Find the most samples (hundredths of the recorded batch if its size is unknown) whose peak fits.

    The batch is changed before ``what_ifs``, replacing any change of it among them, and what a pipeline says of the
    samples of its micro-batches. Raises WhatifError if one of them does not apply.
    """
    others = [
        replace(t, options={name: value for name, value in t.options.items() if name != SETTING_BATCH.get(t.name)})
        for t in what_ifs if t.name != _BATCH
    ]  # fmt: skip
    unit = batch or 100
    peaks: dict[int, int] = {}
    reasons: list[WhatifError] = []

    def changed(samples: int) -> tuple[Transform, ...]:
        option = f"size={samples}" if batch else f"factor={samples / unit!r}"
        return (load_transform(f"{_BATCH}:{option}"), *others)

    def does_not_fit(samples: int) -> bool | None:
        if not others:
            peaks[samples] = peak(with_batch(memory, samples / unit)).total
            return peaks[samples] > capacity_bytes
        try:
            peaks[samples] = trier.peak_bytes_of(changed(samples))
        except WhatifError as error:  # a pipeline has more micro-batches
            reasons.append(error)
            return None
        return peaks[samples] > capacity_bytes

    # A larger batch never takes less.
    first_number(does_not_fit, unit, MOST_TIMES * unit)
    if not peaks:
        raise reasons[0]
    fits = max((samples for samples, bytes_ in peaks.items() if bytes_ <= capacity_bytes), default=0)
    written = tuple(map(spelled, others))
    step = trier.attempt(changed(fits)) if fits else None
    peak_bytes = peaks[fits or min(peaks)]
    high_bytes = peak_range_bytes(peak_bytes, others)[1]
    samples = fits if batch else None
    return LargestBatch(written, samples, fits / unit, peak_bytes, high_bytes, capacity_bytes, step, min(peaks))


def fewest_workers(trier: Trier, what_ifs: Sequence[Transform], capacity_bytes: int) -> FewestWorkers:
    """Find the fewest workers for the what-if that leaves their number open, or that is the only one with workers.

    Raises WhatifError if there is none or several such, or if no number of workers is possible.
    """
    shared = _of_workers(what_ifs)
    peaks: dict[int, int] = {}
    reasons: list[WhatifError] = []

    def changed(workers: int) -> tuple[Transform, ...]:
        return tuple(t.with_options({"workers": workers}) if t is shared else t for t in what_ifs)

    def fits(workers: int) -> bool | None:
        try:
            peaks[workers] = trier.peak_bytes_of(changed(workers))
        except WhatifError as error:  # the cluster's nodes or the model's heads do not allow such groups
            reasons.append(error)
            return None
        return peaks[workers] <= capacity_bytes

    # More workers never need more memory each.
    found = first_number(fits, 1, MOST_WORKERS)
    if not peaks:
        raise reasons[0]
    shown = max(peaks) if found is None else found
    chosen = changed(shown)
    return FewestWorkers(tuple(map(spelled, chosen)), found, peaks[shown], capacity_bytes, trier.attempt(chosen))


def _of_workers(what_ifs: Sequence[Transform]) -> Transform:
    able = [t for t in what_ifs if "workers" in t.parameters]
    chosen = [t for t in able if "workers" not in t.options] or able
    if len(chosen) != 1:
        got = " and ".join(t.name for t in chosen) or "none"
        advice = "say workers=N for the others" if chosen else "name such a what-if"
        raise WhatifError(
            f"memory: --solve workers: expected one what-if whose number of workers is open, as in fsdp, got {got}; "
            f"{advice}."
        )
    return chosen[0]
