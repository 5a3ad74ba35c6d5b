"""The README's commands are run, and what it shows is what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", README)


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command for command, _ in SHOWN])
def test_shown_output_is_real(command: str, output: str) -> None:
    program, *arguments = command.split()
    assert program == "whatif"
    run = subprocess.run(
        [sys.executable, "-m", "whatif", *arguments], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "COLUMNS": "110", "NO_COLOR": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip("\n") == output.strip("\n")


def test_python_example_runs(tmp_path: Path, own_traces: Path) -> None:
    blocks = re.findall(r"```python\n((?:.*\n)*?)```", README)
    transform, library = blocks
    script = tmp_path / "halve.py"
    script.write_text(transform, encoding="utf-8")
    trace = own_traces / "transformer_cpu.json.gz"
    program = library.replace('"train.json.gz"', repr(str(trace)))
    program += f"\nprint(whatif.apply(graph, {str(script)!r}).speedup)\n"
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            # Pages of the reference are made where the site is (tests/test_docs_site.py).
            assert target.startswith("reference/") or (page.parent / target).exists(), f"{page.name}: {target}"
