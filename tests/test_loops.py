"""The hot loops in both forms: compiled ahead of time, and the same files as plain Python."""

from __future__ import annotations

import heapq
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers import LOOP_FILES, REBUILD, both_forms, module_of_loops
from whatif.graph.order import numbered, order_by, spread
from whatif.runtime.loops import Loops

MODULES = [module_of_loops(path) for path in LOOP_FILES]


@pytest.mark.parametrize("module", MODULES)
def test_every_file_of_loops_is_compiled(module: str) -> None:
    if not Loops(module, plain=False).compiled:
        message = f"{module} is not compiled; {REBUILD}"
        pytest.fail(message) if os.environ.get("WHATIF_STRICT") == "1" else pytest.skip(message)
    assert not Loops(module, plain=True).compiled


def test_a_variable_asks_for_plain_loops() -> None:
    program = "import whatif.graph.order as order; print(order.loops.compiled)"
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "WHATIF_PLAIN": "1"}, capture_output=True, text=True
    )
    assert run.stdout.split() == ["False"], run.stderr


def test_running_needs_no_cython() -> None:
    program = "import sys, whatif.simulation.simulator; print('Cython' in sys.modules, 'cython' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.split() == ["False", "False"], run.stderr


@pytest.mark.parametrize("loops", both_forms("whatif.graph._loops"))
def test_dependencies_are_grouped_by_target(loops: Loops) -> None:
    """Read-only columns, as those of a graph; dependencies without order among their targets."""
    source, target = np.array([0, 1, 0, 2], np.int32), np.array([3, 2, 2, 3], np.int32)
    lags_ns, anchors = np.array([5, 6, 7, 8]), np.array([0, 1, 0, 0], np.int8)
    for column in (source, target, lags_ns, anchors):
        column.flags.writeable = False
    offsets, points, lags = np.zeros(5, np.int32), np.zeros(4, np.int32), np.zeros(4, np.int64)
    loops.group_by_target(4, source, target, lags_ns, anchors, offsets, points, lags)
    assert offsets.tolist() == [0, 0, 0, 2, 4]
    assert points.tolist() == [1, 4, 4, 6]
    assert lags.tolist() == [6, 7, 5, 8]


@pytest.mark.parametrize("loops", both_forms("whatif.graph._loops"))
def test_rows_are_grouped_by_their_code(loops: Loops) -> None:
    rng = np.random.default_rng(0)
    for n in (0, 1, 7, 60):
        rows, codes = np.flatnonzero(rng.random(n) < 0.5), np.repeat(rng.integers(0, 5, n), 3).astype(np.int32)
        codes = codes[: len(rows)]
        offsets, grouped = np.zeros(7, np.int64), np.empty(len(rows), np.int64)
        loops.group_rows(rows, codes, offsets, grouped)
        for code in range(5):
            assert grouped[offsets[code] : offsets[code + 1]].tolist() == rows[codes == code].tolist()


@pytest.mark.parametrize("loops", both_forms("whatif.graph._loops"))
def test_neighbours_that_stay_are_found_on_each_thread(loops: Loops) -> None:
    thread = np.array([0, 1, 0, 1, 0, 2], np.int32)
    gone = np.array([1, 0, 0, 1, 1, 1], np.uint8)
    previous, following = np.empty(6, np.int32), np.empty(6, np.int32)
    loops.kept_neighbours(thread, gone, np.full(3, -1, np.int32), previous, following)
    assert previous.tolist() == [-1, 1, 2, 1, 2, -1]
    assert following.tolist() == [2, 1, 2, -1, -1, -1]


@pytest.mark.parametrize("loops", both_forms("whatif.graph._loops"))
@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int32, np.int64])
def test_values_are_spread_around_the_places_that_are_skipped(loops: Loops, dtype: type) -> None:
    column = np.array([1, 0, 1, 1], dtype)
    for places in ([], [0], [4], [0, 1, 4], [2, 3, 5], [1, 2, 3, 4, 5, 6, 7]):
        skipped = np.array(places, np.int64)
        result = np.zeros(4 + len(skipped), dtype)
        loops.spread(column.view(np.uint8), skipped, column.itemsize, result.view(np.uint8))
        assert np.delete(result, skipped).tolist() == column.tolist()
        assert not result[skipped].any()
        assert np.delete(spread(column, skipped, len(result)), skipped).tolist() == column.tolist()


@pytest.mark.parametrize("loops", both_forms("whatif.graph._loops"))
def test_a_walk_back_ends_at_a_first_task_or_where_it_has_been(loops: Loops) -> None:
    """On one free thread, and without other dependencies."""
    for before, last, expected in (([-1, 0, 0, 1], 3, [3, 1, 0]), ([1, 2, 1], 0, [0, 1, 2]), ([-1], 0, [0])):
        assert walked_back(loops, [0] * len(before), [], last, before) == expected


@pytest.mark.parametrize("loops", both_forms("whatif.graph._loops"))
def test_a_walk_back_prefers_the_own_thread_then_the_smallest_id(loops: Loops) -> None:
    """Task 4 is on thread 1, with 2; all tasks start and end at 0, so that whatever it waits for binds."""
    assert walked_back(loops, [0, 2, 1, 3, 1], [(1, 4), (0, 4), (3, 4)], 4) == [4, 2]
    assert walked_back(loops, [0, 2, 4, 3, 1], [(1, 4), (0, 4), (3, 4)], 4) == [4, 0]
    assert walked_back(loops, [0, 1, 1, 3, 1], [(2, 4), (1, 4), (0, 4)], 4, lag_ns=-1) == [4, 1]


