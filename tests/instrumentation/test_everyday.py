"""`whatif collect` disturbs nothing: scripts end as they do without it, with the same output and checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import whatif
from tests.helpers import need

torch = need("torch")

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "everyday"
QUICK = ["--steps", "3", "--untraced-steps", "2"]
COLLECT = [sys.executable, "-m", "whatif", "collect", *QUICK]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh folder that holds the scripts."""
    shutil.copytree(SCRIPTS, folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def checkpoints(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.pt"))}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["train.py"], []),
        (["train.py", "--steps", "37", "-o", "mine.pt", "--status", "7"], []),
        (["train.py", "--fail-at", "20"], []),
        (["gan.py"], []),
        (["lstm.py"], []),
        (["infer.py"], ["--inference"]),
        (["-m", "pkg.train", "-m", "--stop"], []),
    ],
    ids=" ".join,
)
def test_a_script_ends_as_it_does_alone(tmp_path: Path, words: list[str], options: list[str]) -> None:
    alone = run(tmp_path / "alone", sys.executable, *words)
    recorded = run(tmp_path / "recorded", *COLLECT, *options, "-o", "run.json.gz", *words)
    place = str(tmp_path / "alone"), str(tmp_path / "recorded")
    assert recorded.stdout == alone.stdout.replace(*place), recorded.stderr
    assert recorded.returncode == alone.returncode
    assert checkpoints(tmp_path / "recorded") == checkpoints(tmp_path / "alone")
    assert checkpoints(tmp_path / "alone")
    # What Python prints of an error is printed, and nothing else of ours around it.
    assert alone.stderr.replace(*place) in recorded.stderr
    assert "run.json.gz: recorded; next: whatif explain run.json.gz" in recorded.stderr
    graph = whatif.read(tmp_path / "recorded" / "run.json.gz")
    assert whatif.apply(graph, "scale:factor=0.5").predicted_ms > 0


def test_stop_ends_the_script_and_says_so_first_and_last(tmp_path: Path) -> None:
    found = run(tmp_path / "run", *COLLECT, "--stop", "train.py", "--steps", "100")
    assert found.returncode == 0
    said = [line for line in found.stderr.splitlines() if line.startswith("whatif: ")]
    assert "it is stopped then, before its own end (--stop)" in said[0]
    assert "stopped train.py after 16 steps: it did not run to its end" in said[-2] + said[-1]
    assert "saved after 15" in found.stdout


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 7), (signal.SIGINT, -signal.SIGINT)])
def test_signals_are_the_scripts_own(tmp_path: Path, number: int, status: int) -> None:
    shutil.copytree(SCRIPTS, tmp_path / "run")
    process = subprocess.Popen(
        [*COLLECT, "signals.py"], cwd=tmp_path / "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(6000):
        if (tmp_path / "run" / "ready").exists() or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert ("handler" in out) == (number == signal.SIGTERM)
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert (tmp_path / "run" / "signals.json.gz").exists()


@pytest.mark.parametrize("launcher", [["torchrun", "--nproc-per-node", "2", "--master-port", "29713"]])
def test_each_process_of_a_launcher_is_recorded(tmp_path: Path, launcher: list[str]) -> None:
    found = run(tmp_path / "run", *COLLECT, *launcher, "ranks.py")
    assert found.returncode == 0, found.stderr
    assert found.stdout == "ranks trained\n"
    files = sorted((tmp_path / "run").glob("ranks.rank*.json.gz"))
    assert [file.name for file in files] == ["ranks.rank0.json.gz", "ranks.rank1.json.gz"]
    assert len(whatif.read_ranks(files).graph.info.ranks) == 2


def test_accelerate_starts_the_script_under_collect(tmp_path: Path) -> None:
    need("accelerate")
    found = run(tmp_path / "run", *COLLECT, "accelerate", "launch", "--cpu", "train.py", "--steps", "20")
    assert found.returncode == 0, found.stderr
    assert "saved after 19" in found.stdout
    assert whatif.read(tmp_path / "run" / "train.json.gz").info.path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.ipynb"], "expected a Python script, got a notebook; in the notebook run `%load_ext whatif`"),
        (["-m", "no_such_package.train"], "expected a module that Python finds from"),
        (["python", "train.py"], "expected a script, got Python itself; leave `python` away"),
        (["nothing.py"], "expected a Python script, got no such file: check the path"),
        (["accelerate", "test"], "expected `accelerate launch SCRIPT.py`"),
    ],
)
def test_what_cannot_be_run_is_answered_in_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    found = run(tmp_path / "run", *COLLECT, *words)
    assert found.returncode == 1
    assert len(found.stderr.splitlines()) == 1
    assert sentence in found.stderr
