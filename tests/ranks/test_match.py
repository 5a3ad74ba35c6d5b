"""Which collectives are the same one, on whose clock, and who waited for whom."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks.hand import collectives, rank_graph, run_of, two_ranks
from whatif import WhatifError
from whatif.ingest.ranks.clocks import find_clocks
from whatif.ingest.ranks.files import Places
from whatif.ingest.ranks.match import match
from whatif.ingest.ranks.read import merged, read_ranks
from whatif.ingest.ranks.waits import find_waits, latency_ns
from whatif.prediction.predict import Baseline
from whatif.questions.stragglers import report


def matches(*by_rank: dict[str, object]) -> list[list[tuple[int, int]]]:
    """The (rank, row) of each collective."""
    ranks = []
    for columns in by_rank:
        n = len(columns["size_bytes"])  # type: ignore[arg-type]
        ranks.append(collectives([10 * i for i in range(n)], [1] * n, **columns))
    found = match(ranks)
    rows = zip(found.collective.tolist(), found.rank.tolist(), found.row.tolist(), strict=True)
    result: list[list[tuple[int, int]]] = [[] for _ in range(found.n_collectives)]
    for collective, rank, row in rows:
        result[collective].append((rank, row))
    return sorted(result)


def calls(size_bytes: list[int], **columns: object) -> dict[str, object]:
    return {"size_bytes": np.array(size_bytes), **columns}


def test_by_size_and_by_order_within_one_size() -> None:
    assert matches(calls([1, 2, 1]), calls([2, 1, 1])) == [[(0, 0), (1, 1)], [(0, 1), (1, 0)], [(0, 2), (1, 2)]]


def test_by_operation_group_and_step() -> None:
    operation = ("all_reduce", "all_gather")
    assert matches(calls([1, 1], operation=operation), calls([1, 1], operation=operation[::-1])) == [
        [(0, 0), (1, 1)], [(0, 1), (1, 0)],
    ]  # fmt: skip
    # Ranks 0 and 1 are one group, 2 and 3 the other; all call an all-reduce of one size.
    groups = [calls([1], group=(name,)) for name in ("a", "a", "b", "b")]
    assert matches(*groups) == [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]
    steps = [calls([1, 1], step=np.array([3, 4])), calls([1, 1], step=np.array([4, 5]))]
    assert matches(*steps) == [[(0, 1), (1, 0)]]


def test_what_cannot_be_decided_stays_unmatched_and_counted() -> None:
    ranks = [collectives([0, 10, 20], [1, 1, 1]), collectives([0, 10], [1, 1])]
    found = match(ranks)
    assert found.n_collectives == 0
    assert found.unmatched == (3, 2)
    assert dict(found.reasons) == {"of a kind whose count differs between ranks": 5}
    # Four ranks in groups of two whose members nobody names.
    found = match([collectives([0], [1], group_size=np.array([2])) for _ in range(4)])
    assert dict(found.reasons) == {"of groups that the recordings do not name": 4}
    lone = match(
        [collectives([0, 5], [1, 1], size_bytes=np.array([1, 2])), collectives([0], [1], size_bytes=np.ones(1))]
    )
    assert lone.n_collectives == 1
    assert dict(lone.reasons) == {"on one rank only": 1}
    assert match([]).n_collectives == 0


def test_clocks_that_drift_apart() -> None:
    """60 all-reduces, 10 ms apart; rank 1's clock is 7 s ahead, runs 50 ppm fast, and a tenth of the ends are late."""
    random = np.random.default_rng(0)
    end_ns = np.arange(1, 61) * 10_000_000
    late_ns = np.where(np.arange(60) % 10 == 3, 400_000, random.integers(-500, 500, 60))
    other_ns = np.rint(end_ns * (1 + 50e-6)).astype(np.int64) + 7_000_000_000 + late_ns
    ranks = [collectives((end - 1_000).tolist(), [1_000] * 60) for end in (end_ns, other_ns)]
    clock = find_clocks(ranks, match(ranks), [0, 0])[1]
    assert clock.drift == pytest.approx(50e-6, rel=0.05)
    assert clock.spread_ns < 1_000
    assert clock.n_collectives == 60
    assert np.median(np.abs(clock.common_ns(other_ns) - end_ns)) < 1_000
    # Without drift none is found, and a few collectives show none.
    steady = [collectives((end - 1_000).tolist(), [1_000] * 60) for end in (end_ns, end_ns + late_ns)]
    assert find_clocks(steady, match(steady), [0, 0])[1].drift == 0
    few = [collectives((end[:9] - 1_000).tolist(), [1_000] * 9) for end in (end_ns, other_ns)]
    assert find_clocks(few, match(few), [0, 0])[1].drift == 0


def test_ranks_that_never_meet_the_first_are_found_over_others() -> None:
    """Rank 0 meets rank 1 in group a, rank 1 meets rank 2 in group b; rank 3 meets none."""
    ranks = [
        collectives([90], [10], group=("a",)),
        collectives([190, 290], [10, 10], group=("a", "b")),
        collectives([1_000_290], [10], group=("b",)),
        collectives([5], [1], group=("c",)),
    ]
    clocks = find_clocks(ranks, match(ranks), [0, 50, 60, 70])
    assert [clock.offset_ns for clock in clocks] == [0, 100, 1_000_100, -70]
    assert [clock.n_collectives for clock in clocks] == [0, 1, 1, 0]


