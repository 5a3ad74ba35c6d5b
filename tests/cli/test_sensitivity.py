"""``whatif explain --sensitivity``: the tables, the JSON object, the plot, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from tests.test_sensitivity import baseline, launches, three_kernels
from whatif.cli.main import main
from whatif.questions.explain import explain
from whatif.questions.sensitivity import sensitivity
from whatif.report.text_sensitivity import print_sensitivity

MAGIC = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture(scope="module")
def trace(own_traces: Path) -> str:
    return str(own_traces / "transformer_cpu.json.gz")


def failed(capsys: pytest.CaptureFixture[str], *words: str, status: int) -> str:
    assert main(["explain", *words]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    drawn = three_kernels()
    print_sensitivity(sensitivity(drawn, top=2), explain(drawn))
    assert capsys.readouterr().out == GOLDEN


GOLDEN = """\
gain if one part takes half its time: best kernel family: gemm, 33.3 % of the whole span; best
layer: A, 11.1 % of the whole span.
GPU-bound: the GPU is busy 0.0090 of 0.0090 ms (100 %), 77 % of its work in gemm kernels; a faster
CPU would change little.
hand.json: the whole span takes 0.0090 ms (first to last task of the device)

  10 %, 50 %, 100 %: gain, in percent of the whole span, if the part takes that much less time
  work %: of the whole span; it adds up over threads, so it can be above 100

GPU and CPU
                 work ms   work %   10 %   50 %   100 %
  all GPU work    0.0130    144.4   10.0   33.3    55.6
  all CPU work    0.0040     44.4    0.0    0.0     0.0   changes nothing

Phases
                 work ms   work %   10 %   50 %   100 %
  forward         0.0170    188.9   10.0   50.0   100.0

Execution threads (2 of 3)
                 work ms   work %   10 %   50 %   100 %
  stream 7        0.0090    100.0   10.0   11.1    11.1   mostly hidden
  CPU             0.0040     44.4    0.0    0.0     0.0   changes nothing

Kernel families
                 work ms   work %   10 %   50 %   100 %
  gemm            0.0100    111.1    6.7   33.3    44.4
  elementwise     0.0030     33.3    3.3   11.1    11.1

Layers (2 of 3)
                 work ms   work %   10 %   50 %   100 %
  A               0.0060     66.7    6.7   11.1    11.1   mostly hidden
  B               0.0030     33.3    3.3   11.1    11.1

  mostly hidden: overlaps with other work; less than 25 % of its time counts
  changes nothing: the whole span takes as long even if the part takes no time
"""


def test_nothing_to_work_on_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Host-bound: no kernel matters, and there are no layers."""
    steps: dict[str, Any] = {"n_steps": 5, "steady": (1, 4), "measured_step_ns": {"gpu": (40,) * 4}}
    bound = baseline(launches(5, 40, 30), **steps)
    print_sensitivity(sensitivity(bound), explain(bound))
    text = capsys.readouterr().out
    assert text.startswith("no kernel family shortens a step by 0.5 % if it takes 50 % less time.\n")
    assert "none in this trace: record with `whatif collect`" in text
    assert "changes nothing: a step takes as long even if the part takes no time" in text
    assert "mostly hidden" not in text


def test_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", trace, "--sensitivity", "--top", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speedups_pct"] == [10, 50, 100]
    assert found["step_clock"] == "mark"
    assert set(found["sensitivity"]) == {"phase", "thread", "family", "layer"}
    assert found["parts"]["layer"] > 3
    for parts in found["sensitivity"].values():
        assert 1 <= len(parts) <= 3
        at_half = [part["gains"][1]["gain_ms"] for part in parts]
        assert at_half == sorted(at_half, reverse=True)
        for part in parts:
            for gain in part["gains"]:
                assert gain["gain_pct"] == pytest.approx(100 * gain["gain_ms"] / found["baseline_ms"], abs=1e-3)


