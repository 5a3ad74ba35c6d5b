"""``whatif opdb``: each subcommand as text and as JSON, and sentences where it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.opdb.builders import T4, V100, database, origin, own_cache, some_rows, timed
from tests.opdb.test_importers import NCCL
from whatif.cli import opdb as cli
from whatif.cli.main import main
from whatif.opdb.asking import parse_operator
from whatif.opdb.chain import ALL_SOURCES
from whatif.opdb.importing import KINDS
from whatif.opdb.location import default_database
from whatif.opdb.shard import parquet
from whatif.runtime.errors import WhatifError

__all__ = ["own_cache"]
pytestmark = pytest.mark.usefixtures("own_cache")


def text(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 0) -> str:
    """The output of a command as one line: its line breaks depend on the length of the database's path."""
    assert main(["opdb", *map(str, words)]) == status
    return " ".join(capsys.readouterr().out.split())


def report(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 0) -> dict[str, Any]:
    found = json.loads(text(capsys, *words, "--json", status=status))
    assert isinstance(found, dict)
    return found


def complaint(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 1) -> str:
    """The one sentence on stderr."""
    assert main(["opdb", *map(str, words)]) == status
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("whatif: ")
    assert len(output.err.splitlines()) == 1
    return output.err


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return database(
        tmp_path / "db", (some_rows(1), origin()), (timed(range(1, 58, 2), range(10, 39)), origin(T4))
    ).folder


