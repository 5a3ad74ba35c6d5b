"""A recorded step on many devices: the fastest, the cheapest, and those that it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from whatif.hardware.gpu import gpu_asked_for, gpu_names, load_gpu
from whatif.models.durations.estimator import device
from whatif.prediction.baseline import Baseline
from whatif.prediction.composition import spelled
from whatif.prediction.peak_fit import doubt_of, fits, high_peak_bytes
from whatif.prediction.predict import Prediction, apply
from whatif.prediction.transform import Transform, load_transform
from whatif.questions.recommend.prices import Prices
from whatif.runtime.errors import WhatifError
from whatif.runtime.progress import Progress, reported

# Steps that differ by less than this are equal: replay errors are as large.
SAME_SHARE = 0.003


class Candidate(Struct, frozen=True):
    """The step on one device: times in ms, ``cost`` of a step and of an epoch in the currency of the prices."""

    device: str
    step_ms: float
    low_ms: float
    high_ms: float
    gpu_busy_ms: float
    samples_per_s: float | None  # of all devices, as the cost and the energy are
    devices: int
    energy_j: float | None
    peak_bytes: int | None
    high_bytes: int | None  # the upper end of the peak's range
    cost: float | None
    epoch_hours: float | None
    epoch_cost: float | None
    recorded: bool
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether it fits, as ``whatif.prediction.peak_fit.fits`` says."""
        return fits(self.peak_bytes, self.high_bytes, load_gpu(self.device).memory_bytes)

    @property
    def doubt(self) -> str:
        """A sentence if only the end of the peak's range does not fit; else ""."""
        return doubt_of(self.device, self.peak_bytes, self.high_bytes, load_gpu(self.device).memory_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the device as a JSON object."""
        return {
            "device": self.device, "recorded": self.recorded, "predicted_ms": self.step_ms, "low_ms": self.low_ms,
            "high_ms": self.high_ms, "gpu_busy_ms": self.gpu_busy_ms, "samples_per_s": self.samples_per_s,
            "devices": self.devices, "energy_j": self.energy_j,
            "peak_memory_bytes": self.peak_bytes, "high_peak_memory_bytes": self.high_bytes, "fits": self.fits,
            "step_cost": self.cost, "epoch_hours": self.epoch_hours, "epoch_cost": self.epoch_cost,
            "notes": list(self.notes),
        }  # fmt: skip


class Ranking(Struct, frozen=True):
    """Devices, the best first, and those that were left out with the reason."""

    baseline: Baseline
    transforms: tuple[Transform, ...]
    candidates: tuple[Candidate, ...]
    left_out: dict[str, str]
    by: str
    currency: str
    epoch_samples: int | None

    @property
    def verdict(self) -> str:
        """Say which device comes first, and by how much."""
        if not self.candidates:
            return "none of the devices can run the step"
        first = self.candidates[0]
        if self.by == "cost" and first.cost is not None:
            cost = f"{first.cost * 1e3:.3g}" if first.cost < 1 else f"{first.cost * 1e3:,.0f}"
            priced = all(candidate.cost is not None for candidate in self.candidates)
            of = "is cheapest" if priced else "is cheapest of those priced"
            return f"{first.device} {of}: {cost} {self.currency}".rstrip() + " for a thousand steps"
        equal = sum(c.step_ms <= first.step_ms * (1 + SAME_SHARE) for c in self.candidates)
        if equal > 1:
            return f"{equal} devices take the same time: the rest of the step does not depend on the device"
        own = next((c for c in self.candidates if c.recorded), None)
        if own is None or own is first or not first.step_ms:
            return f"{first.device} is fastest" + (", the recorded one" if first.recorded else "")
        return f"{first.device} is fastest, {own.step_ms / first.step_ms:.2f}× as fast as the recorded {own.device}"

    def to_dict(self) -> dict[str, Any]:
        """Return the ranking as a JSON object with the keys that scripts rely on."""
        return {
            "trace": self.baseline.graph.info.path,
            "transforms": [spelled(transform) for transform in self.transforms],
            "step_clock": self.baseline.clock,
            "baseline_ms": self.baseline.step_ms,
            "replay_error_pct": self.baseline.known_error_pct,
            "ranked_by": self.by,
            "currency": self.currency or None,
            "epoch_samples": self.epoch_samples,
            "devices": [candidate.to_dict() for candidate in self.candidates],
            "left_out": [{"device": name, "reason": reason} for name, reason in self.left_out.items()],
            "verdict": self.verdict,
        }


def recommend(
    baseline: Baseline,
    transforms: Sequence[Transform] = (),
    devices: Sequence[str] = (),
    *,
    prices: Prices | None = None,
    by: str | None = None,
    epoch_samples: int | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """Rank ``devices`` (else those with a price, else all that are known) by ``by``: "time" or "cost".

    What-ifs are applied after the change of device, so that they see its units. Unless they name another network, they
    communicate over the device's usual one, also on the recorded device. Without ``by`` the ranking is by cost if
    there are prices. Devices on which the step does not fit, or on which a what-if does not apply, are left out with
    the reason. A rank has one die of a board of two: the die is tried unless the board is named. Raises WhatifError
    on an unknown device, on ``cost`` without prices, on a ``device`` among the what-ifs, and on a recording without a
    GPU, or of an unknown one: every other one would seem as fast.
    """
    graph = baseline.graph
    if not graph.has_gpu:
        raise WhatifError("recommend: expected the recording of a GPU, got one of a CPU.")
    if any(transform.name == "device" for transform in transforms):
        raise WhatifError("recommend: expected what-ifs that go with each device, got device; use --devices NAMES.")
    if by == "cost" and prices is None:
        raise WhatifError("recommend: expected a file of prices to rank by cost; name it with --prices.")
    own = device(graph)
    if own is None:
        kind = (
            f"of {graph.info.gpu}, which is not in whatif/hardware/gpus"
            if graph.info.gpu
            else "that does not name its GPU"
        )
        raise WhatifError(f"recommend: expected the recording of a known GPU, got one {kind}: the ratio is unknown.")
    all_names = tuple(name for name in gpu_names() if load_gpu(name).dies == 1)
    wanted = devices or tuple(prices.per_hour if prices else all_names)
    names = list(dict.fromkeys([*(gpu_asked_for(name).name for name in wanted), own.name]))
    chosen, left_out = [], {}
    for name in reported(names, progress):
        try:
            prediction = apply(baseline, load_transform("device", to=name), *transforms)
        except WhatifError as error:
            left_out[name] = str(error)
        else:
            candidate = _candidate(prediction, name, prices, epoch_samples, recorded=name == own.name)
            if candidate.fits is False:
                left_out[name] = _too_small(candidate)
            else:
                chosen.append(candidate)
    if not chosen and len(set(left_out.values())) == 1:
        raise WhatifError(next(iter(left_out.values())))
    ranked_by = by or ("cost" if prices else "time")
    chosen.sort(key=lambda c: ((c.cost is None, c.cost or 0.0) if ranked_by == "cost" else (False, 0.0), c.step_ms))
    currency = prices.currency if prices else ""
    return Ranking(baseline, tuple(transforms), tuple(chosen), left_out, ranked_by, currency, epoch_samples)


def _candidate(
    prediction: Prediction, name: str, prices: Prices | None, epoch_samples: int | None, *, recorded: bool
) -> Candidate:
    info, total = prediction.graph.info, prediction.totals
    memory_bytes = info.peak_bytes
    steps = epoch_samples / total.samples if epoch_samples and total.samples else None
    return Candidate(
        name, prediction.predicted_ms, prediction.low_ms, prediction.high_ms, prediction.breakdown.gpu_busy_ms,
        total.samples_per_s, total.devices, total.energy_j, memory_bytes,
        None if memory_bytes is None else
        high_peak_bytes(prediction.baseline.graph.info, memory_bytes, prediction.transforms),
        prices.of(name, total.device_s) if prices else None,
        None if steps is None else steps * total.step_s / 3600,
        prices.of(name, steps * total.device_s) if prices and steps is not None else None,
        recorded, prediction.graph.notes,
    )  # fmt: skip


def _too_small(candidate: Candidate) -> str:
    memory = load_gpu(candidate.device).memory_gibyte
    return f"needs {(candidate.peak_bytes or 0) / 2**30:.1f} GiB at its peak, has {memory:g}"
