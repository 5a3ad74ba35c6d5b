"""The timeline file: valid JSON, both processes, every duration, what changed, and no half-written file."""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.cli.test_commands import training
from tests.helpers import CPU, STREAM, Build, equal, launched, write_trace
from tests.trace_event_format import check_trace_events
from whatif.cli.main import main
from whatif.graph.types import TaskKind, Thread, ThreadKind
from whatif.prediction.predict import Baseline, apply
from whatif.report.perfetto import write_perfetto
from whatif.report.task_changes import task_changes
from whatif.runtime.errors import WhatifError
from whatif.simulation.simulator import simulate


def load(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    assert json.loads(text)["otherData"]["tool"] == "whatif"
    return check_trace_events(text)


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
    # A file of simulated events is no recording: what is read is the graph, and it says so.
    assert main(["info", "--json", str(out)]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert as_json["replay_error_pct"] is as_json["measured_ms"] is None
    assert any("no recording: the prediction of scale" in quirk for quirk in as_json["warnings"])
    assert main(["info", str(out)]) == 0
    said = capsys.readouterr().out
    assert "the step is simulated, not recorded" in said.splitlines()[0]
    assert "recorded  " not in said
    assert "replay error" not in said
    assert main(["check", str(out), "--baseline", trace]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("; B is simulated, not recorded")


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_names_in_any_script_come_back(name: str, tmp_path: Path) -> None:
    """Letters beyond ASCII, a line end, a bell, half a character: as they were, but for the half."""
    names = ["注意力::前向", "größe µs", "line\nend\x07", "</script>", "half \ud83d"]
    events = [
        each for n, called in enumerate(names) for each in launched(called, 1000 * n, 5, 1000 * n + 7, 100, n + 1)
    ]
    trace = tmp_path / "größe.json"
    trace.write_text(json.dumps({"traceEvents": events}), encoding="ascii")
    out = tmp_path / name
    assert main(["export", str(trace), "scale:factor=0.5", "-o", str(out)]) == 0
    assert {event["name"] for event in slices(load(out), 2)} >= set(names[:4])
    # Perfetto would show the escapes of letters, not the letters.
    written = out.read_bytes() if name == "out.json" else gzip.decompress(out.read_bytes())
    assert '"name":"注意力::前向"'.encode() in written
    assert set(whatif.read(out).names) >= set(names[:4])


def test_without_a_what_if_only_the_baseline_is_written(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["export", trace, "-o", str(out)]) == 0
    events = load(out)
    assert {e["pid"] for e in events} == {1}
    assert {e["args"]["change"] for e in slices(events, 1)} == {"same"}


def test_every_nanosecond_is_kept_and_arrows_meet_their_slices(trace: str, tmp_path: Path) -> None:
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


def test_what_took_no_time_is_drawn_only_where_nothing_else_begins(tmp_path: Path) -> None:
    """Perfetto would draw it inside the one that begins then.

    stream 7:  a: 0 ns at 1, b: 5 ns at 2, c: 0 ns at 7, d: 10 ns at 7, e: 0 ns at 17
    """
    build = Build(CPU, STREAM)
    for name, duration_ns in (("a", 0), ("b", 5), ("c", 0), ("d", 10), ("e", 0)):
        build.launch(1, duration_ns, name)
    timeline = simulate(build.graph())
    write_perfetto(tmp_path / "out.json", timeline, None)
    kernels = [e for e in slices(load(tmp_path / "out.json"), 1) if e["cat"] == "simulated.kernel"]
    assert [(e["name"], e["ts"], e["dur"]) for e in kernels] == [
        ("a", 0.001, 0), ("b", 0.002, 0.005), ("d", 0.007, 0.01), ("e", 0.017, 0),
    ]  # fmt: skip
    assert whatif.read(tmp_path / "out.json").names == timeline.graph.names


def test_changes_are_distinguished() -> None:
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
    assert was[graph.select(name="^c$").ids[0]] == "removed"
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
    timeline = simulate(whatif.read(trace))
    out = tmp_path / "sub" / "out.json"
    out.parent.mkdir()
    out.write_text("older")

    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whatif.report.perfetto._counters", no_space)
    with pytest.raises(WhatifError, match="No space left on device"):
        write_perfetto(out, timeline, None)
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]
    assert out.read_text() == "older"


def test_a_prediction_can_be_written_from_python(trace: str, tmp_path: Path) -> None:
    baseline = Baseline.of(whatif.read(trace))
    prediction = apply(baseline, "scale:factor=2")
    write_perfetto(tmp_path / "out.json", baseline.timeline, prediction.timeline)
    assert slices(load(tmp_path / "out.json"), 2)


# -- what is written is read again ----------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", ["shared", "own"])
def test_real_recordings_come_back(whole: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Column by column, with the same makespan and the same prediction of a what-if on top of it."""
    folder: Path = request.getfixturevalue(f"{whole}_traces")
    path = {"own": "transformer_cpu.json.gz", "shared": "modded-nanogpt-8xh100/current.rank0.json.gz"}[whole]
    baseline = Baseline.of(whatif.read(folder / path))
    what_if = {"own": "fused_adam", "shared": "scale:kind=gpu,factor=0.7"}[whole]
    prediction = apply(baseline, what_if)
    out = tmp_path / "out.json.gz"
    write_perfetto(out, baseline.timeline, prediction.timeline, what_if)
    events = load(out)
    assert {e["cat"] for e in events if e["ph"] == "s"} <= {"launch", "communication"}
    again = whatif.read(out)
    assert equal(again, prediction.graph)
    assert again.info.operators == prediction.graph.info.operators
    assert simulate(again).makespan_ns == prediction.timeline.makespan_ns
    second = Baseline.of(again)
    assert (second.replay_error_pct, second.calibration) == (0, None)
    assert second.step_ns / 1e6 == pytest.approx(prediction.predicted_ms)
    halved = apply(prediction.graph, "scale:factor=0.5", clock=baseline.clock, calibrated=False)
    # How far marks may run ahead of a GPU is counted from the written step in one, from the recorded one in the other.
    missed = {"own": 0, "shared": 0.001}[whole]
    assert apply(second, "scale:factor=0.5").predicted_ms == pytest.approx(halved.predicted_ms, rel=missed, abs=0)


def test_how_recorded_steps_differ_comes_back(own_traces: Path, tmp_path: Path) -> None:
    """An export without it predicted other workers as if all were equally fast, 1.3 % below its recording."""
    recording, out = own_traces / "transformer_cpu.json.gz", tmp_path / "out.json.gz"
    baseline = Baseline.of(whatif.read(recording))
    write_perfetto(out, baseline.timeline, None, "")
    what_if = "distributed:workers=4,bandwidth=10Gbps"
    assert apply(whatif.read(out), what_if).predicted_ms == pytest.approx(apply(baseline, what_if).predicted_ms)


def test_a_what_if_that_comes_too_late_for_an_export_says_so(own_traces: Path, tmp_path: Path) -> None:
    """Two passes after an exchange silently took 160 ms, and 122 with both applied to the recording."""
    baseline, out = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz")), tmp_path / "out.json.gz"
    held = "distributed:workers=4,bandwidth=10Gbps"
    write_perfetto(out, baseline.timeline, apply(baseline, held).timeline, held)
    late = "applied behind distributed, which out.json.gz already holds"
    assert any(late in note for note in apply(out, "gradient_accumulation").graph.notes)
    for in_time in ("cpu:speedup=2", "scale:factor=0.5", "bandwidth"):
        assert not any(late in note for note in apply(out, in_time).graph.notes)


@pytest.mark.parametrize(("option", "noted"), [("", True), (",copies=4", False)])
def test_an_exported_pipeline_does_not_know_of_copies(
    own_traces: Path, tmp_path: Path, option: str, noted: bool
) -> None:
    """Its stages are neighbours in a node; with both applied together they are as far apart as the copies put them."""
    baseline, out = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz")), tmp_path / "out.json.gz"
    held = f"pipeline:stages=2,micro_batches=2{option}"
    write_perfetto(out, baseline.timeline, apply(baseline, held).timeline, held)
    notes = apply(out, "distributed:workers=4,bandwidth=10Gbps").graph.notes
    assert any("out.json.gz holds a pipeline without copies" in note for note in notes) == noted


def test_several_ranks_are_processes_and_arrows_join_their_collectives(own_traces: Path, tmp_path: Path) -> None:
    folder = own_traces / "ranks_cpu" / "even"
    out = tmp_path / "ranks.json"
    assert main(["export", str(folder), "scale:factor=0.5", "-o", str(out), "--quiet"]) == 0
    events = load(out)
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert sorted(processes) == ["baseline, rank 0", "baseline, rank 1", "predicted, rank 0", "predicted, rank 1"]
    collectives = [e for e in events if e.get("cat") == "collective"]
    graph = whatif.read(folder)
    in_each_rank = len([e for e in slices(events, processes["baseline, rank 0"]) if e["cat"].endswith("communication")])
    assert in_each_rank > 20
    assert len([e for e in collectives if e["ph"] == "s"]) == 2 * in_each_rank
    for begin, end in zip(collectives[::2], collectives[1::2], strict=True):
        assert begin["pid"] != end["pid"]
        assert processes["baseline, rank 0"] % 2 == processes["baseline, rank 1"] % 2
        assert begin["pid"] % 2 == end["pid"] % 2
    again = whatif.read(out)
    assert len(again.info.ranks) == len(graph.info.ranks) == 2
    assert again.info.ranks[1].memory == graph.info.ranks[1].memory


def test_the_files_of_ranks_can_be_named(own_traces: Path, tmp_path: Path) -> None:
    files = sorted(str(path) for path in (own_traces / "ranks_cpu" / "even").glob("*.json.gz"))
    assert len(files) == 2
    out = tmp_path / "ranks.json.gz"
    assert main(["export", *files, "-o", str(out), "--quiet"]) == 0
    assert len({e["pid"] for e in load(out)}) == 2


def test_a_schedule_of_its_own_is_kept_as_an_order(own_traces: Path, tmp_path: Path) -> None:
    """Priorities reorder the slices on a channel: read again they stay in that order without the what-if."""
    trace = str(own_traces / "transformer_cpu.json.gz")
    out = tmp_path / "p3.json"
    what_ifs = ["distributed:workers=2,bandwidth=1Gbps", "p3:bandwidth=1Gbps,workers=2"]
    baseline = Baseline.of(whatif.read(trace))
    for names in (what_ifs[:1], what_ifs[1:]):
        prediction = apply(baseline, *names)
        write_perfetto(out, baseline.timeline, prediction.timeline)
        again = whatif.read(out)
        assert simulate(again).makespan_ns == prediction.timeline.makespan_ns
        assert Baseline.of(again).step_ns / 1e6 == pytest.approx(prediction.predicted_ms)
        arrows = {e["cat"] for e in load(out) if e["ph"] == "s" and e["pid"] == 2}
        assert "communication" in arrows


def test_counters_show_memory_and_links(own_traces: Path, tmp_path: Path) -> None:
    """The fullest moment drawn is the peak; what a link moved, rate by time, is what its transfers hold."""
    from whatif.graph.memory import peak

    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    prediction = apply(baseline, "distributed:workers=2,bandwidth=1Gbps")
    write_perfetto(tmp_path / "out.json", baseline.timeline, prediction.timeline)
    counters = [e for e in load(tmp_path / "out.json") if e["ph"] == "C"]
    memory = [e["args"] for e in counters if e["name"] == "memory (MiB)" and e["pid"] == 1]
    assert baseline.graph.info.memory is not None
    assert max(m["total"] for m in memory) == pytest.approx(peak(baseline.graph.info.memory).total / 2**20, abs=1e-3)
    assert all(sum(m.values()) == pytest.approx(2 * m["total"], abs=0.01) for m in memory)
    link = [e for e in counters if e["name"] == "link: network"]
    moved_bits = sum(now["args"]["Gbit/s of payload"] * (then["ts"] - now["ts"]) * 1e3 for now, then in pairwise(link))
    graph = prediction.graph
    transfers = graph.kind == TaskKind.COMMUNICATION
    assert moved_bits / 8 == pytest.approx(int(graph.size_bytes[transfers].sum()), rel=1e-4)
    assert link[-1]["args"]["Gbit/s of payload"] == 0


def test_a_transfer_of_unknown_size_is_busy_or_not(tmp_path: Path) -> None:
    build = Build(CPU, Thread("network", ThreadKind.CHANNEL))
    for start_ns in (0, 10):
        build.task(0, 10)
        call = build.task(1, 5, "all_reduce", TaskKind.COMMUNICATION)
        build.edge(call - 1, call, start_ns)
    write_perfetto(tmp_path / "out.json", simulate(build.graph()), None)
    values = [(e["ts"], e["args"]["busy"]) for e in load(tmp_path / "out.json") if e["ph"] == "C"]
    assert values == [(0.01, 1), (0.015, 0), (0.03, 1), (0.035, 0)]


# -- what is read is data -------------------------------------------------------------------------------------------


def damaged(text: str, how: str) -> str:
    """Files with one fault each, by the name of the fault."""
    place = text.index('"whatif_graph":') + len('"whatif_graph":')
    saved = json.loads(text[place:-2])
    columns = saved["columns"]
    if how == "cut":
        return text[: (place + len(text)) // 2]
    if how == "without":
        return text[: place - len(',\n"whatif_graph":')] + "}"
    if how == "object":
        columns["name"]["dtype"] = "|O"
    elif how == "bomb":
        columns["name"]["count"] = saved["n_tasks"] = 2**40
    elif how == "more":
        saved["n_tasks"] += 1
    elif how == "shorter":
        columns["duration_ns"] = {**columns["name"], "count": saved["n_tasks"], "dtype": "<i8"}
    elif how == "negative":
        columns["kind"] = encoded([-5] * saved["n_tasks"], "i1")
    elif how == "codes":
        columns["family"] = encoded([99] * saved["n_tasks"], "i1")
    elif how == "operators":
        columns["called"] = encoded([7] * saved["n_tasks"], "i4")
    elif how == "edges":
        saved["dependencies"]["source"] = encoded([2**30] * saved["dependencies"]["source"]["count"], "i4")
    elif how in ("family", "sizes", "size", "dtype"):
        integers = [["batch", 1], ["m", 2], ["n", 3], ["k", 4]]
        what = {"family": "matmul", "name": "mm", "dtype": "fp32", "integers": integers, "phase": "fwd", "layout": ""}
        wrong: dict[str, Any] = {
            "family": "zzz",
            "sizes": integers[1:],
            "size": [["batch", -5], *integers[1:]],
            "dtype": "zz",
        }
        saved["info"]["operators"] = [{**what, "integers" if how.startswith("size") else how: wrong[how]}]
    elif how == "types":
        saved["info"]["batch_size"] = "many"
    elif how == "unknown":
        saved["info"]["__class__"] = "os.system"
    elif how == "base64":
        columns["name"]["data"] = "no base64"
    elif how == "format":
        saved["format"] = 2
    elif how == "nested":
        for _ in range(3):
            saved["info"] = {**saved["info"], "ranks": [saved["info"]]}
        saved["info"]["ranks"][0]["ranks"][0]["steady"] = [[[[0]]]]
    elif how == "lag":
        saved["threads"][0]["lag_ns"] = 2**62
    return text[:place] + json.dumps(saved) + "}\n"


def encoded(values: list[int], dtype: str) -> dict[str, Any]:
    data = base64.b64encode(zlib.compress(np.array(values, dtype=dtype).tobytes())).decode()
    return {"dtype": dtype, "count": len(values), "data": data}


HOW = ("cut", "without", "object", "bomb", "more", "shorter", "negative", "codes", "operators", "edges", "types",
       "unknown", "base64", "format", "nested", "lag", "family", "sizes", "size", "dtype")  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_graph_is_refused_in_one_sentence(
    how: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["export", trace, "-o", str(out)]) == 0
    out.write_text(damaged(out.read_text(), how))
    capsys.readouterr()
    assert main(["info", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "expected" in printed.err
    assert "export it again" in printed.err
    assert printed.err.count("\n") == 1


def test_a_file_of_an_older_version_is_read(trace: str, tmp_path: Path) -> None:
    """With the field of the device whose network what-ifs assumed, which is now that of the graph."""
    out = tmp_path / "out.json"
    assert main(["export", trace, "-o", str(out), "--quiet"]) == 0
    text = out.read_text()
    assert text.count('"copy_devices":') == 1
    graph = whatif.read(out)
    out.write_text(text.replace('"copy_devices":', '"node":"V100-SXM2-16","copy_devices":'))
    assert whatif.read(out).info == graph.info


def test_any_cut_of_the_file_is_refused(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["export", trace, "-o", str(out)]) == 0
    text = out.read_bytes()
    for size in range(60, len(text) - 2, max(len(text) // 60, 1)):
        out.write_bytes(text[:size])
        with pytest.raises(WhatifError):
            whatif.read(out)


def test_events_are_written_as_they_are_made(tmp_path: Path) -> None:
    """Writing many tasks takes little more memory than the graph: a bounded number of bytes a task."""
    program = f"""
import resource, numpy as np
from tests.helpers import CPU, STREAM, Build
from whatif.graph.edit import columns_of
from whatif.report.perfetto import write_perfetto
from whatif.simulation.simulator import simulate
build = Build(CPU, STREAM)
for i in range(1000):
    build.launch(10, 100, "a kernel with a name of usual length, void at::native::elementwise_kernel<4>")
small = build.graph()
write_perfetto({str(tmp_path / "small.json")!r}, simulate(small), simulate(small))
graph = small.replace(
    **{{name: np.tile(column, 100) for name, column in columns_of(small).items()}}, dependencies=small.dependencies)
timeline = simulate(graph)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_perfetto({str(tmp_path / "large.json")!r}, timeline, timeline)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / len(graph))
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "large.json").stat().st_size > 400 * 200_000
    # The file has more than 400 bytes a task; the columns that are looked at and compared have 250.
    assert float(done.stdout) < 350
