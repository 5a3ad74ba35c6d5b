"""Every command that writes a file replaces an older one of its own kind, and no other file."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest

from tests.cli.test_commands import training
from tests.helpers import write_trace
from whatif.cli.main import main
from whatif.runtime.files import replaceable_file

pytestmark = pytest.mark.slow

PRECIOUS = b'{"schemaVersion": 1, "traceEvents": [], "mine": "a recording that took a night"}'


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_trace(tmp_path / "run.json", training()))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["export", "TRACE", "-o", "OUT"], "out.json"),
        (["export", "TRACE", "scale:factor=0.5", "-o", "OUT"], "out.json.gz"),
        (["report", "TRACE", "-o", "OUT"], "out.html"),
        (["anonymize", "TRACE", "-o", "OUT"], "out.anonymous.json"),
        (["validate", "PAIRS", "--markdown", "OUT"], "out.md"),
    ],
)
def test_only_its_own_kind_is_replaced(
    words: list[str], name: str, trace: str, own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    places = {"TRACE": trace, "OUT": str(out), "PAIRS": str(own_traces / "campaign_cpu_3")}
    command = [places.get(word, word) for word in words]
    assert main(command) == 0
    out.touch()
    assert main(command) == 0  # an older one of its kind
    other = tmp_path / f"precious{out.suffix}"
    other.write_bytes(gzip.compress(PRECIOUS) if out.suffix == ".gz" else PRECIOUS)
    kept = other.read_bytes()
    capsys.readouterr()
    assert main([str(other) if word == str(out) else word for word in command]) == 1
    assert "got another file: name another or remove it first" in capsys.readouterr().err
    assert other.read_bytes() == kept
    other.write_bytes(b"")  # nothing is lost
    assert main([str(other) if word == str(out) else word for word in command]) == 0


def test_a_measured_recording_is_never_replaced_by_a_predicted_one(own_traces: Path, tmp_path: Path) -> None:
    from whatif.from_module.recording import is_predicted

    kept = tmp_path / "kept.json.gz"
    shutil.copy(own_traces / "transformer_cpu.json.gz", kept)
    with pytest.raises(Exception, match="an older predicted recording to replace, got another file"):
        replaceable_file(kept, "predicted recording", is_predicted)


def test_an_empty_name(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["export", trace, "-o", ""], ["report", trace, "-o", ""]):
        assert main(words) == 1
        assert "got an empty name" in capsys.readouterr().err
    for words in (["apply", "scale:factor=0.5", trace, "--plot", ""], ["memory", trace, "--plot="]):
        assert main(words) == 2
        assert "got an empty name" in capsys.readouterr().err
