"""The text report of ``whatif apply``: the prediction first, then the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from whatif.predict import Prediction
from whatif.report.layout import (
    BREAKDOWN_LABELS,
    CLOCK_LABELS,
    CLOCK_SUBJECTS,
    UNTRACED_LABELS,
    ms_format,
    plain,
    print_table,
    print_title,
    report,
)
from whatif.report.text_explain import print_explanation
from whatif.report.text_info import print_summary

__all__ = ["print_explanation", "print_prediction", "print_summary"]


def print_prediction(prediction: Prediction) -> None:
    """Print what ``whatif apply`` reports."""
    baseline = prediction.baseline
    ms = ms_format(prediction.baseline_ms)
    names = " + ".join(_spelled(t.name, t.options) for t in prediction.transforms)
    with report() as out:
        change = f"{ms(prediction.baseline_ms)} → {ms(prediction.predicted_ms)} ms, {_change(prediction)}"
        out.print(plain(f"{names}: {change}", "bold"))
        out.print(plain(f"nominal 90 % range {ms(prediction.low_ms)} … {ms(prediction.high_ms)} ms", "dim"))
        if prediction.verdict:
            out.print(plain(prediction.verdict))
        print_title(out, f"{CLOCK_SUBJECTS[baseline.clock].capitalize()} ({CLOCK_LABELS[baseline.clock]}), ms")
        print_table(out, ["", "baseline", "predicted", "change"], _compared(prediction, ms))
        rates = prediction.to_dict().get("samples_per_s")
        if isinstance(rates, dict):
            out.print()
            out.print(plain(f"  {rates['baseline']:,.1f} → {rates['predicted']:,.1f} samples/s"))
        out.print()
        out.print(_footnote(prediction, ms))
        untraced = baseline.calibration.untraced if baseline.calibration else None
        if untraced:
            what = UNTRACED_LABELS[untraced.clock]
            out.print(plain(f"  baseline calibrated to {what} ({ms(untraced.median_ns / 1e6)} ms)", "dim"))


def _spelled(name: str, options: dict[str, object]) -> str:
    return name + (":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "")


def _change(prediction: Prediction) -> str:
    speedup = prediction.speedup
    if abs(speedup - 1) < 0.0005:
        return "no change"
    return f"{speedup:.2f}× as fast" if abs(speedup - 1) >= 0.01 else f"{speedup:.3f}× as fast"


def _compared(prediction: Prediction, ms: Callable[[float | None], str]) -> list[tuple[str | Text, ...]]:
    """The step and its parts before and after, the parts that neither has left out."""
    before, after = prediction.baseline.breakdown, prediction.breakdown
    what = "span" if prediction.baseline.clock == "span" else "step"
    step = (what, prediction.baseline_ms, prediction.predicted_ms)
    parts = [(label, getattr(before, key), getattr(after, key)) for key, label in BREAKDOWN_LABELS]
    parts.append(("GPU busy", before.gpu_busy_ms, after.gpu_busy_ms))
    rows = [
        (label, ms(old), ms(new), ("+" if new > old else "") + ms(new - old))
        for label, old, new in (step, *parts)
        if label == what or old or new
    ]
    return [tuple(plain(cell, "bold") for cell in rows[0]), *rows[1:]]


def _footnote(prediction: Prediction, ms: Callable[[float | None], str]) -> Text:
    baseline = prediction.baseline
    untraced_ns = baseline.graph.info.untraced_step_ns
    parts = [f"without the profiler {ms(untraced_ns / 1e6)} ms"] if untraced_ns else []
    parts += [
        f"recorded {ms(baseline.measured_ns / 1e6)} ms",
        f"replay error {baseline.replay_error_pct:+.2f} %",
        f"unexplained wait {baseline.unexplained_wait_pct:.1f} %",
    ]
    return plain("  " + "; ".join(parts), "dim")
