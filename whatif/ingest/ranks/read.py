"""Read the recordings of a run's ranks and make one graph of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, structs

from whatif.graph.columns import one_table
from whatif.graph.memory import fullest
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Finding
from whatif.hardware.cluster.links import GLOO_MESSAGE_NS
from whatif.ingest.events import CUT, SeveralProcessesError
from whatif.ingest.find_steps import StepRule
from whatif.ingest.graph_of_events import graph_of_events
from whatif.ingest.integrity import TRANSFERS
from whatif.ingest.ranks.clocks import Clock, find_clocks
from whatif.ingest.ranks.collectives import Collectives, gpu_collectives
from whatif.ingest.ranks.files import (
    Places,
    RankFacts,
    chosen,
    find_recordings,
    place,
    rank_facts,
)
from whatif.ingest.ranks.gloo import with_gloo
from whatif.ingest.ranks.match import Match, match
from whatif.ingest.ranks.merge import COLLECTIVE, merge, sentences_by_rank
from whatif.ingest.ranks.sent import Sent
from whatif.ingest.ranks.waits import Waits, find_waits, latency_ns
from whatif.ingest.read_events import read_events
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import local_copy
from whatif.runtime.jobs import each
from whatif.runtime.progress import Progress
from whatif.runtime.threads import usable_cores
from whatif.simulation.transfers import LATENCY, WORKERS

# Ranks of one run on clocks that a time server keeps differ by milliseconds; a larger difference is reported.
FAR_NS = 10_000_000_000
# Recordings with a smaller share of collectives in common are not of one run.
FEWEST_MATCHED = 0.5

# Starting processes takes a second, as does reading this many bytes; text shrinks tenfold in .gz: our measurements.
_WORTH_BYTES, _PACKED = 100_000_000, 10


class Ranks(Struct, frozen=True):
    """Several ranks of a run: one graph of all, and how they were matched. Tuples have an entry for each rank read."""

    graph: TaskGraph
    numbers: tuple[int, ...]  # the ranks, ascending
    world_size: int
    paths: tuple[str, ...]
    collectives: tuple[Collectives, ...]
    clocks: tuple[Clock, ...]
    matched: Match
    waits: Waits

    @property
    def clock_offsets_ns(self) -> tuple[int, ...]:
        """How far each rank's clock is ahead of the first one's, ns."""
        infos = self.graph.info.ranks or (self.graph.info,)
        return tuple(
            clock.offset_ns + info.origin_ns - infos[0].origin_ns
            for clock, info in zip(self.clocks, infos, strict=True)
        )


def read_ranks(
    paths: str | Path | Sequence[str | Path],
    *,
    only: Sequence[int] | None = None,
    jobs: str | int | None = None,
    progress: Progress | None = None,
    step_count: int | None = None,
    step_mark: str | None = None,
) -> Ranks:
    """Return one graph of several ranks, whose recordings ``paths`` names by file or by folder.

    Files and folders may be on other machines, at any address that fsspec reaches (``s3://bucket/run``). ``only`` are
    the ranks to read, of many. ``jobs`` is where they are read (``whatif.runtime.jobs``); by default in as many
    processes as there are cores if that is faster. ``progress(done, total)`` is called for each file. ``step_count``
    and ``step_mark`` set the steps of each rank, as in ``whatif.read``. Raises WhatifError, one sentence, if a file
    cannot be read, if two are the same rank, or if they do not belong to one run.
    """
    paths = [paths] if isinstance(paths, str | Path) else paths
    if not isinstance(paths, Sequence) or not paths or not all(isinstance(path, str | Path) for path in paths):
        raise WhatifError(f"read_ranks: expected paths of recordings, or of their folder, got {str(paths)[:60]!r}.")
    found = chosen(find_recordings(paths), only)
    if not found:
        raise _none_of(only or (), paths)
    named: list[tuple[str, _Rank]] = []
    rule = StepRule(step_count, step_mark)
    for done, ranks in enumerate(each(_ranks_of, found, rule, jobs=_usual_jobs(found) if jobs is None else jobs)):
        named += [(name, (sent.graph, met, facts)) for name, (sent, met, facts) in ranks]
        if progress is not None:
            progress(done + 1, len(found))
    places = place([name for name, _ in named], [facts for _, (_, _, facts) in named])
    wanted = [i for i in range(len(named)) if only is None or places.ranks[i] in only]
    if not wanted or (only is not None and len(wanted) < len(set(only))):
        raise _none_of([rank for rank in only or () if rank not in places.ranks], paths)
    by_rank = sorted(wanted, key=lambda i: places.ranks[i])
    graphs, collectives = [named[i][1][0] for i in by_rank], [named[i][1][1] for i in by_rank]
    names = [named[i][0] for i in by_rank]
    named.clear()  # many ranks fill the memory
    _check_alike(graphs, names)
    return merged(graphs, collectives, structs.replace(places, ranks=tuple(places.ranks[i] for i in by_rank)), names)


_Rank = tuple[TaskGraph, Collectives, RankFacts]
_SentRank = tuple[Sent, Collectives, RankFacts]


def _none_of(ranks: Sequence[int], paths: Sequence[str | Path]) -> WhatifError:
    some = ", ".join(map(str, ranks[:5])) + (", …" if len(ranks) > 5 else "")
    return WhatifError(f"{paths[0]}: expected recordings of rank {some}, got none; `whatif info` lists the ranks.")


def _usual_jobs(files: Sequence[str]) -> int:
    """As many processes as there are cores, if reading takes longer than starting them and joblib is installed."""
    packed = sum(os.path.getsize(file) * (_PACKED if file.endswith(".gz") else 1)
                 for file in files if os.path.isfile(file))  # fmt: skip
    if packed < _WORTH_BYTES or find_spec("joblib") is None:
        return 1
    return max(1, min(len(files), usable_cores()))


def _ranks_of(file: str, rule: StepRule) -> list[tuple[str, _SentRank]]:
    """The rank of a file by the file's name, or each process of an nsys report with its number after the name."""
    with local_copy(file) as path:
        try:
            return [(file, _read(path, file, rule))]
        except SeveralProcessesError as several:
            return [
                (f"{file} (process {pid})", _read(path, file, rule, process))
                for process, pid in several.processes.items()
            ]


def _read(path: Path, file: str, rule: StepRule, process: int | None = None) -> _SentRank:
    events = read_events(path, process=process)
    graph = graph_of_events(events, file, rule)
    graph, collectives = (graph, gpu_collectives(graph, events)) if graph.has_gpu else with_gloo(graph, events)
    return Sent.of(graph), collectives, rank_facts(events.header)


def _check_alike(graphs: Sequence[TaskGraph], paths: Sequence[str]) -> None:
    """Raise WhatifError if some recordings have GPU work and others have none."""
    on_gpu = [graph.has_gpu for graph in graphs]
    if len(set(on_gpu)) > 1:
        other = on_gpu.index(not on_gpu[0])
        raise WhatifError(
            f"{paths[other]}: expected recordings of one run, got {'' if on_gpu[other] else 'no '}GPU kernels in it "
            f"and {'GPU kernels' if on_gpu[0] else 'none'} in {paths[0]}; name the recordings of one run."
        )


def merged(
    graphs: Sequence[TaskGraph], collectives: Sequence[Collectives], places: Places, paths: Sequence[str]
) -> Ranks:
    """Return one graph of the ranks' graphs, in the order of their ranks; that of one rank alone is its own.

    Raises WhatifError if they do not match.
    """
    matched = match(collectives)
    warnings = [*places.warnings, *_doubts(graphs, collectives, matched, paths)]
    clocks = find_clocks(collectives, matched, [graph.info.origin_ns for graph in graphs])
    waits = find_waits(collectives, matched, clocks)
    result = Ranks(
        graphs[0], places.ranks, places.world_size, tuple(paths), tuple(collectives), tuple(clocks), matched, waits
    )
    count = len(graphs)
    if count == 1:  # as if its file were read alone: its collectives hold the waits for others
        return result
    parts = _without_waiting(graphs, collectives, matched, waits, places.world_size)
    begins_ns = [int(clock.common_ns(np.zeros(1, dtype=np.int64))[0]) for clock in clocks]
    begins_ns = [begin_ns - min(begins_ns) for begin_ns in begins_ns]
    info = replace(
        graphs[0].info,
        path=f"{paths[0]} and {count - 1} more {'ranks' if count > 2 else 'rank'}",
        workers=places.world_size,
        ranks=tuple(graph.info for graph in graphs),
        memory=fullest([graph.info.memory for graph in graphs])[1],
        quirks=(*sentences_by_rank([graph.info.quirks for graph in graphs], places.ranks), *warnings),
        findings=_findings(graphs, places.ranks),
    )
    graph = merge(parts, info, places.ranks, begins_ns).check()
    result = structs.replace(result, graph=graph)
    far = max((abs(ns) for ns in result.clock_offsets_ns), default=0)
    if far > FAR_NS:
        sentence = f"the ranks' clocks are up to {far / 1e9:,.0f} s apart: are the recordings of the same run?"
        graph = graph.replace(info=replace(graph.info, quirks=(*graph.info.quirks, sentence)))
    return structs.replace(result, graph=graph)


def _findings(graphs: Sequence[TaskGraph], numbers: Sequence[int]) -> tuple[Finding, ...]:
    """Findings of the ranks' recordings, cut files first; without waits in collectives, which are known here."""
    found = [
        replace(finding, sentence=f"rank {number}: {finding.sentence}")
        for number, graph in zip(numbers, graphs, strict=True)
        for finding in graph.info.findings
        if finding.check != TRANSFERS
    ]
    return tuple(sorted(found, key=lambda finding: finding.check != CUT))


def _doubts(
    graphs: Sequence[TaskGraph], collectives: Sequence[Collectives], matched: Match, paths: Sequence[str]
) -> list[str]:
    """Warnings about ranks that do not fit together. Raises WhatifError if they do not fit at all."""
    if len(graphs) < 2:
        return []
    total, lost = sum(map(len, collectives)), sum(matched.unmatched)
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(matched.reasons.items()))
    if not total:
        raise WhatifError(
            f"{paths[0]}: expected collectives between the ranks, got none in any of the {len(graphs)} "
            "recordings; analyze one of them alone."
        )
    if total - lost < FEWEST_MATCHED * total:
        every = zip(paths, graphs, strict=True)
        cut = [f"{path}: {f.sentence}; " for path, graph in every for f in graph.info.findings if f.check == CUT]
        first = [*cut, f"{paths[0]}: "][0]
        raise WhatifError(
            f"{first}expected the same collectives on every rank, got "
            f"{total - lost} of {total} in common "
            f"({why}); are the recordings of one run, with the same steps?"
        )
    for path, graph, own in zip(paths, graphs, collectives, strict=True):
        if not len(own):
            ends = "".join(f"{finding.sentence}; " for finding in graph.info.findings if finding.check == CUT)
            raise WhatifError(
                f"{path}: {ends}expected the recording of a rank, with collectives as in the others, got none in it; "
                "name the files of the ranks without it."
            )
    found = []
    if lost:
        found.append(f"{lost} of {total} collectives are not matched ({why}): waiting in them counts as transfer")
    steps = sorted({graph.info.n_steps for graph in graphs})
    if len(steps) > 1:
        found.append(f"the ranks recorded {steps[0]} to {steps[-1]} steps: only their common part is matched")
    return found


