"""One fact has one number: in the terminal, as JSON, in a plot, in a notebook and on the page of the report."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.cli.test_commands import training
from tests.helpers import need, replace, write_trace
from whatif.cli.main import main
from whatif.prediction.baseline import Baseline
from whatif.prediction.predict import Prediction, apply
from whatif.report.layout import BREAKDOWN_LABELS, ms_format

pytestmark = pytest.mark.slow

Ask = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """A function that runs a command twice and gives what it prints as text, on one line, and as JSON."""

    def both(*words: str) -> tuple[str, dict[str, Any]]:
        assert main([*words, "--quiet"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert main([*words, "--quiet", "--json"]) == 0
        return text, json.loads(capsys.readouterr().out)

    return both


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def case(
    request: pytest.FixtureRequest, own_traces: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, Prediction]:
    """A trace, a what-if, and its prediction: a recorded transformer, and a made step of a GPU."""
    if request.param == "cpu":
        trace, what_if = str(own_traces / "transformer_cpu.json.gz"), "fused_adam"
    else:
        trace = str(write_trace(tmp_path_factory.mktemp("facts") / "run.json", training()))
        what_if = "scale:kind=gpu,factor=0.37"
    return trace, what_if, apply(Baseline.of(whatif.read(trace)), what_if)


def plain(markup: str) -> str:
    """The text of a page, on one line, without its pictures and scripts."""
    without = re.sub(r"<(svg|script|style)\b.*?</\1>", " ", markup, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", without)).split())


def test_a_prediction(ask: Ask, case: tuple[str, str, Prediction], tmp_path: Path) -> None:
    need("matplotlib")
    from whatif.report.plot_breakdown import prediction_figure

    trace, what_if, prediction = case
    text, facts = ask("apply", what_if, trace)
    assert facts == json.loads(json.dumps(prediction.to_dict()))
    ms = ms_format(facts["baseline_ms"])
    notebook = plain(prediction._repr_html_())
    page = tmp_path / "report.html"
    assert main(["report", trace, what_if, "-o", str(page), "--quiet"]) == 0
    report = plain(page.read_text(encoding="utf-8"))
    for number in ("baseline_ms", "predicted_ms", "low_ms", "high_ms"):
        for where in (text, notebook, report):
            assert ms(facts[number]) in where, (number, facts[number])
    headline = f"{ms(facts['baseline_ms'])} → {ms(facts['predicted_ms'])} ms"
    assert headline in text
    assert headline in notebook
    for key, label in BREAKDOWN_LABELS:
        before, after = (facts["breakdown"][side][key] for side in ("baseline", "predicted"))
        if before or after:
            row = f"{label} {ms(before)} {ms(after)}"
            assert row in text
            assert row in notebook
            assert ms(before) in report
            assert ms(after) in report
    drawn = {
        container.get_label(): [bar.get_width() for bar in container.patches]
        for container in prediction_figure(prediction).axes[0].containers
        if hasattr(container, "patches")
    }
    for key, label in BREAKDOWN_LABELS:
        parts = [facts["breakdown"][side][key] for side in ("baseline", "predicted")]
        assert drawn.get(label, [0.0, 0.0]) == pytest.approx(parts, abs=1e-6)
    assert f"{facts['replay_error_pct']:+.2f} %" in text
    assert f"{facts['replay_error_pct']:+.2f} %" in report


def test_what_bounds_the_step_and_what_to_do(ask: Ask, case: tuple[str, str, Prediction], tmp_path: Path) -> None:
    need("matplotlib")
    from whatif.questions.advice.advise import advise
    from whatif.report.plot_advise import advice_figure

    trace, what_if, prediction = case
    page = tmp_path / "report.html"
    assert main(["report", trace, what_if, "-o", str(page), "--quiet"]) == 0
    report = plain(page.read_text(encoding="utf-8"))
    text, facts = ask("advise", trace)
    for sentence in facts["verdict"]:
        assert " ".join(sentence.split()) in text
        assert " ".join(sentence.split()) in report
    figure = advice_figure(advise(prediction.baseline))
    entries = [*(facts["advice"] or facts["no_gain"])[:10], *facts["combinations"][:10]]
    assert [bar.get_width() for bar in figure.axes[0].patches] == pytest.approx([e["gain_pct"] for e in entries])
    for entry in entries[:5]:
        assert f"{entry['gain_pct']:.1f}" in report
    explained_text, explained = ask("explain", trace)
    assert explained["verdict"] in explained_text
    assert explained["verdict"].lower() in report.lower()


def test_a_sweep(ask: Ask, case: tuple[str, str, Prediction]) -> None:
    need("matplotlib")
    from whatif import load_transform
    from whatif.questions.sweep import parse_vary, sweep
    from whatif.report.plot_sweep import sweep_figure

    trace, _, prediction = case
    kind = "gpu" if prediction.graph.on_gpu.any() else "cpu"
    text, facts = ask("sweep", f"scale:kind={kind}", trace, "--vary", "factor=0.25,0.5,0.75")
    transforms = [load_transform(f"scale:kind={kind}")]
    found = sweep(prediction.baseline, transforms, [parse_vary("factor=0.25,0.5,0.75", transforms)])
    notebook = plain(found._repr_html_())
    ms = ms_format(facts["baseline_ms"])
    line = sweep_figure(found).axes[0].lines[0]
    assert line.get_ydata().tolist() == [point["predicted_ms"] for point in facts["points"]]
    for point in facts["points"]:
        row = f"{point['factor']} {ms(point['predicted_ms'])} {ms(point['low_ms'])} … {ms(point['high_ms'])}"
        assert row in text
        assert row in notebook


def test_scaling(ask: Ask, own_traces: Path) -> None:
    need("matplotlib")
    from whatif import load_transform
    from whatif.questions.sweep.scaling import scaling
    from whatif.report.plot_sweep import scaling_figure

    trace = str(own_traces / "transformer_cpu.json.gz")
    text, facts = ask("scaling", trace, "--workers", "1,2,4")
    assert facts["verdict"] in text
    ms = ms_format(facts["baseline_ms"])
    found = scaling(Baseline.of(whatif.read(trace)), [load_transform("distributed")], [1, 2, 4])
    lines = {line.get_label(): line.get_ydata() for axes in scaling_figure(found).axes for line in axes.lines}
    assert list(lines["step"]) == pytest.approx([row["predicted_ms"] for row in facts["rows"]])
    assert list(lines["predicted"]) == pytest.approx([row["throughput"] for row in facts["rows"]])
    for row in facts["rows"]:
        step = f"{row['workers']} {ms(row['predicted_ms'])} {ms(row['low_ms'])} … {ms(row['high_ms'])}"
        assert f"{step} {ms(row['communication_ms'])} {row['throughput']:.2f}× {row['samples_per_s']:.1f}" in text


def test_memory(ask: Ask, own_traces: Path, tmp_path: Path) -> None:
    """The peak and its parts: allocations were not recorded, so all come from shapes."""
    from whatif.report.text_memory import size

    trace, page = str(own_traces / "transformer_cpu.json.gz"), tmp_path / "report.html"
    text, facts = ask("memory", trace)
    assert main(["report", trace, "amp", "-o", str(page), "--quiet"]) == 0
    report = plain(page.read_text(encoding="utf-8"))
    assert facts["peak_bytes"] == facts["peak"]["total_bytes"]
    for where in (text, report):
        assert f"A step needs {size(facts['peak_bytes'])} at its peak" in where
        for key in ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes", "workspace_bytes"):
            assert size(facts["peak"][key]) in where
    for what_if in facts["what_ifs"]:
        if what_if.get("peak_bytes"):
            assert size(what_if["peak_bytes"]) in text


def test_two_recordings(ask: Ask, own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("matplotlib")
    from whatif.questions.comparison.compare import compare
    from whatif.questions.comparison.two_recordings import TwoRecordings
    from whatif.report.plot_compare import comparison_figure

    paths = [str(own_traces / f"transformer_cpu{name}.json.gz") for name in ("", "_fused")]
    text, facts = ask("compare", *paths)
    ms = ms_format(max(facts[side]["step_ms"] for side in "ab"))
    headline = f"{ms(facts['a']['step_ms'])} → {ms(facts['b']['step_ms'])} ms a step, {facts['change_pct']:+.1f} %"
    assert headline in text
    assert facts["what_if"]["sentence"] in text
    figure = comparison_figure(compare(TwoRecordings.of(*map(whatif.read, paths)), describe=False))
    assert figure.get_suptitle().startswith(headline)
    drawn = [bar.get_width() for axes in figure.axes[1:] for bar in axes.patches]
    for part in facts["phases"][:3]:
        assert f"{part['phase']} {ms(part['a']['cpu_ms'])} {ms(part['b']['cpu_ms'])}" in text
    for kind in ("layers", "kernels"):
        changes = [part["change_cpu_ms"] + part["change_gpu_ms"] for part in facts[kind][:5]]
        assert all(any(width == pytest.approx(change, abs=1e-5) for width in drawn) for change in changes)
    assert main(["check", "--baseline", *paths, "--json"]) == 0
    gate = json.loads(capsys.readouterr().out)
    assert (gate["change_pct"], gate["noise_pct"]) == (facts["change_pct"], facts["noise_pct"])
    assert gate["changed"]["step_ms"] == facts["b"]["step_ms"]


def test_sensitivity(ask: Ask, case: tuple[str, str, Prediction]) -> None:
    """The gain of a part that takes no time at all: the last point of its curve, the last column of its row."""
    need("matplotlib")
    from whatif.questions.sensitivity import sensitivity
    from whatif.report.plot_sensitivity import sensitivity_figure

    trace, _, prediction = case
    text, facts = ask("explain", trace, "--sensitivity")
    figure = sensitivity_figure(sensitivity(prediction.baseline))
    curves = {
        (axes.get_title(loc="left"), name.get_text()): line.get_ydata()[-1]
        for axes in figure.axes
        if axes.axison
        for name, line in zip(axes.get_legend().get_texts(), axes.lines, strict=True)
    }
    phases = facts["sensitivity"]["phase"]
    assert phases
    for row in phases:
        gain_pct = 100 * row["gains"][-1]["gain_ms"] / facts["baseline_ms"]
        assert row["gains"][-1]["speedup_pct"] == 100
        assert curves["Phases", row["name"]] == pytest.approx(gain_pct, abs=1e-4)
        assert f" {gain_pct:.1f}" in text


def test_a_recording(ask: Ask, case: tuple[str, str, Prediction]) -> None:
    trace, _, prediction = case
    text, facts = ask("info", trace)
    graph = whatif.read(trace)
    notebook = plain(graph._repr_html_())
    timeline = plain(prediction.baseline.timeline._repr_html_())
    ms = ms_format(facts["measured_ms"])
    assert f"recorded {ms(facts['measured_ms'])} ms" in text
    assert f"{ms(facts['measured_ms'])} ms" in notebook
    for count in facts["tasks"].values():
        assert f" {count:,}" in text
        assert f" {count:,}" in notebook
    busy = ms_format(max(thread["busy_ms"] for thread in facts["threads"]))
    for thread in facts["threads"]:
        assert f"{thread['thread']} {thread['tasks']:,} {busy(thread['busy_ms'])}" in text
        assert thread["thread"] in timeline


def test_names_of_a_trace_are_text_in_a_notebook(tmp_path: Path) -> None:
    """Escaped in tables and pictures; a picture is small."""
    from tests.helpers import CPU, STREAM, Build

    hostile = "</td><script>alert(1)</script>$\\frac{"
    build = Build(CPU, STREAM)
    for n in range(30):
        build.launch(10, 100, f"{hostile}{n}")
    graph = build.graph()
    named = tuple(whatif.Thread(hostile + t.name, t.kind, t.device, t.stream) for t in graph.threads)
    graph = graph.replace(threads=named, info=replace(graph.info, path=hostile.replace("/", "")))
    timeline = whatif.simulate(graph)
    for markup in (graph._repr_html_(), timeline._repr_html_()):
        assert "<script" not in markup
        assert "&lt;script&gt;" in markup
        assert len(markup) < 100_000
    assert len(repr(graph)) < 200
    assert len(repr(timeline)) < 300


def test_without_matplotlib_the_tables_are_there(monkeypatch: pytest.MonkeyPatch, own_traces: Path) -> None:
    import sys

    prediction = apply(whatif.read(own_traces / "lab_dts" / "dnn1.trace.json.gz"), "scale:factor=0.5")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    markup = prediction._repr_html_()
    assert "<table>" in markup
    assert "pip install 'whatif-profiler[plot]'" in markup
