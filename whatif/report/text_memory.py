"""The text report of ``whatif memory``: the peak, its composition, the step, what-ifs, what fits."""

from __future__ import annotations

from pathlib import Path

from whatif.graph.memory import Moment, peak
from whatif.graph.types import Phase
from whatif.prediction.peak_fit import doubt, peak_range_bytes
from whatif.questions.advice.trial import Refused, Trial
from whatif.questions.memory_summary import MemorySummary, shown_moments
from whatif.questions.what_fits import MOST_TIMES, MOST_WORKERS, FewestWorkers, LargestBatch
from whatif.report.layout import CLOCK_SUBJECTS, Report, bar, ms_format, pct, report, some_of
from whatif.report.text_advise import print_refused
from whatif.units import counted, size

SOURCES = {
    "allocations": "from its recorded allocations",
    "shapes": "from the shapes of its operators: allocations were not recorded",
}
# Display names of the parts of the memory at a moment.
PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "workspace": "workspace",
    "inputs": "inputs, buffers and the rest",
}


def source_words(summary: MemorySummary) -> str:
    """Return the source of a step's memory figures."""
    source = SOURCES.get(summary.memory.source, summary.memory.source)
    return source.replace("recorded", summary.baseline.graph.info.made)


def print_memory(summary: MemorySummary, top: int = 10) -> None:
    """Print the report of ``whatif memory``, ``top`` layers."""
    baseline, most = summary.baseline, summary.peak
    name = Path(baseline.graph.info.path).name
    with report() as out:
        out.say(f"A step needs {size(most.total)} at its peak, {_where(most.phase, most.layer)}.", "bold")
        more = f"; a run may need up to {size(summary.high_bytes)}" if summary.high_bytes > most.total else ""
        out.say(f"{name}: {source_words(summary)}{more}", "dim")
        for caveat in summary.caveats:
            out.say(caveat, "dim")
        if summary.measured_bytes:
            error = 100 * (most.total / summary.measured_bytes - 1)
            out.say(f"the GPU's allocator measured {size(summary.measured_bytes)} ({error:+z.1f} %)", "dim")
        parts = [(label, getattr(most, key)) for key, label in PARTS.items()]
        rows = [(label, size(part), f"{pct(part, most.total)} %", bar(part, most.total)) for label, part in parts]
        out.table("At the peak", ["", "size", "", " "], rows)
        if len({peak_bytes for _, peak_bytes in summary.rank_peaks}) > 1:
            ranks = summary.rank_peaks[:top]
            title = some_of("Peak by rank", len(ranks), len(summary.rank_peaks))
            cells = [(size(held) if held else "unknown", bar(held or 0, most.total)) for _, held in ranks]
            peaks = [(f"rank {rank}", *row) for (rank, _), row in zip(ranks, cells, strict=True)]
            out.table(title, ["", "size", " "], peaks)
        _print_step(out, summary)
        _print_layers(out, summary, top)
        _print_what_ifs(out, summary)
        sentences = capacity_sentences(summary)
        if sentences:
            out.say()
        for sentence, style in zip(sentences, ("bold", "", "dim"), strict=False):
            out.say(sentence, style)


def _where(phase: Phase, layer: str) -> str:
    if phase == Phase.UPDATE:
        return "in the update"
    return f"in the {phase.name.lower()} pass of {layer or 'the part outside all layers'}"


def _at(most: Moment) -> tuple[str, str, str]:
    """The position of a peak, its largest part, and the size of that part."""
    largest = max(PARTS, key=lambda key: getattr(most, key))
    where = "update" if most.phase == Phase.UPDATE else f"{most.phase.name.lower()}, {most.layer or '(no layer)'}"
    return where, PARTS[largest], f"{pct(getattr(most, largest), most.total)} %"


def _print_step(out: Report, summary: MemorySummary) -> None:
    rows = []
    for first, last, moment in shown_moments(summary.moments):
        first, last = first or "(no layer)", last or "(no layer)"
        layers = "" if moment.phase == Phase.UPDATE else first if first == last else f"{first} … {last}"
        rows.append((moment.phase.name.lower(), layers, size(moment.total), bar(moment.total, summary.peak.total)))
    out.table("Over the step", ["", " ", "at most", " "], rows, text_columns=2, gives_way=1)


def _print_layers(out: Report, summary: MemorySummary, top: int) -> None:
    shown, rest = summary.layers[:top], summary.layers[top:]
    title = some_of("Activations by layer", len(shown), len(summary.layers))
    rows: list[tuple[str, ...]] = [
        (part.name or "(no layer)", size(part.activations), size(part.gradients), size(part.workspace))
        for part in shown
    ]
    if rest:
        sums = [sum(part.activations for part in rest), sum(part.gradients for part in rest)]
        rows.append(("(others)", *(size(part) for part in sums), size(max(part.workspace for part in rest))))
    out.table(title, ["", "activations", "gradients", "workspace"], rows)