def _without_waiting(
    graphs: Sequence[TaskGraph], collectives: Sequence[Collectives], matched: Match, waits: Waits, world_size: int
) -> list[TaskGraph]:
    """Each rank's graph with its matched collectives numbered, and shortened to their transfers."""
    size_bytes = matched.column([c.size_bytes for c in collectives])
    _, kinds = one_table(c.operation for c in collectives)
    members = np.bincount(matched.collective, minlength=max(matched.n_collectives, 1))[matched.collective]
    kind = matched.column(kinds) * (len(graphs) + 1) + members
    # Ranks that were not read take part, too.
    group_size = matched.column([c.group_size for c in collectives])
    workers = np.where(group_size > 0, group_size, np.where(members == len(graphs), world_size, members))
    latency = latency_ns(size_bytes, waits.transfer_ns, kind)
    if not any(graph.has_gpu for graph in graphs):
        # Transfers that share a link take longer, which looks like latency. A ring of gloo has at most two rounds.
        latency = np.minimum(latency, 2 * (workers - 1) * GLOO_MESSAGE_NS)
    by_rank = np.argsort(matched.rank, kind="stable")
    bounds = np.searchsorted(matched.rank[by_rank], np.arange(len(graphs) + 1))
    parts = []
    for i, (graph, collectives_of_rank) in enumerate(zip(graphs, collectives, strict=True)):
        rows = by_rank[bounds[i] : bounds[i + 1]]
        task = collectives_of_rank.task[matched.row[rows]]
        # A transfer begins a stream's lag after the arrival, which precedes it on the stream.
        lag_ns = graph.thread_lag_ns[graph.thread[task]]
        transfer_ns = np.maximum(waits.transfer_ns[rows] - np.where(waits.joins[rows], lag_ns, 0), 0)
        # Steps count from the first rank's first one, even if ranks began to record at different steps.
        ahead = collectives_of_rank.first_step - collectives[0].first_step
        step = np.where(graph.step >= 0, np.maximum(graph.step + ahead, -1), -1).astype(np.int32)
        graph = graph.replace(step=step) if ahead else graph
        parts.append(
            graph.with_duration(task, transfer_ns).attach(
                **_columns(len(graph), task, {
                    COLLECTIVE: np.where(waits.joins[rows], 1, -1) * (matched.collective[rows] + 1),
                    WORKERS: workers[rows],
                    LATENCY: np.minimum(latency[rows], transfer_ns),
                })
            )
        )  # fmt: skip
    return parts


def _columns(n: int, tasks: Any, values: dict[str, Any]) -> dict[str, Any]:
    columns = {}
    for name, value in values.items():
        columns[name] = np.zeros(n, dtype=np.int64)
        columns[name][tasks] = value
    return columns
