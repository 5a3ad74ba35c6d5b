"""The folder of a database: written once, merged in any order, and what is damaged, foreign or untrue is refused."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import replace
from tests.opdb.builders import T4, V100, database, files_of, origin, provenance, sentence, some_rows, timed
from whatif.opdb.merging import diff, merge
from whatif.opdb.provenance import encode
from whatif.opdb.rows import Rows, sound_part
from whatif.opdb.shard import columns_of, read_shard, write_shard
from whatif.opdb.store import MARKER, CannotWriteError, Outcome, Store
from whatif.runtime.errors import WhatifError


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = some_rows().canonical()
    store = database(tmp_path / "db", (rows, origin()))
    [contribution], wrong = store.contributions()
    assert wrong == []
    back = contribution.read()
    assert back.sha256() == rows.sha256()
    assert back.t_s.tolist() == rows.t_s.tolist()
    assert back.kernels.decoded() == rows.kernels.decoded()
    assert back.ops.keys.tolist() == rows.ops.keys.tolist()
    assert contribution.provenance.origin == origin()
    assert contribution.sidecar.relative_to(store.folder).parts[:2] == (V100, "matmul")


def test_the_same_rows_in_another_order_are_the_same_contribution(tmp_path: Path) -> None:
    rows = some_rows()
    store = database(tmp_path / "db", (rows, origin()))
    outcome, _ = store.add(rows.take(np.arange(len(rows))[::-1]), origin())
    assert outcome == Outcome.PRESENT
    outcome, _ = store.add(rows, origin(author="somebody else"))
    assert outcome == Outcome.ADDED  # what is known of it differs: provenance is never lost


def test_the_same_times_of_another_device_are_refused(tmp_path: Path) -> None:
    store = database(tmp_path / "db", (some_rows(), origin(V100)))
    with pytest.raises(WhatifError) as error:
        store.add(some_rows(), origin(T4))
    assert f"already stored for {V100}" in sentence(error)
    # Seven rows may agree by chance.
    few = timed(range(1, 8), [10.0] * 7)
    store.add(few, origin(V100))
    store.add(few, origin(T4))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 5), max_size=4, unique=True), min_size=2, max_size=3))
def test_databases_merge_in_any_order(tmp_path_factory: pytest.TempPathFactory, people: list[list[int]]) -> None:
    """Each person has some of six contributions; every order of merging gives the same files, and loses none."""
    folder = tmp_path_factory.mktemp("people")
    pool = [(some_rows(seed), origin((V100, T4)[seed % 2], author=f"person {seed}")) for seed in range(6)]
    stores = [database(folder / str(n), *(pool[c] for c in chosen)) for n, chosen in enumerate(people)]
    results = []
    for number, order in enumerate(itertools.permutations(stores)):
        target = Store.open(folder / f"merged {number}", create=True)
        for source in order:
            if files_of(source):
                merge(source, target)
        results.append(files_of(target))
        assert sorted(c.read().sha256() for c in target.contributions()[0]) == sorted(
            pool[c][0].canonical().sha256() for c in {c for chosen in people for c in chosen}
        )
    assert all(result == results[0] for result in results)
    assert len(results[0]) == len({c for chosen in people for c in chosen})


def test_diff_states_what_only_one_has_and_how_the_times_compare(tmp_path: Path) -> None:
    first = database(tmp_path / "1", (timed([1, 2, 3], [10, 20, 30]), origin(author="a")), (some_rows(), origin(T4)))
    second = database(tmp_path / "2", (timed([2, 3, 4], [22, 33, 44]), origin(author="b")), (some_rows(), origin(T4)))
    found = diff(first, second)
    assert (len(found.only_first), len(found.only_second), found.both) == (1, 1, 1)
    [compared] = found.compared
    assert (compared.device, compared.family, compared.operators) == (V100, "matmul", 2)
    assert compared.ratio_median == pytest.approx(1.1)


def test_a_merge_takes_the_sound_and_names_the_damaged(tmp_path: Path) -> None:
    source = database(tmp_path / "1", (some_rows(1), origin()), (some_rows(2), origin()))
    [one, _], _ = source.contributions()
    one.shard.write_bytes(one.shard.read_bytes()[:-20])
    target = Store.open(tmp_path / "2", create=True)
    done = merge(source, target)
    assert len(done.added) == 1
    assert len(done.refused) == 1
    assert one.shard.name in done.refused[0]
    alone = database(tmp_path / "3", (some_rows(1), origin()))
    [one], _ = alone.contributions()
    one.shard.write_bytes(b"")
    with pytest.raises(WhatifError):
        merge(alone, target)


def test_a_shard_that_is_not_what_its_sidecar_says_is_refused(tmp_path: Path) -> None:
    store = database(tmp_path / "db", (some_rows(1), origin()), (some_rows(2), origin()))
    [one, two], _ = store.contributions()
    one.shard.write_bytes(two.shard.read_bytes())
    with pytest.raises(WhatifError) as error:
        one.read()
    assert "expected the rows that its sidecar describes" in sentence(error)
    two.read()


def test_a_sidecar_that_was_changed_is_refused(tmp_path: Path) -> None:
    store = database(tmp_path / "db", (some_rows(), origin(V100)))
    [one], _ = store.contributions()
    text = one.sidecar.read_text()
    assert '"includes_launch": true' in text
    for changed in (
        text.replace(V100, T4),
        text.replace('"includes_launch": true', '"includes_launch": false'),
        text.replace('"schema_version": 1', '"schema_version": 2'),
        text.replace('"family": "matmul"', '"family": "magic"'),
        text.replace('"author": "a"', '"author": 5'),
        text.replace("{", '{"more": 1,', 1),
        "[" * 100_000,
        "",
        "\x00\xff",
        '{"schema_version": 1e999}',
        "x" * 1_100_000,
    ):
        one.sidecar.write_text(changed)
        found, [wrong] = store.contributions()
        assert found == []
        assert "expected" in wrong


def test_a_shard_without_its_sidecar_does_not_exist(tmp_path: Path) -> None:
    """What an interrupted import leaves behind: the shard, or a part of it, and no sidecar."""
    store = database(tmp_path / "db", (some_rows(1), origin()))
    [one], _ = store.contributions()
    (one.shard.parent / ("0" * 24 + ".parquet")).write_bytes(b"PAR1 and then the power went")
    (one.shard.parent / ".part").write_bytes(b"")
    found, wrong = store.contributions()
    assert (len(found), wrong) == (1, [])


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_import_leaves_the_database_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Interrupted before the shard or before the sidecar gets its name; the same import then succeeds."""
    store = database(tmp_path / "db", (some_rows(1), origin()))
    before = files_of(store)
    renamed = os.replace
    calls = iter(range(1, 10))

    def interrupted(source: str, target: str) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        renamed(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.add(some_rows(2), origin())
    assert files_of(store) == before
    assert not list(store.folder.rglob("*.part"))
    assert store.add(some_rows(2), origin())[0] == Outcome.ADDED
    assert len(store.contributions()[0]) == 2


@pytest.mark.parametrize("suffix", [".parquet", ".json"])
@pytest.mark.parametrize("damage", [b"", b"PAR1 and then the power went", None])
def test_what_is_damaged_is_written_anew(tmp_path: Path, suffix: str, damage: bytes | None) -> None:
    """By the same import, or a merge with somebody who has it whole; what is there and whole stays as it is."""
    store = database(tmp_path / "db", (some_rows(), origin()))
    whole = database(tmp_path / "whole", (some_rows(), origin()))
    [one], _ = store.contributions()
    file, before = one.sidecar.with_suffix(suffix), files_of(store)
    for again in (lambda: store.add(some_rows(), origin())[0], lambda: merge(whole, store).added):
        if damage is None:
            file.unlink()
        else:
            file.write_bytes(damage)
        assert again() in (Outcome.ADDED, [one.provenance.contribution])
        assert files_of(store) == before
        assert store.contributions()[0][0].read().sha256() == one.provenance.sha256
        assert store.add(some_rows(), origin())[0] == Outcome.PRESENT


def test_what_cannot_be_written_ends_an_import_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where a folder has to be; and a disk that is full, which ends a merge as well."""
    store = Store.open(tmp_path / "db", create=True)
    store.begin()
    (store.folder / V100).write_text("x")
    with pytest.raises(CannotWriteError) as error:
        store.add(some_rows(), origin())
    sentence(error)
    source = database(tmp_path / "source", (some_rows(1), origin(T4)), (some_rows(2), origin(T4)))
    tried = []

    def full(path: Path, _rows: Rows) -> None:
        tried.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whatif.opdb.store.write_shard", full)
    with pytest.raises(CannotWriteError, match="No space left"):
        merge(source, store)
    assert len(tried) == 1
    assert not list(store.folder.rglob("*.part"))


def test_a_database_that_was_killed_at_its_birth_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    folder.mkdir()
    (folder / f".{MARKER}.77.part").write_text('{"wha')
    assert Store.open(folder, create=True).contributions() == ([], [])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_no_contribution(tmp_path: Path) -> None:
    store = database(tmp_path / "db", (some_rows(), origin()))
    [one], _ = store.contributions()
    os.mkfifo(one.sidecar.with_name("0" * 24 + ".json"))
    assert len(store.contributions()[0]) == 1
    one.shard.unlink()
    os.mkfifo(one.shard)
    with pytest.raises(WhatifError) as error:
        one.read()
    sentence(error)


def test_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    store = database(tmp_path / "db", (some_rows(), origin()))
    (store.folder / V100 / "loop").symlink_to(store.folder)
    assert len(store.contributions()[0]) == 1


def test_every_truncation_is_one_sentence(tmp_path: Path) -> None:
    rows = timed([1, 2, 3], [10, 20, 30])
    whole = tmp_path / "whole.parquet"
    write_shard(whole, rows.canonical())
    data = whole.read_bytes()
    part = tmp_path / "part.parquet"
    for size in range(0, len(data), 7):
        part.write_bytes(data[:size])
        with pytest.raises(WhatifError) as error:
            read_shard(part, "matmul")
        sentence(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_flipped_byte_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A damaged shard is refused or reads as the same rows, and never gives a traceback."""
    store = database(tmp_path_factory.mktemp("db"), (timed([1, 2, 3], [10, 20, 30]), origin()))
    [one], _ = store.contributions()
    whole = bytearray(one.shard.read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    one.shard.write_bytes(whole)
    try:
        rows = one.read()
    except WhatifError as error:
        assert "expected" in str(error)  # noqa: PT017 (either outcome is right)
    else:
        assert rows.sha256() == one.provenance.sha256


class Bomb:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.write_text, (self.path, "boom"))


def write_columns(path: Path, **replaced: object) -> None:
    """A shard of two rows with some columns replaced (None: left out)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, object] = {
        "name": ["mm", "mm"], "phase": ["fwd", "fwd"], "dtype": ["fp32", "fp32"], "layout": ["", ""],
        "batch": [1, 1], "m": [4, 5], "n": [6, 6], "k": [7, 7], "t_s": [1e-5, 2e-5], "t_low_s": [1e-5, 2e-5],
        "t_high_s": [1e-5, 2e-5], "repeats": pa.array([3, 3], pa.int32()), "kernels": ["", ""],
    }  # fmt: skip
    assert tuple(columns) == columns_of("matmul")
    columns = {name: column for name, column in (columns | replaced).items() if column is not None}
    pq.write_table(pa.table(columns), path)


def test_wrong_columns_are_one_sentence(tmp_path: Path) -> None:
    import pyarrow as pa

    path = tmp_path / "shard.parquet"
    write_columns(path)
    assert len(read_shard(path, "matmul")) == 2
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    for replaced in (
        {"t_s": None},
        {"m": None},
        {"more": [1, 2]},
        {"m": [1.5, 2.5]},
        {"m": ["4", "5"]},
        {"m": pa.array([4, 5], pa.int32())},
        {"t_s": pa.array([1, 2], pa.timestamp("ns"))},
        {"t_s": [1e-5, None]},
        {"name": ["mm", None]},
        {"name": pa.array([bomb, bomb], pa.binary())},
        {"kernels": [["a"], ["b"]]},
    ):
        write_columns(path, **replaced)
        with pytest.raises(WhatifError) as error:
            read_shard(path, "matmul")
        sentence(error)
    with pytest.raises(WhatifError):
        read_shard(path, "conv")
    assert not (tmp_path / "boom").exists()


def test_a_shard_that_unfolds_beyond_bounds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Five million rows of one value are some kilobytes on disk.
    size, path = 5_000_000, tmp_path / "bomb.parquet"
    same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(size, np.int8)), pa.array(["x"]))
    pq.write_table(pa.table({"name": same, "t_s": pa.array(np.zeros(size))}), path, compression="zstd")
    assert path.stat().st_size < 50_000
    with pytest.raises(WhatifError) as error:
        read_shard(path, "matmul")
    assert "5,000,000 rows" in sentence(error)
    # A text of a gigabyte would be a few kilobytes as well: rows that nobody can have typed are not sound.
    rows = timed([1, 2], [10, 20])
    long = replace(rows, kernels=replace(rows.kernels, table=("x" * 5000,)))
    assert sound_part(long)[1] == 2


BAD: list[dict[str, float]] = [
    {"t_s": float("nan")}, {"t_s": float("inf")}, {"t_s": 0.0}, {"t_s": -1e-5}, {"t_s": 1e-12}, {"t_s": 1e9},
    {"t_low_s": 2e-5}, {"t_high_s": 5e-6}, {"t_low_s": -1.0}, {"t_high_s": float("inf")}, {"repeats": -1},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_what_no_device_can_have_is_left_out_and_counted(bad: dict[str, float]) -> None:
    rows = timed([1, 2], [10, 10])
    columns = {name: getattr(rows, name).copy() for name in bad}
    for name, value in bad.items():
        columns[name][1] = value
    kept, lost = sound_part(replace(rows, **columns))
    assert (len(kept), lost) == (1, 1)


def test_sizes_that_no_tensor_has_are_left_out(tmp_path: Path) -> None:
    rows: Rows = timed([4, 0, -3, 2**50], [10, 10, 10, 10])
    kept, lost = sound_part(rows)
    assert (kept.ops.integers["m"].tolist(), lost) == ([4], 3)
    with pytest.raises(WhatifError):
        Store.open(tmp_path / "db", create=True).add(rows, origin())


@pytest.mark.parametrize(
    "name", ["../../../escaped", "/etc/passwd", "..", "a\x00b", "x" * 100, "GPU; rm -rf", "\u202e"]
)
def test_a_devices_name_is_no_path(tmp_path: Path, name: str) -> None:
    store = database(tmp_path / "db", (some_rows(), origin(name)))
    [one], wrong = store.contributions()
    assert wrong == []
    assert one.provenance.origin.device.name == name
    assert one.shard.resolve().is_relative_to(store.folder.resolve())
    assert {p.name for p in tmp_path.iterdir()} == {"db"}


def test_other_folders_are_no_databases(tmp_path: Path) -> None:
    for make in (lambda p: None, Path.mkdir, lambda p: p.write_text("x")):
        path = tmp_path / f"{id(make)}"
        make(path)
        with pytest.raises(WhatifError) as error:
            Store.open(path)
        sentence(error)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    with pytest.raises(WhatifError):
        Store.open(mine, create=True)
    assert [p.name for p in mine.iterdir()] == ["thesis.tex"]
    for text in ("", "[]", "{}", '{"whatif_opdb": 99}', '{"whatif_opdb": "\\u0000"}', "[" * 4000, "\xff"):
        marked = tmp_path / "marked"
        marked.mkdir(exist_ok=True)
        (marked / MARKER).write_text(text)
        with pytest.raises(WhatifError) as error:
            Store.open(marked)
        sentence(error)


def test_a_sidecar_reads_as_people_write_it() -> None:
    sidecar = json.loads(encode(provenance(timed([1], [10]), origin())))
    assert sidecar["origin"]["method"] == {"name": "event_pair", "includes_launch": True}
    assert sidecar["origin"]["device"]["name"] == V100
    assert "driver" not in sidecar["origin"]["environment"]