def _print_what_ifs(out: Report, summary: MemorySummary) -> None:
    ms, baseline_ms = ms_format(summary.baseline.step_ms), summary.baseline.step_ms
    rows = [("baseline", size(summary.peak.total), "", ms(baseline_ms), "", "")]
    ranges: list[tuple[str, str, str]] = []
    peaks = [("baseline", *_at(summary.peak))]
    for found, memory in zip(summary.what_ifs, summary.memories, strict=True):
        if isinstance(found, Refused) or memory is None:
            continue
        most = peak(memory)
        change = f"{100 * (most.total / summary.peak.total - 1):+z.1f} %"
        if memory.not_modelled:
            change = "not modelled" if most == summary.peak else f"{change} without {', '.join(memory.not_modelled)}"
        samples = "" if found.same_training else f"{found.samples:g} x samples"
        slower = f"{100 * (found.predicted_ms / baseline_ms - 1):+z.1f} %" if baseline_ms else "–"
        low, high = peak_range_bytes(most.total, found.transforms)
        if low < most.total and not memory.not_modelled:
            ranges.append((found.label, size(low), size(high)))
        rows.append((found.label, size(most.total), change, ms(found.predicted_ms), slower, samples))
        peaks.append((found.label, *_at(most)))
    out.table("What-ifs", ["", "peak", "", "step ms", "", " "], rows, wraps=True)
    if ranges:
        out.table("Range of the peak where devices share a step", ["", "from", "to"], ranges, wraps=True)
    out.table("Largest part at each peak", ["", " ", "largest part", ""], peaks, text_columns=3, wraps=True)
    refused = [found for found in summary.what_ifs if isinstance(found, Refused)]
    print_refused(out, "Does not apply", refused, summary.baseline)


def capacity_sentences(summary: MemorySummary) -> list[str]:
    """Return whether the step fits, the largest batch that does, and what is not counted; nothing if unknown."""
    capacity, largest = summary.capacity_bytes, summary.largest
    if capacity is None or largest is None:
        return []
    own, elsewhere = "step", ""
    for found, held, fits in zip(summary.what_ifs, summary.capacities, summary.fits_each, strict=True):
        if held not in (None, capacity):  # of several the last one has them all
            own, elsewhere = f"{summary.baseline.graph.info.made} step", f"; with {found.label} it {_fits(fits, held)}"
    return [f"The {own} {_fits(summary.fits, capacity)}{elsewhere}.", *_largest_sentences(summary, largest)]


def _fits(fits: bool | None, capacity_bytes: int) -> str:
    return {True: "fits", False: "does not fit", None: "may not fit"}[fits] + f" into {size(capacity_bytes)}"


def print_solved(summary: MemorySummary) -> None:
    """Print the answer of ``whatif memory --solve``: the largest batch, or the fewest workers."""
    if summary.fewest is not None:
        sentences = _fewest_sentences(summary, summary.fewest)
    else:
        assert summary.largest is not None
        sentences = _largest_sentences(summary, summary.largest)
    with report() as out:
        for sentence, style in zip(sentences, ("bold", "dim"), strict=False):
            out.say(sentence, style)


def _caveat(found: LargestBatch | FewestWorkers) -> str:
    """Return what an answer about fitting is judged by, and what it leaves out."""
    source = doubt(found.high_bytes) if found.high_bytes > found.peak_bytes else "The peak is that of the recording"
    return f"{source}. A GPU's context and fragmentation of its allocator need additional memory."


def _with(summary: MemorySummary, found: LargestBatch | FewestWorkers) -> str:
    """The conditions of an answer: the what-ifs, and the memory of the device that they select."""
    other = "" if found.capacity_bytes == summary.capacity_bytes else f" in {size(found.capacity_bytes)}"
    return f"with {' + '.join(found.what_ifs)}{other}" if found.what_ifs else ""


def _largest_sentences(summary: MemorySummary, largest: LargestBatch) -> list[str]:
    beside = _with(summary, largest)
    if largest.step is None:
        one = "one sample" if largest.smallest == 1 else f"{largest.smallest:,} samples"
        least = "a hundredth of the recorded batch" if largest.samples is None else f"a batch of {one}"
        return [f"Even {least} does not fit{beside and f' {beside}'}: it takes {size(largest.peak_bytes)}."]
    # The limit of the search: a larger one may fit as well.
    least = "at least " if largest.factor >= MOST_TIMES else ""
    batch = f"is {least}{largest.factor:,.{0 if largest.factor >= 100 else 2}f} times the recorded one"
    if largest.samples:
        batch = f"has {least}{counted(largest.samples, 'sample')}"
        recorded = summary.baseline.graph.info.samples
        in_all = round(recorded * largest.step.samples) if recorded and isinstance(largest.step, Trial) else 0
        if in_all > largest.samples:
            batch += f" ({in_all:,} in a step of all workers and passes)"
    answer = f"The largest batch that fits {beside and f'{beside} '}{batch}: {size(largest.peak_bytes)}"
    return [f"{answer}{_takes(summary, largest.step)}.", _caveat(largest)]


def _fewest_sentences(summary: MemorySummary, fewest: FewestWorkers) -> list[str]:
    beside = _with(summary, fewest)
    if fewest.workers is None:
        most = f"No number of workers of {fewest.of} up to {MOST_WORKERS:,} makes the step fit"
        return [f"{most}: {beside} it takes {size(fewest.peak_bytes)}."]
    verb = "is" if fewest.workers == 1 else "are"
    each = f" on each of {fewest.devices:,} devices" if fewest.devices > 1 else ""
    answer = f"{counted(fewest.workers, 'worker')} of {fewest.of} {verb} enough, {beside}: {size(fewest.peak_bytes)}"
    return [f"{answer}{each}{_takes(summary, fewest.step)}.", _caveat(fewest)]


def _takes(summary: MemorySummary, step: Trial | Refused | None) -> str:
    if not isinstance(step, Trial):
        return ""
    ms = ms_format(summary.baseline.step_ms)
    return f", {CLOCK_SUBJECTS[summary.baseline.clock]} of {ms(step.predicted_ms)} ms"
