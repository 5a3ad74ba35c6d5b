"""What the plots draw, as numbers: those of --json, with units, no text over another, and the same bytes twice."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import whatif
from tests.cli.test_commands import training
from tests.helpers import CPU, STREAM, Build, need, replace, write_trace
from whatif.cli.main import main
from whatif.prediction.baseline import Baseline
from whatif.prediction.predict import Prediction, apply
from whatif.prediction.transform import load_transform
from whatif.questions.validate.validate import Validation, baseline_of, predict
from whatif.questions.validate.validate_pairs import find_pairs
from whatif.runtime.errors import WhatifError
from whatif.simulation.breakdown import Breakdown

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

need("matplotlib")
# Workers and layers are counted.
UNITS = ("ms", "%", "MiB", "GiB", "times", "share", "s (", "workers", "layers, in the order", "cost of")
LONG = "void at::native::vectorized_elementwise_kernel<4, at::native::$CUDAFunctor_add$<float>, std::array<char*, 3ul>>"


@pytest.fixture(scope="module")
def prediction(own_traces: Path) -> Prediction:
    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    return apply(baseline, "fused_adam", "distributed:workers=2,bandwidth=100Mbps")


@pytest.fixture(scope="module")
def validation(own_traces: Path) -> Validation:
    pairs, _ = find_pairs([own_traces / "campaign_cpu"])
    chosen = [pair for pair in pairs if pair.baseline.name.startswith(("vgg19", "gnmt")) and len(pair.what_ifs) == 1]
    outcomes = tuple(predict(pair, baseline_of(pair, True)) for pair in chosen)  # type: ignore[arg-type]
    assert len(outcomes) > 8
    return Validation(outcomes, (), True)


# -- what every plot has to be ----------------------------------------------------------------------------------------


def check_readable(figure: Figure) -> None:
    """Units on every axis that counts, a title of one line, and no text over another or cut by the edge."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    assert "\n" not in figure.get_suptitle()
    page = figure.bbox
    for axes in figure.axes:
        if not axes.axison:
            continue
        for axis in (axes.xaxis, axes.yaxis):
            labels = [
                label for label in axis.get_ticklabels(which="both") if label.get_text() and _inside(label, axes, axis)
            ]
            boxes = [label.get_window_extent(renderer) for label in labels]
            for one, other in combinations(boxes, 2):
                assert not _overlap(one, other), [label.get_text() for label in labels]
            if not labels:
                continue
            is_named = any(_is_word(label.get_text()) for label in labels)
            axis_text = axis.get_label_text() + axes.get_title(loc="left")
            assert is_named or any(unit in axis_text for unit in UNITS), axis_text
        for text in [*axes.texts, *(axes.get_legend().get_texts() if axes.get_legend() else ())]:
            if text.get_text():
                box = text.get_window_extent(renderer)
                assert page.x0 - 1 <= box.x0
                assert box.x1 <= page.x1 + 1, text.get_text()
                assert page.y0 - 1 <= box.y0
                assert box.y1 <= page.y1 + 1, text.get_text()


def _inside(label: Any, axes: Any, axis: Any) -> bool:
    low, high = sorted(axes.get_xlim() if axis is axes.xaxis else axes.get_ylim())
    place = label.get_position()[0 if axis is axes.xaxis else 1]
    return bool(low <= place <= high)


def _is_word(text: str) -> bool:
    try:
        float(text.replace("−", "-").replace("$", "").replace(",", ""))
    except ValueError:
        return not text.startswith("$")  # a power of ten
    return False


def _overlap(one: Any, other: Any) -> bool:
    return bool(min(one.x1, other.x1) - max(one.x0, other.x0) > 1 and min(one.y1, other.y1) - max(one.y0, other.y0) > 1)


def widths(figure: Figure, axes: int = 0) -> list[float]:
    return [float(patch.get_width()) for patch in figure.axes[axes].patches if hasattr(patch, "get_width")]


