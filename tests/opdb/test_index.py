"""The index: the same rows as the shards, found by key, built again when they change, and who is set aside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.opdb.builders import T4, V100, database, indexed, origin, own_cache, products, some_rows, timed
from whatif.opdb import index as index_module
from whatif.opdb.index import open_index
from whatif.opdb.keys import mixed
from whatif.opdb.provenance import Origin
from whatif.opdb.quarantine import Aside
from whatif.opdb.rows import measurements, operators
from whatif.opdb.store import Store

__all__ = ["own_cache"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.lists(st.integers(1, 40), max_size=20))
def test_find_is_a_dictionary(present: list[int], asked: list[int]) -> None:
    times = np.arange(1, len(present) + 1) * 10.0
    family = indexed((timed(present, times.tolist()), origin())).families["matmul"]
    first, last = family.find(products(asked or [1]).keys)
    for place, m in enumerate(asked):
        wanted = sorted(t * 1e-6 for t, p in zip(times.tolist(), present, strict=True) if p == m)
        assert sorted(family.t_s[first[place] : last[place]].tolist()) == pytest.approx(wanted)


def test_an_index_from_disk_is_the_one_in_memory(tmp_path: Path, own_cache: Path) -> None:
    parts = ((some_rows(1), origin()), (some_rows(2), origin(T4)), (timed([5, 6], [10, 20]), origin()))
    store = database(tmp_path / "db", *parts)
    built, opened = open_index(store), open_index(store)
    assert [c.contribution for c in opened.contributions] == [c.contribution for c in built.contributions]
    memory = indexed(*sorted(parts, key=lambda part: store.add(*part)[1]))
    for index in (built, opened):
        family, wanted = index.families["matmul"], memory.families["matmul"]
        assert family.keys.tolist() == wanted.keys.tolist()
        assert family.t_s.tolist() == wanted.t_s.tolist()
        assert index.groups == memory.groups
    assert opened.devices() == [T4, V100]


def test_an_index_follows_its_database(tmp_path: Path, own_cache: Path) -> None:
    store = database(tmp_path / "db", (some_rows(1), origin()))
    assert len(open_index(store)) == 20
    store.add(some_rows(2), origin())
    assert len(open_index(store)) == 40
    # One index a database is kept, however often it changed.
    assert len(list(next(own_cache.rglob("index")).glob("*/*"))) == 1


def test_a_damaged_shard_costs_itself_alone(tmp_path: Path, own_cache: Path) -> None:
    store = database(tmp_path / "db", (some_rows(1), origin()), (some_rows(2), origin()))
    [one, _], _ = store.contributions()
    one.shard.write_bytes(one.shard.read_bytes()[:100])
    for index in (open_index(store), open_index(store)):
        assert len(index) == 20
        [warning] = index.warnings
        assert str(one.shard) in warning


def test_an_index_that_was_cut_short_is_built_again(tmp_path: Path, own_cache: Path) -> None:
    store = database(tmp_path / "db", (some_rows(1), origin()))
    open_index(store)
    for damage in ("matmul.t_s.npy", "catalogue.json"):
        [file] = own_cache.rglob(damage)
        file.write_bytes(file.read_bytes()[:50])
        assert len(open_index(store)) == 20
    [file] = own_cache.rglob("matmul.t_s.npy")
    file.unlink()
    assert len(open_index(store)) == 20


def test_an_index_holds_no_objects(tmp_path: Path, own_cache: Path) -> None:
    """What lies in the cache is never unpickled."""
    store = database(tmp_path / "db", (some_rows(1), origin()))
    open_index(store)
    [file] = own_cache.rglob("matmul.t_s.npy")
    np.save(file, np.array([{"an": "object"}], dtype=object), allow_pickle=True)
    assert open_index(store).families["matmul"].t_s.dtype == np.float64


def test_the_same_measurements_given_twice_count_once(tmp_path: Path, own_cache: Path) -> None:
    store = database(tmp_path / "db", (some_rows(1), origin(author="a")), (some_rows(1), origin(author="b")))
    assert len(store.contributions()[0]) == 2
    assert len(open_index(store)) == 20


def test_operators_whose_keys_clash_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys of two bits nearly all operators share theirs with another."""
    monkeypatch.setattr("whatif.opdb.keys.mixed", lambda values: mixed(values) & np.uint64(3))
    index = indexed((timed(list(range(1, 41)), [10.0] * 40), origin()))
    [warning] = index.warnings
    assert "another operator has their key" in warning
    assert len(index) == len({*index.families["matmul"].keys.tolist()}) <= 4


def lawful(count: int, seed: int = 0) -> tuple[list[int], list[float]]:
    """Sizes, and times of a floor and a rate with 2 % of noise, in microseconds."""
    random = np.random.default_rng(seed)
    m = random.choice(np.arange(1, 100_000), count, replace=False)
    return m.tolist(), ((5 + m * 0.01) * np.exp(random.normal(0, 0.02, count))).tolist()


def test_a_stray_and_an_impossible_row_are_set_aside_in_any_order() -> None:
    m, t = lawful(200)
    t[20] *= 5
    # 2·10^8 multiply-adds... of (10^8, 64) by (64, 64): 0.8 PFLOP/s in a microsecond.
    m[30], t[30] = 100_000_000, 1.0
    rows = timed(m, t)
    results = []
    for order in (np.arange(200), np.arange(200)[::-1]):
        half = order[:100], order[100:]
        index = indexed(*((rows.take(part), origin(author=str(n))) for n, part in enumerate(half)))
        family = index.families["matmul"]
        results.append((family.keys.tolist(), family.aside.tolist()))
        by_key = dict(zip(*results[-1], strict=True))
        assert by_key[int(products([m[20]]).keys[0])] == Aside.STRAY
        assert by_key[int(products([m[30]]).keys[0])] == Aside.IMPOSSIBLE
        assert sum(a != Aside.SOUND for a in family.aside.tolist()) == 2
        assert len(family) == 200  # set aside, not deleted
    assert results[0] == results[1]


def test_rows_below_the_memorys_rate_may_come_from_a_cache() -> None:
    ops = operators("elementwise", {"elements": [100_000, 10**9], "tensors": 1}, name="relu", dtype="fp32")
    family = indexed((measurements(ops, [1e-7, 1e-3]), origin())).families["elementwise"]
    aside = dict(zip(family.keys.tolist(), family.aside.tolist(), strict=True))
    assert [aside[int(key)] for key in ops.keys] == [Aside.SOUND, Aside.IMPOSSIBLE]


def test_an_empty_database_has_an_index(tmp_path: Path, own_cache: Path) -> None:
    index = open_index(Store.open(tmp_path / "db", create=True))
    assert (len(index), index.devices(), index.warnings) == (0, [], ())
    assert index_module.INDEX_VERSION >= 1


def test_of_the_same_times_those_count_that_say_how_they_were_taken(tmp_path: Path) -> None:
    """A table that was exported and imported again knows no method; whichever id comes first."""
    for seed in range(6):
        store = database(tmp_path / str(seed), (some_rows(seed), origin()))
        store.add(some_rows(seed), Origin(device=origin().device))
        (contribution,) = open_index(store).contributions
        assert contribution.origin.method == origin().method
