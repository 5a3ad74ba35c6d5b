"""The table of ``whatif plan``, and the reasons for its first row."""

from __future__ import annotations

from collections.abc import Callable

from whatif.prediction.peak_fit import doubt_of
from whatif.questions.plan.search import Planned, Row
from whatif.questions.plan.space import LEVELS
from whatif.report.columns import Cell
from whatif.report.layout import ms_format, plain, report, significant
from whatif.units import counted, size


def print_plan(found: Planned, top: int) -> None:
    """Print the first ``top`` plans, the reasons for the best, and its launch command."""
    ms = ms_format(found.best.step_ms)
    with report() as out:
        out.say(headline(found), "bold")
        several = len(found.asked) > 1
        asked = found.asked[0]
        held = f", {size(asked.memory_bytes)} each" if asked.memory_bytes else ""
        out.step(found.baseline)
        if not several:
            devices = f"{counted(asked.gpus, 'GPU')} of"
            if not found.baseline.graph.has_gpu:
                devices = f"{counted(asked.gpus, 'CPU')} like the recorded one, on the network of"
            out.say(
                f"{devices} {asked.cluster}{held}; {asked.global_batch:,} {found.unit} a step; "
                f"{counted(found.counted, 'plan')} estimated, "
                f"the best {sum(row.simulated for row in found.rows)} simulated (*)"
            )
        if several:
            best_of_each = [_cells(found, row, ms) for row in found.each]
            out.table("The best of each", _headers(found), best_of_each, wraps=True)
            planned = [row.asked for row in found.each]
            for question in found.asked:
                if question not in planned:
                    out.say(f"  no plan fits {counted(question.gpus, 'GPU')} of {question.cluster}")
        listed = [_cells(found, row, ms) for row in found.rows[:top]]
        out.table("All plans" if several else "", _headers(found), listed, wraps=True)
        out.table("Where the step goes, ms", PARTS, [_parts(name, row, ms) for name, row in compared(found)])
        out.say()
        for sentence in reasons(found):
            out.say(f"  {sentence}")
        for why in dict.fromkeys(found.left_out.values()):
            names = ", ".join(name for name, other in found.left_out.items() if other == why)
            out.say(f"  not searched: {names}, because {why}", "dim")
        out.say()
        out.say("As what-ifs:", "bold")
        # On one line each, to be copied.
        out.say("  " + (" ".join(found.best.what_ifs) or "none: the step as it is"), soft_wrap=True)
        for name, flags in found.launch.items():
            out.say(f"{name}:", "bold")
            out.say(f"  {flags}", soft_wrap=True)


def _headers(found: Planned) -> list[str]:
    where = ["cluster", "GPUs"] if len(found.asked) > 1 else []
    cost = [f"{found.currency or 'cost'}/M {found.unit}"] if _priced(found) else []
    return [
        "tensor × pipeline × data", "micro × passes", "recompute", *where, "step (ms)", f"{found.unit}/s", *cost,
        "peak GiB",
    ]  # fmt: skip


def _priced(found: Planned) -> bool:
    """Whether some GPU has a price; others show dashes."""
    return any(question.per_hour is not None for question in found.asked)


def _cells(found: Planned, row: Row, ms: Callable[[float], str]) -> tuple[Cell, ...]:
    where = [row.asked.cluster, f"{row.plan.devices:,}"] if len(found.asked) > 1 else []
    cost = ["–" if row.cost is None else significant(row.cost)] if _priced(found) else []
    peak = "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}"
    return (
        *described(row), *where, plain(f"{ms(row.step_ms)}{' *' if row.simulated else ''}"),
        significant(row.samples_per_s), *cost, peak,
    )  # fmt: skip


# Steps that are displayed as equal, to a tenth of a percent.
AS_FAST_PCT = 0.05
PARTS = ["", "work", "TP comm", "bubble", "exchange", "update", "rest", "step"]