# -- breakdown, of predictions and of recordings ----------------------------------------------------------------------


def test_the_recorded_step_is_named_if_the_cost_of_the_profiler_was_estimated(shared_traces: Path) -> None:
    from whatif.report.plot_breakdown import prediction_figure

    graph = whatif.read(shared_traces / "kineto-resnet50-v100" / "num_workers_4.2021-06.pt.trace.json.gz")
    figure = prediction_figure(apply(Baseline.of(graph), "scale:kind=gpu,factor=0.5"))
    (diamond,) = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert diamond.get_label() == "recorded, with the profiler's cost"


def test_bars_are_the_parts_of_the_prediction(prediction: Prediction) -> None:
    from whatif.report.plot_breakdown import prediction_figure

    figure = prediction_figure(prediction)
    check_readable(figure)
    as_dict = prediction.to_dict()
    shown = {}
    for container in figure.axes[0].containers:
        if hasattr(container, "patches"):
            shown[container.get_label()] = [bar.get_width() for bar in container.patches]
    parts = [as_dict["breakdown"][side] for side in ("baseline", "predicted")]
    keys = {"CPU only": "cpu_only_ms", "exposed communication": "communication_ms", "neither": "idle_ms"}
    assert shown == {
        label: pytest.approx([part[key] for part in parts], abs=1e-6)
        for label, key in keys.items()
        if any(part[key] for part in parts)
    }
    assert sum(bars[1] for bars in shown.values()) == pytest.approx(as_dict["predicted_ms"])
    (diamond,) = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert diamond.get_xdata().tolist() == [as_dict["measured_ms"]]
    # The bar is without the profiler where the recording has that; the diamond never is, and no number misleads.
    corrected = prediction.baseline.calibration is not None
    assert diamond.get_label() == ("recorded, with the profiler's cost" if corrected else "recorded")
    numbers = [
        text.get_text()
        for text in figure.axes[0].texts
        if text.get_text().startswith(f"{as_dict['baseline_ms']:.2f} ms")
    ]
    same = f"{as_dict['measured_ms']:.2f}" == f"{as_dict['baseline_ms']:.2f}"
    assert numbers == [f"{as_dict['baseline_ms']:.2f} ms" + ("" if same else f" (◆ {as_dict['measured_ms']:.2f})")]
    ends = [line.get_xdata() for line in figure.axes[0].lines if line.get_marker() == "|"]
    assert sorted(float(end[0]) for end in ends) == pytest.approx([as_dict["low_ms"], as_dict["high_ms"]])


def test_steps_of_any_size_are_drawn() -> None:
    """Nothing, almost nothing, a year, one bar and many: no warning, no overlap."""
    from whatif.report.plot_breakdown import Bar, bars_figure

    def bar(name: str, step_ms: float) -> Bar:
        part = step_ms / 4
        return Bar(
            name,
            Breakdown(part, part, part, part, 0.0, step_ms, step_ms),
            step_ms,
            0.9 * step_ms,
            1.2 * step_ms,
            step_ms,
        )

    for steps in ([0.0], [1e-6], [3e10, 1.0], [float(n) for n in range(1, 24)]):
        figure = bars_figure([bar(f"{LONG} {n}", step) for n, step in enumerate(steps)], "a step, ms", LONG)
        check_readable(figure)
        assert len(figure.axes[0].get_yticks()) == len(steps)


def test_parts_can_be_distinguished_without_colour() -> None:
    from matplotlib.colors import to_rgb

    from whatif.report.plot_breakdown import PART_COLORS, PART_HATCHES

    grey = [float(np.dot(to_rgb(color), (0.299, 0.587, 0.114))) for color in PART_COLORS]
    for one, other in combinations(range(len(grey)), 2):
        assert PART_HATCHES[one] != PART_HATCHES[other] or abs(grey[one] - grey[other]) > 0.2


