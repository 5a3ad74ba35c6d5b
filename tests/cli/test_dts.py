"""``whatif dts``: text, JSON, plots, exports, a script of one's own, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import need
from tests.transforms.test_dts import CLUSTER
from whatif.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture(scope="session")
def trace(own_traces: Path) -> str:
    return str(own_traces / "lab_dts" / "dnn1.trace.json.gz")


def test_ranks_all_five(cluster: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dts", str(cluster), trace]) == 0
    text = capsys.readouterr().out
    for name in ("pipeline_learning", "federated", "split", "parallel_split", "federated_split"):
        assert name in text
    assert "trains an epoch fastest here" in text
    assert "an epoch is 100 batches of 100, shared by 3 clients" in text


def test_json(cluster: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["dts", str(cluster), trace, "--json", "--clients", "2", "--cut", "pool2", "--batches", "10", "--seed", "3"]
    assert main(asked) == 0
    as_json = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in as_json["architectures"]}
    assert len(rows) == 5
    assert as_json["not_possible"] == []
    epochs = [row["epoch_ms"]["median"] for row in as_json["architectures"]]
    assert epochs == sorted(epochs)
    for row in rows.values():
        for time in (row["batch_ms"], row["epoch_ms"]):
            assert time["low"] < time["median"] < time["high"]
    assert rows["split"]["cut_behind"] == ["pool2"]
    assert rows["split"]["equation_ms"] == pytest.approx(rows["split"]["batch_ms"]["undisturbed"])
    assert rows["federated"]["batches_per_client"] == 5
    assert rows["pipeline_learning"]["batches_per_client"] == 10
    assert rows["federated_split"]["roles"].keys() == {"server", "edge 1", "client 1", "edge 2", "client 2"}
    # The same seed draws the same.
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out) == as_json


def test_too_small_a_cluster_for_some(cluster: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dts", str(cluster), trace, "--clients", "5"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Not possible here" in text
    assert "federated_split: dts: expected a processor for each of 11 roles, got 7" in text


def test_plot_and_export(cluster: Path, trace: str, tmp_path: Path) -> None:
    need("matplotlib")
    for name in ("plot.png", "plot.svg"):
        assert main(["dts", str(cluster), trace, "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 5_000
    for name in ("graph.dot", "graph.png"):
        asked = ["dts", str(cluster), trace, "--architecture", "federated", "--export", str(tmp_path / name)]
        assert main(asked) == 0
    lines = (tmp_path / "graph.dot").read_text().splitlines()
    assert lines[0] == 'digraph "federated" {'
    assert '  "tower" [shape=ellipse, label="client 1\\ntower"];' in lines or any("server\\n" in line for line in lines)
    assert sum(" -> " in line for line in lines) == 6  # three clients, there and back
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")


def test_an_architecture_of_ones_own(cluster: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The example learns in a ring; it is ranked beside a built-in one."""
    script = str(ROOT / "examples" / "gossip_learning.py")
    assert main(["dts", str(cluster), trace, "--json", "--architecture", script, "--architecture", "federated"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in as_json["architectures"]}
    assert rows.keys() == {"gossip_learning", "federated"}
    # Its own heuristic: the strongest processor is the first peer.
    assert rows["gossip_learning"]["roles"]["peer 1"] == "tower"
    assert rows["gossip_learning"]["equation_ms"] is None


GOOD = "def roles(dnn, training): return []\ndef play(plan, training): pass\n"


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("x = 1\n", "expected functions roles(dnn, training) and play(plan, training), got no roles()"),
        ("def roles(dnn): pass\n", "expected roles(dnn, training), got roles(dnn)"),
        (GOOD + "def allocate(*, roles): pass\n", "expected allocate(roles, machines), got allocate(*, roles)"),
        ("1 / 0\n", "the architecture could not be run: ZeroDivisionError: division by zero"),
        ("def roles(dnn, training): return 1 / 0\ndef play(p, t): pass\n", "roles() of the architecture 'mine' failed"),
    ],
)
def test_a_wrong_script(
    cluster: Path, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, sentence: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(script)
    assert main(["dts", str(cluster), trace, "--architecture", str(path)]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--clients", "0"], "expected from 1 to 1,000 clients, got 0"),
        (["--batches", "0"], "expected from 1 to 100,000 batches in an epoch, got 0"),
        (["--samples", "0"], "expected from 1 to 100,000 samples of the fluctuations, got 0"),
        (["--seed", "-1"], "expected --seed of 0 or more, got -1"),
        (["--max-paths", "-2"], "expected --max-paths of 1 or more, or 0 for all, got -2"),
        (["--export", "x.txt"], "expected a file that ends in .dot, .png, .svg, .pdf, got another ending"),
        (["--architecture", "nothing"], "expected an architecture of pipeline_learning, federated"),
    ],
)
def test_nonsense(
    cluster: Path, trace: str, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["dts", str(cluster), trace, *words]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_the_measuring_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables II and III by the facts of the lab's networks; an LSTM counts its matrices once a row."""
    need("torch")
    models = f"{ROOT / 'benchmarks' / 'lab' / 'dts_models.py'}:build"
    measured = {}
    for name, pixels in (("dnn1", 50), ("dnn2", 64)):
        asked = ["--input", f"20,1,{pixels},{pixels}", "--kwargs", json.dumps({"name": name})]
        assert main(["dts", "--measure", models, *asked, "--json"]) == 0
        measured[name] = json.loads(capsys.readouterr().out)
        assert main(["dts", "--measure", models, *asked]) == 0
        assert f"[[processor]]\nname = {json.dumps('NAME')}\ngflop_s = " in capsys.readouterr().out
    assert [measured[name]["parameters"] for name in measured] == [72_802, 1_044_482]
    assert measured["dnn2"]["flops"] / measured["dnn1"]["flops"] == pytest.approx(4.8, abs=0.05)
    assert measured["dnn1"]["gflop_s"] > 0
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.LSTM(8, 16)\n\n"
        "    def forward(self, x):\n        return self.layer(x)[0]\n"
    )
    assert main(["dts", "--measure", f"{tmp_path / 'net.py'}:Net", "--input", "5,3,8", "--json"]) == 0
    # 15 rows of four gates: 64 x 8 from the input and 64 x 16 from the state, of 5 "samples" along the first dimension.
    assert json.loads(capsys.readouterr().out)["flops"] == 2 * 15 * 64 * (8 + 16) / 5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "expected CLUSTER.toml and TRACE, or --measure FILE.py:MODEL --input SHAPE, got neither"),
        (["cluster.toml"], "got CLUSTER.toml alone"),
        (["--measure", "net.py:Net"], "got no --input"),
        (["--input", "2,3"], "got --input without --measure"),
        (["cluster.toml", "--measure", "net.py:Net", "--input", "2,3"], "got 'cluster.toml' as well"),
        (["--measure", "net.py:Net", "--input", "2,x"], "dts: expected --input [NAME=]SIZES[:TYPE]"),
        (["--measure", "net.py:Net", "--input", "0,8"], "dts: expected --input with sizes of 1 or more"),
        (["--measure", "net.py:Net", "--input", "2,3", "--kwargs", "7"], "dts: expected --kwargs as a JSON object"),
    ],
)
def test_what_is_asked_for_is_one_thing(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dts", *words]) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())
