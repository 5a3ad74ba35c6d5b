"""The loops over the events of threads, against slow and obvious twins."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import both_forms
from whatif.ingest.nest import Nest
from whatif.runtime.loops import Loops

LOOPS = both_forms("whatif.ingest._nesting")


def nested(rng: np.random.Generator, n: int) -> tuple[list[int], list[int]]:
    """Starts and ends of intervals that nest, longer ones first where several start together; none is empty."""
    found: list[tuple[int, int]] = []

    def fill(low: int, high: int) -> None:
        while low < high and len(found) < n:
            begin = int(rng.integers(low, high))
            end = int(rng.integers(begin + 1, high + 1))
            found.append((begin, end))
            if rng.random() < 0.6:
                fill(begin, end)
            low = end + int(rng.integers(0, 3))

    while len(found) < n:
        last = max((end for _, end in found), default=0)
        fill(last, last + 40)
    found.sort(key=lambda interval: (interval[0], -interval[1]))
    return [begin for begin, _ in found], [end for _, end in found]


@pytest.mark.parametrize("loops", LOOPS)
def test_the_innermost_interval_is_the_shortest_one_around(loops: Loops) -> None:
    rng = np.random.default_rng(1)
    for n in (0, 1, 5, 40, 200):
        starts, ends = nested(rng, n)
        times = list(range(-1, max(ends, default=0) + 2))
        found = np.empty(len(times), np.int64)
        loops.innermost(
            np.array(starts, np.int64),
            np.array(ends, np.int64),
            np.sort(np.array(ends, np.int64)),
            np.array(times),
            found,
        )
        for time, at in zip(times, found.tolist(), strict=True):
            around = [(ends[i] - starts[i], -i) for i in range(len(starts)) if starts[i] <= time < ends[i]]
            assert at == (-min(around)[1] if around else -1)


def test_times_need_no_order() -> None:
    nest, times = Nest(np.array([0, 2, 10]), np.array([9, 5, 12])), np.array([11, 3, -1, 8, 2])
    assert nest.innermost(times).tolist() == [2, 1, -1, 0, 1]


@pytest.mark.parametrize("loops", LOOPS)
def test_an_interval_with_one_inside_lasts_longer_by_its_own_time(loops: Loops) -> None:
    rng = np.random.default_rng(2)
    for n in (1, 5, 40, 200):
        starts, ends = nested(rng, n)
        counted = rng.random(len(starts)) < 0.5
        durations = [end - begin for begin, end in zip(starts, ends, strict=True)]
        lasts = [begin + max(took, 1) for begin, took in zip(starts, durations, strict=True)]
        expected = [[0, 0, 0] for _ in starts]
        for i, begin in enumerate(starts):
            outer = [j for j in range(i) if begin < lasts[j]]
            if outer:
                expected[outer[-1]][0] += 1
                expected[outer[-1]][1] += int(counted[i])
                expected[outer[-1]][2] += durations[i]
        begin, own_ns = starts[n // 4], np.empty(len(starts), np.int64)
        found = loops.wrappers(
            np.array(starts, np.int64), np.array(durations, np.int64), np.sort(lasts), counted.view(np.uint8), begin,
            own_ns,
        )  # fmt: skip
        assert own_ns[:found].tolist() == [
            durations[i] - inner[2]
            for i, inner in enumerate(expected)
            if counted[i] and inner[:2] == [1, 1] and starts[i] >= begin
        ]


@pytest.mark.parametrize("loops", LOOPS)
def test_a_layer_is_carried_through_what_passes_it_on(loops: Loops) -> None:
    """Against looking back and ahead from every piece."""
    rng = np.random.default_rng(3)
    for n in (0, 1, 6, 40, 200):
        own = np.where(rng.random(n) < 0.4, rng.integers(1, 4, n), 0).astype(np.int32)
        passing, empty, ends = (rng.random(n) < share for share in (0.6, 0.4, 0.1))
        passing &= ~empty
        for between in (False, True):
            expected = passing.copy()
            for i in np.flatnonzero(empty) if between else ():
                before, after = np.flatnonzero(~empty[:i]), i + np.flatnonzero(~empty[i:])
                expected[i] = len(before) > 0 and len(after) > 0 and passing[before[-1]] and passing[after[0]]
            layers = own.tolist()
            for i in range(n):
                if layers[i] == 0 and expected[i] and not ends[i]:
                    layers[i] = layers[i - 1] if i else 0
            found, passed = own.copy(), passing.copy()
            loops.carry_layers(found, passed.view(np.uint8), empty.view(np.uint8), ends.view(np.uint8), between)
            assert passed.tolist() == expected.tolist()
            assert found.tolist() == layers


@pytest.mark.parametrize("loops", LOOPS)
def test_a_wait_is_for_the_newest_task_of_another_stream(loops: Loops) -> None:
    """Of the last few finished tasks launched before the call, the one launched last; the first of equal ones."""
    rng = np.random.default_rng(4)
    for n, looked_at in ((1, 3), (8, 2), (60, 5), (60, 200)):
        stream, launched_ns = rng.integers(0, 3, n).astype(np.int32), rng.integers(0, 50, n)
        ends = rng.permutation(n)
        target, done, asked_ns = rng.integers(0, n, 20), rng.integers(0, n + 1, 20), rng.integers(0, 60, 20)
        source = np.full(20, -1, np.int64)
        loops.newest_of_others(ends, launched_ns, stream, target, done, asked_ns, looked_at, source)
        for task, over, time_ns, found in zip(target, done, asked_ns, source.tolist(), strict=True):
            fits = [
                other
                for other in ends[max(over - looked_at, 0) : over].tolist()
                if stream[other] != stream[task] and launched_ns[other] < time_ns
            ]
            assert found == (max(fits, key=lambda other: launched_ns[other]) if fits else -1)


@pytest.mark.parametrize("loops", LOOPS)
def test_a_thread_is_cut_into_its_calls_and_the_pieces_between(loops: Loops) -> None:
    """Time   0  2     5  6     9   12
    Calls        [--A--]        B (empty)
    Left out              [--)
    Pieces   [--)      [-)  [---) [---)"""
    points = np.array([0, 2, 5, 5, 6, 7, 9, 9, 9, 12])
    start_ns, end_ns, call = np.empty((3, 12), np.int64)
    n = loops.cut(
        points, np.array([2, 9]), np.array([5, 9]), np.array([6]), np.array([7]), 4, start_ns, end_ns, call
    )  # fmt: skip
    pieces = list(zip(start_ns[:n].tolist(), end_ns[:n].tolist(), call[:n].tolist(), strict=True))
    assert pieces == [(0, 2, -1), (2, 5, 4), (5, 6, -1), (7, 9, -1), (9, 9, 5), (9, 12, -1)]


@pytest.mark.parametrize("loops", LOOPS)
def test_calls_that_overlap_are_one_group(loops: Loops) -> None:
    """On each thread a group goes on until a call starts at its end or later; no calls have no group."""
    track = np.array([0, 0, 0, 0, 1, 1], np.int32)
    start_ns, end_ns = np.array([0, 2, 9, 12, 3, 5]), np.array([10, 4, 12, 12, 5, 5])
    group, first, reach_ns = np.full((3, 6), -1, np.int64)
    n = loops.overlapping(track, start_ns, end_ns, group, first, reach_ns)
    assert group.tolist() == [0, 0, 0, 1, 2, 3]
    assert first[:n].tolist() == [0, 3, 4, 5]
    assert reach_ns[:n].tolist() == [12, 12, 5, 5]
    assert loops.overlapping(track[:0], start_ns[:0], end_ns[:0], group, first, reach_ns) == 0


@pytest.mark.parametrize("loops", LOOPS)
def test_a_thread_is_busy_in_its_operators_and_its_calls(loops: Loops) -> None:
    """Time    0    3  4    6  7  8  9
    Operators  [------)[-------)
                    [--)
    Calls           [--------)  [-----)  E (empty)
    """
    operators, calls = (np.array([0, 2, 4]), np.array([4, 4, 7])), (np.array([3, 7, 9]), np.array([6, 8, 9]))
    start_ns, end_ns = np.empty((2, 6), np.int64)
    n = loops.busy(*operators, *calls, start_ns, end_ns)
    assert list(zip(start_ns[:n].tolist(), end_ns[:n].tolist(), strict=True)) == [(0, 7), (7, 8), (9, 9)]
    none = np.empty(0, np.int64)
    assert loops.busy(none, none, *calls, start_ns, end_ns) == 3
    assert loops.busy(*operators, none, none, start_ns, end_ns) == 2
