"""push and pull: a union through any URL that fsspec reaches; what breaks on the way leaves nothing half."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import need
from tests.opdb.builders import T4, V100, database, files_of, origin, own_cache, sentence, some_rows, timed  # noqa: F401
from whatif.cli.main import main
from whatif.opdb.sharing import pull, push
from whatif.opdb.store import MARKER, Store
from whatif.runtime.errors import WhatifError

need("fsspec")

Url = Callable[[], str]


@pytest.fixture(params=["file", "memory", "path"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty place of each kind."""
    if request.param == "memory":
        from fsspec.implementations.memory import MemoryFileSystem

        place = f"memory://{uuid.uuid4().hex}/db"
        yield place
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
    else:
        yield str(tmp_path / "far") if request.param == "path" else (tmp_path / "far").as_uri()


def test_what_was_pushed_comes_back(tmp_path: Path, url: str) -> None:
    mine = database(tmp_path / "mine", (some_rows(1), origin()), (some_rows(2), origin(T4)))
    done = push(mine, url)
    assert (len(done.added), len(done.present), done.rows) == (2, 0, 40)
    yours = Store.open(tmp_path / "yours", create=True)
    pulled = pull(url, yours)
    assert sorted(pulled.added) == sorted(done.added)
    assert files_of(yours) == files_of(mine)
    assert [c.read().sha256() for c in yours.contributions()[0]] == [c.read().sha256() for c in mine.contributions()[0]]
    # The same again changes nothing.
    assert (len(push(mine, url).present), len(pull(url, yours).present)) == (2, 2)


def test_two_people_meet_there(tmp_path: Path, url: str) -> None:
    mine = database(tmp_path / "mine", (some_rows(1), origin()), (some_rows(3), origin(author="both")))
    yours = database(tmp_path / "yours", (some_rows(2), origin(T4)), (some_rows(3), origin(author="both")))
    push(mine, url)
    assert (len(push(yours, url).added), len(push(yours, url).present)) == (1, 2)
    for store in (mine, yours):
        pull(url, store)
    assert files_of(mine) == files_of(yours)
    assert len(files_of(mine)) == 3


def test_only_what_was_asked_for_travels(tmp_path: Path, url: str) -> None:
    mine = database(tmp_path / "mine", (some_rows(1), origin()), (some_rows(2), origin(T4)))
    push(mine, url, device=T4)
    yours = Store.open(tmp_path / "yours", create=True)
    pull(url, yours)
    assert [c.provenance.origin.device.name for c in yours.contributions()[0]] == [T4]
    with pytest.raises(WhatifError) as error:
        pull(url, yours, family="conv")
    assert "no matching ones" in sentence(error)
    with pytest.raises(WhatifError) as error:
        push(mine, url, family="conv")
    assert "no matching ones" in sentence(error)


