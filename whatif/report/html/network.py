"""More workers, and a faster network between them."""

from __future__ import annotations

from itertools import groupby

from whatif.prediction.composition import spelled
from whatif.questions.sweep.scaling import Scaling
from whatif.questions.sweep.sweep import Sweep
from whatif.questions.sweep.values import as_number
from whatif.report.html.charts import Chart, Charts, Series, figure
from whatif.report.html.commands import TRACE, command, typed
from whatif.report.html.facts import WORKERS, Facts
from whatif.report.html.made import Made
from whatif.report.html.markup import Html, items, paragraph, prose, section
from whatif.report.html.tables import Cell, Column, Header, Row, table
from whatif.report.layout import ms_format, sentence_case
from whatif.report.text_sweep import efficiency_cell, headline
from whatif.simulation.steps import CLOCK_NOUNS

RANGE = "nominal 90 % range, ms"


def network(facts: Facts, charts: Charts) -> Html:
    """Return the scaling curve, and the curve over the network's speed."""
    assumed = [items(facts.assumed)] if facts.assumed else []
    return section(
        "network", "More workers, a faster network", *assumed, *_scaling(facts, charts), *_bandwidth(facts, charts)
    )


def _scaling(facts: Facts, charts: Charts) -> list[Html]:
    found = facts.scaling
    if not isinstance(found, Scaling):
        return [paragraph(prose(found))]
    ms, noun = ms_format(found.single_ms), CLOCK_NOUNS[found.baseline.clock]
    rows = [row for row in found.rows if row.step_ms is not None]
    throughputs = [found.more_throughput(row, found.single) for row in rows]
    low, high = (tuple(ends[end] if ends else None for ends in throughputs) for end in (1, 2))
    charts["c-scaling"] = Chart(
        "lines",
        tuple(f"{row.count:,}" for row in rows),
        (
            Series("predicted", tuple(found.throughput(row) for row in rows), 0, low, high),
            Series("ideal", tuple(float(row.count) for row in rows), 7, dashed=True),
        ),
        "workers",
        "throughput, × one worker's",
        tuple(float(row.count) for row in rows),
        logarithmic=True,
        both_logarithmic=True,
    )
    shown: list[Row] = [
        [
            f"{row.count:,}",
            Cell(ms(row.step_ms), row.step_ms),
            f"{ms(row.low_ms)} … {ms(row.high_ms)}",
            Cell(ms(row.communication_ms), row.communication_ms),
            Cell(f"{found.throughput(row) or 0:,.2f}", found.throughput(row)),
            Cell(efficiency_cell(found, row), found.efficiency_pct(row)),
        ]
        for row in rows
    ]
    numbers = [f"{noun}, ms", RANGE, "exposed communication, ms", "throughput, ×", "efficiency, %"]
    columns: list[Header] = [Column("workers", False), *numbers]
    names = [spelled(t) for t in found.transforms]
    sentence = f"{sentence_case(found.verdict)}."
    return [
        paragraph(sentence, class_="lead"),
        figure("c-scaling", f"Throughput of {' + '.join(names)}", sentence),
        table("t-scaling", "Weak scaling: the recorded batch on each worker", columns, shown, made=Made.PREDICTED),
        *([items(found.notes)] if found.notes else []),
        command(
            found.baseline, "scaling", TRACE, *map(typed, found.transforms), "--workers", ",".join(map(str, WORKERS))
        ),
    ]


def _bandwidth(facts: Facts, charts: Charts) -> list[Html]:
    found = facts.bandwidth
    if not isinstance(found, Sweep):
        return [paragraph(prose(found))] if found != facts.scaling else []
    ms, noun = ms_format(found.baseline.step_ms), CLOCK_NOUNS[found.baseline.clock]
    varied, points = found.varied[0], [point for point in found.points if point.step_ms is not None]
    option = varied.option
    numbers = [
        as_number(varied.put(found.transforms, point.values[0])[varied.of[0]].options[option]) or 0.0
        for point in points
    ]
    in_bits = option == "bandwidth"
    title = "bandwidth of a link, Gbit/s" if in_bits else "times as fast as the recorded network"
    step_ms, low_ms, high_ms = zip(*((point.step_ms, point.low_ms, point.high_ms) for point in points), strict=True)
    charts["c-bandwidth"] = Chart(
        "lines",
        tuple(point.values[0] for point in points),
        (Series(f"predicted {noun}", step_ms, 0, low_ms, high_ms),),
        title,
        f"{noun}, ms",
        tuple(number * 8 / 1e9 if in_bits else number for number in numbers),
        logarithmic=True,
    )
    rows: list[Row] = []
    # Consecutive speeds with the same step become one row.
    equal = groupby(
        zip(points, numbers, strict=True), lambda pair: (ms(pair[0].step_ms), ms(pair[0].low_ms), ms(pair[0].high_ms))
    )
    for (step, low, high), pairs in equal:
        (first, number), *others = pairs
        upto = f" … {others[-1][0].values[0]}" if others else ""
        rows.append([Cell(f"{first.values[0]}{upto}", number), Cell(step, first.step_ms), f"{low} … {high}"])
    names = [spelled(t) for t in found.transforms]
    sentence = headline(found)
    columns: list[Header] = [option, f"{noun}, ms", RANGE]
    vary = f"{option}={','.join(point.values[0] for point in points)}"
    return [
        paragraph(f"{sentence}.", class_="lead"),
        figure("c-bandwidth", f"The {noun} over the network: {' + '.join(names)}", sentence),
        table("t-bandwidth", "A faster network", columns, rows, made=Made.PREDICTED),
        *([items(found.notes)] if found.notes else []),
        command(found.baseline, "sweep", *map(typed, found.transforms), TRACE, "--vary", vary),
    ]
