"""The text report of ``whatif compare``: the change of the step, what describes it, then the parts that changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.padding import Padding

from whatif.questions.comparison.compare import Comparison, counted
from whatif.questions.comparison.measured_step import MeasuredStep
from whatif.questions.comparison.part_changes import PartChange
from whatif.questions.explain import Part
from whatif.report.layout import (
    BREAKDOWN_LABELS,
    CLOCK_LABELS,
    UNTRACED_LABELS,
    ms_format,
    plain,
    print_table,
    print_title,
    report,
    told_apart,
)
from whatif.report.text_explain import short_name

Value = Callable[[Part], float]
HEADERS = ("", "A", "B", "change", "count")
ENTRIES = 8  # names shown of a long list


def print_comparison(found: Comparison, top: int = 10) -> None:
    """Print what ``whatif compare`` reports, ``top`` rows of each table."""
    two = found.two
    ms = ms_format(max(step.ms for step in two.measured))
    with report() as out:
        out.print(plain(found.headline, "bold"))
        if found.description is not None:
            out.print(plain(found.description.sentence, "bold"))
        out.print()
        files = told_apart([side.graph.info.path for side in (two.before, two.after)])
        sides = zip("AB", files, (two.before, two.after), two.measured, strict=True)
        steps = []
        for name, file, side, measured in sides:
            out.print(plain(f"{name}: {file}", "dim"))
            how = "simulated" if side.graph.info.recorded.simulated is not None else _timed(measured)
            steps.append((name, ms(measured.ms), _spread(measured, ms), how))
        print_title(out, f"{'The whole span' if two.clock == 'span' else 'A step'} as measured, ms")
        print_table(out, ["", "median", "spread", " "], steps)
        if found.pace is not None:
            out.print(plain(f"  the same call takes {found.pace:.2f} times as long in B (median by time)", "dim"))
        if two.differences:
            print_title(out, "The recordings differ in")
            rows = [(item.what, f"{item.before} → {item.after}") for item in two.differences]
            print_table(out, ["", " "], rows, gives_way=1)
        _print_breakdown(out, found, ms)
        if two.on_gpu:
            _print_changes(out, "Phases: GPU", found.phases, _gpu_ms, ms, top)
            _print_changes(out, "Phases: CPU", found.phases, _cpu_ms, ms, top)
        else:
            _print_changes(out, "Phases", found.phases, _cpu_ms, ms, top)
        work = _gpu_ms if two.on_gpu else _cpu_ms
        families, operations = ("Kernel", "Kernels and copies") if two.on_gpu else ("Operator", "Operators")
        _print_changes(out, "Layers", found.layers, work, ms, top)
        _print_changes(out, f"{families} families", found.kernels, work, ms, top)
        _print_changes(out, operations, found.operations, work, ms, top)
        _print_names(out, "Layers", found.layers)


def _gpu_ms(part: Part) -> float:
    return part.gpu_ms


def _cpu_ms(part: Part) -> float:
    return part.cpu_ms


def part_label(change: PartChange) -> str:
    """Return the name of a part as it is shown, with that in B where it has another one there."""
    name = short_name(change.name)
    return f"{name} → {short_name(change.renamed)}" if change.renamed else name


def count_cell(change: PartChange) -> str:
    """Return how many tasks a part has in a step: one number where that did not change."""
    before, after = (0.0 if part is None else part.tasks for part in (change.before, change.after))
    shown = [_count(before), _count(after)]
    if change.status in ("new", "gone"):
        return f"{change.status}, {shown[1] if change.before is None else shown[0]}"
    return shown[0] if shown[0] == shown[1] else " → ".join(shown)


def _count(tasks: float) -> str:
    return f"{tasks:,.0f}" if tasks >= 0.5 or not tasks else "<1"


def _spread(measured: MeasuredStep, ms: Callable[[float | None], str]) -> str:
    if measured.low_ms is None or measured.high_ms is None:
        return "not known"
    return f"{ms(measured.low_ms)} … {ms(measured.high_ms)}"


def _timed(measured: MeasuredStep) -> str:
    if measured.clock in UNTRACED_LABELS:
        return "untraced, CPU time" if measured.clock == "cpu" else "untraced"
    return CLOCK_LABELS[measured.clock]


def _print_breakdown(out: Console, found: Comparison, ms: Callable[[float | None], str]) -> None:
    """Where the simulated steps go; the tables below show the parts."""
    two = found.two
    before, after = (explanation.breakdown.to_dict() for explanation in found.explained)
    rows = [("simulated from the recording", *_cells(two.before.step_ns / 1e6, two.after.step_ns / 1e6, ms))]
    if two.on_gpu:
        rows += [(label, *_cells(before[key], after[key], ms)) for key, label in BREAKDOWN_LABELS]
    print_title(out, "Where it goes, ms")
    print_table(out, HEADERS[:4], rows)


def _cells(before: float, after: float, ms: Callable[[float | None], str]) -> tuple[str, str, str]:
    return ms(before), ms(after), _signed(after - before, ms)


def _signed(change: float, ms: Callable[[float | None], str]) -> str:
    text = ms(change)
    return text if text.startswith("-") else f"+{text}"


def _print_changes(
    out: Console,
    heading: str,
    changes: Sequence[PartChange],
    value: Value,
    ms: Callable[[float | None], str],
    top: int,
) -> None:
    """The parts whose value changed most, and a line that counts the others."""
    told = [change for change in changes if any(part and value(part) for part in (change.before, change.after))]
    told.sort(key=lambda change: -abs(change.change(value)))
    if not told:
        return
    shown = told[:top]
    of = f" ({len(shown)} of {len(told)})" if len(shown) < len(told) else ""
    rows = []
    for change in shown:
        before, after = (None if part is None else value(part) for part in (change.before, change.after))
        rows.append((part_label(change), ms(before), ms(after), _signed(change.change(value), ms), count_cell(change)))
    rest = told[top:]
    if rest:
        sums = [
            sum(value(part) for part in side if part) for side in zip(*((c.before, c.after) for c in rest), strict=True)
        ]
        rows.append((f"({len(rest)} more)", *_cells(sums[0], sums[1], ms), ""))
    print_title(out, f"{heading}{of}, ms")
    # What a phase or a layer has of tasks is launches and kernels alike.
    print_table(out, [*HEADERS[:4], "tasks" if heading.startswith(("Phases", "Layers")) else "count"], rows)


def _print_names(out: Console, heading: str, changes: tuple[PartChange, ...]) -> None:
    """Name what only one of the two has, as far as it fits."""
    kinds = counted(changes)
    for status, where in (("gone", "only in A"), ("new", "only in B")):
        names = sorted(change.name for change in changes if change.status == status)
        if names:
            more = f" and {len(names) - ENTRIES:,} more" if len(names) > ENTRIES else ""
            print_title(out, f"{heading} {where} ({kinds[status]:,})")
            out.print(Padding(plain(", ".join(names[:ENTRIES]) + more), (0, 0, 0, 2)))
