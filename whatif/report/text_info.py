"""The text report of ``whatif info``: the quality of the recording, and its content."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from whatif.graph.types import Severity
from whatif.questions.summary import Summary
from whatif.report.layout import (
    CLOCK_LABELS,
    UNTRACED_LABELS,
    Report,
    bar,
    kind_label,
    ms_format,
    pct,
    plain,
    report,
)
from whatif.simulation.steps import least_steps
from whatif.units import counted

# Families beyond the eighth take a percent or less.
SHOWN_FAMILIES = 8

# The most rows on a screen: eight ranks with their streams.
SHOWN_THREADS = 100


def print_summary(summary: Summary) -> None:
    """Print the report of ``whatif info``."""
    with report() as out:
        out.say(f"{Path(summary.graph.info.path).name}: {summary.trust}", "bold")
        out.table(None, ["", " "], _facts(summary), gives_way=1)
        _print_steps(out, summary)
        out.table(
            f"Tasks ({len(summary.graph):,})",
            ["", ""],
            [(kind_label(kind, summary.graph), f"{count:,}") for kind, count in summary.tasks.items()],
        )
        ms = ms_format(max((t.busy_ms for t in summary.threads), default=0.0))
        rows = [(t.name, f"{t.tasks:,}", ms(t.busy_ms)) for t in summary.threads]
        out.table("Execution threads", ["", "tasks", "busy ms"], rows[:SHOWN_THREADS])
        if len(rows) > SHOWN_THREADS:
            out.say(f"  and {len(rows) - SHOWN_THREADS:,} others: see --json", "dim")
        _print_shares(out, summary)
        out.points("Findings, quirks and doubts", summary.warnings)
        out.points("Noted", [f.sentence for f in summary.trust.findings if f.severity == Severity.NOTE])
        out.points("Checks made", summary.trust.checks)


def _facts(summary: Summary) -> list[tuple[str, str]]:
    info, has_gpu = summary.graph.info, summary.time_share_of == "gpu"
    gpu = info.gpu or ("not named by the trace" if has_gpu else "none: a CPU recording")
    known = "" if summary.gpu_known_as in (None, info.gpu) else f" (known as {summary.gpu_known_as})"
    unknown = " (not in whatif's tables)" if info.gpu and summary.gpu_known_as is None else ""
    steps = f"{info.n_steps}, from {info.step_source}" if info.n_steps else "none found"
    if summary.baseline.clock == "span":
        least = least_steps(summary.graph)
        why = f"; step times need at least {least}" if 0 < info.n_steps < least else ""
        steps = f"{steps}{why}: all times are of the whole span"
    facts = [("GPU", gpu + known + unknown), ("steps", steps)]
    if info.batch_size:
        sizes = sorted({rank.batch_size or 0 for rank in info.ranks})
        batch = (
            " or ".join(str(n or "unknown") for n in sizes) + ", by rank" if len(sizes) > 1 else str(info.batch_size)
        )
        facts.append(("batch size", batch))
    if has_gpu and (summary.graph.launch_of >= 0).any():
        depth = f"blocks at {info.queue_depth:,} pending tasks" if info.queue_depth else "no limit seen"
        facts += [
            ("launch lag", f"{info.launch_lag_ns / 1e3:.1f} µs from the end of a launch"),
            ("launch queue", depth),
        ]
    return facts


def _print_steps(out: Report, summary: Summary) -> None:
    baseline, info = summary.baseline, summary.graph.info
    ms = ms_format(baseline.step_ms)
    clock = CLOCK_LABELS[baseline.clock]
    how = f"{clock}, median of {summary.steady_steps} steady steps" if summary.steady_steps > 1 else clock
    rows = [
        (info.made, f"{ms(baseline.measured_ns / 1e6)} ms", how),
        ("replayed", f"{ms(baseline.replayed_ns / 1e6)} ms", f"replay error {baseline.replay_error_pct:+z.2f} %"),
        ("unexplained wait", f"{baseline.unexplained_wait_pct:.1f} % ", "of the whole recording"),
    ][: 3 if info.is_recorded else 1]
    if info.untraced_step_ns:
        rows.insert(
            0, ("without the profiler", f"{ms(info.untraced_step_ns / 1e6)} ms", "wall clock, before the recording")
        )
    calibration = baseline.calibration
    if calibration and calibration.untraced:
        meets = f"within {calibration.missed_pct:.2f} % of {UNTRACED_LABELS[calibration.untraced.clock]}"
        rows.insert(3, ("calibrated", f"{ms(calibration.corrected_ns / 1e6)} ms", meets))
    if estimated := baseline.estimated_ms:
        spread = f"estimated: {ms(estimated['low'])} … {ms(estimated['high'])} ms"
        rows.insert(0, ("without the profiler", f"{ms(estimated['estimate'])} ms", spread))
    out.table("Whole span" if baseline.clock == "span" else "Step", ["", "", " "], rows, gives_way=2)
    if calibration:
        out.note(calibration.sentence, "dim")


def _print_shares(out: Report, summary: Summary) -> None:
    whose = "GPU" if summary.time_share_of == "gpu" else "CPU"
    title = f"{whose} time ({ms_format(summary.time_ms)(summary.time_ms)} ms in all)"
    layers = (
        counted(summary.n_layers, "layer")
        if summary.n_layers
        else "no layers: record with `whatif collect` to get them"
    )
    phases = ", ".join(f"{name} {share:.0f} %" for name, share in summary.phases_pct.items())
    rows: list[tuple[str | Text, ...]] = [
        ("with a layer", _share(summary.time_with_layer_pct), plain(layers, "dim")),
        ("with a phase", _share(summary.time_with_phase_pct), plain(phases, "dim")),
    ]
    out.table(title, ["", "", " "], rows, gives_way=2)
    families = [(name.replace("_", " "), share) for name, share in summary.families_pct.items()][:SHOWN_FAMILIES]
    noun = "Kernel" if summary.time_share_of == "gpu" else "Operator"
    for heading, shares in ((f"{noun} families", families), ("Number formats", list(summary.dtypes_pct.items()))):
        out.table(heading, ["", "", " "], [(name, f"{pct(share)} %", bar(share, 100)) for name, share in shares])


def _share(share_pct: float | None) -> str:
    return "–" if share_pct is None else f"{pct(share_pct)} %"