def test_import_list_and_query(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Into the user's default database, which the first import creates."""
    log = tmp_path / "run.log"
    log.write_text(NCCL)
    said = report(capsys, "import", "nccl-tests", log)
    assert (said["rows_added"], said["refused"], said["database"]) == (3, [], str(default_database()))
    assert str(tmp_path) in said["database"]
    assert "1 known" in text(capsys, "import", "nccl-tests", log)
    [contribution] = report(capsys, "list")["contributions"]
    assert (contribution["device"], contribution["family"]) == ("H100-SXM-80", "collective")
    assert contribution["method"] == "wall"
    assert "H100-SXM-80 collective" in text(capsys, "list")
    spec = "all_reduce:bytes=8192,ranks=2,nodes=2,layout=in_place"
    reply = report(capsys, "query", spec, "--device", "NVIDIA H100 80GB HBM3")
    assert (reply["answered_by"], reply["t_s"]) == ("exact", pytest.approx(30.33e-6))
    assert reply["low_s"] < reply["t_s"] < reply["high_s"]
    assert reply["measurements"][0]["contribution"] == contribution["contribution"]
    shown = text(capsys, "query", spec, "--device", "H100-SXM-80")
    assert shown.startswith("30.33 us on H100-SXM-80")
    assert "measured (1 row)" in shown
    assert text(capsys, "query", spec, "--device", "H100") == shown


@pytest.mark.parametrize(
    ("operator", "device", "as_for"),
    [
        ("mm:m=64,n=64,k=64,dtype=fp8", "V100-SXM2-32", "fp16"),
        ("mm:m=64,n=64,k=64,dtype=tf32", "T4", "fp32"),
        ("mm:m=64,n=64,k=64,dtype=bf16", "A100-SXM-80", ""),
        ("mm:m=64,n=64,k=64,dtype=int8", "V100-SXM2-32", ""),
        ("add:elements=64,dtype=bf16", "V100-SXM2-32", ""),
    ],
)
def test_a_format_without_units_is_answered_as_another_and_says_so(
    operator: str, device: str, as_for: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["opdb", "query", operator, "--device", device]
    assert main(words) == 0
    assert ("has no matrix units for" in (said := capsys.readouterr().err)) == bool(as_for)
    assert not as_for or said.endswith(f"the time is estimated as for {as_for}\n")
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == bool(as_for)


def test_a_query_about_a_board_of_two_dies_is_answered_for_one_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for device, per_die in (("MI250X", True), ("MI250X-GCD", False), ("MI300X", False)):
        assert main(["opdb", "query", "mm:m=512,n=512,k=512", "--device", device]) == 0
        said = capsys.readouterr()
        assert f"on {'MI250X-GCD' if per_die else device}" in said.out
        assert ("MI250X has 2 dies, one for each rank: this is the time on MI250X-GCD" in said.err) == per_die


def test_a_query_without_an_answer_names_other_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message listed the asked device itself as measured, and only GPUs for a CPU."""
    db = database(tmp_path / "cpu", (some_rows(3), origin("cpu:A CPU x1")), (some_rows(2), origin(T4))).folder
    said = complaint(capsys, "query", "all_reduce:bytes=8,ranks=2", "--device", "cpu:A CPU x1", "--db", db)
    assert "got measurements of matmul that do not; other devices with measurements: T4." in said
    said = complaint(capsys, "query", "mm:m=8,n=8,k=8", "--device", "cpu", "--db", db)
    assert said.startswith("whatif: expected the name of a known GPU, got 'cpu': known are A10,")
    assert said.endswith("; measured in the database: T4, cpu:A CPU x1.\n")


def test_an_interpolation_says_what_it_rests_on(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between 19 us at m=19 and 20 us at m=21, of 29 products."""
    inside = report(capsys, "query", "mm:m=20,n=64,k=64", "--device", "T4", "--db", db)
    assert (inside["answered_by"], inside["evidence_rows"]) == ("interpolated", 29)
    assert 19e-6 < inside["t_s"] < 20e-6
    how = {"method": "event_pair", "launch": "with launch", "cache": "unknown", "framework": "pytorch"}
    assert inside["method"] == how
    sheet = text(capsys, "query", "mm:m=4096,n=4096,k=4096,dtype=fp64", "--device", "A100-SXM-80", "--db", db)
    assert "from the device's data sheet alone" in sheet


def test_a_query_says_whether_its_time_holds_a_launch(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NeuSight's models learned times with launches, and a data sheet that is weighted with them holds one, too."""
    asked = {
        ("add:elements=1000,tensors=2", ""): (True, "pytorch, event pair, with launch"),
        ("bmm:batch=16,m=64,n=64,k=64,dtype=fp16", ""): (False, "computed, without launch"),
        ("bmm:batch=16,m=64,n=64,k=64,dtype=fp16", "--launch"): (True, "computed, with launch"),
    }
    for (operator, option), (launch, words) in asked.items():
        command = ("query", operator, *filter(None, [option]), "--device", "H100-SXM-80", "--db", db)
        found = report(capsys, *command)
        assert (found["answered_by"], found["includes_launch"]) == ("analytic", launch)
        assert (found["t_s"] > 15e-6) == launch
        said = text(capsys, *command)
        assert f"times {words}" in said
        assert ("mostly from the device's data sheet" in said) == (found["method"] is not None)


def test_export_merge_and_diff(db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, "export", tmp_path / "part", "--device", "T4", "--db", db)["rows_added"] == 29
    other = database(tmp_path / "other", (some_rows(3), origin())).folder
    difference = report(capsys, "diff", other, "--db", db)
    assert (len(difference["only_first"]), len(difference["only_second"]), difference["both"]) == (2, 1, 0)
    assert "only in" in text(capsys, "diff", other, "--db", db)
    assert report(capsys, "merge", other, "--db", db)["rows_added"] == 20
    assert report(capsys, "diff", other, "--db", db)["only_second"] == []
    table = tmp_path / "t4.csv"
    assert "29 rows written" in text(capsys, "export", table, "--device", "T4", "--db", db)
    words = ("import", "csv", table, "--method", "event_pair", "--launch", "included", "--db", tmp_path / "again")
    assert report(capsys, *words)["rows_added"] == 29


def test_check_states_what_is_damaged(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, "check", "--db", db)["problems"] == []
    assert "sound; 49 rows in 2 contributions" in text(capsys, "check", "--db", db)
    shard = next(db.rglob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-9])
    [problem] = report(capsys, "check", "--db", db, status=1)["problems"]
    assert shard.name in problem
    assert "1 problem;" in text(capsys, "check", "--db", db, status=1)


def test_evaluate_counts_every_held_out_row(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "evaluate", "--share", "0.3", "--seed", "1", "--db", db)
    assert found["rows"] == 49
    assert found["held_out"] == sum(found["answered_by"].values()) == found["total"]["rows"]
    assert sum(s["rows"] for s in found["by_operator"]) == found["held_out"]
    assert set(found["answered_by"]) <= {"interpolated", "analytic"}
    only = report(capsys, "evaluate", "--share", "0.3", "--seed", "1", "--source", "analytic", "--db", db)
    assert set(only["answered_by"]) == {"analytic"}
    assert "in range" in text(capsys, "evaluate", "--share", "0.3", "--seed", "1", "--db", db)
    unseen = report(capsys, "evaluate", "--unseen-device", "--db", db)
    assert (unseen["seed"], unseen["held_out_share"], unseen["held_out"]) == (None, None, 49)
    assert "49 of 49 rows held out (device by device)" in text(capsys, "evaluate", "--unseen-device", "--db", db)
    assert "without --seed" in complaint(capsys, "evaluate", "--unseen-device", "--seed", "1", "--db", db)


def test_the_words_of_the_command_are_those_of_the_library() -> None:
    assert cli._KINDS == KINDS
    assert tuple(source.name.lower() for source in ALL_SOURCES) == cli._ANSWER_SOURCES


def test_wrong_words_are_one_sentence(db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected an op database" in complaint(capsys, "list", "--db", tmp_path / "none")
    assert "expected an op database" in complaint(capsys, "merge", tmp_path / "none", "--db", db)
    assert "closest are A10, A10G;" in complaint(capsys, "query", "mm:m=1,n=1,k=1", "--device", "A10O", "--db", db)
    assert "expected an operator" in complaint(capsys, "query", "mn:m=1", "--device", "T4", "--db", db)
    assert "expected a family" in complaint(capsys, "list", "--family", "x", "--db", db)
    assert "only with csv" in complaint(capsys, "import", "recording", db, "--method", "trace", "--db", db)
    query = ("query", "mm:m=1,n=1,k=1", "--device", "T4", "--db", db)
    assert "expected a method" in complaint(capsys, *query, "--method", "x")
    for words in (
        (),
        ("import", "magic", "x"),
        ("query", "mm:m=1"),
        ("evaluate", "--share", "2"),
        ("list", "--device"),
    ):
        complaint(capsys, *words, status=2)


@pytest.mark.parametrize(
    "spec",
    ["", "mm", "mm:m", "mm:m=1,n=1", "mm:m=1,m=2,n=1,k=1", "mm:m=1,n=1,k=1.5", "mm:m=1,n=1,k=-1", "mm:m=1,n=1,k=x",
     "mm:m=1,n=1,k=99999999999999999", "mm:m=1,n=1,k=1,dtype=fp7", "mm:m=1,n=1,k=1,phase=up", "mm:q=1", "mm:m=\u0661",
     "mm:m=0,n=1,k=1", "conv2d:batch=1,in_channels=1,out_channels=1,in_h=3,kernel_h=9", "add:elements=1,tensors=0"],
)  # fmt: skip
def test_operators_that_are_none(spec: str) -> None:
    with pytest.raises(WhatifError, match="expected"):
        parse_operator(spec)


def test_squares_and_ones_need_not_be_spelled() -> None:
    said = parse_operator("conv2d:batch=8,in_channels=3,out_channels=64,in_h=224,kernel_h=7,stride_h=2,padding_h=3")
    conv = said.described(0)
    assert [conv[k] for k in ("in_w", "kernel_w", "stride_w", "padding_w", "dilation_w", "groups", "dtype")] == [
        224, 7, 2, 3, 1, 1, "fp32",
    ]  # fmt: skip
    assert parse_operator("add:elements=5").integers["tensors"].tolist() == [2]


def test_without_pyarrow_the_sentence_says_how_to_install_it(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(WhatifError, match=r"pip install 'whatif-profiler\[opdb\]'"):
        parquet()


def test_an_index_needs_no_pyarrow(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once it is built, looking up needs the index alone."""
    words = ("query", "mm:m=21,n=64,k=64", "--device", "T4", "--db", db)
    first = report(capsys, *words)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert report(capsys, *words) == first
    assert {c["device"] for c in report(capsys, "list", "--db", db)["contributions"]} == {V100, T4}


def test_where_a_person_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_database() == tmp_path / "data" / "whatif" / "opdb"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")  # to be ignored, says the XDG specification
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if sys.platform == "linux":
        assert default_database() == tmp_path / "home" / ".local" / "share" / "whatif" / "opdb"
    monkeypatch.setenv("WHATIF_OPDB", str(tmp_path / "named"))
    assert default_database() == tmp_path / "named"
