"""Measures operators into a database: skips those that it has, saves each at once, keeps all on Ctrl-C."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np

from whatif.graph.described import Described
from whatif.graph.types import Float64
from whatif.opdb.importers.described import operators_of, rows_of
from whatif.opdb.importers.found import Found
from whatif.opdb.importing import add_found
from whatif.opdb.merging import Merged
from whatif.opdb.provenance import Origin
from whatif.opdb.rows import Operators, Rows, measurements
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError

from ..operators.calls import NotReplayable
from ..operators.measure import NO_TIME
from .journal import Journal
from .machine import Way, clocks_note, origin_of
from .pace import fastest
from .spelled import spelled
from .visits import Question, Visited, fastest_pace_ns, visit_all

# Requested half-width of the 90 % interval, as a share of the time: by this two runs may differ (docs/profile.md).
WANTED = 0.03
ONLY_CUDA = "tf32 is measured on NVIDIA GPUs alone"


@dataclass
class Profiled:
    """Outcome for the requested operators: counts of measured and present ones, and of others by reason."""

    measured: int = 0
    present: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    half_widths: list[float] = field(default_factory=list)
    damaged_lines: int = 0
    interrupted: bool = False
    rows: list[Rows] = field(default_factory=list)
    merged: Merged = field(default_factory=Merged)


def questions_of(operators: Iterable[Described]) -> tuple[list[Question], Counter[str]]:
    """Return a call of each operator; count the operators without one by reason."""
    questions, left_out = [], Counter[str]()
    for operator in operators:
        try:
            questions.append(Question(operator, spelled(operator)))
        except NotReplayable as reason:
            left_out[str(reason)] += 1
    return questions, left_out


def profile(
    store: Store,
    questions: Sequence[Question],
    way: Way,
    *,
    precision: float = WANTED,
    budget_s: float = float("inf"),
    author: str | None = None,
    licence: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profiled:
    """Measure the operators that the database lacks for this way and machine; add them as one contribution per family.

    Ctrl-C ends it early and keeps the times so far. Raises WhatifError if nothing can be measured or written.
    """
    origin = origin_of(way, author=author, licence=licence)
    done = Profiled()
    requested = []
    for question, is_known in zip(questions, _are_known(questions, store, origin), strict=True):
        if question.operator.dtype == "tf32" and way.device != "cuda":
            done.left_out[ONLY_CUDA] += 1
        elif is_known:
            done.present += 1
        else:
            requested.append(question)
    store.begin()  # fails now, not after hours, if the folder is not writable
    with Journal(store.folder, origin) as journal:
        done.damaged_lines = journal.damaged_lines
        if requested:
            end_s = time.monotonic() + budget_s
            try:
                _visit_groups(requested, journal, way, precision, end_s, progress)
            except KeyboardInterrupt:
                done.interrupted = True
        if way.device == "cuda":
            origin = msgspec.structs.replace(origin, source=msgspec.structs.replace(origin.source, note=clocks_note()))
        _finish(store, origin, journal.found, [q.operator for q in requested], done)
        journal.remove()
    return done


def _visit_groups(
    requested: Sequence[Question],
    journal: Journal,
    way: Way,
    precision: float,
    end_s: float,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Visit operators of one device in one process, collectives of each group size in as many processes as ranks."""
    groups: dict[int, list[Question]] = {}
    for question in requested:
        ranks = dict(question.operator.integers)["ranks"] if question.operator.family == "collective" else 0
        groups.setdefault(ranks, []).append(question)
    before = 0
    for ranks, part in groups.items():

        def part_done(done: int, total: int, before: int = before) -> None:
            if progress:
                progress(before + done, len(requested))

        visit_all(
            part, journal.found, way._replace(ranks=ranks), precision=precision, end_s=end_s, keep=journal.keep,
            progress=part_done,
        )  # fmt: skip
        before += len(part)


def known_rows(store: Store, origin: Origin, ops: Operators) -> Rows:
    """Return the database's rows of these operators from this device, environment and method."""
    times: dict[int, Float64] = {}
    for rows in _like(store, origin):
        if rows.family == ops.family:
            columns = np.stack([rows.t_s, rows.t_low_s, rows.t_high_s, rows.repeats], axis=1)
            times |= dict(zip(rows.ops.keys.tolist(), columns, strict=True))
    present = ops.take(np.array([key in times for key in ops.keys.tolist()], dtype=np.bool_))
    t, low, high, repeats = np.array([times[key] for key in present.keys.tolist()]).reshape(-1, 4).T
    return measurements(present, t, t_low_s=low, t_high_s=high, repeats=repeats)


def _like(store: Store, origin: Origin) -> Iterator[Rows]:
    contributions, _ = store.contributions()
    for contribution in contributions:
        stored = contribution.provenance.origin
        if (stored.device, stored.environment, stored.method) == (origin.device, origin.environment, origin.method):
            with suppress(WhatifError):  # damaged rows are measured again
                yield contribution.read()


def _are_known(questions: Sequence[Question], store: Store, origin: Origin) -> list[bool]:
    """Return whether the database has each question's operator from this device, environment and method."""
    known = {(rows.family, key) for rows in _like(store, origin) for key in rows.ops.keys.tolist()}
    found = np.zeros(len(questions), dtype=np.bool_)
    for places, ops in operators_of([question.operator for question in questions]):
        found[places] = [(ops.family, key) in known for key in ops.keys.tolist()]
    return found.tolist()


def _finish(
    store: Store, origin: Origin, found: dict[Described, Visited], requested: Sequence[Described], done: Profiled
) -> None:
    """Write the times, including those of a killed earlier run, and count missing operators."""
    timed = []
    pace_ns = fastest_pace_ns(found.values())
    if math.isfinite(pace_ns):
        pace_ns = fastest(store.folder, f"{origin.device.name} {origin.environment_id}", pace_ns)
    for operator, visited in found.items():
        row = visited.timed(operator, pace_ns)
        if row is not None:
            timed.append(row)
            done.half_widths.append(visited.half_width)
    for operator in requested:
        result = found.get(operator)
        if result is None or not (result.visits or result.skipped):
            done.left_out[NO_TIME] += 1
        elif result.skipped:
            done.left_out[result.skipped] += 1
        elif result.timed(operator, pace_ns) is None:
            done.left_out["too short to be timed"] += 1
    done.measured = len(timed)
    if not timed:
        return
    contributions = Found()
    for rows in rows_of(timed):
        contributions.keep(rows, origin)
    done.rows = [rows for rows, _ in contributions.contributions]
    done.left_out += contributions.dropped
    done.merged = add_found(contributions, store)