def test_comparison_shows_both_recordings_and_the_changes(own_traces: Path) -> None:
    from whatif.questions.comparison.compare import compare
    from whatif.questions.comparison.two_recordings import TwoRecordings
    from whatif.report.plot_compare import comparison_figure

    before, after = (
        whatif.read(own_traces / name) for name in ("transformer_cpu.json.gz", "transformer_cpu_fused.json.gz")
    )
    found = compare(TwoRecordings.of(before, after), describe=False)
    figure = comparison_figure(found, top=5)
    check_readable(figure)
    as_dict = found.to_dict()
    assert widths(figure)[:2] == pytest.approx([as_dict[side]["breakdown"]["cpu_only_ms"] for side in "ab"], abs=1e-6)
    assert widths(figure, 2) == pytest.approx([part.work_change_ms for part in found.kernels[:5]])
    same = comparison_figure(compare(TwoRecordings.of(before, before), describe=False))
    check_readable(same)
    assert [text.get_text() for text in same.axes[1].texts] == ["nothing changed"]
    # Without layers nobody can say that they are as they were: phases stand there.
    unlayered = comparison_figure(replace(found, layers=()), top=5)
    check_readable(unlayered)
    assert unlayered.axes[1].get_title("left").startswith("phases")
    assert widths(unlayered, 1) == pytest.approx([part.work_change_ms for part in found.phases[:5]])


# -- what-ifs ranked --------------------------------------------------------------------------------------------------


def test_gains_are_those_of_the_advice(own_traces: Path) -> None:
    from whatif.prediction.transform import load_transform
    from whatif.questions.advice.advise import advise
    from whatif.questions.advice.candidates import Candidates
    from whatif.report.plot_advise import advice_figure

    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    some = tuple(load_transform(name) for name in ("fused_adam", "amp:target=bf16", "batch_size:factor=2"))
    advice = advise(baseline, Candidates(some, (), ()), top=5)
    figure = advice_figure(advice, top=5)
    check_readable(figure)
    as_dict = advice.to_dict()
    entries = [*as_dict["advice"][:5], *as_dict["combinations"][:5]]
    assert widths(figure) == pytest.approx([entry["gain_pct"] for entry in entries])
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(rows) == len(entries) >= 3
    # Every what-if of a combination is named.
    assert [" ".join(row.split()) for row in rows] == [" + ".join(entry["what_ifs"]) for entry in entries]
    nothing = replace(advice, gaining=(), together=(), not_gaining=advice.gaining)
    assert len(widths(advice_figure(nothing))) == len(advice.gaining)
    with pytest.raises(WhatifError, match="got none to draw"):
        advice_figure(replace(nothing, not_gaining=()))


# -- predictions beside the truth -------------------------------------------------------------------------------------


def test_validation_draws_every_pair(validation: Validation) -> None:
    from whatif.report.plot_validate import validation_figure

    figure = validation_figure(validation)
    check_readable(figure)
    points = figure.axes[0].lines[0]
    pairs = validation.to_dict()["pairs"]
    assert points.get_xdata().tolist() == [pair["measured_ms"] for pair in pairs]
    assert points.get_ydata().tolist() == [pair["predicted_ms"] for pair in pairs]
    errors = [float(line.get_xdata()[0]) for line in figure.axes[1].lines if line.get_marker() in "o^"]
    assert sorted(errors) == pytest.approx(sorted(pair["error_pct"] for pair in pairs))
    assert f"{validation.score.median_error_pct:.1f} %" in figure.get_suptitle()


def test_a_wild_prediction_stays_on_the_page(validation: Validation) -> None:
    from whatif.report.plot_validate import EDGE_PCT, validation_figure

    wild = replace(validation.outcomes[0], predicted_ms=1e9, high_ms=2e9, low_ms=0.0)
    for outcomes in ((wild,), (wild, *validation.outcomes)):
        figure = validation_figure(Validation(outcomes, (), True))
        check_readable(figure)
        assert max(float(line.get_xdata()[0]) for line in figure.axes[1].lines if line.get_marker() in "o^") == EDGE_PCT
    with pytest.raises(WhatifError, match="got none to draw"):
        validation_figure(Validation((), (), True))


