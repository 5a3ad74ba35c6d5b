"""Names that a terminal, a browser or a spreadsheet would obey, in every text of a trace: no command passes one on."""

from __future__ import annotations

import collections
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.trust.common import CPU_RECORDING, Outcome, call, loaded, written

HOSTILE = (
    "\x1b[31m\x1b]0;owned\x07\x9b2J\u202e\u200b</script><img src=x onerror=alert(1)>\"'><svg/onload=alert(2)>"
    "=cmd|'/c calc'!A1`|[x](javascript:alert(3))\r\n\x08"
)
HARMFUL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
COMMANDS = [
    ["info"],
    ["info", "--json"],
    ["explain"],
    ["explain", "--json"],
    ["explain", "--sensitivity"],
    ["advise", "--top", "3"],
    ["apply", "scale:kind=all,factor=0.5"],
    ["apply", "amp"],
    ["apply", "no_such_what_if"],
    ["memory"],
    ["scaling", "--workers", "1,2"],
    ["sweep", "cpu", "--vary", "speedup=1,2"],
    ["compare", "clean.json"],
    ["check", "--baseline", "clean.json"],
    ["anonymize", "-o", "anonymous.json.gz"],
]


def spoiled(value: Any) -> Any:
    """The value with HOSTILE behind every short text in it."""
    if isinstance(value, str):
        return value + HOSTILE if len(value) < 60 else value
    if isinstance(value, list):
        return [spoiled(item) for item in value]
    return {key: spoiled(item) for key, item in value.items()} if isinstance(value, dict) else value


def hostile(trace: dict[str, Any]) -> dict[str, Any]:
    trace = json.loads(json.dumps(trace))
    for event in trace["traceEvents"]:
        name, arguments = event.get("name"), event.get("args")
        if isinstance(name, str) and not name.startswith(("ProfilerStep", "Optimizer.")):
            event["name"] = name + HOSTILE
        for key in ("Process Group Name", "Collective name", "labels", "name"):
            if isinstance(arguments, dict) and isinstance(arguments.get(key), str):
                arguments[key] += HOSTILE
    metadata = trace["whatif"]
    for layer in metadata["layers"]:
        layer["name"], layer["type"] = layer["name"] + HOSTILE, f"{layer.get('type')}{HOSTILE}"
    for key in ("environment", "optimizer", "model", "gpu", "script", "precision"):
        if key in metadata:
            metadata[key] = spoiled(metadata[key])
    for device in trace.get("deviceProperties") or []:
        device["name"] = f"{device.get('name')}{HOSTILE}"
    return trace


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean trace, and a hostile one whose path is hostile as well; the current folder is that of the clean one."""
    clean = loaded(CPU_RECORDING)
    folder = tmp_path / "a<img src=x onerror=alert(9)>"
    folder.mkdir()
    (tmp_path / "clean.json").write_bytes(written(clean))
    path = folder / "x\x1b[31m<b onmouseover=alert(8)>.json"
    path.write_bytes(written(hostile(clean)))
    monkeypatch.chdir(tmp_path)
    return path


def check(outcome: Outcome, words: list[str]) -> None:
    assert outcome.is_sound, (words, outcome.err)
    harmful = HARMFUL.findall(outcome.out + outcome.err)
    assert not harmful, (words, sorted(set(harmful)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_command_prints_what_a_terminal_obeys(traces: Path, words: list[str]) -> None:
    assert HARMFUL.search(str(traces))
    check(call(*words, traces), words)


def test_the_name_of_a_what_if_may_be_hostile() -> None:
    check(call("transforms", HOSTILE), ["transforms", HOSTILE])


def test_an_exported_timeline_parses_and_holds_no_control_character(traces: Path) -> None:
    outcome = call("export", traces, "amp", "-o", "timeline.json")
    check(outcome, ["export"])
    assert outcome.status == 0
    text = Path("timeline.json").read_text(encoding="utf-8")
    assert json.loads(text)["traceEvents"]
    assert "\x1b" not in text


class Page(HTMLParser):
    """Counts elements by tag, and collects attributes that run or fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: collections.Counter[str] = collections.Counter()
        self.harmful: list[tuple[str, str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        for name, value in attrs:
            if name.startswith("on") or (name in ("href", "src") and value and not value.startswith("#")):
                self.harmful.append((tag, name, value))


def test_a_report_has_no_element_that_a_name_brought_in(traces: Path) -> None:
    pages = []
    for path in ("clean.json", traces):
        outcome = call("report", path, "-o", "report.html")
        check(outcome, ["report"])
        assert outcome.status == 0
        text = Path("report.html").read_text(encoding="utf-8")
        assert "Content-Security-Policy" in text
        pages.append((Page(text), text))
    (clean, _), (spoilt, text) = pages
    assert spoilt.elements.keys() <= clean.elements.keys() | {"span"}
    assert spoilt.elements["script"] == clean.elements["script"]
    assert not spoilt.harmful
    assert not HARMFUL.search(text.replace("\t", ""))