def test_command_prints_tables(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", trace, "--sensitivity", "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("gain if one part takes half its time: ")
    assert "Layers (3 of " in text


@pytest.mark.parametrize("ending", MAGIC)
def test_plot(trace: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("matplotlib")
    plot = tmp_path / f"gains{ending}"
    plot.write_text("an older plot")
    assert main(["explain", trace, "--sensitivity", "--plot", str(plot)]) == 0
    assert capsys.readouterr().out.endswith(f"\n  {plot}: written\n")
    drawn = plot.read_bytes()
    assert drawn.startswith(MAGIC[ending])
    assert main(["explain", trace, "--sensitivity", "--json", "--plot", str(plot)]) == 0
    assert json.loads(capsys.readouterr().out)["plot"] == str(plot)
    assert plot.read_bytes() == drawn
    assert list(tmp_path.iterdir()) == [plot]


def test_plot_has_a_panel_a_kind_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    need("matplotlib")
    from whatif.report.plot_sensitivity import sensitivity_figure

    figure = sensitivity_figure(sensitivity(three_kernels()))
    panels = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in panels] == [
        "GPU and CPU", "Phases", "Execution threads", "Kernel families", "Layers",
    ]  # fmt: skip
    for axes in panels:
        assert "(% of" in axes.get_xlabel()
        assert axes.get_ylabel() == "gain (% of the whole span)"
        assert axes.get_ylim()[1] >= 5
        looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines]
        assert len(set(looks)) == len(looks)
    layers = panels[-1]
    assert [text.get_text() for text in layers.get_legend().get_texts()] == ["A", "B", "C"]
    a = layers.lines[0].get_xydata().tolist()
    assert len(a) == 21
    assert a[2] == pytest.approx([10, 100 * 0.6 / 9])
    assert a[-1] == pytest.approx([100, 100 / 9])


def test_hostile_names_are_drawn_as_they_are(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    need("matplotlib")
    from tests.helpers import CPU, Build
    from whatif.graph.types import TaskKind
    from whatif.report.plot_sensitivity import sensitivity_figure
    from whatif.report.plots import save

    build = Build(CPU)
    names = ["$\\frac{", "_hidden", "two\nlines\x1b[31m", "漢字" * 40, "<script>", ""]
    for name in names:
        build.task(0, 10, name, TaskKind.CPU_OP, layer=name)
    found = sensitivity(baseline(build))
    figure = sensitivity_figure(found)
    layers = next(axes for axes in figure.axes if axes.get_title(loc="left") == "Layers")
    shown = {text.get_text() for text in layers.get_legend().get_texts()}
    assert shown == {"$\\frac{", "_hidden", "two lines�[31m", ("漢字" * 40)[:33] + "…", "<script>"}
    save(sensitivity_figure(found), tmp_path / "hostile.png")
    assert (tmp_path / "hostile.png").read_bytes().startswith(MAGIC[".png"])
    assert not [str(w.message) for w in recwarn if "legend" in str(w.message) or "Glyph" in str(w.message)]


def test_a_plot_alone_is_a_question_unasked(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = failed(capsys, trace, "--plot", "x.png", status=2)
    assert "expected --sensitivity, --efficiency or --by step with --plot" in error


@pytest.mark.parametrize("name", ["gains.jpg", "gains", "gains.png.gz"])
def test_another_ending_is_refused(trace: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = failed(capsys, trace, "--sensitivity", "--plot", str(tmp_path / name), status=1)
    assert "expected a plot's name that ends in .png, .svg, .pdf, got another ending" in error
    assert not list(tmp_path.iterdir())


def test_a_plot_never_takes_the_place_of_its_trace(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need("matplotlib")
    copy = tmp_path / "trace.png"
    copy.write_bytes(Path(trace).read_bytes())
    error = failed(capsys, str(copy), "--sensitivity", "--plot", str(copy), status=1)
    assert "expected another file than the trace itself" in error
    assert copy.read_bytes() == Path(trace).read_bytes()


def test_without_matplotlib_one_sentence_says_what_to_install(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = failed(capsys, trace, "--sensitivity", "--plot", str(tmp_path / "gains.png"), status=1)
    assert "a plot needs matplotlib" in error
    assert "pip install 'whatif-profiler[plot]'" in error
    assert main(["explain", trace, "--sensitivity", "--top", "1"]) == 0  # the table needs none


def test_matplotlib_is_loaded_only_for_a_plot(trace: str) -> None:
    import subprocess

    program = (
        "import sys; from whatif.cli.main import main\n"
        f"assert main(['explain', {trace!r}, '--sensitivity', '--top', '1']) == 0\n"
        "assert 'matplotlib' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
