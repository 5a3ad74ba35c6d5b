"""Lines of source from both kinds of stacks: by hand, and on public recordings; synchronizations that are removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import CPU, STREAM, Build, launched, mark, op, write_trace
from tests.report_page import Page
from whatif import DependencyKind, TaskGraph, WhatifError
from whatif.cli.main import main
from whatif.ingest.lines import By, is_users, read_lines
from whatif.prediction.baseline import Baseline
from whatif.questions.comparison.regression import check_regression
from whatif.questions.comparison.two_recordings import TwoRecordings
from whatif.questions.flame import flame
from whatif.questions.lines import line_parts, mean_step_ms
from whatif.report.text_check import markdown
from whatif.simulation.simulator import simulate
from whatif.simulation.steps import CLOCK_NOUNS


def python(name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}


def lines_of(graph: TaskGraph, by: str = "line") -> dict[str, str]:
    """The line of each named task."""
    found = read_lines(graph, by)  # type: ignore[arg-type]
    return {
        graph.names[name]: found.names[code]
        for name, code in zip(graph.name.tolist(), found.code.tolist(), strict=True)
        if code >= 0
    }


def with_functions(folder: Path) -> TaskGraph:
    """Two operators in functions of the user and one call deeper, in torch's.

    ::

        train.py(1): <module>  |--------------------------------|
        train.py(5): step          |-------------------|
        torch/x.py(9): mm              |-----|
        aten::                          |mm|        |add|
        backward (tid 2)                                   |MmBackward|
    """
    return whatif.read(
        write_trace(
            folder / "functions.json",
            [
                mark("ProfilerStep#0", 0, 1000),
                python("train.py(1): <module>", 0, 1000),
                python("train.py(5): step", 100, 400),
                python("torch/x.py(9): mm", 200, 100),
                op("aten::mm", 210, 50, **{"Sequence number": 3, "Fwd thread id": 0}),
                op("aten::add", 400, 50),
                op("aten::exp", 700, 50),
                op("MmBackward", 800, 50, tid=2, **{"Sequence number": 3, "Fwd thread id": 1}),
            ],
        )
    )


def test_functions_name_the_innermost_of_the_user(tmp_path: Path) -> None:
    graph = with_functions(tmp_path)
    found = lines_of(graph)
    assert found["aten::mm"] == "train.py(5): step › mm"
    assert found["aten::add"] == "train.py(5): step"
    assert found["aten::exp"] == "train.py(1): <module>"
    assert found["MmBackward"] == "backward of train.py(5): step › mm"
    assert set(lines_of(graph, "file").values()) == {"train.py"}
    stacks = lines_of(graph, "stack")
    assert stacks["aten::mm"] == "train.py(1): <module> › train.py(5): step › mm"
    assert stacks["aten::exp"] == "train.py(1): <module>"
    assert stacks["MmBackward"] == f"{stacks['aten::mm']} › backward"


def test_python_between_operators_is_of_the_line_that_runs_longest(tmp_path: Path) -> None:
    """Line 2 begins the time between two operators, line 3 takes most of it."""
    events = [mark("ProfilerStep#0", 0, 1000), op("aten::mm", 100, 50), op("aten::add", 800, 50)]
    events += [
        python("train.py(2): main", 90, 110),
        python("train.py(3): main", 200, 590),
        python("train.py(4): main", 790, 200),
    ]
    graph = whatif.read(write_trace(tmp_path / "between.json", events))
    found = read_lines(graph)
    between = np.flatnonzero((graph.start_ns + graph.info.origin_ns) == 150_000)
    assert [found.names[code] for code in found.code[between].tolist()] == ["train.py(3): main"]


def test_a_function_that_ends_behind_the_start_of_the_next(tmp_path: Path) -> None:
    """Starts and durations are rounded each, so that ends are a nanosecond off: the line that runs stays known."""
    events = [mark("ProfilerStep#0", 0, 1000), *(op("aten::mm", 100 * at, 50) for at in range(1, 10))]
    events += [python("train.py(9): epoch", 50, 940)]
    events += [python(f"train.py({at}): train", 100 * at - 10, 100.001) for at in range(1, 10)]
    graph = whatif.read(write_trace(tmp_path / "rounded.json", events))
    found = read_lines(graph)
    starts_us = (graph.start_ns + graph.info.origin_ns) / 1e3
    for at in range(1, 10):
        (task,) = np.flatnonzero(starts_us == 100 * at)
        assert found.names[found.code[task]] == f"train.py({at}): train"


def test_a_flame_graph_adds_up_to_the_step(tmp_path: Path) -> None:
    baseline = Baseline.of(with_functions(tmp_path), calibrated=False)
    found = flame(baseline)
    assert found.of == "stacks"
    outermost = [frame for frame in found.frames if frame.depth == 0]
    assert sum(frame.ms for frame in outermost) == pytest.approx(baseline.step_ns / 1e6)
    at = {frame.name: frame for frame in found.frames}
    assert (at["train.py(5): step"].depth, at["mm"].depth, at["aten::mm"].depth) == (1, 2, 3)
    assert at["aten::mm"].ms == pytest.approx(0.05)
    # A frame lies within the one that calls it.
    for outer, inner in zip(found.frames, found.frames[1:], strict=False):
        if inner.depth > outer.depth:
            assert outer.begin_ms <= inner.begin_ms
            assert inner.begin_ms + inner.ms <= outer.begin_ms + outer.ms + 1e-9


def test_a_flame_graph_without_stacks_is_of_layers(own_traces: Path) -> None:
    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    found = flame(baseline)
    assert found.of == "layers"
    assert {frame.name for frame in found.frames if frame.depth == 0} == {"data", "forward", "backward", "update"}
    assert sum(frame.self_ms for frame in found.frames) == pytest.approx(baseline.step_ns / 1e6)


def test_call_stacks_name_the_line_that_runs(tmp_path: Path) -> None:
    stack = (
        "/x/site-packages/torch/nn/functional.py(9): linear;net.py(33): forward;net.py(50): forward;train.py(7): main"
    )
    events = [mark("ProfilerStep#0", 0, 1000), op("aten::linear", 100, 50, **{"Call stack": stack})]
    graph = whatif.read(write_trace(tmp_path / "stacks.json", events))
    assert lines_of(graph)["aten::linear"] == "net.py(33): forward"
    assert lines_of(graph, "layer")["aten::linear"] == "net.py(50) › net.py(33)"


def test_without_stacks_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "bare.json", [mark("ProfilerStep#0", 0, 99), op("aten::mm", 1, 50)])
    assert main(["explain", "--by", "line", str(trace)]) == 1
    assert "record with `whatif collect --lines`" in capsys.readouterr().err
    assert main(["explain", "--by", "layer", str(trace)]) == 1
    assert (
        "expected layers, call stacks or Python functions in the trace, got none; record with `whatif collect`, "
        in (capsys.readouterr().err)
    )


@pytest.mark.parametrize(
    ("by", "why"),
    [
        ("layer", "its call stacks show no forward function of a model; record with `whatif collect`."),
        ("line", "its call stacks show no code of your own; record with `whatif collect --lines`."),
    ],
)
def test_stacks_that_name_nothing_say_so(tmp_path: Path, by: By, why: str) -> None:
    stack = {"Call stack": "/x/site-packages/torch/nn/functional.py(9): linear"}
    events = [mark("ProfilerStep#0", 0, 1000), op("aten::linear", 100, 50, **stack)]
    graph = whatif.read(write_trace(tmp_path / "stacks.json", events))
    found = line_parts(Baseline.of(graph), by)
    assert found.headline == f"no {by} of the {CLOCK_NOUNS[found.baseline.clock]} is known: {why}"


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("train.py", True), ("/home/a/net.py", True), ("models/net.py", True), ("torch/nn/functional.py", False),
        ("/usr/lib/python3.11/typing.py", False), ("typing.py", False), ("/v/site-packages/timm/x.py", False),
        ("<string>", False),
    ],
)  # fmt: skip
def test_whose_file(file: str, users: bool) -> None:
    assert is_users(file) is users


def test_the_loop_of_others(shared_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script's loop by its source: 42 loads, 44 copies to the GPU, 46 is the model, 51 the optimizer."""
    trace = str(shared_traces / "kineto-resnet50-v100" / "num_workers_0.2021-06.pt.trace.json.gz")
    assert main(["explain", "--by", "line", trace, "--as-recorded", "--json"]) == 0
    lines = {line["line"].partition(":")[0]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines["resnet50_profiler_api.py(42)"]["critical_ms"] == pytest.approx(44.5, abs=1)
    assert lines["resnet50_profiler_api.py(44)"]["waits_per_step"] == 3
    assert lines["resnet50_profiler_api.py(44)"]["gain_ms"] >= 0
    # Four loader workers were measured to gain 28.5 ms; then the GPU bounds the step.
    assert 28.5 <= lines["resnet50_profiler_api.py(42)"]["gain_ms"] <= 35
    assert lines["backward of resnet50_profiler_api.py(46)"]["gpu_ms"] > lines["resnet50_profiler_api.py(46)"]["gpu_ms"]


def with_item(folder: Path, python_us: float = 0) -> Path:
    """loss.item() behind each step's kernel: the call waits 900 us; Python may sort before it."""
    events = []
    for step in range(6):
        at = (2000 + python_us) * step
        events.append(mark(f"ProfilerStep#{step}", at, 1999 + python_us))
        if python_us:
            events.append(python("train.py(7): sort", at + 2, python_us))
            at += python_us
        events += launched("gemm", at + 10, 5, at + 30, 1000, 2 * step + 1)
        events.append(python("train.py(12): step", at + 5, 1500))
        events.append(python("<built-in method item of Tensor object at 0x7f>", at + 100, 940))
        events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "pid": 1, "tid": 1, "ts": at + 110,
             "dur": 925, "args": {"correlation": 2 * step + 2}}
        )  # fmt: skip
    return write_trace(folder / f"item{python_us:.0f}.json", events)


