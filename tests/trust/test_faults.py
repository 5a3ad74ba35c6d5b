"""Full and closed outputs, no home, other locales, kill -9: no traceback, and no broken file over a good one."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trust.common import CPU_RECORDING

WHATIF = [sys.executable, "-m", "whatif"]


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([*WHATIF, *words], capture_output=True, text=True, timeout=300, env=environment)


def check(done: subprocess.CompletedProcess[str], status: int) -> None:
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert "unexpected error" not in done.stderr


@pytest.mark.parametrize(("output", "status"), [("> /dev/full", 1), (">&-", 1), ("| head -1", 0)])
def test_an_output_that_takes_nothing(output: str, status: int) -> None:
    command = f'"{sys.executable}" -m whatif explain "{CPU_RECORDING}" {output}'
    check(subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300), status)


def test_other_environments() -> None:
    trace = str(CPU_RECORDING)
    check(run("apply", "amp", trace, LC_ALL="POSIX", PYTHONIOENCODING="ascii", PYTHONUTF8="0"), 0)
    check(run("info", trace, TMPDIR="/nonexistent", HOME="/nonexistent"), 0)


def test_an_answer_does_not_depend_on_the_hash_seed() -> None:
    answers = {run("apply", "amp", str(CPU_RECORDING), "--json", PYTHONHASHSEED=seed).stdout for seed in ("0", "77")}
    assert len(answers) == 1
    assert json.loads(answers.pop())["predicted_ms"] > 0


def _html(path: Path) -> None:
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")


@pytest.mark.slow
def test_ctrl_c_while_it_starts_is_one_sentence() -> None:
    """Python may be interrupted before it calls `main`: what it prints then is not ours."""
    seen = set()
    for delay_ms in range(20, 400, 20):
        started = subprocess.Popen(
            [*WHATIF, "apply", "amp", str(CPU_RECORDING)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        time.sleep(delay_ms / 1e3)
        started.send_signal(signal.SIGINT)
        said = started.communicate()[1]
        if "Traceback" in said and not re.search(r'__main__\.py", line [0-9]+, in main\n', said):
            continue
        seen.add(said.strip().splitlines()[-1] if said.strip() else "")
        assert "Traceback" not in said
        assert "unexpected error" not in said
    assert "whatif: interrupted." in seen


# What a command writes, its arguments before the file, and a check that fails on a broken file.
WRITERS: dict[str, tuple[list[str], Callable[[Path], object]]] = {
    "timeline.json": (["export", str(CPU_RECORDING), "amp", "-o"], lambda path: json.loads(path.read_text())),
    "report.html": (["report", str(CPU_RECORDING), "-o"], _html),
    "anonymous.json.gz": (
        ["anonymize", str(CPU_RECORDING), "-o"],
        lambda path: json.loads(gzip.decompress(path.read_bytes())),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_killed_command_leaves_the_older_file_whole(tmp_path: Path, name: str) -> None:
    words, is_whole = WRITERS[name]
    path, dice = tmp_path / name, random.Random(5)
    start_s = time.monotonic()
    done = run(*words, str(path))
    whole_s = time.monotonic() - start_s
    check(done, done.returncode if done.returncode in (0, 1) else 0)
    assert path.exists(), done.stderr
    for _ in range(6):
        killed = subprocess.Popen([*WHATIF, *words, str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(dice.uniform(0.6, 1.05) * whole_s)
        killed.kill()
        killed.wait()
        is_whole(path)


@pytest.mark.slow
def test_two_writers_of_one_database_lose_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.opdb.builders import database, origin, some_rows\n"
        "start = int(sys.argv[1])\n"
        "for i in range(start, start + 60): database(Path(sys.argv[2]), (some_rows(i, 40), origin()))"
    )
    root, folder = str(Path(__file__).resolve().parents[2]), tmp_path / "db"
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(start), str(folder)], cwd=root, stderr=subprocess.PIPE)
        for start in (0, 30)
    ]
    for writer in writers:
        _, said = writer.communicate()
        assert writer.returncode == 0, said
    check(run("opdb", "check", "--db", str(folder)), 0)
    assert len(list(folder.glob("*/*/*/*.json"))) == 90  # a folder for each device, family and provenance
