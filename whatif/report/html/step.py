"""Where a step goes: its breakdown, its critical path, phases, threads, layers and kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from zlib import crc32

from whatif.prediction.composition import spelled_together
from whatif.prediction.utilization import CONVENTION
from whatif.questions.efficiency import Efficiency
from whatif.questions.explain import Part
from whatif.report.html.charts import N_COLORS, Chart, Charts, Series, figure
from whatif.report.html.commands import TRACE, command
from whatif.report.html.facts import MOST_ROWS, Facts
from whatif.report.html.made import Made, read_off
from whatif.report.html.markup import Content, Html, paragraph, prose, section, tag
from whatif.report.html.tables import Cell, Column, Header, Row, table
from whatif.report.layout import (
    BREAKDOWN_LABELS,
    CLOCK_SUBJECTS,
    count,
    kind_label,
    ms_format,
    pct,
    sentence_case,
    some_of,
)
from whatif.report.text_efficiency import HEADERS as USE_HEADERS
from whatif.report.text_efficiency import use_rows
from whatif.report.text_explain import ONE_RANK, short_name
from whatif.report.text_lines import short_line
from whatif.report.text_steps import reasons
from whatif.simulation.steps import CLOCK_NOUNS

# The height of a frame of the flame graph, pixels.
FRAME_PX = 18


def breakdown(facts: Facts, charts: Charts) -> Html:
    """Return the breakdown of the step, for the baseline and under the what-if, and its waits."""
    step_ms = facts.baseline.step_ms
    ms, prediction = ms_format(step_ms), facts.prediction
    noun, subject = CLOCK_NOUNS[facts.baseline.clock], CLOCK_SUBJECTS[facts.baseline.clock]
    before = facts.explanation.breakdown.to_dict()
    after = prediction.breakdown.to_dict() if prediction else {}
    graphs = [facts.baseline.graph, *([prediction.graph] if prediction else [])]
    on_gpu = any(graph.has_gpu for graph in graphs)
    # Without a GPU most parts do not exist.
    parts = [(key, label) for key, label in BREAKDOWN_LABELS if on_gpu or before[key] or after.get(key)]
    bars = ["baseline"]
    if prediction:
        bars.append(spelled_together(prediction.transforms))
    charts["c-breakdown"] = Chart(
        "stacked",
        tuple(bars),
        tuple(
            Series(label, (before[key], after[key]) if after else (before[key],), color)
            for color, (key, label) in enumerate(parts)
        ),
        f"ms of {subject}",
    )
    rows: list[Row] = [
        [
            label,
            Cell(ms(before[key]), before[key], before[key] / step_ms if step_ms else 0.0),
            pct(before[key], step_ms),
            *([Cell(ms(after[key]), after[key]), _signed(after[key] - before[key], ms)] if after else []),
        ]
        for key, label in parts
    ]
    columns: list[Header] = [Column("part", False), Column("ms", made=Made.SIMULATED), "%"]
    columns += [Column("predicted ms", made=Made.PREDICTED), "change, ms"] if after else []
    alternative = ". ".join(
        f"{bar}: " + ", ".join(f"{label} {ms(values[key])} ms" for key, label in parts)
        for bar, values in zip(bars, (before, after), strict=False)
    )
    path, graph = facts.explanation.critical_path_ms, facts.baseline.graph
    path_rows: list[Row] = [
        [kind_label(kind, graph), Cell(ms(part), part, part / step_ms if step_ms else 0.0), pct(part, step_ms)]
        for kind, part in path.items()
    ]
    slack = facts.explanation.slack
    return section(
        "step",
        f"Where the {noun} goes",
        figure("c-breakdown", f"The {noun} in parts", f"{sentence_case(alternative)}.", height=80 + 50 * len(bars)),
        table("t-breakdown", f"Breakdown of {subject}", columns, rows),
        table(
            "t-path",
            f"Critical path: what {subject} waits for",
            [Column("kind of task", False), "ms", "%"],
            path_rows,
            made=Made.SIMULATED,
            note=f"Shortening anything else shortens nothing; the parts add up to {subject}.",
        ),
        *([paragraph(f"{sentence_case(slack)}.")] if slack else []),
        _parts("t-phases", "Phases", facts.explanation.phases, facts),
        _parts("t-threads", "Execution threads", facts.explanation.threads, facts),
        *([paragraph(ONE_RANK, class_="note")] if facts.ranks else []),
        command(facts.baseline, "explain", TRACE),
    )


def flame(facts: Facts) -> Html | None:
    """Return the flame graph of the step, widths in ms of the critical path; None if nothing takes time."""
    found = facts.flame
    whole_ms = found.whole_ms
    if whole_ms <= 0:
        return None
    ms = ms_format(facts.baseline.step_ms)
    drawn = [
        tag(
            "svg",
            tag("title", f"{frame.name}: {ms(frame.ms)} ms ({pct(frame.ms, whole_ms)} %)"),
            tag("rect", width="100%", height=FRAME_PX - 1, class_=f"f{crc32(frame.name.encode()) % N_COLORS}"),
            tag("text", short_name(short_line(frame.name)), x=3, y=FRAME_PX - 5),
            x=f"{100 * frame.begin_ms / whole_ms:.3f}%",
            y=FRAME_PX * frame.depth,
            width=f"{100 * frame.ms / whole_ms:.3f}%",
            height=FRAME_PX,
        )
        for frame in found.frames
    ]
    alternative = sentence_case(found.headline)
    height = FRAME_PX * (1 + max(frame.depth for frame in found.frames))
    rows: list[Row] = [
        [
            "· " * frame.depth + short_name(short_line(frame.name)),
            Cell(ms(frame.ms), frame.ms, frame.ms / whole_ms),
            pct(frame.ms, whole_ms),
            Cell(ms(frame.self_ms), frame.self_ms),
        ]
        for frame in found.wide
    ]
    return section(
        "flame",
        "Which code the step waits for" if found.of == "stacks" else "Which layers the step waits for",
        paragraph(alternative, class_="lead"),
        tag(
            "div", tag("svg", drawn, class_="flame", height=height, role="img", aria_label=alternative),
            class_="scroll", tabindex=0, role="region", aria_label="Flame graph",
        ),
        paragraph(
            "A frame is as wide as its time on the critical path. Below it are its callees, in the order in which they "
            "run on average. Point at a frame for its name and time, or search the table.",
            class_="note",
        ),
        table(
            "t-flame", "Frames of 1 % or more, each below those that call it",
            [Column("frame", False), "ms", "%", "itself, ms"], rows, made=Made.SIMULATED,
        ),
        command(facts.baseline, "explain", TRACE, "--by", "stack"),
    )  # fmt: skip


def layers(facts: Facts) -> Html:
    """Return the table of layers."""
    found = facts.explanation
    if not found.layers:
        notice = paragraph(prose("None in this recording: record with `whatif collect` to get them."))
        return section("layers", "Layers", notice)
    return section(
        "layers",
        "Layers",
        _parts("t-layers", some_of("Layers", len(found.layers), found.n_layers), found.all_layers, facts),
        command(facts.baseline, "explain", TRACE, "--top", str(MOST_ROWS)),
    )


def kernels(facts: Facts) -> Html:
    """Return the tables of kernel families and of kernels, or of operators without a GPU."""
    found, has_gpu = facts.explanation, facts.baseline.graph.has_gpu
    family, names = ("Kernel families", "Kernels and copies") if has_gpu else ("Operator families", "Operators")
    cut = f"The {MOST_ROWS} that matter most." if len(found.operations) == MOST_ROWS else ""
    return section(
        "kernels",
        names,
        _parts("t-families", family, found.kernels, facts),
        _parts("t-kernels", names, found.operations, facts, note=cut),
        command(facts.baseline, "explain", TRACE, "--top", str(MOST_ROWS)),
    )


def efficiency(facts: Facts, charts: Charts) -> Html | None:
    """Return the share of the GPU's peaks that kernel families reach, with a roofline; None if unknown."""
    found = facts.efficiency
    if found.gpu is None or not found.has_rates:
        return None
    drawn: list[Content] = []
    if found.points:
        charts["c-roofline"] = _roofline(found)
        reached = ", ".join(f"{use.name} {tflops:,.1f} TFLOP/s at {x:,.1f} FLOP/B" for use, x, tflops in found.points)
        drawn = [figure("c-roofline", f"Roofline of {found.gpu.name}", f"{sentence_case(reached)}.")]
    rows: list[Row] = []
    for use, cells in zip(found.families, use_rows(found, found.families), strict=True):
        values = (use.kernels, use.ms, use.tflops, use.compute_pct, use.gbyte_s, use.memory_pct, use.intensity, None,
                  use.usual_saves_ms)  # fmt: skip
        rows.append([cells[0], *map(Cell, cells[1:], values)])
    names = ("family", *USE_HEADERS[1:])
    return section(
        "efficiency",
        "How well the GPU is used",
        paragraph(found.headline, class_="lead"),
        *drawn,
        table(
            "t-efficiency",
            f"Families of kernels, a {CLOCK_NOUNS[facts.baseline.clock]}",
            [Column(header, header not in ("family", "bound")) for header in names],
            rows,
            made=Made.SIMULATED,
            note=f"{sentence_case(CONVENTION)}. Peaks are the data sheet's. – is not known.",
        ),
        command(facts.baseline, "explain", TRACE, "--efficiency"),
    )