def test_lines_of_two_recordings(tmp_path: Path) -> None:
    """In the second one each step sorts in Python for 300 us first; the 10 us until the launch are of the same task."""
    graphs = [whatif.read(with_item(tmp_path, us)) for us in (0, 300)]
    found = check_regression(TwoRecordings.of(*graphs, calibrated=False), 3.0)
    assert found.lines[0].name == "train.py(7): sort"
    assert found.lines[0].work_change_ms == pytest.approx(0.31)
    assert "Python and the framework" in found.verdict
    assert "line train.py(7): sort (+0.31 ms)" in found.verdict
    assert "lines that grew most" in markdown(found)


def test_advice_names_the_line_that_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All waits are of one line, so that it gains what remove_syncs does."""
    trace = with_item(tmp_path)
    assert main(["advise", str(trace), "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["waiting_lines"]
    assert line["line"] == "train.py(12): step › item"
    assert line["waits_per_step"] == 1
    baseline = Baseline.of(whatif.read(trace))
    without = simulate(whatif.load_transform("remove_syncs")(baseline.graph))
    gain_ms = mean_step_ms(baseline, baseline.timeline) - mean_step_ms(baseline, without)
    assert line["gain_ms"] == pytest.approx(gain_ms, abs=0.001)
    assert main(["advise", str(trace)]) == 0
    assert "train.py(12): step › item" in capsys.readouterr().out
    assert main(["report", str(trace), "-o", str(tmp_path / "page.html")]) == 0
    assert Page(tmp_path / "page.html").data("facts")["advise"]["waiting_lines"] == [line]


def with_logging(folder: Path, printing: str = "train.py(9): report", reads: str = "aten::item") -> Path:
    """A step of 1 ms in which the user's report takes 400 us behind the backward pass; no other line is of interest."""
    events = []
    for step in range(6):
        at = 1000 * step
        forward = {"Sequence number": step, "Fwd thread id": 0}
        events += [
            mark(f"ProfilerStep#{step}", at, 1000),
            python("train.py(5): main", at, 99),
            mark("whatif::layer::fc", at + 1, 98),
            op("aten::mm", at + 2, 96, **forward),
            python("train.py(6): main", at + 100, 200),
            op("MmBackward0", at + 101, 198, **{"Sequence number": step, "Fwd thread id": 1}),
            python(printing, at + 300, 400),
            op("aten::mean", at + 301, 300),
            op(reads, at + 601, 90),
            python("train.py(7): main", at + 700, 300),
            mark("Optimizer.step#SGD.step", at + 701, 298),
            op("aten::add_", at + 702, 296),
        ]
    return write_trace(folder / "logging.json", events)


