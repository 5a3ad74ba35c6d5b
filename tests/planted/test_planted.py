"""Causes planted into a step on a CPU: each is named with its line and a gain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import free_port, need

SCRIPT = Path(__file__).with_name("script.py")
CAUSES = ("item", "gc", "transform", "print")


def line_of(cause: str) -> int:
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    (number,) = (place for place, line in enumerate(lines, 1) if line.endswith(f"# planted {cause}"))
    return number


def command(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def by_line(folder: Path, recording: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(
        output(command(folder, "-m", "whatif", "explain", "--by", "line", "--json", recording))
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
def test_the_line_is_named_with_a_gain(cause: str, tmp_path: Path) -> None:
    """What the step really gains without the cause depends on the machine: `script.py CAUSE --time` measures it."""
    need("torch")
    collect = ("-m", "whatif", "collect", "--lines", "--stop", "--steps", "12", "-o", "run.json.gz", str(SCRIPT), cause)
    output(command(tmp_path, *collect))
    found = by_line(tmp_path, "run.json.gz")
    planted = [line for line in found["lines"] if f"script.py({line_of(cause)})" in line["line"]]  # type: ignore[attr-defined]
    assert planted, found["headline"]
    gain_ms = sum(line["gain_ms"] for line in planted)
    assert 0 < gain_ms < found["mean_ms"]  # type: ignore[operator]
    # No other single line would gain as much.
    others = [line["gain_ms"] for line in found["lines"] if line not in planted and line["gain_ms"]]  # type: ignore[attr-defined]
    assert cause in ("item", "print") or gain_ms > max(others)


@pytest.mark.slow
def test_the_uneven_rank_is_named_with_its_line(tmp_path: Path) -> None:
    need("torch")
    port = str(free_port())
    collect = ("-m", "whatif", "collect", "--lines", "--stop", "--steps", "8", "-o", "run.json.gz", str(SCRIPT), "rank")
    ranks = [
        command(tmp_path, *collect, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(2)
    ]
    for process in ranks:
        output(process)
    files = [f"run.rank{rank}.json.gz" for rank in range(2)]
    found = json.loads(output(command(tmp_path, "-m", "whatif", "explain", "--json", *files)))
    assert found["ranks"]["stragglers"][0] == 1
    assert found["ranks"]["sentences"][0].startswith("rank 1 holds the others up by ")
    lines = by_line(tmp_path, files[1])["lines"]
    assert any(f"script.py({line_of('rank')})" in line["line"] for line in lines)  # type: ignore[attr-defined]