def _roofline(found: Efficiency) -> Chart:
    """TFLOP/s over FLOPs per byte: a roof for each format, a point for each family."""
    rate = found.memory_tbyte_s
    reached = [x for _, x, _ in found.points]
    low, high = min(0.5, *reached), max(1000.0, *reached)
    powers = tuple(10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1))
    across = tuple(sorted({*powers, *reached, *(peak / rate for _, peak in found.roofs)}))
    roofs = [
        Series(name, tuple(min(x * rate, peak) for x in across), color, dashed=True)
        for color, (name, peak) in enumerate(found.roofs)
    ]
    points = [
        Series(use.name, tuple(tflops if x == intensity else None for x in across), (len(roofs) + place) % N_COLORS)
        for place, (use, intensity, tflops) in enumerate(found.points)
    ]
    return Chart(
        "lines", (), (*roofs, *points), "FLOPs a byte", "TFLOP/s", x=across, ticks=powers, logarithmic=True,
        both_logarithmic=True,
    )  # fmt: skip


def steps(facts: Facts, charts: Charts) -> Html | None:
    """Return the recorded steps side by side, with the reasons of slow ones; None if there is at most one."""
    found = facts.steps
    if found is None or len(found.steps) < 2:
        return None
    ms = ms_format(found.median_ms)
    numbers = tuple(float(each.step) for each in found.steps)
    strips = [
        Series(label, tuple(each.ms if each.slow == slow else None for each in found.steps), color)
        for color, (slow, label) in enumerate(((False, "others"), (True, "slow")))
        if any(each.slow == slow for each in found.steps)
    ]
    median = Series("median", (found.median_ms,) * len(numbers), 2, dashed=True)
    charts["c-steps"] = Chart("lines", (), (*strips, median), "step", "ms", x=numbers)
    alternative = sentence_case(found.headline)
    rows: list[Row] = [
        [
            str(each.step),
            Cell(ms(each.ms), each.ms),
            Cell(f"{100 * (each.ms / found.median_ms - 1):+z.1f} %" if found.median_ms else "–", each.ms),
            reasons(each, ms),
        ]
        for each in found.steps
    ]
    return section(
        "steps",
        "How the steps differ",
        paragraph(alternative, class_="lead"),
        figure("c-steps", "The time of each step", alternative),
        table(
            "t-steps",
            f"Steps as {facts.baseline.graph.info.made}",
            ["step", "ms", "to the median", Column("more of, ms", numbers=False)],
            rows,
            made=read_off(facts.baseline.graph),
        ),
        command(facts.baseline, "explain", TRACE, "--by", "step"),
    )


def _parts(ident: str, caption: str, parts: Sequence[Part], facts: Facts, *, note: str = "") -> Html:
    step_ms = facts.baseline.step_ms
    ms, has_gpu = ms_format(step_ms), facts.baseline.graph.has_gpu
    columns: list[Header] = [
        Column("name", False),
        "tasks",
        *(["GPU ms"] if has_gpu else []),
        "CPU ms",
        "critical ms",
        "critical %",
    ]
    rows: list[Row] = []
    for part in parts:
        share = part.critical_ms / step_ms if step_ms else 0.0
        gpu = [Cell(ms(part.gpu_ms), part.gpu_ms)] if has_gpu else []
        rows.append(
            [
                short_name(part.name) or "(no name)",
                Cell(count(part.tasks), part.tasks),
                *gpu,
                Cell(ms(part.cpu_ms), part.cpu_ms),
                Cell(ms(part.critical_ms), part.critical_ms, share),
                Cell(f"{100 * share:.1f}", 100 * share),
            ]
        )
    return table(ident, caption, columns, rows, made=Made.SIMULATED, note=note)


def _signed(change: float, ms: Callable[[float | None], str]) -> Cell:
    return Cell(("+" if change > 0 else "") + ms(change), change)
