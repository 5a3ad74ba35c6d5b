"""Every snippet of the tutorial is run, in the order of the page, and shows what it says; docs/sensitivity.md too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whatif.graph import TASK_COLUMNS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "writing-a-transform.md").read_text(encoding="utf-8")
SENSITIVITY = (ROOT / "docs" / "sensitivity.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)(?: file=(\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, own_traces: Path) -> Path:
    """A folder with the recordings that the page names, its files, and the script that its first command writes."""
    place = tmp_path_factory.mktemp("tutorial")
    shutil.copy(own_traces / "transformer_cpu.json.gz", place / "train.json.gz")
    shutil.copy(own_traces / "transformer_cpu.json.gz", place / "before.json.gz")
    shutil.copy(own_traces / "transformer_cpu_fused.json.gz", place / "after.json.gz")
    for _, file, text in BLOCKS:
        if file:
            (place / file).write_text(text, encoding="utf-8")
    return place


def test_every_block_is_of_a_kind_that_is_run() -> None:
    """Plain blocks are drawings; toml without a file is the example package's, which has tests of its own."""
    kinds = {(language, bool(file)) for language, file, _ in BLOCKS}
    assert kinds == {
        ("console", False),
        ("", False),
        ("python", True),
        ("pycon", False),
        ("toml", True),
        ("toml", False),
    }


def test_the_entry_point_is_that_of_the_example() -> None:
    shown = [text for language, file, text in BLOCKS if language == "toml" and not file]
    assert [
        text in (ROOT / "examples" / "plugin" / "pyproject.toml").read_text(encoding="utf-8") for text in shown
    ] == [True]


def test_commands_run_in_their_order(folder: Path) -> None:
    commands = [line for language, _, text in BLOCKS if language == "console" for line in text.splitlines()]
    assert len(commands) == 3
    for line in commands:
        prompt, program, *words = line.split()
        assert (prompt, program) == ("$", "whatif")
        done = run([sys.executable, "-m", "whatif", *words], folder)
        assert done.returncode == 0, done.stderr
    done = run([sys.executable, "-m", "whatif", "apply", "urgent_first.py:time_us=40", "drawn.json"], drawn(folder))
    assert done.returncode == 0, done.stderr
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_idea.py"], folder)
    assert done.returncode == 0, done.stdout


def drawn(folder: Path) -> Path:
    """The folder once the step has been drawn."""
    done = run([sys.executable, "drawn.py"], folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_sessions_print_what_they_show(folder: Path) -> None:
    sessions = "\n".join(text for language, _, text in BLOCKS if language == "pycon")
    assert sessions.count(">>> ") > 30
    (folder / "sessions.txt").write_text(sessions, encoding="utf-8")
    done = run([sys.executable, "-m", "doctest", "sessions.txt"], folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_names_every_column() -> None:
    table = PAGE[PAGE.index("| column | what it holds |") : PAGE.index("## Select")]
    named = re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|")))
    assert sorted(named) == sorted(TASK_COLUMNS)


@pytest.mark.parametrize("file", ["drawn.py", "urgent_first.py", "test_my_idea.py"])
def test_files_are_tidy(folder: Path, file: str) -> None:
    # In this folder nobody can tell which import is whose, so their order is not asked for.
    rules = ["--config", str(ROOT / "pyproject.toml"), "--ignore", "I001,B905"]
    done = run([sys.executable, "-m", "ruff", "check", "--no-cache", *rules, file], folder)
    assert done.returncode == 0, done.stdout


def test_the_script_of_the_page_has_the_sections_of_one(folder: Path) -> None:
    text = (folder / "urgent_first.py").read_text(encoding="utf-8")
    assert all(f"\n{section}" in text for section in ("Source: ", "Model:  ", "Effort: "))


# -- docs/sensitivity.md -------------------------------------------------------------------------------------------


def test_the_table_of_gains_is_what_the_command_prints(shared_traces: Path, folder: Path) -> None:
    (table,) = re.findall(r"^```\n(Kernel families.*?)^```$", SENSITIVITY, re.MULTILINE | re.DOTALL)
    trace = shared_traces / "modded-nanogpt-8xh100" / "current.rank0.json.gz"
    done = run([sys.executable, "-m", "whatif", "explain", str(trace), "--sensitivity", "--top", "6"], folder)
    assert table in done.stdout


def test_the_library_can_be_asked_as_shown(folder: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", SENSITIVITY, re.MULTILINE | re.DOTALL)
    done = run([sys.executable, "-c", program + "\nassert len(curve.parts[0].gain_ms) == 6"], folder)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
