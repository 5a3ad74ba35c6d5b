"""Every rank at one pace: by hand, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

import whatif
from tests.ranks.hand import rank_graph, run_of, two_ranks
from whatif import TaskGraph, WhatifError
from whatif.ingest.ranks.merge import ranks_of


def end_of_tails(graph: TaskGraph) -> list[int]:
    return sorted(whatif.simulate(graph).end_ns[graph.select(name="^tail$")].tolist())


@pytest.mark.parametrize(("follow", "end_ns"), [("fastest", 52), ("mean", 77), ("median", 77)])
def test_two_ranks_at_one_pace(follow: str, end_ns: int) -> None:
    """The forward pass takes 20 and 70 ns: 20, or 45; then 20 ns of transfer and 10 of the tail."""
    prediction = whatif.apply(two_ranks().graph, f"balance_ranks:follow={follow}")
    assert end_of_tails(prediction.graph) == [end_ns, end_ns]


def test_of_three_ranks_the_median_is_none_of_the_others() -> None:
    graph = run_of([rank_graph(20, 70), rank_graph(40, 50), rank_graph(70, 20)]).graph
    assert end_of_tails(whatif.apply(graph, "balance_ranks:follow=median").graph) == [72, 72, 72]


def test_it_can_be_applied_once() -> None:
    once = whatif.apply(two_ranks().graph, "balance_ranks").graph
    twice = whatif.apply(once, "balance_ranks").graph
    assert np.array_equal(once.duration_ns, twice.duration_ns)
    assert twice.notes[-1] == "balance_ranks: all ranks compute at one pace already; nothing changes"


def test_communication_keeps_its_time() -> None:
    before = two_ranks().graph
    after = whatif.apply(before, "balance_ranks").graph
    communication = before.select(kind=whatif.TaskKind.COMMUNICATION)
    assert np.array_equal(before.duration_ns[communication], after.duration_ns[communication])
    assert np.array_equal(ranks_of(before), ranks_of(after))


def test_one_rank_alone_is_refused() -> None:
    with pytest.raises(
        WhatifError, match=r"^balance_ranks: expected the recordings of several ranks, got one rank alone"
    ):
        whatif.apply(rank_graph(20, 20), "balance_ranks")
    with pytest.raises(WhatifError, match="follow"):
        whatif.apply(two_ranks().graph, "balance_ranks:follow=slowest")
