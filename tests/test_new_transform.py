"""``whatif transforms --new``: the script works as it is written, keeps the rules, and replaces nothing."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import whatif
from tests.helpers import CPU, STREAM, Build
from whatif import WhatifError, apply, load_transform
from whatif.cli.main import main
from whatif.graph.kernels import KernelFamily
from whatif.prediction.new_transform import write_new

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write_new(tmp_path / "my_idea.py")


def test_the_command_says_what_to_run_next(
    tmp_path: Path, own_traces: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert main(["transforms", "--new", "my_idea.py"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("my_idea.py: written")
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("  whatif ")]
    assert len(commands) == 2
    for _, *words in commands:
        assert main([str(own_traces / "transformer_cpu.json.gz") if w == "TRACE" else w for w in words]) == 0
    out = capsys.readouterr().out
    assert "My idea: what if element-wise work were `speedup` times as fast?" in out
    assert "my_idea: 49." in out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "my idea" / "idea.py")
    Path(path).parent.mkdir()
    assert main(["transforms", "--new", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "written": path,
        "next": [f"whatif transforms {shlex.quote(path)}", f"whatif apply {shlex.quote(path)} TRACE"],
    }


def test_the_script_shortens_the_drawn_elementwise_kernel(script: Path) -> None:
    """Two kernels of 10 ns on one stream, of which the second one is element-wise: 20 ns become 15."""
    build = Build(CPU, STREAM)
    for family, layer in ((KernelFamily.GEMM, "a"), (KernelFamily.ELEMENTWISE, "b")):
        call = build.task(0, 0, "launch")
        build.edge(call, build.task(1, 10, "kernel", family=family, layer=layer))
    graph = build.graph()
    transform = load_transform(script)
    changed = transform(graph).check()
    assert changed.duration_ns.tolist() == [0, 10, 0, 5]
    assert (changed.low_ns.tolist(), changed.high_ns.tolist()) == ([0, 10, 0, 0], [0, 10, 0, 10])
    assert changed.notes == ("my_idea: 1 tasks are 2 times as fast",)
    assert transform.with_options({"speedup": 1.25})(graph).low_ns.tolist() == [0, 10, 0, 6]
    assert transform.with_options({"speedup": 1.0})(graph).duration_ns.tolist() == graph.duration_ns.tolist()
    with pytest.raises(WhatifError, match="expected element-wise work in layers that match 'a', got none"):
        transform.with_options({"layer": "a"})(graph)
    for wrong in ("0.5", "nan"):
        with pytest.raises(WhatifError, match="expected a speedup of 1 or more"):
            transform.with_options({"speedup": wrong})(graph)


def test_the_script_works_on_every_shipped_recording(script: Path, own_traces: Path) -> None:
    for trace in sorted(own_traces.glob("*.json.gz")):
        prediction = apply(whatif.read(str(trace)), str(script))
        assert prediction.speedup > 1.005, trace.name
        assert prediction.low_ms < prediction.predicted_ms < prediction.high_ms


def test_the_script_works_on_a_gpu(script: Path, shared_traces: Path) -> None:
    graph = whatif.read(str(shared_traces / "modded-nanogpt-8xh100/current.rank0.json.gz"))
    assert apply(graph, str(script)).speedup > 1.005


def test_the_script_keeps_the_rules_of_a_transform(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(text)) or ""
    for section in ("Source: ", "Model:  ", "Effort: (small|medium|large|none): "):
        assert re.search(f"^{section}", doc, re.MULTILINE)
    assert len(text.splitlines()) <= 80


@pytest.mark.parametrize("config", [["--isolated"], ["--config", str(ROOT / "pyproject.toml")]])
@pytest.mark.parametrize("what", [["check"], ["format", "--check"]])
@pytest.mark.parametrize("name", ["my_idea.py", "x.py", "a_rather_long_name_for_a_small_idea.py"])
def test_linters_are_content(tmp_path: Path, name: str, what: list[str], config: list[str]) -> None:
    path = write_new(tmp_path / name)
    run = subprocess.run(
        [sys.executable, "-m", "ruff", *what, *config, "--no-cache", str(path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_nothing_is_overwritten(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("mine")
    assert main(["transforms", "--new", str(script)]) == 1
    assert f"{script}: expected the name of a new file, got one that is there" in capsys.readouterr().err
    assert script.read_text() == "mine"


def test_nothing_is_written_through_a_link(script: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.py"
    link.symlink_to(script)
    before = script.read_text()
    with pytest.raises(WhatifError, match="got one that is there"):
        write_new(link)
    assert script.read_text() == before


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("my_idea", "ends in .py"),
        ("my-idea.py", "letters, digits and _"),
        ("2nd.py", "letters, digits and _"),
        ("class.py", "letters, digits and _"),
        (".py", "ends in .py"),
        ("a b.py", "letters, digits and _"),
        ('x"""; import os.py', "letters, digits and _"),
        ("random.py", "that of the Python module 'random'"),
        ("numpy.py", "that of the Python module 'numpy'"),
        ("amp.py", "the built-in transform 'amp'"),
        ("nowhere/my_idea.py", "expected a folder to write into"),
    ],
)
def test_a_name_that_would_not_work_is_refused(
    name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transforms", "--new", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_name_and_a_new_script_are_two_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transforms", "amp", "--new", str(tmp_path / "my_idea.py")]) == 2
    assert "expected NAME or --new FILE.py, got both" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
