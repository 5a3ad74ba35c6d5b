"""The text report of ``whatif apply``: the prediction first, then the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from whatif.models.durations.estimator import described
from whatif.prediction.composition import spelled, spelled_together
from whatif.prediction.predict import Prediction
from whatif.report.layout import (
    BREAKDOWN_LABELS,
    CLOCK_LABELS,
    CLOCK_SUBJECTS,
    UNTRACED_LABELS,
    Report,
    ms_format,
    plain,
    rate,
    report,
)

# Sources of the durations that a what-if changed or added (`estimator.Source`; docs/estimates.md).
SOURCE_LABELS = {
    "measured": "measured alone",
    "database": "by the op database",
    "learned": "by a model of the device",
    "other_devices": "from other devices",
    "roofline": "by roofline",
    "paper": "by a paper",
    "assumed": "assumed",
}


def print_prediction(prediction: Prediction) -> None:
    """Print the report of ``whatif apply``."""
    baseline = prediction.baseline
    ms = ms_format(prediction.baseline_ms)
    with report() as out:
        out.say(headline(prediction), "bold")
        out.say(f"nominal 90 % range {ms(prediction.low_ms)} … {ms(prediction.high_ms)} ms", "dim")
        out.without_profiler(baseline)
        if prediction.verdict:
            out.say(prediction.verdict)
        out.table(
            f"{CLOCK_SUBJECTS[baseline.clock].capitalize()} ({CLOCK_LABELS[baseline.clock]}), ms",
            ["", "baseline", "predicted", "change"],
            compared(prediction, ms),
        )
        rates = prediction.to_dict().get("samples_per_s")
        if isinstance(rates, dict):
            out.say()
            out.say(f"  {rate(rates['baseline'])} → {rate(rates['predicted'])} samples/s")
        elif prediction.samples_factor != 1:
            times = prediction.samples_factor
            out.say()
            out.say(f"  {times:.4g}× as many samples in a step, {times * prediction.speedup:.2f}× as many a second")
        if len(prediction.transforms) > 1:
            _print_contributions(out, prediction, ms)
        out.say()
        out.say(_footnote(prediction, ms), "dim")
        estimated = ", ".join(f"{count:,} {SOURCE_LABELS[key]}" for key, count in described(prediction.graph).items())
        if estimated:
            out.say(f"  tasks with estimated durations: {estimated}", "dim")
        calibration = baseline.calibration
        if calibration and calibration.untraced:
            untraced = calibration.untraced
            near = "to" if calibration.met else f"within {calibration.missed_pct:.1f} % of"
            subject = UNTRACED_LABELS[untraced.clock]
            out.say(f"  baseline calibrated {near} {subject} ({ms(untraced.median_ns / 1e6)} ms)", "dim")


def headline(prediction: Prediction) -> str:
    """Return the headline: the what-ifs, the step before and after."""
    ms = ms_format(prediction.baseline_ms)
    names = spelled_together(prediction.transforms)
    change = f"{ms(prediction.baseline_ms)} → {ms(prediction.predicted_ms)} ms, {_change(prediction)}"
    return f"{names}: {change}"


def _change(prediction: Prediction) -> str:
    speedup = prediction.speedup
    if abs(speedup - 1) < 0.0005:
        return "no change"
    return f"{speedup:.2f}× as fast" if abs(speedup - 1) >= 0.01 else f"{speedup:.3f}× as fast"


def compared(prediction: Prediction, ms: Callable[[float | None], str]) -> list[tuple[str | Text, ...]]:
    """Return the step and its parts before and after, without parts that are absent from both."""
    before, after = prediction.baseline.breakdown, prediction.breakdown
    noun = "span" if prediction.baseline.clock == "span" else "step"
    step = (noun, prediction.baseline_ms, prediction.predicted_ms)
    parts = [(label, getattr(before, key), getattr(after, key)) for key, label in BREAKDOWN_LABELS]
    parts.append(("GPU busy", before.gpu_busy_ms, after.gpu_busy_ms))
    rows = [
        (label, ms(old), ms(new), ("+" if new > old else "") + ms(new - old))
        for label, old, new in (step, *parts)
        if label == noun or old or new
    ]
    return [tuple(plain(cell, "bold") for cell in rows[0]), *rows[1:]]


def _print_contributions(out: Report, prediction: Prediction, ms: Callable[[float | None], str]) -> None:
    """Print the saving of each transform, alone and after those above it, and the shared part."""
    composition = prediction.composition
    rows = [
        (spelled(transform), ms(part.alone_ms), ms(part.added_ms))
        for transform, part in zip(prediction.transforms, composition.contributions, strict=True)
    ]
    alone_ms = [part.alone_ms for part in composition.contributions]
    total_ms = None if None in alone_ms else sum(gain_ms or 0.0 for gain_ms in alone_ms)
    rows.append(("sum", ms(total_ms), ms(composition.together_ms)))
    out.table("Gain of each, ms", ["", "alone", "added to those above"], rows)
    missing = [part.reason for part in composition.contributions if part.reason]
    for reason in missing:
        out.say(f"  alone it does not apply: {reason}", "dim")
    shared_ms = composition.interaction_ms
    if shared_ms is not None and ms(abs(shared_ms)) != ms(0.0):
        out.say(f"  {add_up(shared_ms, ms)}", "dim")


def add_up(shared_ms: float, ms: Callable[[float | None], str]) -> str:
    """Return a sentence on the difference between the gains of what-ifs alone and together, with the reason."""
    more, why = ("more", "some save the same time") if shared_ms > 0 else ("less", "one makes another more effective")
    return f"alone they add up to {ms(abs(shared_ms))} ms {more} than together: {why}"


def _footnote(prediction: Prediction, ms: Callable[[float | None], str]) -> str:
    baseline = prediction.baseline
    untraced_ns = baseline.graph.info.untraced_step_ns
    made = baseline.graph.info.made
    if not baseline.graph.info.is_recorded:
        return f"  the baseline of {ms(baseline.measured_ns / 1e6)} ms is {made}, not recorded"
    parts = [f"without the profiler {ms(untraced_ns / 1e6)} ms"] if untraced_ns else []
    parts += [
        f"recorded {ms(baseline.measured_ns / 1e6)} ms",
        f"replay error {baseline.replay_error_pct:+z.2f} %",
        f"unexplained wait {baseline.unexplained_wait_pct:.1f} %",
    ]
    return "  " + "; ".join(parts)
