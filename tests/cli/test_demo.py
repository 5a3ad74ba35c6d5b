"""``whatif demo``: a shipped recording and its report, written without a clone."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

import whatif
from whatif.cli import demo
from whatif.cli.main import main


@pytest.mark.slow  # the whole report
@pytest.mark.parametrize("name", list(demo.SHIPPED))
def test_it_writes_a_recording_with_its_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(demo, "_has_browser", lambda: True)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # an earlier demo is replaced
        assert main(["demo", name]) == 0
    out = capsys.readouterr().out
    trace, page = next(tmp_path.glob("*.json.gz")), next(tmp_path.glob("*.html"))
    assert opened[-1] == page.as_uri()
    assert "Do first: " in out
    # The commands that it prints to try next can be run as printed.
    for command in out.rpartition("Try next:\n")[2].splitlines():
        assert main(command.split()[1:]) == 0
    assert len(whatif.read(trace)) > 1000


def test_another_file_of_that_name_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "transformer_cpu.json.gz"
    theirs.write_text("mine", encoding="utf-8")
    assert main(["demo", "cpu", "-o", str(tmp_path)]) == 1
    assert "got another file" in capsys.readouterr().err
    assert theirs.read_text(encoding="utf-8") == "mine"
    assert list(tmp_path.iterdir()) == [theirs]


def test_without_a_terminal_no_browser_opens(capsys: pytest.CaptureFixture[str]) -> None:
    assert not demo._has_browser()
