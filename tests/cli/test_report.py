"""The page of ``whatif report``: the numbers of the commands, nothing of a trace obeyed, and no half-written file."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.cli.reports import written
from tests.cli.test_commands import V100, training
from tests.cli.test_report_commands import commands_of
from tests.helpers import CPU, STREAM, Build, mark, write_trace
from tests.report_page import Page, resources, unpacked
from whatif import WhatifError
from whatif.cli.main import main
from whatif.prediction.baseline import Baseline
from whatif.prediction.predict import apply
from whatif.prediction.transform import built_in_summaries
from whatif.questions.memory_summary import memory_summary
from whatif.report.html import timeline
from whatif.report.html.facts import gather
from whatif.report.html.tables import Cell, Row, joined
from whatif.report.text_memory import size

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\u202egnirts\x1b[31m😀 & \"quoted\" 'single'"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "five steps.json.gz", training(), deviceProperties=V100)


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON object of another command."""
    capsys.readouterr()
    assert main([*words, "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


# -- the same numbers as everywhere ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory, own_traces: Path) -> tuple[Page, str]:
    """The page of a recording of our own, whose parts are compared with the commands."""
    path = str(own_traces / "transformer_cpu.json.gz")
    return written(tmp_path_factory.mktemp("page"), path, "amp:target=bf16", "compile"), path


COMMANDS = {
    "info": ["info"],
    "explain": ["explain", "--top", "400"],
    "efficiency": ["explain", "--efficiency"],
    "steps": ["explain", "--by", "step"],
    "flame": ["explain", "--by", "stack"],
    "sensitivity": ["explain", "--sensitivity"],
    "advise": ["advise"],
    "apply": ["apply", "amp:target=bf16", "compile"],
    "scaling": ["scaling", "--names", "amp:target=bf16", "compile", "distributed"],
}


@pytest.mark.parametrize("key", list(COMMANDS))
def test_the_data_of_the_page_are_those_of_the_commands(
    transformer: tuple[Page, str], capsys: pytest.CaptureFixture[str], key: str
) -> None:
    held, path = transformer
    name, *rest = COMMANDS[key]
    words = [name, *rest, path] if name == "apply" else [name, path, *(w for w in rest if w != "--names")]
    found, shown = asked(capsys, *words), held.data("facts")[key]
    folder = str(Path(path).parent) + os.sep
    found = json.loads(json.dumps(found).replace(folder, ""))
    if "trust" not in shown:
        found.pop("trust")
    if key in ("efficiency", "steps", "flame", "advise", "scaling"):
        found.pop("warnings")  # the commands add the recording's own
    shown.pop("warnings") if key == "scaling" else None
    assert shown == found


def test_the_tables_show_the_data(transformer: tuple[Page, str]) -> None:
    held, _ = transformer
    facts = held.data("facts")
    shown = held.tables["t-breakdown"]
    # A recording of a CPU has no rows of a GPU.
    assert [row[1].value for row in shown.rows] == [ms for ms in facts["explain"]["breakdown"].values() if ms]
    assert [row[3].value for row in shown.rows] == [
        ms for ms in facts["apply"]["breakdown"]["predicted"].values() if ms
    ]
    for ident, key, name in (("t-layers", "layers", "layer"), ("t-kernels", "operations", "name")):
        rows = [*facts["explain"][key]]
        cells = [row for row in held.tables[ident].rows if row[0].text != "(no layer)"]
        assert [row[0].text for row in cells] == [row[name] for row in rows]
        assert [row[-2].value for row in cells] == pytest.approx([row["critical_ms"] for row in rows], abs=1e-6)
    alone = held.tables["t-alone"]
    assert [row[0].text for row in alone.rows] == [" + ".join(e["what_ifs"]) for e in facts["advise"]["advice"]]
    assert [row[1].value for row in alone.rows] == [entry["gain_pct"] for entry in facts["advise"]["advice"]]
    together = held.tables["t-together"]
    assert [row[1].value for row in together.rows] == [e["gain_pct"] for e in facts["advise"]["combinations"]]
    assert held.numbers["baseline_ms"] == facts["explain"]["baseline_ms"]
    assert held.numbers["predicted_ms"] == facts["apply"]["predicted_ms"]
    assert held.numbers["peak_bytes"] == facts["memory"]["peak_bytes"]
    assert [row[1].value for row in held.tables["t-scaling"].rows] == [
        row["predicted_ms"] for row in facts["scaling"]["rows"]
    ]
    # Equal steps are one row.
    points = {round(row["predicted_ms"], 2): row["predicted_ms"] for row in reversed(facts["sweep"]["points"])}
    assert [row[1].value for row in held.tables["t-bandwidth"].rows] == [*reversed(points.values())]
    assert held.tables["t-bandwidth"].rows[-1][0].text.endswith("400Gbps")
    assert held.tables["t-peak"].column(1)["activations"].value == facts["memory"]["peak"]["activation_bytes"]
    for sentence in facts["advise"]["verdict"]:
        assert sentence in held.text


def test_what_is_drawn_is_what_the_tables_say(transformer: tuple[Page, str]) -> None:
    held, _ = transformer
    charts = held.data("charts")
    assert charts.keys() == {
        "c-breakdown",
        "c-gains",
        "c-memory",
        "c-scaling",
        "c-bandwidth",
        "c-sensitivity",
        "c-steps",
    }
    # Corrected, so that it is not as recorded.
    assert charts["c-breakdown"]["labels"][0] == held.data("timeline-data")["sides"][0]["title"] == "baseline"
    breakdown = charts["c-breakdown"]["series"]
    assert [part["values"][0] for part in breakdown] == [row[1].value for row in held.tables["t-breakdown"].rows]
    gains = charts["c-gains"]["series"][0]
    assert all(low <= value <= high for low, value, high in zip(gains["low"], gains["values"], gains["high"]))  # noqa: B905
    assert charts["c-bandwidth"]["x"] == [1, 2.5, 5, 10, 25, 40, 50, 100, 200, 400]
    memory = [sum(values) for values in zip(*(part["values"] for part in charts["c-memory"]["series"]), strict=True)]
    assert max(memory) * 2**20 == pytest.approx(held.data("facts")["memory"]["peak_bytes"])
    for ident in charts:
        says = next(known["aria-label"] for name, known in held.tags if known.get("id") == ident)
        assert says


def test_names_of_what_ifs_and_terms_are_explained(transformer: tuple[Page, str]) -> None:
    """The hover text is the what-if's summary and its options; the terms stand in a list too."""
    held, _ = transformer
    meant = {known["title"] for name, known in held.tags if name == "abbr" and "class" not in known}
    assert "AMP: train in mixed precision (autocast, and a loss scaler for fp16); target bf16" in meant
    critical = "time on the critical path: shortening anything else does not shorten the step"
    assert critical in meant
    assert held.text.count(critical) == 1
    built_in = {name: summary.rstrip(".") for name, summary, _ in built_in_summaries()}
    advised = {name for entry in held.data("facts")["advise"]["advice"] for name in entry["what_ifs"]}
    for one in advised:
        name, _, options = one.partition(":")
        ending = f"; {options.replace(',', ', ').replace('=', ' ')}" if options else ""
        assert any(title and title.endswith(ending) and built_in[name] in title for title in meant), one


def test_rows_that_differ_in_their_name_alone_are_one() -> None:
    rows: list[Row] = [["a", Cell("1", 1.0), "x"], ["b", Cell("2", 2.0), "x"], ["c", Cell("1", 1.0), "x"]]
    assert [row[0] for row in joined(rows)] == ["a, c", "b"]


def test_ranges_and_sources_of_every_prediction_are_reported(transformer: tuple[Page, str]) -> None:
    held, _ = transformer
    labels = {known["class"] for name, known in held.tags if name == "abbr" and "class" in known}
    assert labels == {f"made made-{made}" for made in ("measured", "simulated", "predicted", "estimated")}
    sources = held.tables["t-alone"].column(-1)
    assert "by" in sources["amp:target=bf16"].text or "alone" in sources["amp:target=bf16"].text
    assert "Gain of each what-if" in held.text
    assert "Alone they add up to" in held.text


def test_a_step_that_does_not_fit_shows_what_makes_it_fit(tmp_path: Path, own_traces: Path) -> None:
    with gzip.open(own_traces / "predicted" / "gpt2_h100_predicted.json.gz") as file:
        step = json.load(file)
    step["deviceProperties"][0]["totalGlobalMem"] = 4 * 2**30
    small = tmp_path / "small.json"
    small.write_text(json.dumps(step))
    held = written(tmp_path, small)
    names = [" + ".join(entry["what_ifs"]) for entry in held.data("facts")["advise"]["makes_fit"]]
    assert "activation_checkpoint" in names
    assert [row[0].text for row in held.tables["t-alone"].rows] == names
    assert "What makes it fit" in held.text
    assert f"fits with {names[0]}" in held.text


def test_a_gpu_has_a_roofline_and_slack(tmp_path: Path, own_traces: Path) -> None:
    """Each family is one point at its rate, below the roofs."""
    held = written(tmp_path, own_traces / "predicted" / "gpt2_h100_predicted.json.gz")
    facts, chart = held.data("facts"), held.data("charts")["c-roofline"]
    shown = held.tables["t-efficiency"]
    tflops = [family["tflops"] for family in facts["efficiency"]["families"]]
    assert [row[3].value for row in shown.rows] == [
        None if rate is None else pytest.approx(rate, abs=1e-4) for rate in tflops
    ]
    points = [series for series in chart["series"] if not series["dashed"]]
    roof = [max(ends) for ends in zip(*(s["values"] for s in chart["series"] if s["dashed"]), strict=True)]
    rates = {family["family"]: family for family in facts["efficiency"]["families"]}
    for series in points:
        ((place, rate),) = [(at, y) for at, y in enumerate(series["values"]) if y is not None]
        assert rate == pytest.approx(rates[series["name"]]["tflops"], abs=1e-4)
        assert chart["x"][place] == pytest.approx(rates[series["name"]]["intensity"], abs=1e-4)
        assert rate < roof[place]
    assert facts["explain"]["slack"][1:] in held.text
    # fp32 was called by the name of another format with the same peak.
    assert [s["name"] for s in chart["series"] if s["dashed"]] == ["fp64, fp32", "tf32", "fp16, bf16", "fp8"]
    assert "profiler's own cost" not in held.text  # nothing was recorded


def test_several_ranks_are_distinguished(tmp_path: Path, own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From their folder, or file by file; rank 1 sleeps."""
    folder = own_traces / "ranks_cpu" / "sleeping"
    held = written(tmp_path, folder)
    assert held.source == written(tmp_path, *sorted(folder.iterdir())).source
    assert str(own_traces) not in held.source
    for command in ("info", "explain"):
        found = asked(capsys, command, str(folder))
        shown = held.data("facts")[command]["ranks"]
        assert shown == json.loads(json.dumps(found["ranks"]).replace(f"{folder}{os.sep}", ""))
    assert main(["info", str(folder)]) == 0
    within = re.search(r"within [\d.]+ % of the step without", capsys.readouterr().out)
    assert within is not None
    assert within[0].removesuffix(" of the step without") in held.tables["t-quality"].column(2)["calibrated step"].text
    assert held.tables["t-ranks"].column(-1)["rank 1"].value == pytest.approx(shown["ranks"][1]["late_ms"], abs=1e-5)
    # A command that is shown can be typed: "rank0.json.gz and 1 more rank" cannot.
    commands = commands_of(tmp_path / "page.html")
    assert len(commands) > 4
    assert all("FOLDER" in command and " more rank" not in command for command in commands)
    assert "rank 1 holds the others up" in held.text
    threads = {thread["name"] for side in held.data("timeline-data")["sides"] for thread in side["threads"]}
    assert {"rank 0", "rank 1"} <= {name.partition(":")[0] for name in threads}


def test_what_is_no_step_is_not_called_one(tmp_path: Path, shared_traces: Path, trace: Path) -> None:
    """Three steps are reported as one span, and the page says so; five are reported as steps."""
    found = written(tmp_path, shared_traces / "tracelens-h100-mi300" / "mi300.resnet_act_checkpoint_ddp_train.json.gz")
    assert "it holds 3 steps, and step times need at least 4" in found.text
    assert found.tables["t-quality"].rows[0][0].text == "recorded span"
    for said in ("a step takes", "Where the step goes", "recorded step", "ms a step", "a step, task by task"):
        assert said not in found.text
    assert "Where the span goes" in found.text
    stepped = written(tmp_path, trace).text
    assert "Where the step goes" in stepped
    assert "the whole span" not in stepped


def test_a_span_says_how_many_steps_a_cpu_recording_needs(tmp_path: Path, own_traces: Path) -> None:
    """Two steps of a CPU are enough; the page said that step times need four."""
    recording = own_traces / "transformer_cpu.json.gz"
    assert "its 5 steps together, as --clock span asks for" in written(tmp_path, recording, "--clock", "span").text


def test_one_is_not_called_many_and_code_is_no_backtick(tmp_path: Path, shared_traces: Path) -> None:
    found = written(tmp_path, shared_traces / "hta" / "rank_non_gpu.json.gz")
    assert "1 execution thread;" in found.text or "1 execution thread " in found.text
    assert "1 execution threads" not in found.text
    assert "`" not in found.text
    assert "<code>whatif collect</code>" in found.source


def test_memory_states_how_it_was_made(tmp_path: Path, shared_traces: Path, own_traces: Path) -> None:
    """Parameters that no recording lists are estimated; without layers the memory is that of operators."""
    vgg = written(tmp_path, shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    assert vgg.tables["t-peak"].rows
    assert made(vgg, "t-peak") == "estimated"
    assert vgg.tables["t-moments"].headers[1] == "layers"
    bare = written(tmp_path, shared_traces / "param-dlrm-8xv100" / "rank0.json.gz")
    assert bare.data("facts")["explain"]["layers"] == []
    assert "The largest batch that fits is at least 65,536 times the recorded one" in bare.text
    assert bare.tables["t-moments"].headers[1] == "operators"
    assert bare.tables["t-memory-layers"].headers[0] == "operator"
    measured = written(tmp_path, own_traces / "memory_cpu" / "vgg19.trace.json.gz")
    assert made(measured, "t-peak") == "measured"


def made(page: Page, table: str) -> str:
    """How a page says that the numbers of a table were made."""
    found = re.search(f'id="{table}-caption">[^<]*</span> <abbr [^>]*>([a-z]+)</abbr>', page.source)
    assert found is not None
    return found[1]


# -- the timeline ---------------------------------------------------------------------------------------------------


def test_the_packed_step_is_the_simulated_one(trace: Path) -> None:
    baseline = Baseline.of(whatif.read(trace))
    prediction = apply(baseline, "scale:kind=gpu,factor=0.5")
    shown = timeline.timelines(baseline, prediction)
    for side, line in zip(shown["sides"], (baseline.timeline, prediction.timeline), strict=True):
        graph = line.graph
        low, high = line.window_ns(baseline.clock)
        columns = unpacked(side, shown["unit_ns"])
        kept = (line.end_ns > low) & (line.start_ns < high) & (line.end_ns > line.start_ns)
        tasks = np.flatnonzero(kept)
        tasks = tasks[np.lexsort((np.maximum(line.start_ns[tasks], low), graph.thread[tasks]))]
        assert columns["start_ns"].tolist() == (np.maximum(line.start_ns[tasks], low) - low).tolist()
        ends_ns = np.minimum(line.end_ns[tasks], high) - low
        assert (columns["start_ns"] + columns["duration_ns"]).tolist() == ends_ns.tolist()
        assert [shown["texts"][code] for code in columns["name"]] == [graph.names[code] for code in graph.name[tasks]]
        assert (columns["what"] & 15).tolist() == graph.kind[tasks].tolist()
        assert ((columns["what"] >> 15) & 1).tolist() == np.isin(tasks, line.critical_path).astype(int).tolist()
        on_gpu = graph.on_gpu[tasks]
        assert (((columns["what"] >> 13) & 3)[on_gpu] == timeline.CHANGES.index("changed")).all()
        assert (((columns["what"] >> 13) & 3)[~on_gpu] == timeline.CHANGES.index("same")).all()
        assert side["left_out"] == 0


def many(n: int) -> Baseline:
    """One step of ``n`` tasks of all lengths on a CPU thread and a stream, with a thousand long names."""
    random = np.random.default_rng(7)
    build = Build(CPU, STREAM)
    for task in range(n // 2):
        name = f"void some_library::a_kernel_template<{task % 1000}, float, float, int>(float*, int)"
        build.launch(int(random.integers(1000, 9000)), int(random.integers(1000, 9000)), name)
    build.info = type(build.info)(path="many.json", measured_step_ns={"span": (10**9,)})
    return Baseline.of(build.graph())


def test_a_step_of_a_hundred_thousand_tasks_stays_small_and_what_is_left_out_is_reported() -> None:
    baseline = many(130_000)
    shown = timeline.timelines(baseline, apply(baseline, "scale:kind=gpu,factor=0.5"))
    assert len(json.dumps(shown)) < 2_500_000  # beside some 0.4 MB of page and chart library
    for side in shown["sides"]:
        assert side["n"] == timeline.MOST_TASKS
        assert side["left_out"] == pytest.approx(70_000, abs=1)  # what ends before the first kernel starts is not seen
        assert sum(thread["n"] for thread in side["threads"]) == side["n"]
    shortest_ns = min(unpacked(side, 1)["duration_ns"].min() for side in shown["sides"])
    assert shortest_ns > 1000


def test_steps_of_equal_tasks_are_cut_to_the_same_number(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    monkeypatch.setattr(timeline, "MOST_TASKS", 3)
    side = timeline.timelines(Baseline.of(whatif.read(trace)), None)["sides"][0]
    assert side["n"] == 3
    assert side["left_out"] > 0


# -- one file that obeys nobody -------------------------------------------------------------------------------------


def test_the_page_fetches_nothing_and_obeys_only_its_own_scripts(tmp_path: Path, trace: Path) -> None:
    held = written(tmp_path, trace)
    assert resources(held) == []
    directives = dict(part.strip().split(" ", 1) for part in held.policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert set(directives["script-src"].split()) == held.obeyed
    assert len(held.obeyed) == 2
    assert "unsafe" not in held.policy
    assert not [name for name, known in held.tags if any(key.startswith("on") or key == "style" for key in known)]


def test_what_a_trace_calls_things_stays_text(tmp_path: Path) -> None:
    names = training(layer=HOSTILE, kernel=HOSTILE)
    path = write_trace(tmp_path / "<b>&'\".json", names, deviceProperties=V100)
    held = written(tmp_path, path)
    plain = training(layer="a_layer", kernel="a_kernel")
    clean = written(tmp_path, write_trace(tmp_path / "run.json", plain, deviceProperties=V100))
    shapes = [[name for name, _ in shown.tags if name != "wbr"] for shown in (held, clean)]
    assert shapes[0] == shapes[1]
    assert held.source.count("</script") == clean.source.count("</script")
    shown = [row[0].text for row in held.tables["t-kernels"].rows]
    assert any(text.startswith("<img src=x onerror=alert(1)></script>") and "😀" in text for text in shown)
    for harmful in ("\u202e", "\x1b"):
        assert harmful not in held.source
        assert harmful not in json.dumps(held.data("timeline-data"), ensure_ascii=False)
    assert not re.search(r"[<>&]", next(text for known, text in held.scripts if known.get("id") == "facts"))


def test_the_page_names_no_folder_and_is_the_same_each_time(tmp_path: Path, trace: Path) -> None:
    first = written(tmp_path, trace)
    assert str(tmp_path) not in first.source
    assert first.source == written(tmp_path, trace).source


def test_headings_tables_and_controls_can_be_read_out(tmp_path: Path, trace: Path) -> None:
    held = written(tmp_path, trace)
    levels = [int(name[1]) for name, _ in held.tags if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [known["id"] for _, known in held.tags if known.get("id")]
    assert len(ids) == len(set(ids))
    for name, known in held.tags:
        for key in ("aria-labelledby", "aria-describedby"):
            assert known.get(key) is None or known[key] in ids
        if name == "a" and str(known["href"]).startswith("#"):
            assert str(known["href"])[1:] in ids
        if name == "canvas":
            assert known["aria-label"]
        if name == "th":
            assert known["scope"] in ("col", "row")
    assert ("html", {"lang": "en"}) in held.tags
    for table in held.tables.values():
        assert all(len(row) == len(table.headers) for row in table.rows)


# -- what can go wrong ----------------------------------------------------------------------------------------------


def test_what_is_unknown_is_reported_in_a_sentence(tmp_path: Path, trace: Path) -> None:
    held = written(tmp_path, trace)
    facts = held.data("facts")
    assert "expected training steps" in facts["memory"]["reason"]
    assert facts["memory"]["reason"] in held.text
    assert "backward pass" in facts["scaling"]["reason"]
    assert held.text.count(facts["scaling"]["reason"]) == 1  # the sweep's is the same


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["RUN", "ampp", "-o", "OUT"], 1, "ampp"),
        (["RUN", "amp"], 2, "-o"),
        (["amp", "RUN", "-o", "OUT"], 2, "the trace comes first"),
        (["RUN", "-o", "RUN"], 1, "expected another file than the trace itself"),
        (["RUN", "-o", "nowhere/page.html"], 1, "expected a folder to write into"),
        (["RUN", "-o", "page.pdf"], 1, "expected the name of an .html file"),
        (["RUN", "scale:factor=-1", "-o", "OUT"], 1, "factor"),
        (["missing.json", "-o", "OUT"], 1, "missing.json"),
    ],
)
def test_errors_are_one_sentence_and_leave_no_file(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, says: str
) -> None:
    before = trace.read_bytes()
    known = {"RUN": str(trace), "OUT": str(tmp_path / "out.html")}
    assert main(["report", *(known.get(word, word) for word in words)]) == status
    printed = capsys.readouterr().err
    assert says in printed
    assert len(printed.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]
    assert trace.read_bytes() == before


def test_an_older_page_is_replaced_whole(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    out.write_text("<title>What-if report: older</title>")
    assert main(["report", str(trace), "-o", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("GPU-bound: ")
    assert printed[-1] == f"{out}: written; open it in a browser"
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_each_tile_has_a_number_and_its_range(transformer: tuple[Page, str], own_traces: Path) -> None:
    held, _ = transformer
    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    again, faster = apply(baseline), apply(baseline, "scale:kind=cpu,factor=0.5")
    assert held.numbers["faster_ms"] == faster.predicted_ms
    found = re.findall(r'<a [^>]*class="tile".*?</a>', held.source, re.DOTALL)
    tiles = [re.sub(r"<[^>]+>", "", tile) for tile in found]
    assert len(tiles) == 5
    for tile in tiles:
        assert re.search(r"\d(?: MiB)? … \d", tile), tile
    assert f"{again.low_ms:.2f} … {again.high_ms:.2f} ms" in tiles[0]
    assert f"{faster.low_ms:.2f} … {faster.high_ms:.2f} mswith a CPU twice as fast" in tiles[3]
    peak = held.data("facts")["memory"]
    assert f"{size(peak['peak_bytes'])} … {size(peak['high_bytes'])}" in tiles[2]
    # More workers have the range of their efficiency, in which errors of one worker's step cancel.
    eight = next(row for row in held.data("facts")["scaling"]["rows"] if row["workers"] == 8)
    low, high = (8 * eight[f"efficiency_{end}_pct"] / 100 for end in ("low", "high"))
    assert f"{eight['throughput']:.2f}×{low:.2f} … {high:.2f}×" in tiles[4]


def test_the_timeline_says_so_if_its_step_is_not_the_median(tmp_path: Path, own_traces: Path) -> None:
    """Of four steps the median lies between two. On a CPU calls that communicate are none of CUDA's."""
    held = written(tmp_path, own_traces / "lab_pipeline_cpu" / "resnet.trace.json.gz", "pipeline:stages=2")
    assert "The steps shown are those closest to the median step." in held.text
    assert held.data("timeline-data")["calls"] == "communication calls"


def test_memory_without_what_ifs(own_traces: Path) -> None:
    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    found = memory_summary(baseline, None)
    assert found.what_ifs == found.memories == ()
    assert found.peak == memory_summary(baseline, ["amp"]).peak


# -- real recordings ------------------------------------------------------------------------------------------------


def test_a_what_if_that_does_not_apply_is_refused_before_anything_is_written(tmp_path: Path, trace: Path) -> None:
    baseline = Baseline.of(whatif.read(trace))
    from whatif.prediction.transform import load_transform

    with pytest.raises(WhatifError, match="bandwidth"):
        gather(baseline, [load_transform("bandwidth")])


def test_what_a_larger_batch_gains_is_reported_in_one_way(tmp_path: Path) -> None:
    """The step is longer, its samples are quicker: verdict, card and prediction speak of the same ones."""
    trace = write_trace(tmp_path / "trained.json", [*training(), mark("Optimizer.step#SGD.step", 990, 5)])
    shown = written(tmp_path, trace, "batch_size:factor=2").source
    facts = gather(Baseline.of(whatif.read(trace)), [whatif.load_transform("batch_size", factor=2.0)])
    assert facts.trial is not None
    assert facts.trial.samples == 2
    times = facts.trial.baseline_ms / facts.trial.recorded_samples_ms
    assert facts.as_fast == f"{times:.2f}× as fast"
    assert facts.for_whom == " for the samples of a recorded step"
    assert shown.count(f"{facts.as_fast}{facts.for_whom}.") == 1
    # The range of the tile is of these samples as well; no wait comes once a batch here.
    assert facts.prediction is not None
    assert facts.as_fast_ms == pytest.approx((facts.prediction.low_ms / 2, facts.prediction.high_ms / 2))
    assert f'data-key="predicted_ms">{facts.as_fast}</span>' in shown
