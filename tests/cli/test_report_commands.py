"""The commands that a page of ``whatif report`` names: typed into a shell, they give the numbers of the page."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_commands import V100, training
from tests.helpers import write_trace
from tests.report_page import Page
from whatif.cli.main import main

pytestmark = pytest.mark.slow

# A script of the user's own, called as one of whatif's is.
OWN_SCRIPT = '''"""A kernel takes half as long.

Source: made for a test.
Model:  every kernel is twice as fast.
"""

from whatif import TaskGraph, TaskKind


def transform(graph: TaskGraph, *, name: str = "all") -> TaskGraph:
    return graph.scale(graph.kind == TaskKind.KERNEL, 0.5)
'''


def commands_of(page: Path) -> list[str]:
    """The commands that a page names as equivalent, as typed in a shell."""
    found = re.findall(r'class="command">The same in a terminal: <code>([^<]+)</code>', page.read_text("utf-8"))
    return [html.unescape(command) for command in found]


def words(command: str, folder: Path) -> list[str]:
    """The arguments that a shell in ``folder`` passes to the program."""
    typed = f"whatif() {{ printf '%s\\n' \"$@\"; }}\n{command}\n"
    shell = subprocess.run(["sh", "-c", typed], cwd=folder, capture_output=True, text=True, check=True)
    assert shell.stderr == ""
    return shell.stdout.splitlines()


def answers(
    page: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The output of each command of a page, by its name; ``explain`` by its option if it has one."""
    monkeypatch.chdir(folder)
    found = {}
    for command in commands_of(page):
        arguments = words(command, folder)
        capsys.readouterr()
        assert main([*arguments, "--json", "--quiet"]) == 0, command
        options = {"--sensitivity": "sensitivity", "--efficiency": "efficiency", "step": "steps", "stack": "flame"}
        name = next((options[word] for word in arguments if word in options), arguments[0])
        found[name] = json.loads(capsys.readouterr().out)
    return found


def steps(answer: dict[str, Any]) -> list[Any]:
    """The numbers that identify an answer."""
    keys = ("step_clock", "baseline_ms", "measured_ms", "predicted_ms", "low_ms", "peak_bytes", "single_ms")
    rows = [row["predicted_ms"] for key in ("rows", "points") for row in answer.get(key, [])]
    return [answer.get(key) for key in keys] + rows


def check(page: Path, found: dict[str, Any]) -> None:
    held = Page(page).data("facts")
    for name, answer in found.items():
        assert steps(answer) == steps(held[name]), name


NAMES = ['it\'s a "run" $(exit 3); `x`.json', "-o.json", "a b*&?.json"]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_file_and_any_option_is_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trace, page = write_trace(tmp_path / name, training(), deviceProperties=V100), tmp_path / "page.html"
    what_if = "scale:name=volta.*(gemm|$HOME| x),factor=0.5"
    assert main(["report", str(trace), what_if, "-o", str(page), "--quiet"]) == 0
    found = answers(page, tmp_path, capsys, monkeypatch)
    assert {"info", "explain", "advise", "apply", "sensitivity"} <= found.keys()
    check(page, found)
    assert found["apply"]["predicted_ms"] < found["apply"]["baseline_ms"]


def test_the_clock_and_the_calibration_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_traces: Path
) -> None:
    trace, page = Path(shutil.copy(own_traces / "transformer_cpu.json.gz", tmp_path)), tmp_path / "page.html"
    given = ["--clock", "span", "--no-calibration"]
    assert main(["report", str(trace), "amp:target=bf16", *given, "-o", str(page), "--quiet"]) == 0
    assert all(command.endswith("--clock span --as-recorded") for command in commands_of(page))
    found = answers(page, tmp_path, capsys, monkeypatch)
    assert {
        "info",
        "explain",
        "advise",
        "apply",
        "sensitivity",
        "memory",
        "scaling",
        "sweep",
        "steps",
        "flame",
    } == found.keys()
    check(page, found)
    assert main(["report", str(trace), "amp:target=bf16", "-o", str(page), "--quiet"]) == 0
    assert not any("--clock" in command or "--no-cal" in command for command in commands_of(page))


def test_a_page_of_a_void_recording_names_commands_that_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shared_traces: Path
) -> None:
    lacks_kernels = shared_traces / "edls-a4000" / "torch_profiler_trace.json.gz"
    trace, page = Path(shutil.copy(lacks_kernels, tmp_path)), tmp_path / "page.html"
    assert main(["report", str(trace), "scale:kind=gpu,factor=0.5", "--force", "-o", str(page), "--quiet"]) == 0
    assert all(command.endswith(" --force") for command in commands_of(page))
    check(page, answers(page, tmp_path, capsys, monkeypatch))


def test_a_script_of_the_users_own_is_named_as_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where whatif has one of that name: what a page predicts is what its command predicts."""
    trace = write_trace(tmp_path / "run.json", training(), deviceProperties=V100)
    script, page = tmp_path / "compile.py", tmp_path / "page.html"
    script.write_text(OWN_SCRIPT)
    assert main(["report", str(trace), f"{script}:name=a b", "-o", str(page), "--quiet"]) == 0
    assert "whatif apply './compile.py:name=a b' run.json" in commands_of(page)
    check(page, answers(page, tmp_path, capsys, monkeypatch))


def test_a_name_that_cannot_be_shown_is_no_command(tmp_path: Path) -> None:
    trace, page = write_trace(tmp_path / "a\u202eb.json", training(), deviceProperties=V100), tmp_path / "page.html"
    assert main(["report", str(trace), "-o", str(page), "--quiet"]) == 0
    assert "whatif info TRACE" in commands_of(page)
    assert "whose name cannot be shown as it is" in page.read_text("utf-8")
