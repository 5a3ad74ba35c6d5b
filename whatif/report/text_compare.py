"""The text report of ``whatif compare``: the change of the step, its explanation, then the parts that changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whatif.questions.comparison.causes import Cause
from whatif.questions.comparison.compare import Comparison
from whatif.questions.comparison.measured_step import MeasuredStep
from whatif.questions.comparison.part_changes import PartChange, work_ms
from whatif.questions.comparison.two_recordings import TwoRecordings
from whatif.questions.explain import Part
from whatif.report.layout import (
    BREAKDOWN_LABELS,
    CLOCK_LABELS,
    UNTRACED_LABELS,
    Report,
    count,
    distinct_names,
    markdown_table,
    markdown_text,
    ms_format,
    report,
    sentence_case,
    signed,
    some_of,
)
from whatif.report.text_explain import short_name

Value = Callable[[Part], float]
HEADERS = ("", "A", "B", "change")
FIRST_RANK = (
    "With several ranks, phases, layers and operators or kernels are the work of the first rank; the critical path "
    "runs through all ranks."
)
ENTRIES = 8  # names shown of a long list


def print_comparison(found: Comparison, top: int = 10) -> None:
    """Print the report of ``whatif compare``, ``top`` rows of each table."""
    two = found.two
    ms = ms_format(max(step.ms for step in two.measured))
    with report() as out:
        out.say(found.headline, "bold")
        if found.description is not None:
            out.say(found.description.sentence, "bold")
        if found.cause is not None:
            out.say(f"cause: {found.cause}", "bold")
        out.say()
        files = distinct_names([side.graph.info.path for side in (two.before, two.after)])
        sides = zip("AB", files, (two.before, two.after), two.measured, strict=True)
        steps = []
        for name, file, side, measured in sides:
            out.say(f"{name}: {file}", "dim")
            source = _timed(measured) if side.graph.info.is_recorded else side.graph.info.made
            steps.append((name, ms(measured.ms), _spread(measured, ms), source))
        out.table(
            f"{'The whole span' if two.clock == 'span' else 'A step'} as measured, ms",
            ["", "median", "spread", " "],
            steps,
        )
        if found.pace is not None:
            out.say(f"  the same call takes {found.pace:.2f} times as long in B (median by time)", "dim")
        rows = [(item.what, f"{item.before} → {item.after}") for item in two.differences]
        out.table("The recordings differ in", ["", " "], rows, gives_way=1)
        _print_breakdown(out, found, ms)
        print_causes(out, found.causes, ms)
        if two.on_gpu:
            _print_changes(out, "Phases: GPU", found.phases, _gpu_ms, ms, top)
            _print_changes(out, "Phases: CPU", found.phases, _cpu_ms, ms, top)
        else:
            _print_changes(out, "Phases", found.phases, _cpu_ms, ms, top)
        work = _gpu_ms if two.on_gpu else _cpu_ms
        families, operations = ("Kernel", "Kernels and copies") if two.on_gpu else ("Operator", "Operators")
        _print_changes(out, "Layers", found.layers, work, ms, top)
        _print_changes(out, "Lines", found.lines, work_ms, ms, top)
        _print_changes(out, f"{families} families", found.kernels, work, ms, top)
        _print_changes(out, operations, found.operations, work, ms, top)
        _print_names(out, "Layers", found.layers)
        say_whose(out, two)


def say_whose(out: Report, two: TwoRecordings) -> None:
    """Say whose parts the tables show, of several ranks."""
    if two.after.graph.info.ranks:
        out.say()
        out.say(FIRST_RANK, "dim")


def markdown(found: Comparison, top: int = 10) -> str:
    """Return the comparison for a pull request: the change, its cause, then the critical paths and ``top`` parts."""
    two = found.two
    work = _gpu_ms if two.on_gpu else _cpu_ms
    operations = "kernels and copies" if two.on_gpu else "operators"
    changed = [
        (f"{noun} that changed most", sorted(parts, key=lambda part: -abs(part.change(work)))[:top], work)
        for noun, parts in (("layers", found.layers), ("lines", found.lines), (operations, found.operations))
    ]
    differs = [f"{item.what}: {item.before} → {item.after}" for item in two.differences]
    described = "" if found.description is None else found.description.sentence
    return markdown_report(
        found.headline,
        str(found.cause or ""),
        found.causes,
        changed,
        differs,
        found.warnings,
        two,
        ("A", "B"),
        described,
    )


def markdown_report(
    headline: str,
    cause: str,
    causes: Sequence[Cause],
    changed: Sequence[tuple[str, Sequence[PartChange], Value]],
    differs: Sequence[str],
    warnings: Sequence[str],
    two: TwoRecordings,
    sides: tuple[str, str],
    described: str = "",
) -> str:
    """Return a comparison of two recordings in Markdown: sentences first, then tables, differences and warnings."""
    ms = ms_format(max(step.ms for step in two.measured))
    sections = [f"**{markdown_text(sentence_case(headline))}**"]
    if described:
        sections.append(f"{markdown_text(described)}.")
    if cause:
        sections.append(f"Cause: {markdown_text(cause)}.")
    if causes:
        rows = [(each.name, *_cells(each.before_ms, each.after_ms, ms), each.where) for each in causes]
        sections.append(markdown_table(("critical path, ms a step", *sides, "change", "most in"), rows))
    for noun, parts, value in changed:
        if parts:
            cells = [change_row(part, value, ms) for part in parts]
            sections.append(markdown_table((f"{noun}, ms a step", *sides, "change", "tasks"), cells))
    if two.after.graph.info.ranks:
        sections.append(FIRST_RANK)
    if differs:
        sections.append("\n".join(f"- differs in {markdown_text(text)}" for text in differs))
    sections += [f"> {markdown_text(sentence_case(warning))}." for warning in warnings]
    return "\n\n".join(sections)


def _gpu_ms(part: Part) -> float:
    return part.gpu_ms


def _cpu_ms(part: Part) -> float:
    return part.cpu_ms


def _part_label(change: PartChange) -> str:
    """The label of a part, with its name in B if it differs."""
    name = short_name(change.name)
    return f"{name} → {short_name(change.renamed)}" if change.renamed else name


def change_row(change: PartChange, value: Value, ms: Callable[[float | None], str]) -> tuple[str, ...]:
    """Return the cells of a part: its name, a value in A and in B, the change, and its number of tasks."""
    before, after = (None if part is None else value(part) for part in _sides(change))
    return _part_label(change), *_cells(before, after, ms), _count_cell(change)


def _sides(change: PartChange) -> tuple[Part | None, Part | None]:
    return change.before, change.after


def _count_cell(change: PartChange) -> str:
    """The number of tasks of a part in a step: a single one if it did not change."""
    shown = [count(0.0 if part is None else part.tasks) for part in _sides(change)]
    if change.status in ("new", "gone"):
        return f"{change.status}, {shown[1] if change.before is None else shown[0]}"
    return shown[0] if shown[0] == shown[1] else " → ".join(shown)


def _spread(measured: MeasuredStep, ms: Callable[[float | None], str]) -> str:
    if measured.low_ms is None or measured.high_ms is None:
        return "not known"
    return f"{ms(measured.low_ms)} … {ms(measured.high_ms)}"


def _timed(measured: MeasuredStep) -> str:
    if measured.clock in UNTRACED_LABELS:
        return "untraced, CPU time" if measured.clock == "cpu" else "untraced"
    if measured.clock == "estimate":
        return "untraced, estimated"
    return CLOCK_LABELS[measured.clock]


def print_causes(
    out: Report, causes: Sequence[Cause], ms: Callable[[float | None], str], headers: Sequence[str] = HEADERS
) -> None:
    """Print the composition of the two critical paths, the largest change first."""
    rows = [(cause.name, *_cells(cause.before_ms, cause.after_ms, ms), cause.where) for cause in causes]
    out.table("Critical path, ms", [*headers, " "], rows)


def _print_breakdown(out: Report, found: Comparison, ms: Callable[[float | None], str]) -> None:
    """Print the breakdown of the simulated steps; the tables below show the parts."""
    two = found.two
    before, after = (explanation.breakdown.to_dict() for explanation in found.explained)
    rows = [("simulated from the recording", *_cells(two.before.step_ms, two.after.step_ms, ms))]
    if two.on_gpu:
        rows += [(label, *_cells(before[key], after[key], ms)) for key, label in BREAKDOWN_LABELS]
    out.table("Where it goes, ms", HEADERS, rows)


def _cells(before: float | None, after: float | None, ms: Callable[[float | None], str]) -> tuple[str, str, str]:
    return ms(before), ms(after), signed((after or 0.0) - (before or 0.0), ms)


def _print_changes(
    out: Report,
    heading: str,
    changes: Sequence[PartChange],
    value: Value,
    ms: Callable[[float | None], str],
    top: int,
) -> None:
    """Print the parts whose value changed most, and a line that counts the others."""
    changed = [change for change in changes if any(part and value(part) for part in _sides(change))]
    changed.sort(key=lambda change: -abs(change.change(value)))
    shown, rest = changed[:top], changed[top:]
    rows = [change_row(change, value, ms) for change in shown]
    if rest:
        before, after = (sum(value(part) for part in side if part) for side in zip(*map(_sides, rest), strict=True))
        rows.append((f"({len(rest)} more)", *_cells(before, after, ms), ""))
    out.table(f"{some_of(heading, len(shown), len(changed))}, ms", [*HEADERS, "tasks"], rows)


def _print_names(out: Report, heading: str, changes: tuple[PartChange, ...]) -> None:
    """Print the names of parts that only one of the two has, cut to fit the line."""
    for status, where in (("gone", "only in A"), ("new", "only in B")):
        names = sorted(change.name for change in changes if change.status == status)
        if names:
            more = f" and {len(names) - ENTRIES:,} more" if len(names) > ENTRIES else ""
            out.title(f"{heading} {where} ({len(names):,})")
            out.note(", ".join(names[:ENTRIES]) + more)
