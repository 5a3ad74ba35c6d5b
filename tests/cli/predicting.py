"""``whatif predict`` as a person calls it: its JSON, or the one sentence with which it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers import need
from whatif.cli.main import main


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    need("torch")
    assert main(["predict", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["predict", *words]) in (1, 2)
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1
    return captured.err