@st.composite
def meetings(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """When each rank arrives at each of some all-reduces, and how long each transfer takes."""
    n_ranks, n = draw(st.integers(2, 5)), draw(st.integers(1, 30))
    arrivals: list[list[int]] = [[] for _ in range(n_ranks)]
    transfers, now = [], 0
    for _ in range(n):
        for arrival in arrivals:
            arrival.append(now + draw(st.integers(0, 1_000)))
        transfers.append(draw(st.integers(1, 100)))
        now = max(arrival[-1] for arrival in arrivals) + transfers[-1]
    return arrivals, transfers


@settings(deadline=None)
@given(meetings(), st.lists(st.integers(-(10**12), 10**12), min_size=5, max_size=5))
def test_waiting_is_what_the_last_one_costs_whatever_the_clocks_show(
    drawn: tuple[list[list[int]], list[int]], shifts_ns: list[int]
) -> None:
    arrivals, transfers = drawn
    all_here = [max(times) for times in zip(*arrivals, strict=True)]
    ranks = []
    for arrival, shift_ns in zip(arrivals, shifts_ns, strict=False):
        spent = [here + t - own for own, here, t in zip(arrival, all_here, transfers, strict=True)]
        ranks.append(collectives([own + shift_ns for own in arrival], spent))
    found = match(ranks)
    waits = find_waits(ranks, found, find_clocks(ranks, found, [0] * len(ranks)))
    for rank, row, wait_ns, transfer_ns in zip(
        found.rank.tolist(), found.row.tolist(), waits.wait_ns.tolist(), waits.transfer_ns.tolist(), strict=True
    ):
        assert transfer_ns == transfers[row]
        assert wait_ns == all_here[row] - arrivals[rank][row]


def test_latency_is_what_the_bytes_do_not_explain() -> None:
    size = np.array([0, 1_000, 2_000, 500, 500, -1])
    time_ns = np.array([100, 600, 1_100, 70, 80, 5])
    kind = np.array([0, 0, 0, 1, 1, 1])
    assert latency_ns(size, time_ns, kind).tolist() == [100, 100, 100, 0, 0, 0]


def test_the_report_names_the_straggler_and_its_work() -> None:
    ranks = two_ranks()
    found = report(ranks, Baseline.of(ranks.graph))
    ms = 1e-6
    assert [row.waiting_ms for row in found.rows] == pytest.approx([50 * ms, 0])
    assert [row.transfer_ms for row in found.rows] == pytest.approx([20 * ms, 20 * ms])
    assert [row.last_pct for row in found.rows] == [0, 100]
    assert [row.late_ms for row in found.rows] == pytest.approx([0, 50 * ms])
    assert [row.rank for row in found.stragglers] == [1]
    assert [(part.of, part.name, round(part.ms / ms)) for part in found.stragglers[0].excess] == [
        ("phase", "forward (GPU)", 50)
    ]
    assert "rank 1 holds the others up" in found.sentences[0]
    assert "forward (GPU)" in found.sentences[0]
    even = run_of([rank_graph(20, 20), rank_graph(20, 20)])
    assert report(even, Baseline.of(even.graph)).sentences[0].startswith("no straggler")


def test_recordings_that_are_not_of_one_run_are_refused() -> None:
    graphs = [rank_graph(20, 20), rank_graph(20, 20)]
    places, paths = Places((0, 1), 2), ["a.json", "b.json"]
    other = [collectives([22], [20], task=[3]), collectives([22], [20], task=[3], operation=("all_gather",))]
    with pytest.raises(WhatifError, match=r"^a\.json: expected the same collectives on every rank, got 0 of 2"):
        merged(graphs, other, places, paths)
    with pytest.raises(WhatifError, match="expected collectives between the ranks"):
        merged(graphs, [collectives([], []), collectives([], [])], places, paths)


def test_a_hundred_thousand_collectives_are_matched_at_once() -> None:
    """Memory and time are linear: 100 ranks with 1,000 all-reduces each."""
    ranks = [collectives(list(range(0, 100_000, 100)), [50] * 1_000) for _ in range(100)]
    found = match(ranks)
    assert found.n_collectives == 1_000
    assert len(found.rank) == 100_000
    clocks = find_clocks(ranks, found, [0] * 100)
    assert {clock.offset_ns for clock in clocks} == {0}
    assert not find_waits(ranks, found, clocks).wait_ns.any()


def test_a_wait_that_computation_hides_holds_nobody_up() -> None:
    """The first rank computes on another stream for 30 of the 50 ns in which its all-reduce waits."""
    ranks = run_of([rank_graph(20, 70, beside_ns=30), rank_graph(70, 20)])
    found = report(ranks, Baseline.of(ranks.graph))
    ms = 1e-6
    assert [row.waiting_ms for row in found.rows] == pytest.approx([20 * ms, 0])
    assert [row.late_ms for row in found.rows] == pytest.approx([0, 20 * ms])
    assert [row.transfer_ms for row in found.rows] == pytest.approx([20 * ms, 20 * ms])


def test_a_rank_that_is_late_without_more_work_is_not_said_to_begin_later(own_traces: Path) -> None:
    """Replayed ranks sleep equally long; who is last changes from one collective to the next."""
    ranks = read_ranks(own_traces / "lab_ranks_cpu" / "ranks-gpt2-200mbit-4")
    for sentence in report(ranks, Baseline.of(ranks.graph)).sentences:
        assert re.search(r"no phase, family or layer takes it over \d+\.\d\d ms longer than the others\.$", sentence)
