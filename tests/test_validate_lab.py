"""Records of the lab as pairs: what is read from one, what is refused, and those that ship."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import whatif
from whatif.cli.main import main
from whatif.questions.validate.validate import validate
from whatif.questions.validate.validate_pairs import find_pairs
from whatif.runtime.errors import WhatifError

TRACE = "transformer_cpu.json.gz"


def rounds(*medians_ms: float) -> list[dict[str, Any]]:
    return [{"samples_ms": [[ms - 1, ms, ms + 1]]} for ms in medians_ms]


def write(folder: Path, own_traces: Path, **changed: Any) -> Path:
    """A folder with one record of two runs beside the recording that they start from."""
    shutil.copy(own_traces / TRACE, folder / TRACE)
    record = {
        "schema": 1, "experiment": "ddp", "baseline": {"trace": TRACE, "rounds": rounds(60, 50, 40)},
        "runs": [
            {"name": "slow", "what_if": ["distributed:workers=2,bandwidth=100Mbps"], "rounds": rounds(900, 950, 1000)},
            {"name": "fast", "what_if": ["distributed:workers=2,bandwidth=1Gbps"], "rounds": rounds(130, 120, 140),
             "compute": "replayed"},
        ],
    }  # fmt: skip
    path = folder / "ddp-transformer.json"
    path.write_text(json.dumps({**record, **changed}))
    return path


def run(**changed: Any) -> dict[str, Any]:
    return {"name": "one", "what_if": ["distributed:workers=2"], "rounds": rounds(100), **changed}


def test_each_run_of_a_record_is_a_pair(tmp_path: Path, own_traces: Path) -> None:
    path = write(tmp_path, own_traces)
    pairs, unpaired = find_pairs([tmp_path])
    assert not unpaired
    slow, fast = pairs
    assert slow.baseline == fast.baseline == tmp_path / TRACE
    assert slow.changed == path
    assert slow.what_ifs == ("distributed:workers=2,bandwidth=100Mbps",)
    assert slow.clock == "wall"
    assert slow.baseline_untraced is not None
    assert slow.changed_untraced is not None
    # The medians of the rounds' medians; the network's pace is not the machine's, so no round is scaled by another.
    assert slow.baseline_untraced.median_ms == 50
    assert slow.changed_untraced.median_ms == 950
    assert (slow.remark, fast.remark) == ("", "replayed compute")


def test_the_prediction_starts_from_the_plain_steps_of_the_same_session(tmp_path: Path, own_traces: Path) -> None:
    """Two records share a recording, and each has plain steps of its own: the second has others."""
    first = write(tmp_path, own_traces)
    second = json.loads(first.read_text())
    second["baseline"]["rounds"] = rounds(60, 60, 60)
    (tmp_path / "ddp-later.json").write_text(json.dumps(second))
    found = validate([tmp_path])
    assert not found.unpaired
    assert [round(outcome.baseline_ms) for outcome in found.outcomes] == [60, 60, 50, 50]
    assert [outcome.measured_ms for outcome in found.outcomes] == [950, 130, 950, 130]


def test_runs_that_no_what_if_leads_to_are_listed(tmp_path: Path, own_traces: Path) -> None:
    write(tmp_path, own_traces, runs=[run(what_if=[]), run(name="two", rounds="none"), "no run", run(name="three")])
    pairs, unpaired = find_pairs([tmp_path])
    assert len(pairs) == 1
    reasons = {row.name: row.reason for row in unpaired}
    assert reasons == {
        "ddp-transformer/one": "no what-if yet for what it does",
        "ddp-transformer/two": "its record holds no step time",
    }


def test_a_record_names_no_script_and_no_file_elsewhere(tmp_path: Path, own_traces: Path) -> None:
    write(tmp_path, own_traces, runs=[run(what_if=["./evil.py"])])
    with pytest.raises(WhatifError, match="expected what_if to name an installed what-if, got"):
        find_pairs([tmp_path])
    inside = tmp_path / "inside"
    inside.mkdir()
    path = write(inside, own_traces, baseline={"trace": f"../{TRACE}", "rounds": rounds(50)})
    shutil.move(inside / TRACE, tmp_path / TRACE)
    pairs, unpaired = find_pairs([path])
    assert not pairs
    assert {row.reason for row in unpaired} == {f"its baseline {TRACE} has no recording"}


def test_a_pairs_file_names_a_script_that_the_command_names(
    tmp_path: Path, own_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        '"""Faster."""\nfrom whatif import TaskGraph\n\n\n'
        "def transform(graph: TaskGraph, *, factor: float = 0.5) -> TaskGraph:\n"
        "    return graph.scale(graph.on_cpu, factor)\n",
        encoding="utf-8",
    )
    traces = [own_traces / f"transformer_cpu{name}.json.gz" for name in ("", "_fused")]
    pair = '[[pair]]\nbaseline = "{}"\nchanged = "{}"\nwhat_if = "mine.py:factor=0.8"\n'
    (tmp_path / "pairs.toml").write_text(pair.format(*traces))
    assert main(["validate", str(tmp_path)]) == 1
    assert "add the path of mine.py to the command" in capsys.readouterr().err
    assert main(["validate", str(tmp_path), str(script), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["pairs"][0]
    assert found["predicted_ms"] == pytest.approx(whatif.apply(str(traces[0]), f"{script}:factor=0.8").predicted_ms)


def test_a_pairs_file_remarks_on_a_run(tmp_path: Path, own_traces: Path) -> None:
    write(tmp_path, own_traces)
    remark = '[[run]]\nname = "ddp-transformer/slow"\nscored = false\nremark = "a constant was chosen on it"\n'
    (tmp_path / "pairs.toml").write_text(remark)
    pairs, _ = find_pairs([tmp_path])
    assert [(pair.scored, pair.remark) for pair in pairs] == [
        (False, "a constant was chosen on it"), (True, "replayed compute"),
    ]  # fmt: skip


@pytest.mark.parametrize("baseline", [{}, {"trace": TRACE}, {"trace": 7, "rounds": [{"samples_ms": [["x"]]}]}])
def test_damaged_records_are_no_pairs(tmp_path: Path, own_traces: Path, baseline: dict[str, Any]) -> None:
    write(tmp_path, own_traces, baseline=baseline)
    pairs, unpaired = find_pairs([tmp_path])
    assert not pairs
    assert len(unpaired) == 2
