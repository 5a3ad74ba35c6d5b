"""The text report of ``whatif memory``: the peak, what it is made of, the step, what-ifs, what fits."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from whatif.graph.memory import Moment, peak
from whatif.graph.types import Phase
from whatif.questions.advice.trial import Refused, Trial
from whatif.questions.memory_summary import MOST_TIMES, MemorySummary, shown_moments
from whatif.report.layout import CLOCK_SUBJECTS, bar, ms_format, pct, plain, print_table, print_title, report

SOURCES = {
    "allocations": "from its recorded allocations",
    "shapes": "from the shapes of its operators: allocations were not recorded",
}
REST = "inputs, buffers and the rest"
_KIB = 1024


def size(size_bytes: float) -> str:
    """Return a number of bytes as people read it: 1.25 GiB."""
    value, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= _KIB and len(units) > 1:
        value, units = value / _KIB, units[1:]
    return f"{value:,.0f} {units[0]}" if units[0] == "bytes" else f"{value:,.2f} {units[0]}"


def print_memory(summary: MemorySummary, top: int = 10) -> None:
    """Print what ``whatif memory`` reports, ``top`` layers."""
    baseline, most = summary.baseline, summary.peak
    name = Path(baseline.graph.info.path).name
    with report() as out:
        out.print(plain(f"A step needs {size(most.total)} at its peak, {_where(most.phase, most.layer)}.", "bold"))
        out.print(plain(f"{name}: {SOURCES.get(summary.memory.source, summary.memory.source)}", "dim"))
        for caveat in summary.caveats:
            out.print(plain(caveat, "dim"))
        if summary.measured_bytes:
            error = 100 * (most.total / summary.measured_bytes - 1)
            out.print(plain(f"the GPU's allocator measured {size(summary.measured_bytes)} ({error:+.1f} %)", "dim"))
        parts = [
            ("parameters", most.parameters),
            ("gradients", most.gradients),
            ("optimizer state", most.optimizer_state),
            ("activations", most.activations),
            ("workspace", most.workspace),
            (REST, most.inputs),
        ]
        print_title(out, "At the peak")
        rows = [(label, size(part), f"{pct(part, most.total)} %", bar(part, most.total)) for label, part in parts]
        print_table(out, ["", "size", "", " "], rows)
        _print_step(out, summary)
        _print_layers(out, summary, top)
        _print_what_ifs(out, summary)
        _print_capacity(out, summary)


def _where(phase: Phase, layer: str) -> str:
    if phase == Phase.UPDATE:
        return "in the update"
    return f"in the {phase.name.lower()} pass of {layer or 'the part outside all layers'}"


def _at(most: Moment) -> tuple[str, str, str]:
    """Where a peak is, what it is made of largest part, and how much of it that is."""
    parts = {
        "activations": most.activations,
        "workspace": most.workspace,
        "gradients": most.gradients,
        "parameters": most.parameters,
        "optimizer state": most.optimizer_state,
        REST: most.inputs,
    }
    largest = max(parts, key=lambda name: parts[name])
    where = "update" if most.phase == Phase.UPDATE else f"{most.phase.name.lower()}, {most.layer or '(no layer)'}"
    return where, largest, f"{pct(parts[largest], most.total)} %"


def _print_step(out: Console, summary: MemorySummary) -> None:
    print_title(out, "Over the step")
    rows = []
    for first, last, moment in shown_moments(summary.moments):
        first, last = first or "(no layer)", last or "(no layer)"
        layers = "" if moment.phase == Phase.UPDATE else first if first == last else f"{first} … {last}"
        rows.append((moment.phase.name.lower(), layers, size(moment.total), bar(moment.total, summary.peak.total)))
    print_table(out, ["", " ", "at most", " "], rows, text_columns=2, gives_way=1)


def _print_layers(out: Console, summary: MemorySummary, top: int) -> None:
    shown, rest = summary.layers[:top], summary.layers[top:]
    title = f"Activations by layer ({len(shown)} of {len(summary.layers)})" if rest else "Activations by layer"
    rows: list[tuple[str, ...]] = [
        (part.name or "(no layer)", size(part.activations), size(part.gradients), size(part.workspace))
        for part in shown
    ]
    if rest:
        sums = [sum(part.activations for part in rest), sum(part.gradients for part in rest)]
        rows.append(("(others)", *(size(part) for part in sums), size(max(part.workspace for part in rest))))
    print_title(out, title)
    print_table(out, ["", "activations", "gradients", "workspace"], rows)


def _print_what_ifs(out: Console, summary: MemorySummary) -> None:
    ms, baseline_ms = ms_format(summary.baseline.step_ns / 1e6), summary.baseline.step_ns / 1e6
    print_title(out, "What-ifs")
    rows = [("as recorded", size(summary.peak.total), "", ms(baseline_ms), "", "")]
    peaks = [("as recorded", *_at(summary.peak))]
    for found, memory in zip(summary.what_ifs, summary.memories, strict=True):
        if isinstance(found, Refused) or memory is None:
            continue
        most = peak(memory)
        change = f"{100 * (most.total / summary.peak.total - 1):+.1f} %"
        if memory.not_modelled:
            change = "not modelled" if most == summary.peak else f"{change} without {', '.join(memory.not_modelled)}"
        samples = "" if found.same_training else f"{found.samples:g} x samples"
        slower = f"{100 * (found.predicted_ms / baseline_ms - 1):+.1f} %" if baseline_ms else "–"
        rows.append((" + ".join(found.spelled), size(most.total), change, ms(found.predicted_ms), slower, samples))
        peaks.append((" + ".join(found.spelled), *_at(most)))
    print_table(out, ["", "peak", "", "step ms", "", " "], rows, wraps=True)
    print_title(out, "Largest part at each peak")
    print_table(out, ["", " ", "largest part", ""], peaks, text_columns=3, wraps=True)
    refused = [found for found in summary.what_ifs if isinstance(found, Refused)]
    if refused:
        path = summary.baseline.graph.info.path
        print_title(out, "Does not apply")
        print_table(
            out,
            ["", " "],
            [(" + ".join(r.spelled), r.reason.replace(path, Path(path).name) if path else r.reason) for r in refused],
            gives_way=1,
        )


def _print_capacity(out: Console, summary: MemorySummary) -> None:
    sentences = capacity_sentences(summary)
    if sentences:
        out.print()
    for sentence, style in zip(sentences, ("bold", "", "dim"), strict=False):
        out.print(plain(sentence, style))


def capacity_sentences(summary: MemorySummary) -> list[str]:
    """Say whether the step fits, the largest batch that does, and what is not counted; nothing of an unknown size."""
    capacity, largest = summary.capacity_bytes, summary.largest
    if capacity is None or largest is None:
        return []
    clock = summary.baseline.clock
    fits = "fits into" if summary.peak.total <= capacity else "does not fit into"
    told = [f"The step {fits} {size(capacity)}."]
    if largest.step is None:
        least = "a hundredth of the recorded batch" if largest.samples is None else "a batch of one sample"
        return [*told, f"Not even {least} would: it takes {size(largest.peak_bytes)}."]
    # The search ends there, and a larger one may fit as well.
    least = "at least " if largest.factor >= MOST_TIMES else ""
    batch = f"is {least}{largest.factor:,.{0 if largest.factor >= 100 else 2}f} times the recorded one"
    if largest.samples:
        batch = f"has {least}{largest.samples:,} samples"
    ms, step = ms_format(summary.baseline.step_ns / 1e6), largest.step
    takes = f", {CLOCK_SUBJECTS[clock]} of {ms(step.predicted_ms)} ms" if isinstance(step, Trial) else ""
    return [
        *told,
        f"The largest batch that fits {batch}: {size(largest.peak_bytes)}{takes}.",
        "This counts tensors; a GPU's context and fragmentation of its allocator need additional memory.",
    ]
