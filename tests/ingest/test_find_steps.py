"""Detection of steps from repetitions, the user's options for steps, and the best clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import Event, extra_data, kernel, launched, mark, op, read_events, write_trace
from tests.ingest.drawn import steps
from whatif import WhatifError
from whatif.cli.main import main
from whatif.simulation.steps import default_clock


def sequence(names: list[str]) -> list[Event]:
    """Kernels of these names, one every 10 us, each with its launch."""
    return [event for i, name in enumerate(names) for event in launched(name, 10 * i, 3, 10 * i + 5, 4, i + 1)]


LAYER = ["norm", *("gemm", "bias", "gelu", "gemm", "add", "softmax", "mask", "dropout")]


def test_a_layer_that_repeats_in_a_forward_pass_is_no_step(tmp_path: Path) -> None:
    """40 equal layers, and what lies around them once a pass."""
    one = ["embed", "position", *LAYER * 40, "norm", "head", "sample"]
    info = read_events(tmp_path, sequence(one * 4)).info
    assert (info.n_steps, info.step_source, info.loop) == (4, "repetition", (0, 0))


def test_a_loop_of_few_kernels_is_no_step_and_a_sentence_says_so(tmp_path: Path) -> None:
    graph = read_events(tmp_path, sequence(["mul", "add"] * 100))
    assert (graph.info.n_steps, graph.info.loop) == (0, (2, 100))
    assert any("2 GPU tasks repeat 100 times" in quirk and "--step-count" in quirk for quirk in graph.info.quirks)
    with pytest.raises(WhatifError, match=r"cuda_graph: expected a recording with steps.*--step-count"):
        whatif.apply(graph, "cuda_graph")


def test_what_a_graph_launches_counts_as_one(tmp_path: Path) -> None:
    """Ten launches of a graph of four equal kernels each."""
    events = []
    for i in range(10):
        events.append(launched("k", 100 * i, 3, 100 * i + 5, 4, i + 1)[0] | {"name": "cudaGraphLaunch"})
        events += [kernel("k", 100 * i + 5 + 5 * j, 4, i + 1) for j in range(4)]
    assert read_events(tmp_path, events).info.n_steps == 10


@pytest.mark.parametrize(("layers", "n_steps"), [(1, 12), (4, 6)])
def test_steps_in_a_graph_alternate_with_steps_without(tmp_path: Path, layers: int, n_steps: int) -> None:
    """Both in turn were one step. A graph of several equal layers is not divided into steps."""
    events: list[Event] = []
    for i in range(6):
        at, first = 1000 * i, 100 * i + 1
        for j, name in enumerate(LAYER):
            events += launched(name, at + 10 * j, 3, at + 10 * j + 5, 4, first + j)
        events.append(launched("graph", at + 400, 3, at + 405, 4, first + 50)[0] | {"name": "cudaGraphLaunch"})
        events += [kernel(name, at + 405 + 5 * j, 4, first + 50) for j, name in enumerate(LAYER * layers)]
    info = read_events(tmp_path, events).info
    assert (info.n_steps, info.step_source) == (n_steps, "repetition")


def rewritten(tmp_path: Path, events: list[Event], **rule: Any) -> whatif.TaskGraph:
    path = Path(read_events(tmp_path, events).info.path)
    return whatif.read(path, **rule)


def test_the_user_says_how_many_steps_there_are(tmp_path: Path) -> None:
    graph = rewritten(tmp_path, sequence(["mul", "add"] * 100), step_count=20)
    assert (graph.info.n_steps, graph.info.loop) == (20, (0, 0))
    assert np.bincount(graph.step[graph.on_gpu]).tolist() == [10] * 20
    assert whatif.apply(graph, "cuda_graph").speedup > 1


def test_the_user_names_what_begins_a_step(tmp_path: Path) -> None:
    marks = [mark(f"decode {i}", 250 * i, 200) for i in range(8)]
    graph = rewritten(tmp_path, [*sequence(["mul", "add"] * 100), *marks, op("aten::a", 0, 2000)], step_mark="^decode")
    assert (graph.info.n_steps, graph.info.step_source) == (8, "marks like '^decode'")


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"step_count": 1000}, "--step-count 1000: expected 1 to 200 steps"),
        ({"step_mark": "train"}, "--step-mark 'train': expected 2 or more matching annotations or operators, got none"),
        ({"step_mark": ""}, "--step-mark: expected a regular expression, got an empty one"),
        ({"step_mark": "("}, "expected a regular expression, got '\\('"),
    ],
)
def test_a_rule_that_fits_nothing_is_refused(tmp_path: Path, rule: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WhatifError, match=sentence):
        rewritten(tmp_path, sequence(["mul", "add"] * 100), **rule)


def test_every_command_takes_the_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = read_events(tmp_path, sequence(["mul", "add"] * 100)).info.path
    for words in (["info", path], ["apply", "cuda_graph", path], ["explain", path], ["advise", path]):
        assert main([*words, "--step-count", "20", "--json"]) == 0, words
    page = str(tmp_path / "page.html")
    assert main(["report", path, "--step-count", "20", "-o", page]) == 0
    assert "--step-count 20" in Path(page).read_text()
    capsys.readouterr()


def test_ranks_take_the_rule(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was ignored for a folder, and for the files of several ranks."""
    folder = own_traces / "ranks_cpu" / "even"
    files = [str(folder / f"rank{rank}.json.gz") for rank in (0, 1)]
    for traces in ([str(folder)], files, [str(folder), "--ranks", "0"]):
        assert main(["info", *traces, "--step-count", "4", "--json"]) == 0, traces
        assert json.loads(capsys.readouterr().out)["steps"] == 4, traces
    by_mark = whatif.read_ranks(files, step_mark=r"^ProfilerStep#\d")
    assert by_mark.graph.info.n_steps == whatif.read(folder).info.n_steps == 5
    assert by_mark.matched.unmatched == (0, 0)
    with pytest.raises(WhatifError, match="--step-mark 'nothing': expected 2 or more"):
        whatif.read(folder, step_mark="nothing")


