"""Causes planted into a step on a CPU: each is named with its line and a gain."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import free_port, need
from tests.instrumentation import warm
from whatif.cli.main import main

SCRIPT = Path(__file__).with_name("script.py")
CAUSES = ("item", "gc", "transform", "print")
COLLECT = ("-m", "whatif", "collect", "--lines", "--stop", "-o", "run.json.gz", "--steps")
# The nine steps between the first and the last of these have each cause equally often, that of every third step too.
PERIODS = "11"
RANK_FILES = ("run.rank0.json.gz", "run.rank1.json.gz")


def line_of(cause: str) -> int:
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    (number,) = (place for place, line in enumerate(lines, 1) if line.endswith(f"# planted {cause}"))
    return number


def command(folder: Path, *words: str, python: str = sys.executable, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, *words], cwd=folder, env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def whatif_json(folder: Path, *words: str) -> dict[str, Any]:
    with chdir(folder), redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer


def record(
    folder: Path, cause: str, steps: str = PERIODS, *options: str, python: str = sys.executable
) -> dict[str, Any]:
    """The answer of `explain --by line` to a new recording with a cause."""
    output(command(folder, *COLLECT, steps, *options, str(SCRIPT), cause, python=python))
    return whatif_json(folder, "explain", "--by", "line", "run.json.gz")


def two_ranks(folder: Path, *words: str, python: str = sys.executable) -> str:
    """Run a command as both ranks of a group; return what rank 0 prints."""
    port = str(free_port())
    ranks = [
        command(
            folder, *words, python=python, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        )
        for rank in range(2)
    ]
    first, _ = [output(process) for process in ranks]
    return first


def planted_lines(answer: dict[str, Any], cause: str) -> list[dict[str, Any]]:
    return [line for line in answer["lines"] if f"script.py({line_of(cause)})" in line["line"]]


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
def test_the_line_is_named_with_a_gain(cause: str, tmp_path: Path) -> None:
    """What the step really gains without the cause depends on the machine: `measure.py` measures it."""
    need("torch")
    # The collector looks at all that a process has imported, but not at what a fork finds.
    steps, python = (PERIODS, sys.executable) if cause == "gc" else ("3", warm.executable(tmp_path))
    for _ in range(3):
        answer = record(tmp_path, cause, steps, "--untraced-steps", "2", python=python)
        planted = planted_lines(answer, cause)
        assert planted, answer["headline"]
        gain_ms = sum(line["gain_ms"] for line in planted)
        assert 0 < gain_ms < answer["mean_ms"]
        # Other tests run beside this one: a few recorded steps may be slower elsewhere, but not in each recording.
        most_ms = max(line["gain_ms"] or 0 for line in answer["lines"] if line not in planted)
        if cause in ("item", "print") or gain_ms > most_ms:
            return
    raise AssertionError(f"another line gains more than the {gain_ms} ms of the planted one: {answer['headline']}")


@pytest.mark.slow
def test_the_uneven_rank_is_named_with_its_line(tmp_path: Path) -> None:
    need("torch")
    words = *COLLECT, "3", "--untraced-steps", "2", str(SCRIPT), "rank"
    for _ in range(3):
        two_ranks(tmp_path, *words, python=warm.executable(tmp_path))
        answer = whatif_json(tmp_path, "explain", *RANK_FILES)
        # Other tests run beside this one: a rank that waits for a core holds the others up, but not in each recording.
        if answer["ranks"]["stragglers"][0] == 1:
            break
    assert answer["ranks"]["stragglers"][0] == 1
    assert answer["ranks"]["sentences"][0].startswith("rank 1 holds the others up by ")
    assert planted_lines(whatif_json(tmp_path, "explain", "--by", "line", RANK_FILES[1]), "rank")
