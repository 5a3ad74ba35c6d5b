"""The tables of ``whatif sweep`` and ``whatif scaling``."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from whatif.prediction.composition import spelled
from whatif.questions.sweep.scaling import Scaling, Workers
from whatif.questions.sweep.sweep import Point, Sweep
from whatif.report.layout import ms_format, number, pct, plain, rate, report
from whatif.simulation.steps import CLOCK_NOUNS

# The most rows of a table: of more points it shows this many, evenly chosen, and says so.
MOST_ROWS = 40
# Steps that differ by no more than this are reported as equal.
SAME_STEP = 1e-4


def print_sweep(found: Sweep) -> None:
    """Print the table of a sweep: a row per point, or evenly chosen ones if there are many."""
    baseline_ms = found.baseline.step_ms
    ms = ms_format(baseline_ms)
    shown = _shown(len(found.points))
    with report() as out:
        out.say(headline(found), "bold")
        out.step(found.baseline)
        beside = _beside(found)
        rows: list[list[str | Text]] = []
        for place in shown:
            point = found.points[place]
            if point.step_ms is None:
                rows.append([*point.values, "–", plain("does not apply", "dim"), "", "", *("" for _ in beside)])
                continue
            rows.append(
                [
                    *point.values, ms(point.step_ms), f"{ms(point.low_ms)} … {ms(point.high_ms)}",
                    times_cell(found, point),
                    "" if point.samples_per_s is None else rate(point.samples_per_s),
                    *(cell(point) for _, cell in beside),
                ]
            )  # fmt: skip
        headers = [
            *found.options,
            f"{CLOCK_NOUNS[found.baseline.clock]} (ms)",
            "nominal 90 % range",
            times_header(found),
            "samples/s",
        ]
        headers += [header for header, _ in beside]
        out.table("", headers, rows, text_columns=0, keys=len(found.options))
        reasons = list(dict.fromkeys(f"  {point.reason}" for point in found.points if point.reason))
        if reasons or len(shown) < len(found.points):
            out.say()
        if len(shown) < len(found.points):
            out.say(f"  {len(shown)} of {len(found.points):,} values; --json and --plot have all of them", "dim")
        for reason in reasons:
            out.say(reason)


def _beside(found: Sweep) -> list[tuple[str, Callable[[Point], str]]]:
    """Optional columns, if they differ between points: number of devices, and memory of the fullest one."""
    applying = [point for point in found.points if point.step_ms is not None]
    columns: list[tuple[str, Callable[[Point], str]]] = []
    if any(point.devices > 1 for point in applying) and len({point.devices for point in applying}) > 1:
        columns.append(("devices", lambda point: f"{point.devices:,}"))
    if len({point.peak_bytes for point in applying} - {None}) > 1:
        columns.append(
            ("peak GiB", lambda point: "–" if point.peak_bytes is None else f"{point.peak_bytes / 2**30:.2f}")
        )
    return columns


def headline(found: Sweep) -> str:
    """Return the headline: the point with the shortest step, or with the highest throughput if batches differ."""
    best = found.best
    names = " ".join(spelled(transform) for transform in found.transforms)
    if best is None or not best.step_ms:
        return f"{names}: no step is left"
    step = f"{ms_format(found.baseline.step_ms)(best.step_ms)} ms"
    at = ", ".join(f"{option}={value}" for option, value in zip(found.options, best.values, strict=True))
    times = times_cell(found, best)
    steps = [point.step_ms for point in found.points if point.step_ms is not None]
    if len(found.points) > 1 and max(steps) - min(steps) <= SAME_STEP * min(steps):
        values = "every value" if len(steps) == len(found.points) else "every value that applies"
        return f"{names}: {step} with {values} ({times} {times_header(found)})"
    if found.by_throughput:
        samples = "" if best.samples_per_s is None else f": {rate(best.samples_per_s)}"
        return f"{names}: most samples a second with {at}{samples} ({times} as many), {step} a step"
    return f"{names}: shortest with {at}: {step} ({times} {times_header(found)})"


def times_cell(found: Sweep, point: Point) -> str:
    """Return the formatted speed-up of a point."""
    return number(found.times_as_fast(point), ".2f", "×")


def times_header(found: Sweep) -> str:
    """Return the header of the speed-ups: of steps, or of samples if batches differ."""
    return "as fast a sample" if found.by_sample else "as fast"


def print_scaling(found: Scaling) -> None:
    """Print the table of a scaling curve, and the largest worthwhile number of workers."""
    ms = ms_format(found.single_ms)
    names = " ".join(spelled(transform) for transform in found.transforms)
    with report() as out:
        out.say(found.verdict, "bold")
        kind = "the recorded batch shared by all workers" if found.strong else "the recorded batch on each worker"
        out.say(f"{names}; {'strong' if found.strong else 'weak'} scaling: {kind}")
        out.step(found.baseline)
        rows: list[list[str | Text]] = []
        for row in found.rows:
            if row.step_ms is None:
                rows.append([f"{row.count:,}", "–", plain("does not apply", "dim"), "", "", "", ""])
                continue
            samples = row.samples_per_s
            rows.append(
                [
                    f"{row.count:,}", ms(row.step_ms), f"{ms(row.low_ms)} … {ms(row.high_ms)}",
                    ms(row.communication_ms), f"{found.throughput(row):,.2f}×",
                    "" if samples is None else rate(samples), efficiency_cell(found, row),
                ]
            )  # fmt: skip
        headers = [
            "workers", f"{CLOCK_NOUNS[found.baseline.clock]} (ms)", "nominal 90 % range", "exposed (ms)", "throughput",
            "samples/s", "efficiency (%)",
        ]  # fmt: skip
        out.table("", headers, rows, text_columns=0)
        out.say()
        out.say(f"  {exposed(found)}", "dim")
        for reason in dict.fromkeys(row.reason for row in found.rows if row.reason):
            out.say(f"  {reason}")


def efficiency_cell(found: Scaling, row: Workers) -> str:
    """Return a row's efficiency with its range; the reference, one worker, has no range."""
    ends, efficiency = found.efficiency_range_pct(row), pct(found.efficiency_pct(row) or 0.0)
    if ends is None or row.count == 1:
        return efficiency
    digits = 0 if ends[0] >= 10 else 1  # so that the displayed range contains the value
    return f"{efficiency} ({ends[0]:.{digits}f} … {ends[1]:.{digits}f})"


def exposed(found: Scaling) -> str:
    """Return the definition of exposed communication."""
    work = "computation" if found.baseline.graph.has_gpu else "CPU work (on a CPU, sending is CPU work)"
    return f"exposed: communication that does not overlap with {work}"


def _shown(count: int) -> list[int]:
    if count <= MOST_ROWS:
        return list(range(count))
    return sorted({round(place * (count - 1) / (MOST_ROWS - 1)) for place in range(MOST_ROWS)})