def test_the_same_times_of_another_device_are_refused_both_ways(tmp_path: Path, url: str) -> None:
    mine = database(tmp_path / "mine", (some_rows(1), origin(V100)))
    yours = database(tmp_path / "yours", (some_rows(1), origin(T4)), (some_rows(2), origin(T4)))
    push(mine, url)
    done = push(yours, url)
    assert len(done.added) == 1
    [refused] = done.refused
    assert f"already stored for {V100}" in refused
    pulled = pull(url, yours)
    [refused] = pulled.refused
    assert f"already stored for {T4}" in refused


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(4)), st.permutations(range(4)))
def test_any_order_of_pushing_gives_the_same(
    tmp_path_factory: pytest.TempPathFactory, first: list[int], second: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("people")
    people = [
        database(folder / str(n), *((some_rows(seed), origin((V100, T4)[seed % 2])) for seed in (n, n + 1)))
        for n in range(4)
    ]
    results = []
    for number, order in enumerate((first, second)):
        place = (folder / f"far {number}").as_uri()
        for person in order:
            push(people[person], place)
        target = Store.open(folder / f"mine {number}", create=True)
        pull(place, target)
        results.append(files_of(target))
    assert results[0] == results[1]
    assert len(results[0]) == 5


# -- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken_after", range(6))
def test_a_push_that_breaks_off_leaves_no_half_contribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_after: int
) -> None:
    """The connection breaks at the n-th write: what is there is whole, and pushing again brings the rest."""
    from fsspec.implementations.local import LocalFileSystem

    mine = database(tmp_path / "mine", (some_rows(1), origin()), (some_rows(2), origin(T4)))
    place = (tmp_path / "far").as_uri()
    left = [broken_after]

    def breaking(called: Any) -> Any:
        def call(self: LocalFileSystem, *args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise ConnectionError("the line is dead\nreally")
            return called(self, *args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("put_file", "pipe_file", "mv"):
            patch.setattr(LocalFileSystem, name, breaking(getattr(LocalFileSystem, name)))
        with pytest.raises(WhatifError) as error:
            push(mine, place)
        assert "the line is dead really" in sentence(error)
    far = tmp_path / "far"
    whole = [c.read() for c in Store(far).contributions()[0]]
    assert Store(far).contributions()[1] == []
    assert len(whole) <= 1
    push(mine, place)
    assert files_of(Store.open(far)) == files_of(mine)
    assert not list(far.rglob("*.part"))


def test_what_is_damaged_on_the_way_is_refused(tmp_path: Path) -> None:
    mine = database(tmp_path / "mine", *((some_rows(seed), origin(author=str(seed))) for seed in range(5)))
    place = (tmp_path / "far").as_uri()
    push(mine, place)
    shards = [c.shard for c in Store.open(tmp_path / "far").contributions()[0]]
    sidecars = [shard.with_suffix(".json") for shard in shards]
    shards[0].write_bytes(shards[0].read_bytes()[:-30])
    shards[1].write_bytes(shards[2].read_bytes())
    sidecars[2].write_text(sidecars[2].read_text().replace(V100, T4))
    shards[3].unlink()  # begun, and never ended: it does not exist
    yours = Store.open(tmp_path / "yours", create=True)
    done = pull(place, yours)
    assert len(done.added) == 1
    assert len(done.refused) == 3
    for text in done.refused:
        assert "expected" in text
        assert "\n" not in text
        assert str(tmp_path / "far") in text  # where it lies, not where it was looked at
    assert len(files_of(yours)) == 1


def test_what_is_damaged_here_does_not_travel(tmp_path: Path, url: str) -> None:
    mine = database(tmp_path / "mine", (some_rows(1), origin()), (some_rows(2), origin()))
    [one, _], _ = mine.contributions()
    one.shard.write_bytes(one.shard.read_bytes()[:-20])
    done = push(mine, url)
    assert (len(done.added), len(done.refused)) == (1, 1)
    alone = database(tmp_path / "alone", (some_rows(1), origin()))
    alone.contributions()[0][0].shard.unlink()
    with pytest.raises(WhatifError) as error:
        push(alone, url)
    assert "fetch it again" in sentence(error)


def test_foreign_places_are_refused(tmp_path: Path) -> None:
    mine = database(tmp_path / "mine", (some_rows(), origin()))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(WhatifError) as error:
        push(mine, foreign.as_uri())
    assert "other files" in sentence(error)
    assert sorted(p.name for p in foreign.iterdir()) == ["thesis.txt"]
    for place in (foreign, tmp_path / "nowhere"):
        with pytest.raises(WhatifError) as error:
            pull(place.as_uri(), mine)
        assert MARKER in sentence(error)
    for text in ('{"whatif_opdb": 2}', "[" * 5000, "", "x" * 10_000):
        (foreign / MARKER).write_text(text)
        with pytest.raises(WhatifError) as error:
            pull(foreign.as_uri(), mine)
        assert str(foreign) in sentence(error)


@pytest.mark.skipif(os.name == "nt", reason="needs pipes and links")
def test_links_pipes_and_odd_names_do_no_harm(tmp_path: Path) -> None:
    mine = database(tmp_path / "mine", (some_rows(), origin()))
    far = tmp_path / "far"
    push(mine, far.as_uri())
    folder = next(far.rglob("*.parquet")).parent
    os.mkfifo(folder / f"{'a' * 24}.json")
    (folder / f"{'a' * 24}.parquet").write_bytes(b"")
    (folder / f"{'b' * 24}.json").symlink_to("/dev/zero")
    (folder / f"{'b' * 24}.parquet").symlink_to("/dev/zero")
    (folder / "..json").write_text("{}")
    (folder / "..%2f..%2fevil.json").write_text("{}")
    (folder / f"{'c' * 24}.json").write_text("x" * 2_000_000)
    (folder / f"{'c' * 24}.parquet").write_bytes(b"")
    yours = Store.open(tmp_path / "yours", create=True)
    done = pull(far.as_uri(), yours)
    assert len(done.added) == 1
    assert all("expected" in text for text in done.refused)
    assert files_of(yours) == files_of(mine)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("teleport://x/y", "fsspec knows"),
        ("hdfs-of-nobody://", "fsspec knows"),
        ("", "got nothing"),
        ("zip://db::file:///tmp/bomb.zip", "got a chain of addresses"),
        ("smb://host/share/db", "pip install smbprotocol"),
    ],
)
def test_an_address_that_leads_nowhere_is_one_sentence(tmp_path: Path, url: str, expected: str) -> None:
    mine = database(tmp_path / "mine", (some_rows(), origin()))
    if expected.startswith("pip"):
        try:
            import smbprotocol  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("the driver is installed")
    for call in (lambda: push(mine, url), lambda: pull(url, mine)):
        with pytest.raises(WhatifError) as error:
            call()
        assert expected in sentence(error)


def test_the_commands(tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    database(tmp_path / "mine", (timed(range(1, 9), [10.0] * 8), origin()))
    place = (tmp_path / "far").as_uri()
    assert main(["opdb", "push", place, "--db", str(tmp_path / "mine"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["database"], len(report["added"]), report["rows_added"]) == (place, 1, 8)
    assert main(["opdb", "pull", place, "--db", str(tmp_path / "yours")]) == 0
    assert "1 contribution added (8 rows)" in capsys.readouterr().out
    assert main(["opdb", "pull", "teleport://x", "--db", str(tmp_path / "yours")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_what_fails_makes_no_database(tmp_path: Path) -> None:
    """No empty database is left on either side: later queries would use it."""
    mine, new = database(tmp_path / "mine", (some_rows(), origin())), tmp_path / "new"
    place, far = (tmp_path / "far").as_uri(), tmp_path / "far"
    assert main(["opdb", "pull", (tmp_path / "nowhere").as_uri(), "--db", str(new)]) == 1
    assert main(["opdb", "merge", str(mine.folder), "--family", "conv", "--db", str(new)]) == 1
    assert main(["opdb", "export", str(new), "--family", "conv", "--db", str(mine.folder)]) == 1
    assert not new.exists()
    mine.contributions()[0][0].shard.unlink()
    assert main(["opdb", "push", place, "--db", str(mine.folder)]) == 1
    assert main(["opdb", "merge", str(mine.folder), "--db", str(new)]) == 1
    assert not far.exists()
    assert not new.exists()