def test_a_rule_outranks_the_numbers_of_the_profilers_marks(tmp_path: Path) -> None:
    """One rank's first mark is the other's second one: without a rule they have no step in common."""
    for rank in (0, 1):
        events = [
            *sequence(["gemm", "ncclDevKernel_AllReduce_Sum_f32"] * 4),
            *(mark(f"ProfilerStep#{2 * rank + i}", 40 * i - 1, 40) for i in range(2)),
        ]
        info = {"rank": rank, "world_size": 2}
        write_trace(tmp_path / f"rank{rank}.json", events, distributedInfo=info)
    with pytest.raises(WhatifError, match="expected the same collectives on every rank"):
        whatif.read(tmp_path)
    ranks = whatif.read_ranks(tmp_path, step_count=2)
    assert ranks.matched.unmatched == (0, 0)
    assert ranks.graph.info.n_steps == 2


def test_the_clock_is_one_that_the_recording_has(tmp_path: Path) -> None:
    """All kernels were launched before the first mark: no step ends on the GPU."""
    early = sequence(["k"] * 8)
    marks = [mark(f"ProfilerStep#{i}", 1000 + 100 * i, 100) for i in range(5)]
    graph = read_events(tmp_path, [*early, *marks, op("aten::a", 0, 1500)])
    assert "gpu" not in graph.info.measured_step_ns
    assert default_clock(graph) == "mark"
    assert whatif.apply(graph, "scale:factor=0.5").baseline.clock == "mark"


def test_steps_that_differ_by_the_gpu_alone_are_recognized_by_marks(tmp_path: Path) -> None:
    """The GPU ends its steps late and early in turn; the host does not."""
    events = [mark(f"ProfilerStep#{i}", 100 * i, 100) for i in range(6)] + [op("aten::a", 0, 600)]
    for i in range(6):
        events += launched("k", 100 * i + 1, 3, 100 * i + 10, 80 if i % 2 else 20, i + 1)
    assert default_clock(read_events(tmp_path, events)) == "mark"
    assert default_clock(read_events(tmp_path, steps(5, []))) == "gpu"


def test_published_traces() -> None:
    """A forward pass of a 2.7B model repeats 1,832 kernels exactly; its layers repeat 57 with 97 %."""
    folder = extra_data("traces")
    clean = whatif.read(folder / "zx3xyy-a100-2.7b" / "result_2_7B_clean.sqlite").info
    assert (clean.n_steps, clean.step_source) == (10, "repetition")
    assert whatif.read(folder / "zx3xyy-a100-2.7b" / "result_2_7B_compile_ro.sqlite").info.n_steps == 10
    assert whatif.read(folder / "nano-vllm-h100" / "trace_graph.json.gz").info.n_steps == 20
    assert whatif.read(folder / "nano-vllm-h100" / "trace_eager.json.gz").info.loop == (2, 1000)
    assert default_clock(whatif.read(folder / "modded-nanogpt-8xh100" / "current.rank0.json.gz")) == "mark"
