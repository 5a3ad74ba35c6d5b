"""Measures operators into a database: what it has is left out, what is measured is safe at once, Ctrl-C keeps it."""

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

# Half of the 90 % interval of each time, as a share of it: what two runs may differ by (docs/profile.md).
WANTED = 0.03
ONLY_CUDA = "tf32 is measured on NVIDIA GPUs alone"


@dataclass
class Profiled:
    """What became of the operators that were asked for: how many are new and were there, and why others are missing."""

    measured: int = 0
    present: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    half_widths: list[float] = field(default_factory=list)
    damaged_lines: int = 0
    interrupted: bool = False
    rows: list[Rows] = field(default_factory=list)
    merged: Merged = field(default_factory=Merged)


def questions_of(operators: Iterable[Described]) -> tuple[list[Question], Counter[str]]:
    """Return a call of each operator, and count those that have none by the reason."""
    questions, left_out = [], Counter[str]()
    for what in operators:
        try:
            questions.append(Question(what, spelled(what)))
        except NotReplayable as reason:
            left_out[str(reason)] += 1
    return questions, left_out


def profile(
    store: Store,
    questions: Sequence[Question],
    way: Way,
    *,
    wanted: float = WANTED,
    budget_s: float = float("inf"),
    author: str | None = None,
    licence: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profiled:
    """Measure what the database does not have in this way, on this machine, and add it as a contribution a family.

    Ctrl-C ends it early and keeps what there is. Raises WhatifError where nothing can be measured or written.
    """
    origin = origin_of(way, author=author, licence=licence)
    done = Profiled()
    asked = []
    for question, is_known in zip(questions, _are_known(questions, store, origin), strict=True):
        if question.what.dtype == "tf32" and way.device != "cuda":
            done.left_out[ONLY_CUDA] += 1
        elif is_known:
            done.present += 1
        else:
            asked.append(question)
    store.begin()  # refuses a folder that cannot be written to before hours of measuring
    with Journal(store.folder, origin) as journal:
        done.damaged_lines = journal.damaged_lines
        if asked:
            end_s = time.monotonic() + budget_s
            try:
                _visit_groups(asked, journal, way, wanted, end_s, progress)
            except KeyboardInterrupt:
                done.interrupted = True
        if way.device == "cuda":
            origin = msgspec.structs.replace(origin, source=msgspec.structs.replace(origin.source, note=clocks_note()))
        _finish(store, origin, journal.found, [q.what for q in asked], done)
        journal.remove()
    return done


def _visit_groups(
    asked: Sequence[Question],
    journal: Journal,
    way: Way,
    wanted: float,
    end_s: float,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Visit operators of one device in one process, and collectives of each size of group in as many."""
    groups: dict[int, list[Question]] = {}
    for question in asked:
        ranks = dict(question.what.integers)["ranks"] if question.what.family == "collective" else 0
        groups.setdefault(ranks, []).append(question)
    before = 0
    for ranks, part in groups.items():

        def part_done(done: int, total: int, before: int = before) -> None:
            if progress:
                progress(before + done, len(asked))

        visit_all(
            part, journal.found, way._replace(ranks=ranks), wanted=wanted, end_s=end_s, keep=journal.keep,
            progress=part_done,
        )  # fmt: skip
        before += len(part)


def known_rows(store: Store, origin: Origin, ops: Operators) -> Rows:
    """Return what the database has of these operators from this device, environment and method; others are absent."""
    times: dict[int, Float64] = {}
    for rows in _like(store, origin):
        if rows.family == ops.family:
            columns = np.stack([rows.t_s, rows.t_low_s, rows.t_high_s, rows.repeats], axis=1)
            times |= dict(zip(rows.ops.keys.tolist(), columns, strict=True))
    there = ops.take(np.array([key in times for key in ops.keys.tolist()], dtype=np.bool_))
    t, low, high, repeats = np.array([times[key] for key in there.keys.tolist()]).reshape(-1, 4).T
    return measurements(there, t, t_low_s=low, t_high_s=high, repeats=repeats)


def _like(store: Store, origin: Origin) -> Iterator[Rows]:
    contributions, _ = store.contributions()
    for contribution in contributions:
        there = contribution.provenance.origin
        if (there.device, there.environment, there.method) == (origin.device, origin.environment, origin.method):
            with suppress(WhatifError):  # what is damaged is measured again
                yield contribution.read()


def _are_known(questions: Sequence[Question], store: Store, origin: Origin) -> list[bool]:
    """Whether the database has each question's operator from this device, environment and method."""
    known = {(rows.family, key) for rows in _like(store, origin) for key in rows.ops.keys.tolist()}
    found = np.zeros(len(questions), dtype=np.bool_)
    for places, ops in operators_of([question.what for question in questions]):
        found[places] = [(ops.family, key) in known for key in ops.keys.tolist()]
    return found.tolist()


def _finish(
    store: Store, origin: Origin, found: dict[Described, Visited], asked: Sequence[Described], done: Profiled
) -> None:
    """Write what was found, that of an earlier run that was killed as well, and count what is missing."""
    timed = []
    pace_ns = fastest_pace_ns(found.values())
    if math.isfinite(pace_ns):
        pace_ns = fastest(store.folder, f"{origin.device.name} {origin.environment_id}", pace_ns)
    for what, visited in found.items():
        row = visited.timed(what, pace_ns)
        if row is not None:
            timed.append(row)
            done.half_widths.append(visited.half_width)
    for what in asked:
        one = found.get(what)
        if one is None or not (one.visits or one.skipped):
            done.left_out[NO_TIME] += 1
        elif one.skipped:
            done.left_out[one.skipped] += 1
        elif one.timed(what, pace_ns) is None:
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