def headline(found: Planned) -> str:
    """Return the headline: the best plan and its gain."""
    best = found.best
    plan = best.plan
    cut = " × ".join(
        text
        for text, count in (
            (f"tensor {plan.tensor}", plan.tensor), (f"pipeline {plan.pipeline}", plan.pipeline),
            (f"data {plan.data}{f' ({LEVELS[plan.level]})' if plan.data > 1 else ''}", plan.data),
        )
        if count > 1
    ) or "one device"  # fmt: skip
    adjective = "cheapest" if found.by == "cost" else "fastest"
    price = f", {significant(best.cost)} {found.currency} for a million".rstrip() if best.cost is not None else ""
    micro = f"{plan.micro_batch}" if found.in_samples else f"{plan.micro_batch} × the recorded batch"
    return f"{adjective}: {cut}, micro-batch {micro}, {significant(best.samples_per_s)} {found.unit}/s{price}"


def described(row: Row) -> tuple[str, ...]:
    """Return a plan as cells: its groups with chunks and sharding, its micro-batches, recomputation."""
    plan = row.plan
    stages = f"{plan.pipeline} ({plan.chunks} chunks)" if plan.chunks > 1 else str(plan.pipeline)
    sharding = f" {LEVELS[plan.level]}" if plan.data > 1 else ""
    groups = f"{plan.tensor} × {stages} × {plan.data}{sharding}"
    return groups, f"{plan.micro_batch} × {plan.passes}", "all" if plan.recompute else "–"


def compared(found: Planned) -> list[tuple[str, Row]]:
    """Return the rows to explain: the best, the next, plain DDP and FSDP."""
    rows = [("best", found.best), *([("next", found.rows[1])] if len(found.rows) > 1 else [])]
    rows += [(f"plain {name}", row) for name, row in found.plain.items() if not isinstance(row, str)]
    return rows


def _parts(name: str, row: Row, ms: Callable[[float], str]) -> tuple[Cell, ...]:
    return (name, *(ms(part) for part in (*row.parts, row.rest_ms, row.step_ms)))


def reasons(found: Planned) -> list[str]:
    """Return the advantages of the best plan over the next, and over plain DDP and FSDP."""
    best = found.best
    found_reasons = []
    left = best.memory_left
    if left is not None:
        found_reasons.append(f"the best plan leaves {size(left)} of a GPU's memory")
    tight = doubt_of("the best plan", best.peak_bytes, best.high_bytes, best.asked.memory_bytes)
    found_reasons += [tight] if tight else []
    for name, row in compared(found)[1:]:
        if row is best:
            found_reasons.append(f"the best plan is {name}")
            continue
        groups, passes, _ = described(row)
        known = f"{groups} ({passes}{', recomputed' if row.plan.recompute else ''})"
        if len(found.asked) > 1:
            known += f" on {counted(row.plan.devices, 'GPU')} of {row.asked.cluster}"
        found_reasons.append(f"{name} is {known}, {_beside(best, row)}")
    for name, why in found.plain.items():
        if isinstance(why, str):
            found_reasons.append(f"plain {name}: {why}")
    return found_reasons


def _beside(best: Row, row: Row) -> str:
    """Return how much slower a plan is than the best, with the part that is longer; and dearer, if that differs."""
    slower_pct = 100 * (best.samples_per_s / row.samples_per_s - 1)
    cost = ""
    if best.cost is not None and row.cost is not None:
        dearer_pct = 100 * (row.cost / best.cost - 1)
        if abs(dearer_pct - slower_pct) >= AS_FAST_PCT:
            cost = f" and costs {abs(dearer_pct):.1f} % {'more' if dearer_pct > 0 else 'less'}"
    if abs(slower_pct) < AS_FAST_PCT:
        return f"as fast{cost}"
    if slower_pct < 0:
        return f"{100 * (row.samples_per_s / best.samples_per_s - 1):.1f} % faster{cost}"
    if row.plan.samples != best.plan.samples:  # the parts are of more work
        return f"{slower_pct:.1f} % slower{cost}"
    differs = {
        "work": row.parts.work_ms - best.parts.work_ms,
        "tensor-parallel communication": row.parts.sums_ms - best.parts.sums_ms,
        "bubble": row.parts.bubble_ms - best.parts.bubble_ms,
        "exposed exchange": row.parts.exchange_ms - best.parts.exchange_ms,
        "update": row.parts.update_ms - best.parts.update_ms,
    }  # fmt: skip
    largest = max(differs, key=lambda part: differs[part])
    # If no part is longer, only the simulation of the whole step distinguishes them.
    cause = f": {significant(differs[largest])} ms more {largest}" if differs[largest] > 0 else " when simulated"
    return f"{slower_pct:.1f} % slower{cost}{cause}"