def test_advice_names_the_line_that_costs_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the layers' line is proposed, nor that of the backward pass, nor that of the optimizer's step."""
    trace = str(with_logging(tmp_path))
    assert main(["advise", trace, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (line,) = found["costly_lines"]
    assert (line["line"], line["gain_pct"]) == ("train.py(9): report", pytest.approx(40, abs=1))
    outside = "outside the layers, the backward pass and the optimizer"
    assert found["verdict"][1] == f"Do first: make train.py(9): report cheaper, {outside}."
    assert main(["advise", trace]) == 0
    assert f"Lines of your code {outside}, per mean step" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", "--by", "line", trace, "--json"]) == 0
    lines = {line["line"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert line["gain_ms"] == lines["train.py(9): report"]["gain_ms"]
    assert f"({line['gain_pct']:.0f} %)" in found["verdict"][2]
    assert main(["advise", str(with_logging(tmp_path, "train.py(5): main")), "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["costly_lines"]


def test_what_may_belong_to_the_training_is_not_proposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between the backward pass and the optimizer's step nothing is read from a tensor, as by clipping of gradients."""
    for printing in ("train.py(9): clip", "train.py(9): forward"):
        reads = "aten::mul_" if "clip" in printing else "aten::item"
        assert main(["advise", str(with_logging(tmp_path, printing, reads)), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["costly_lines"] == []


def test_what_waits_for_the_gpu_is_named(tmp_path: Path) -> None:
    graph = whatif.read(with_item(tmp_path))
    found = line_parts(Baseline.of(graph, calibrated=False), "line")
    (line,) = (line for line in found.parts if line.part.name == "train.py(12): step › item")
    assert line.waits == 1
    assert line.blocked_ms == pytest.approx(0.92, abs=0.03)
    assert "train.py(12): step › item waits for the GPU 1 time a step" in found.headline


def test_the_headline_is_of_all_layers_whatever_is_shown(own_traces: Path) -> None:
    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    all_of_them, one = line_parts(baseline, "layer", 100), line_parts(baseline, "layer", 1)
    assert one.headline == all_of_them.headline
    assert one.headline.startswith("head holds more of the critical path than any other layer: ")
    assert " ms belong to no layer that is known)" in one.headline
    assert [line["layer"] for line in one.to_dict()["lines"]] == ["(no layer known)"]


def test_removed_waits_let_the_cpu_run_ahead() -> None:
    """
    ::

        CPU     |launch|  wait      |work (4 ms)|launch| ...
        stream         |k (5 ms)|
    """
    build = Build(CPU, STREAM)
    for step in range(6):
        of = {"step": step}
        call = build.task(0, 10_000, "launch", **of)
        kernel = build.task(1, 5_000_000, "k", **of)
        build.edge(call, kernel, kind=DependencyKind.LAUNCH)
        build.sync()
        build.task(0, 4_000_000, "work", **of)
    graph = build.graph()
    step = np.repeat(np.arange(6), len(graph) // 6).astype(np.int32)
    graph = graph.replace(step=step)
    before = simulate(graph).makespan_ns
    removed = whatif.load_transform("remove_syncs")(graph)
    after = simulate(removed).makespan_ns
    assert before == 6 * (10_000 + 5_000_000 + 4_000_000)
    assert after == pytest.approx(6 * 5_000_000 + 10_000, rel=0.15)
    assert not len(removed.waits.task)
    assert whatif.load_transform("remove_syncs")(removed).declined


def test_a_cpu_waits_for_no_gpu(own_traces: Path) -> None:
    with pytest.raises(WhatifError, match="expected a recording of GPU work"):
        whatif.load_transform("remove_syncs")(whatif.read(own_traces / "transformer_cpu.json.gz"))


@pytest.mark.parametrize("view", [[], ["--by", "step"], ["--by", "layer"], ["--by", "stack"]], ids=" ".join)
def test_every_view_states_the_doubts_of_the_recording(
    view: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = []
    for number in range(6):
        at = 100 * number
        events += [mark(f"ProfilerStep#{number}", at, 100), mark("whatif::layer::fc", at, 80), op("aten::mm", at, 80)]
    load = {"steps": 5, "wall_s": 2.0, "cpu_s": 1.0, "load": 9.0, "involuntary_switches": 300, "minor_faults": 0}
    path = str(write_trace(tmp_path / "busy.json", events, whatif={"traced_load": load, "cpu_cores": 2}))
    sentence = "busy machine, record again: per second of CPU time the program was preempted 300 times"
    assert main(["explain", *view, path]) == 0
    assert f"whatif: warning: {sentence}" in capsys.readouterr().err
    assert main(["explain", *view, path, "--json"]) == 0
    assert any(text.startswith(sentence) for text in json.loads(capsys.readouterr().out)["warnings"])
