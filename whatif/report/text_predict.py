"""The text report of ``whatif predict``: the step, its composition, and the sources of its durations."""

from __future__ import annotations

from whatif.from_module.predict_step import PredictedStep
from whatif.prediction.composition import spelled
from whatif.prediction.utilization import CONVENTION
from whatif.report.layout import (
    BREAKDOWN_LABELS,
    ms_format,
    rate,
    report,
)
from whatif.units import counted, size

# Source of the kernels' durations (docs/opdb.md).
_ANSWER_SOURCES = {
    "exact": "measured",
    "interpolated": "interpolated",
    "learned": "learned on this device",
    "same_chip": "learned on another board of this chip",
    "same_shape": "measured on others",
    "learned_across": "learned on others",
    "analytic": "from the data sheet",
    "published": "from published times of such kernels",
}


def print_predicted(predicted: PredictedStep) -> None:
    """Print the report of ``whatif predict``."""
    prediction = predicted.prediction
    ms = ms_format(prediction.predicted_ms)
    low_ms, high_ms = predicted.range_ms
    names = "".join(f" + {spelled(t)}" for t in prediction.transforms)
    with report() as out:
        out.say(f"{predicted.source}{names} on {predicted.device}: {ms(prediction.predicted_ms)} ms", "bold")
        out.say(f"nominal 90 % range {ms(low_ms)} … {ms(high_ms)} ms; none of it was measured", "dim")
        if prediction.transforms:
            out.say(f"without {names[3:]}: {ms(prediction.baseline_ms)} ms")
        if prediction.verdict:
            out.say(prediction.verdict)
        parts = [(label, getattr(prediction.breakdown, key)) for key, label in BREAKDOWN_LABELS]
        parts.append(("GPU busy", prediction.breakdown.gpu_busy_ms))
        out.table("Step, ms", ["", "predicted"], [(label, ms(value)) for label, value in parts if value])
        out.say()
        for line in _facts(predicted):
            out.say(f"  {line}")
        for note in predicted.notes:
            out.say(f"  {note}", "dim")
        answered = ", ".join(
            f"{count:,} {_ANSWER_SOURCES.get(key, key)}" for key, count in predicted.durations.sources.items()
        )
        out.say(f"  durations of {counted(len(predicted.durations.duration_ns), 'kernel')}: {answered}", "dim")


def _facts(predicted: PredictedStep) -> list[str]:
    found = []
    if predicted.samples_per_s is not None:
        tokens = f", {predicted.tokens_per_s:,.0f} tokens/s" if predicted.tokens_per_s is not None else ""
        found.append(f"{rate(predicted.samples_per_s)} samples/s{tokens}")
    used = predicted.used
    if used.mfu_pct is not None and predicted.gpu is not None:
        again = f" (HFU {used.hfu_pct:.0f} % with recomputation)" if used.recomputed_tflop else ""
        found.append(f"{_tflop(used.tflop)} TFLOP a step, MFU {used.mfu_pct:.0f} % of {predicted.gpu.name}{again}")
        found.append(f"FLOPs: {CONVENTION}")
    if predicted.peak_bytes is not None:
        fits = {True: "fits", False: "does not fit", None: "may not fit"}[predicted.fits]
        memory = f", {fits} {predicted.gpu.memory_gibyte:g} GiB" if predicted.gpu is not None else ""
        found.append(f"{size(predicted.peak_bytes)} at the peak{memory}")
    return found


def _tflop(tflop: float) -> str:
    """Format with two decimals, or as many as three significant digits need."""
    return f"{tflop:,.2f}" if tflop >= 1 else f"{tflop:.3g}"
