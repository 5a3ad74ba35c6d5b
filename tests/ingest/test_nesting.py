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
def test_rows_are_grouped_by_their_code(loops: Loops) -> None:
    rng = np.random.default_rng(0)
    for n in (0, 1, 7, 60):
        rows, codes = np.flatnonzero(rng.random(n) < 0.5), np.repeat(rng.integers(0, 5, n), 3).astype(np.int32)
        codes = codes[: len(rows)]
        offsets, grouped = np.zeros(6, np.int64), np.empty(len(rows), np.int64)
        loops.group_rows(rows, codes, offsets, grouped)
        for code in range(5):
            assert grouped[offsets[code] : offsets[code + 1]].tolist() == rows[codes == code].tolist()


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
def test_an_interval_knows_what_lies_right_inside_it(loops: Loops) -> None:
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
        n_children, n_counted = np.zeros((2, len(starts)), np.int32)
        inner_ns = np.zeros(len(starts), np.int64)
        loops.children(
            np.array(starts, np.int64), np.array(durations, np.int64), np.sort(lasts), counted.view(np.uint8),
            n_children, n_counted, inner_ns,
        )  # fmt: skip
        assert [list(row) for row in zip(n_children, n_counted, inner_ns, strict=True)] == expected