def test_truth_stands_between_baseline_and_prediction(validation: Validation) -> None:
    from whatif.report.plot_truth import truth_figure

    chosen = validation.outcomes[:6]
    figure = truth_figure(chosen, [outcome.pair.question for outcome in chosen], "some pairs")
    check_readable(figure)
    heights = [[bar.get_height() for bar in group] for group in figure.axes[0].containers if hasattr(group, "patches")]
    for drawn, field in zip(heights, ("baseline_ms", "measured_ms", "predicted_ms"), strict=True):
        assert drawn == pytest.approx([getattr(outcome, field) / outcome.baseline_ms for outcome in chosen])


# -- curves, memory, timelines ----------------------------------------------------------------------------------------


def test_scaling_and_sweep_draw_their_points(own_traces: Path) -> None:
    from whatif import load_transform
    from whatif.questions.sweep import parse_vary, sweep
    from whatif.questions.sweep.scaling import scaling
    from whatif.report.plot_sweep import scaling_figure, sweep_figure

    baseline = Baseline.of(whatif.read(own_traces / "lab_dts" / "dnn1.trace.json.gz"))
    transforms = [load_transform("distributed:bandwidth=1Gbps")]
    curve = scaling(baseline, transforms, (1, 2, 4, 64))
    figure = scaling_figure(curve)
    check_readable(figure)
    rows = curve.to_dict()["rows"]
    throughput, step = figure.axes[0].lines[1], figure.axes[1].lines[0]
    assert throughput.get_ydata().tolist() == [row["throughput"] for row in rows]
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    ends = [row[f"efficiency_{end}_pct"] * row["workers"] / 100 for row in rows for end in ("low", "high")]
    assert set(np.round(band, 6)) == set(np.round(ends, 6))
    assert step.get_ydata().tolist() == [row["predicted_ms"] for row in rows]
    check_readable(scaling_figure(replace(curve, rows=curve.rows[:1])))
    assert "sending is CPU work" in figure.get_supxlabel()  # as the table says it
    varied = [load_transform("distributed:workers=4")]
    for values in ("1Gbps", "1Gbps,2Gbps", "10Mbps..400Gbps:97", "999.999999Mbps,1.00000001Gbps"):
        found = sweep(baseline, varied, [parse_vary(f"bandwidth={values}", varied)])
        figure = sweep_figure(found)
        check_readable(figure)
        assert figure.axes[0].lines[1].get_label() == "recorded step, simulated"
        drawn = figure.axes[0].lines[0].get_ydata().tolist()
        assert drawn == [point["predicted_ms"] for point in found.to_dict()["points"]]


def test_steps_have_whole_numbers_and_no_colour_that_is_not_drawn(own_traces: Path) -> None:
    """The axis had a step 1.5, and the legend slow steps where there were none."""
    from whatif.questions.uneven_steps import uneven_steps
    from whatif.report.plot_steps import steps_figure

    graph = whatif.read(own_traces / "resnet18_cifar_cpu_loader0.json.gz")
    found = uneven_steps(graph, Baseline.of(graph))
    assert len(found.steps) == 3
    assert not any(step.slow for step in found.steps)
    (axes,) = steps_figure(found).axes
    assert all(tick == int(tick) for tick in axes.get_xticks())
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["others", "median"]


