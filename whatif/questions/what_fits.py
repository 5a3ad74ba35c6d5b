"""What fits into a device's memory: the largest batch under some what-ifs, and the fewest workers that share a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from msgspec import Struct

from whatif.graph.memory import Memory, peak
from whatif.models.layers.memory_effects import with_batch
from whatif.prediction.composition import spelled
from whatif.prediction.peak_fit import fits, high_peak_bytes
from whatif.prediction.transform import LOADERS, SETTING_BATCH, Transform, load_transform
from whatif.questions.advice.trial import Refused, Trial, Trier
from whatif.runtime.errors import WhatifError

Asked = Literal["batch", "workers"]
# Batches are searched up to this many times the recorded one: larger steps cannot be predicted from it.
MOST_TIMES = 2**16
# Workers are searched up to the number of GPUs in the largest published runs of one model, as a power of two.
MOST_WORKERS = 2**16
# Instead of an impossible number so many below it are tried: the GPUs of the largest node, NVIDIA's GB200 NVL72.
WIDEST_GAP = 72
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
    of: str  # the name of the what-if whose workers they are
    workers: int | None
    devices: int  # in all: beside these workers, those that other what-ifs add
    peak_bytes: int
    high_bytes: int  # the upper end of the peak's range, which may be more than fits
    capacity_bytes: int
    step: Trial | Refused

    def to_dict(self) -> dict[str, Any]:
        """Return it as one JSON object; sizes in bytes, times in ms."""
        return {
            "of": self.of,
            "workers": self.workers,
            "devices": self.devices,
            "peak_bytes": self.peak_bytes,
            "high_bytes": self.high_bytes,
            "capacity_bytes": self.capacity_bytes,
            "step_ms": step_ms(self.step),
            "transforms": list(self.what_ifs),
        }


def step_ms(step: Trial | Refused | None) -> float | None:
    """Return the time of a step that could be tried, ms."""
    return step.predicted_ms if isinstance(step, Trial) else None


def first_number(holds: Callable[[int], bool | None], start: int, most: int) -> int | None:
    """Return the least number from 1 to ``most`` for which ``holds`` is true, as it is for all larger; None if none.

    Doubles ``start``, then bisects. Numbers for which ``holds`` returns None are skipped; in place of such a double
    the next ones below it are tried, ``WIDEST_GAP`` in all.
    """

    def answered(numbers: range) -> tuple[int, bool | None]:
        """The first of the numbers that is possible, with its answer; else the first one, and None."""
        answers = ((number, holds(number)) for number in numbers)
        return next((each for each in answers if each[1] is not None), (numbers[0], None))

    below, double = 0, start
    while True:
        above, found = answered(range(double, max(below, double - WIDEST_GAP), -1))
        if found:
            break
        if double == most:
            return None
        below = below if found is None else above
        double = min(2 * double, most)
    least = above
    while above - below > 1:
        middle = (below + above) // 2
        tried, found = answered(range(middle, above))
        if found:
            least = above = tried
        elif found is None:
            above = middle
        else:
            below = tried
    return least


def _first_peak(
    peak_bytes_of: Callable[[int], int], holds: Callable[[int], bool], start: int, most: int
) -> tuple[int | None, dict[int, int]]:
    """The first number, as ``first_number``, whose peak ``holds``, and the peaks of all that were tried.

    Raises WhatifError if no number is possible.
    """
    peaks: dict[int, int] = {}
    reasons: list[WhatifError] = []

    def tried(number: int) -> bool | None:
        try:
            peaks[number] = peak_bytes_of(number)
        except WhatifError as error:  # nodes or heads do not allow such groups, a pipeline has more micro-batches
            reasons.append(error)
            return None
        return holds(peaks[number])

    found = first_number(tried, start, most)
    if not peaks:
        raise reasons[0]
    return found, peaks


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

    def changed(samples: int) -> tuple[Transform, ...]:
        option = f"size={samples}" if batch else f"factor={samples / unit!r}"
        return (load_transform(f"{_BATCH}:{option}"), *others)

    def peak_bytes_of(samples: int) -> int:
        return trier.peak_bytes_of(changed(samples)) if others else peak(with_batch(memory, samples / unit)).total

    def fitting(peak_bytes: int) -> bool:
        return fits(peak_bytes, None, capacity_bytes) is True

    # A larger batch never takes less.
    _, peaks = _first_peak(peak_bytes_of, lambda peak_bytes: not fitting(peak_bytes), unit, MOST_TIMES * unit)
    most = max((samples for samples, bytes_ in peaks.items() if fitting(bytes_)), default=0)
    written = tuple(map(spelled, others))
    step = trier.attempt(changed(most)) if most else None
    peak_bytes = peaks[most or min(peaks)]
    high_bytes = high_peak_bytes(trier.baseline.graph.info, peak_bytes, others)
    samples = most if batch else None
    return LargestBatch(written, samples, most / unit, peak_bytes, high_bytes, capacity_bytes, step, min(peaks))


def fewest_workers(trier: Trier, what_ifs: Sequence[Transform], capacity_bytes: int) -> FewestWorkers:
    """Find the fewest workers for the what-if that leaves their number open, or that is the only one with workers.

    Raises WhatifError if there is none or several such, or if no number of workers is possible.
    """
    shared = _of_workers(what_ifs)

    def changed(workers: int) -> tuple[Transform, ...]:
        return tuple(t.with_options({"workers": workers}) if t is shared else t for t in what_ifs)

    # More workers never need more memory each.
    found, peaks = _first_peak(
        lambda workers: trier.peak_bytes_of(changed(workers)),
        lambda peak_bytes: fits(peak_bytes, None, capacity_bytes) is True, 1, MOST_WORKERS,
    )  # fmt: skip
    shown = max(peaks) if found is None else found
    chosen = changed(shown)
    high_bytes = high_peak_bytes(trier.baseline.graph.info, peaks[shown], chosen)
    return FewestWorkers(
        tuple(map(spelled, chosen)), shared.name, found, trier.devices_of(chosen), peaks[shown], high_bytes,
        capacity_bytes, trier.attempt(chosen),
    )  # fmt: skip


def _of_workers(what_ifs: Sequence[Transform]) -> Transform:
    able = [t for t in what_ifs if "workers" in t.parameters and t.name not in LOADERS]
    chosen = [t for t in able if "workers" not in t.options] or able
    if len(chosen) != 1:
        got = " and ".join(t.name for t in chosen) or "none"
        advice = "say workers=N for the others" if chosen else "name such a what-if"
        raise WhatifError(
            f"memory: --solve workers: expected one what-if whose number of workers is open, as in fsdp, got {got}; "
            f"{advice}."
        )
    return chosen[0]