def walked_back(
    loops: Loops, thread: list[int], edges: list[tuple[int, int]], last: int, free: list[int] | None = None,
    lag_ns: int = 0,
) -> list[int]:  # fmt: skip
    """The path to ``last`` over tasks of no duration; threads have a lag, and are free in the order ``free``."""
    n = len(thread)
    source, target = np.array(edges or np.empty((0, 2)), np.int32).T.copy()
    offsets, points, lags = np.zeros(n + 1, np.int32), np.empty(len(source), np.int32), np.zeros(len(source), np.int64)
    loops.group_by_target(n, source, target, lags, np.zeros(len(source), np.int8), offsets, points, lags.copy())
    before, ordered = np.array(free or [-1] * n, np.int32), np.full(5, free is None, np.uint8)
    zero, path = np.zeros(n, np.int64), np.empty(n, np.int64)
    done = loops.walk_back(
        zero, zero, np.array(thread, np.int32), ordered, np.full(5, lag_ns), offsets, points, lags, before, last,
        np.zeros(n, np.uint8), path,
    )  # fmt: skip
    return path[:done].tolist()


@pytest.mark.parametrize("loops", both_forms("whatif.graph._loops"))
def test_cost_beyond_a_task_is_taken_from_the_next_ones_of_its_thread(loops: Loops) -> None:
    thread, works = np.array([0, 1, 0, 0, 1, 0], np.int32), np.array([1, 1, 1, 0, 1, 1], np.uint8)
    duration_ns, cost_ns = np.array([10, 20, 30, 40, 50, 60]), np.array([15, 2, 1, 99, 0, 4], np.int32)
    left_ns = np.full(6, np.nan)
    loops.without_cost(thread, works, duration_ns, cost_ns, 2.0, 2, left_ns)
    assert left_ns.tolist() == [0, 16, 8, 0, 50, 52]


@pytest.mark.parametrize("loops", both_forms("whatif.graph._loops"))
@pytest.mark.parametrize("right", [False, True])
def test_places_are_those_of_a_search(loops: Loops, right: bool) -> None:
    """In order, nearly so and at random; with equal values, and values beyond both ends."""
    rng = np.random.default_rng(1)
    for n, m in ((0, 3), (1, 3), (5, 0), (30, 40), (300, 50), (50, 300)):
        ordered, wanted = np.sort(rng.integers(0, n + 1, n)), np.sort(rng.integers(-2, n + 3, m))
        for values in (wanted, wanted + rng.integers(0, 3, m), rng.permutation(wanted)):
            found = np.empty(m, np.int64)
            loops.places(ordered, values, right, found)
            assert found.tolist() == np.searchsorted(ordered, values, "right" if right else "left").tolist()


def test_rows_are_put_in_order_by_several_columns() -> None:
    rng = np.random.default_rng(2)
    for n in (0, 1, 2, 50, 400):
        first, then, last = rng.integers(0, n // 4 + 1, n), rng.integers(0, 3, n), rng.random(n)
        assert order_by(first, then).tolist() == np.lexsort((then, first)).tolist()
        assert order_by(first, then, last).tolist() == np.lexsort((last, then, first)).tolist()


def test_equal_rows_have_one_number() -> None:
    rng = np.random.default_rng(3)
    for n in (0, 1, 2, 60):
        columns = rng.integers(-1, 3, n), rng.integers(-1, 2, n).astype(np.int32)
        number, rows = numbered(*columns).tolist(), list(zip(*(c.tolist() for c in columns), strict=True))
        assert [number.index(a) for a in number] == [rows.index(a) for a in rows]


@pytest.mark.parametrize("loops", both_forms("whatif.graph._loops")[1:])
def test_compiled_loops_refuse_columns_of_another_type(loops: Loops) -> None:
    wide, counts = np.zeros(0, np.int64), np.zeros(1, np.int64)
    with pytest.raises((TypeError, ValueError)):
        loops.group_by_target(0, wide, wide, wide, np.zeros(0, np.int8), counts, np.zeros(0, np.int32), wide)


@pytest.mark.parametrize("loops", both_forms("whatif.graph._loops"))
def test_the_smallest_ready_task_comes_first(loops: Loops) -> None:
    """Against a heap of all ready tasks, on random graphs with dependencies that point backward, some in cycles."""
    random = np.random.default_rng(0)
    for _ in range(60):
        n = int(random.integers(1, 30))
        before, after = random.integers(0, n, (2, int(random.integers(0, 2 * n)))).astype(np.int32)
        if random.random() < 0.8:  # no cycle: by a hidden order
            rank = random.permutation(n)
            kept = rank[before] < rank[after]
            before, after = before[kept], after[kept]
        offsets, rows = np.zeros(n + 2, np.int64), np.empty(len(before), np.int64)
        loops.group_rows(np.arange(len(before)), before, offsets, rows)
        assert rows.tolist() == np.argsort(before, kind="stable").tolist()
        missing = np.bincount(after, minlength=n).astype(np.int32)
        order = np.empty(n, np.int32)
        done = loops.smallest_first(offsets, after[rows], missing.copy(), order)
        assert order[:done].tolist() == by_heap(n, before.tolist(), after.tolist())


def by_heap(n: int, before: list[int], after: list[int]) -> list[int]:
    missing = [after.count(task) for task in range(n)]
    ready = [task for task in range(n) if not missing[task]]
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for source, target in zip(before, after, strict=True):
            if source == order[-1]:
                missing[target] -= 1
                if not missing[target]:
                    heapq.heappush(ready, target)
    return order
