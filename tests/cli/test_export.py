"""The timeline file: valid JSON, both processes, every duration, what changed, and no half-written file."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_commands import training
from tests.helpers import CPU, STREAM, Build, write_trace
from whatif.cli.main import main
from whatif.errors import WhatifError
from whatif.predict import Baseline, apply
from whatif.report.perfetto import write_perfetto
from whatif.report.task_changes import task_changes
from whatif.simulator import simulate
from whatif.types import TaskKind, Thread, ThreadKind


def load(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert found["otherData"]["tool"] == "whatif"
    events = found["traceEvents"]
    assert isinstance(events, list)
    return events


def slices(events: list[dict[str, Any]], pid: int) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_trace(tmp_path / "run.json", training()))


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_export_round_trip(name: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / name
    assert main(["export", trace, "scale:kind=gpu,factor=0.5", "-o", str(out)]) == 0
    assert "https://ui.perfetto.dev" in capsys.readouterr().out
    events = load(out)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "baseline", 2: "predicted"}
    threads = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert threads == {(pid, name) for pid in (1, 2) for name in ("CPU thread 1", "GPU 0 stream 7")}
    kernels = [[e for e in slices(events, pid) if e["cat"] == "simulated.kernel"] for pid in (1, 2)]
    assert [e["dur"] for e in kernels[0]] == [900.0] * 5
    assert [e["dur"] for e in kernels[1]] == [450.0] * 5
    assert {e["args"]["change"] for side in kernels for e in side} == {"changed"}
    assert {e["args"]["layer"] for side in kernels for e in side} == {"Linear_0"}
    assert all("cname" in e for e in kernels[1])
    # A file of simulated events is no recording: it is refused in one sentence.
    assert main(["info", str(out)]) == 1
    err = capsys.readouterr().err
    assert "only events of another tool" in err
    assert err.count("\n") == 1


def test_without_a_what_if_only_the_baseline_is_written(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["export", trace, "-o", str(out)]) == 0
    events = load(out)
    assert {e["pid"] for e in events} == {1}
    assert {e["args"]["change"] for e in slices(events, 1)} == {"same"}


def test_every_nanosecond_is_kept_and_arrows_meet_their_slices(trace: str, tmp_path: Path) -> None:
    import whatif

    timeline = simulate(whatif.read(trace))
    write_perfetto(tmp_path / "out.json", timeline, None)
    events = load(tmp_path / "out.json")
    for event in slices(events, 1):
        task = event["args"]["task"]
        assert round(event["ts"] * 1000) == timeline.start_ns[task]
        assert round(event["dur"] * 1000) == timeline.end_ns[task] - timeline.start_ns[task]
    starts = {(e["tid"], e["ts"]) for e in slices(events, 1)}
    arrows = [e for e in events if e["ph"] in "sf"]
    assert len(arrows) == 2 * 5
    assert all((e["tid"], e["ts"]) in starts for e in arrows)
    ids = [e["id"] for e in arrows if e["ph"] == "s"]
    assert sorted(ids) == sorted(e["id"] for e in arrows if e["ph"] == "f")
    assert len(set(ids)) == len(ids)


def test_the_same_timelines_give_the_same_bytes(trace: str, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json.gz", tmp_path / "b.json.gz"]
    for path in paths:
        assert main(["export", trace, "scale:factor=0.5", "-o", str(path)]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_slices_of_one_row_never_overlap(tmp_path: Path) -> None:
    """Of two kernels that overlap Perfetto would drop one, so the first is drawn shorter, and says its duration."""
    build = Build(CPU, Thread("stream 7", ThreadKind.STREAM, 0, 7, lag_ns=-10))
    for name in ("a", "b"):
        build.launch(1, 100, name)
    write_perfetto(tmp_path / "out.json", simulate(build.graph()), None)
    first, second = (e for e in slices(load(tmp_path / "out.json"), 1) if e["cat"] == "simulated.kernel")
    assert (first["ts"], first["dur"], first["args"]["duration_us"]) == (0.001, 0.09, 0.1)
    assert (second["ts"], second["dur"]) == (0.091, 0.1)


def test_changes_are_told_apart() -> None:
    build = Build(CPU, STREAM)
    for name in ("a", "b", "c"):
        build.launch(10, 100, name)
    graph = build.graph()
    was, became = task_changes(graph, graph)
    assert set(was) == set(became) == {"same"}
    scaled = graph.scale(graph.select(name="^b$"), 0.5)
    was, became = task_changes(graph, scaled)
    assert [w for w, kind in zip(was, graph.kind, strict=True) if kind == TaskKind.KERNEL] == [
        "same",
        "changed",
        "same",
    ]
    assert was == became
    fewer = graph.remove(graph.select(name="^c$"))
    was, became = task_changes(graph, fewer)
    assert was[graph.select(name="^c$").argmax()] == "removed"
    assert set(became) <= {"same", "changed"}
    was, became = task_changes(fewer, graph)
    assert "added" in became


def test_output_that_cannot_be_written(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(trace).read_bytes()
    os.mkfifo(tmp_path / "pipe")
    for output, sentence in (
        (trace, "expected another file than the trace itself"),
        (str(tmp_path), "got something that is no file"),
        (str(tmp_path / "pipe"), "got something that is no file"),
        (str(tmp_path / "nowhere" / "out.json"), "expected a folder to write into"),
    ):
        assert main(["export", trace, "-o", output]) == 1
        assert sentence in capsys.readouterr().err
    assert Path(trace).read_bytes() == before


def test_a_link_is_written_through(trace: str, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "target.json"
    target.parent.mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(target)
    for _ in ("a new file", "an old one"):
        assert main(["export", trace, "-o", str(link)]) == 0
        assert link.is_symlink()
        assert load(target)
    assert [path.name for path in target.parent.iterdir()] == ["target.json"]


def test_a_failure_leaves_no_file_behind(trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import whatif

    timeline = simulate(whatif.read(trace))
    out = tmp_path / "sub" / "out.json"
    out.parent.mkdir()
    out.write_text("older")

    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whatif.report.perfetto._launch_arrows", no_space)
    with pytest.raises(WhatifError, match="No space left on device"):
        write_perfetto(out, timeline, None)
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]
    assert out.read_text() == "older"


def test_a_prediction_can_be_written_from_python(trace: str, tmp_path: Path) -> None:
    import whatif

    baseline = Baseline.of(whatif.read(trace))
    prediction = apply(baseline, "scale:factor=2")
    write_perfetto(tmp_path / "out.json", baseline.timeline, prediction.timeline)
    assert slices(load(tmp_path / "out.json"), 2)