def test_memory_is_stacked_to_its_total(own_traces: Path) -> None:
    from whatif.questions.memory_summary import memory_summary
    from whatif.report.plot_memory import memory_figure

    baseline = Baseline.of(whatif.read(own_traces / "memory_cpu" / "vgg19.trace.json.gz"))
    found = memory_summary(baseline, ["fused_adam"], capacity_bytes=2**30)
    figure = memory_figure(found)
    check_readable(figure)
    top = figure.axes[0].collections[-1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(found.to_dict()["peak_bytes"] / 2**20)
    assert figure.axes[0].get_ylabel() == "memory, MiB"
    assert f"{found.peak.total / 2**20:,.4g} MiB" in figure.get_suptitle()


def test_a_timeline_shows_who_works_in_the_step() -> None:
    """A step of 40 ns, drawn from its first GPU task: the stream works 30 of the 32 ns that are shown."""
    from tests.helpers import step
    from whatif.report.plot_timeline import timeline_figure

    figure = timeline_figure(whatif.simulate(step()))
    check_readable(figure)
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [row.split("  ")[0] for row in rows] == ["CPU", "stream 7"]
    assert rows[1].endswith("100 %")
    empty = Build(CPU, STREAM)
    empty.task(0, 0)
    check_readable(timeline_figure(whatif.simulate(empty.graph())))


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_trace(tmp_path_factory.mktemp("plots") / "run.json", training()))


