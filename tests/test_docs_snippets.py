"""docs/writing-a-transform.md, beyond what tests/test_pages.py runs: what it shows is complete and tidy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.blocks import ROOT, blocks_of
from whatif.graph import TASK_COLUMNS

PAGE = (ROOT / "docs" / "writing-a-transform.md").read_text(encoding="utf-8")
FILES = {block.file: block.text for block in blocks_of(PAGE) if block.file}


def test_the_table_names_every_column() -> None:
    table = PAGE[PAGE.index("| column | what it holds |") : PAGE.index("## Select")]
    named = re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|")))
    assert sorted(named) == sorted(TASK_COLUMNS)


@pytest.mark.parametrize("file", ["drawn.py", "urgent_first.py", "test_my_idea.py"])
def test_files_are_tidy(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text(FILES[file], encoding="utf-8")
    # In this folder nobody can tell which import is whose, so their order is not asked for.
    rules = ["--config", str(ROOT / "pyproject.toml"), "--ignore", "I001,B905"]
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", *rules, file]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_script_of_the_page_has_the_sections_of_one() -> None:
    assert all(f"\n{section}" in FILES["urgent_first.py"] for section in ("Source: ", "Model:  ", "Effort: "))
