"""The text report of ``whatif explain``: the bottleneck of the step, then where its time goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whatif.questions.explain import Explanation, Part
from whatif.report.layout import (
    BREAKDOWN_LABELS,
    CLOCK_SUBJECTS,
    Report,
    bar,
    count,
    kind_label,
    ms_format,
    number,
    pct,
    report,
    some_of,
)

# A column of a table of parts: its header, and its value for a part.
Column = tuple[str, Callable[[Part], str]]

MOST_COLLECTIVES = 8
# The work of all ranks together would describe none of them.
ONE_RANK = (
    "With several ranks, phases, layers and kernels show the work of the first rank, and a thread shows its own; "
    "the critical path runs through all ranks, so a part's critical time can exceed the first rank's work on it."
)


def print_explanation(explanation: Explanation) -> None:
    """Print the report of ``whatif explain``."""
    baseline, step_ms = explanation.baseline, explanation.baseline_ms
    has_gpu = baseline.graph.has_gpu
    ms = ms_format(step_ms)
    subject = CLOCK_SUBJECTS[baseline.clock]
    tasks: Column = ("count", lambda part: count(part.tasks))
    critical: Column = ("critical ms", lambda part: ms(part.critical_ms))
    gpu: Column = ("GPU ms", lambda part: ms(part.gpu_ms))
    cpu: Column = ("CPU ms", lambda part: ms(part.cpu_ms))
    both = [gpu, cpu, critical] if has_gpu else [cpu, critical]
    with report() as out:
        out.say(explanation.verdict, "bold")
        if explanation.slack:
            out.say(explanation.slack, "dim")
        if explanation.as_recorded not in (None, explanation.verdict):
            out.say(f"As recorded, with the profiler: {explanation.as_recorded}", "dim")
        recorded = f", {ms(baseline.measured_ns / 1e6)} ms with the profiler" if baseline.meets_untraced else ""
        out.step(baseline, recorded)
        if has_gpu:
            parts = explanation.breakdown.to_dict()
            shares = [(label, parts[key]) for key, label in BREAKDOWN_LABELS]
            _print_shares(out, "Where the time goes", shares, step_ms)
        path = [(kind_label(kind, baseline.graph), part_ms) for kind, part_ms in explanation.critical_path_ms.items()]
        _print_shares(out, f"Critical path: what {subject} waits for", path, step_ms)
        _print_parts(out, "Phases", explanation.phases, both)
        if len(explanation.threads) > 1:
            _print_parts(out, "Execution threads", explanation.threads, both)
        _print_layers(out, explanation, both)
        side, family, names = (gpu, "Kernel", "Kernels and copies") if has_gpu else (cpu, "Operator", "Operators")
        _print_parts(out, f"{family} families", explanation.kernels, [tasks, side, critical])
        _print_parts(out, names, explanation.operations, [tasks, side, critical])
        _print_collectives(out, explanation)
        if len(baseline.graph.info.ranks) > 1:
            out.say()
            out.say(ONE_RANK, "dim")


def _print_collectives(out: Report, explanation: Explanation) -> None:
    """Print the largest kinds and sizes of collectives, with rates as nccl-tests defines them."""
    ms, on_gpu = ms_format(explanation.baseline_ms), explanation.baseline.graph.has_gpu

    grouped = any(row.group for row in explanation.collectives)
    rows = []
    for row in explanation.collectives[:MOST_COLLECTIVES]:
        size = number(row.size_bytes and row.size_bytes / 1e6, ",.3f")
        cells = [row.kind.replace("_", "-"), *([row.group or "–"] if grouped else []), size, count(row.count)]
        cells.append(ms(row.ms))
        if row.exposed_ms is not None:
            cells += [ms(row.exposed_ms), f"{pct(row.ms - row.exposed_ms, row.ms)} %"]
        should_ms = None if row.expected_ms is None else row.count * row.expected_ms
        cells += [ms(row.waits_ms), ms(row.critical_ms), number(row.algorithm_gbyte_s), number(row.bus_gbyte_s)]
        rows.append([*cells, ms(should_ms)])
    headers = ["", *(["group"] if grouped else []), "MB", "count", "ms", *(["exposed", "hidden"] if on_gpu else [])]
    headers += ["waits", "critical", "GB/s", "bus", "should take"]
    out.table("Collectives", headers, rows)


def short_name(name: str) -> str:
    """A kernel's name without the common parts of PyTorch's kernel names."""
    for common in ("void ", "at::native::", "(anonymous namespace)::", "<unnamed>::"):
        name = name.replace(common, "")
    return name


def _print_shares(out: Report, heading: str, shares: Sequence[tuple[str, float]], step_ms: float) -> None:
    ms = ms_format(step_ms)
    rows = [(label, ms(part), f"{pct(part, step_ms)} %", bar(part, step_ms)) for label, part in shares]
    out.table(heading, ["", "ms", "", " "], rows)


def print_no_layers(out: Report) -> None:
    """Print that the recording has no layers, and how to get them."""
    out.title("Layers")
    out.say("  none in this trace: record with `whatif collect` to get them", "dim")


def _print_layers(out: Report, explanation: Explanation, columns: list[Column]) -> None:
    if not explanation.layers:
        print_no_layers(out)
        return
    heading = some_of("Layers", len(explanation.layers), explanation.n_layers)
    _print_parts(out, heading, explanation.all_layers, columns)


def _print_parts(out: Report, heading: str, parts: Sequence[Part], columns: list[Column]) -> None:
    rows = [[short_name(part.name), *(show(part) for _, show in columns)] for part in parts]
    out.table(heading, ["", *(header for header, _ in columns)], rows)