COMMANDS: dict[str, Callable[[str, Path], list[str]]] = {
    "apply": lambda trace, _: ["apply", "scale:kind=gpu,factor=0.5", trace],
    "advise": lambda trace, _: ["advise", trace],
    "compare": lambda trace, _: ["compare", trace, trace],
    "explain": lambda trace, _: ["explain", trace, "--sensitivity"],
    "sweep": lambda trace, _: ["sweep", "scale:kind=gpu", trace, "--vary", "factor=0.5,1"],
    "validate": lambda _, traces: ["validate", str(traces / "ranks_cpu" / "pairs.toml")],
    "memory": lambda _, traces: ["memory", str(traces / "lab_dts" / "dnn1.trace.json.gz"), "fused_adam"],
    "scaling": lambda _, traces: ["scaling", str(traces / "lab_dts" / "dnn1.trace.json.gz"), "--workers", "1,2"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_compares_draws(
    command: str, gpu_trace: str, own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reported in text and as JSON; nothing but the file is written; an impossible name is reported before the work."""
    words = COMMANDS[command](gpu_trace, own_traces)
    plot = tmp_path / "plot.svg"
    assert main([*words, "--plot", str(plot), "--quiet"]) == 0
    assert capsys.readouterr().out.endswith(f"\n  {plot}: written\n")
    first = plot.read_bytes()
    assert first.startswith(b"<?xml")
    assert b"<dc:date>" not in first
    assert main([*words, "--plot", str(plot), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plot"] == str(plot)
    assert plot.read_bytes() == first
    assert list(tmp_path.iterdir()) == [plot]
    assert main([*words, "--plot", str(tmp_path / "plot.bmp")]) == 1
    assert "expected a plot's name that ends in .png, .svg, .pdf" in capsys.readouterr().err


def test_a_plot_replaces_no_trace(own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("a.png", "b.png")
    for name in names:
        (tmp_path / name).write_bytes((own_traces / "lab_dts" / "dnn1.trace.json.gz").read_bytes())
    traces = [str(tmp_path / name) for name in names]
    for words in (["compare", *traces], ["apply", "scale", traces[1]], ["advise", traces[1]]):
        assert main([*words, "--plot", traces[1]]) == 1
        assert "expected another file than the trace itself" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_the_same_prediction_gives_the_same_bytes(ending: str, prediction: Prediction, tmp_path: Path) -> None:
    from whatif.report.plot_breakdown import prediction_figure
    from whatif.report.plots import save

    for name in ("a", "b"):
        save(prediction_figure(prediction), tmp_path / (name + ending))
    assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()


def test_numbers_are_finite_in_every_plot_of_an_empty_step(tmp_path: Path) -> None:
    """A prediction that leaves nothing of the step: infinitely as fast, and drawn."""
    from whatif.report.plot_breakdown import prediction_figure

    graph = whatif.read(write_trace(tmp_path / "run.json", training()))
    nothing = apply(graph, "scale:factor=0")
    figure = prediction_figure(nothing)
    check_readable(figure)
    assert all(math.isfinite(width) for width in widths(figure))
    hostile = graph.replace(info=replace(graph.info, path="/tmp/$\\frac{a}{b}$ <b>\n\x1b[31m.json"))
    figure = prediction_figure(apply(hostile, "scale:factor=0.5"))
    assert figure.get_suptitle().startswith("$\\frac{a}{b}$ <b> �[31m.json")
    check_readable(figure)


# -- hardware that nobody has at hand ---------------------------------------------------------------------------------


def test_devices_are_in_rank_order(gpu_trace: str) -> None:
    from whatif.questions.recommend.ranking import recommend
    from whatif.report.plot_recommend import recommendation_figure

    graph = whatif.read(gpu_trace)
    graph = graph.replace(info=replace(graph.info, gpu="Tesla V100-SXM2-16GB"))
    found = recommend(Baseline.of(graph), devices=["V100-SXM2-16", "A100-SXM-80", "H100-SXM-80"])
    figure = recommendation_figure(found)
    check_readable(figure)
    devices = found.to_dict()["devices"]
    assert widths(figure) == [device["predicted_ms"] for device in devices]
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [row.removesuffix(" (recorded)") for row in rows] == [device["device"] for device in devices]
    assert [row.endswith(" (recorded)") for row in rows] == [device["recorded"] for device in devices]
    priced = replace(found, candidates=tuple(replace(row, cost=0.001) for row in found.candidates), currency="EUR")
    check_readable(recommendation_figure(priced))
    assert "EUR" in recommendation_figure(priced).axes[1].get_xlabel()
    with pytest.raises(WhatifError, match="got none to draw"):
        recommendation_figure(replace(found, candidates=()))


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_roles_lie_apart_and_are_named(n: int) -> None:
    import networkx
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from whatif.report.plot_network import draw

    graph: networkx.DiGraph[str] = networkx.DiGraph(name="pipeline_learning")
    names = [f"a-board-that-is-called-{place}" for place in range(n)]
    for place, name in enumerate(names):
        graph.add_node(name, role=f"worker {place + 1}")
    for one, other in pairwise(names):
        graph.add_edge(one, other, size_bytes=800, byte_s=1e8)
        graph.add_edge(other, one, size_bytes=800_000_000, byte_s=1e8)
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    draw(axes, graph)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    nodes = [text for text in axes.texts if text.get_text().startswith("worker")]
    assert ["".join(text.get_text().split("\n")[1:]) for text in nodes] == names
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in nodes]
    assert not any(_overlap(one, other) for one, other in combinations(boxes, 2))
    sizes = {text.get_text() for text in axes.texts} - {text.get_text() for text in nodes}
    assert sizes == ({"0.8 kB", "800 MB"} if n > 1 else set())


def test_results_draw_themselves(own_traces: Path) -> None:
    """`.plot()` is the figure of the command's `--plot`; a prediction is made of a file too."""
    from whatif.questions.sweep.scaling import scaling
    from whatif.questions.sweep.sweep import sweep
    from whatif.questions.sweep.values import parse_vary

    path = own_traces / "transformer_cpu_fused.json.gz"
    prediction = whatif.apply(str(path), "scale:factor=0.5")
    assert prediction.predicted_ms == whatif.apply(whatif.read(path), "scale:factor=0.5").predicted_ms
    scale, exchange = [load_transform("scale")], [load_transform("distributed:bandwidth=25Gbps")]
    found = [
        prediction,
        prediction.timeline,
        sweep(prediction.baseline, scale, [parse_vary("factor=0.5,0.8", scale)]),
        scaling(prediction.baseline, exchange, (1, 2)),
    ]
    for one in found:
        assert one.plot().axes


def test_without_matplotlib_a_figure_says_what_to_install(own_traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = whatif.apply(own_traces / "transformer_cpu_fused.json.gz", "scale:factor=0.5")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for shown in (prediction, prediction.timeline):
        with pytest.raises(WhatifError, match="pip install 'whatif-profiler"):
            shown.plot()
