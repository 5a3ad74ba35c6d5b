"""The notebooks run on shipped recordings, are stored without outputs, and print the commands' numbers."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from whatif.cli.main import main

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What a notebook is asked for once it has run: its own variables, as JSON.
ASKED = {
    "1_first_analysis": """{
        "baseline_ms": baseline.step_ns / 1e6, "replay_error_pct": baseline.replay_error_pct,
        "verdict": explanation.verdict, "predicted_ms": prediction.predicted_ms, "low_ms": prediction.low_ms,
        "advice": [[list(entry.trial.spelled), entry.trial.gain_pct] for entry in advice.gaining],
        "curve": [point.step_ms for point in curve.points], "error_pct": error_pct,
    }""",
    "2_daydream_figures": """{
        "errors": [[o.pair.question, list(o.pair.what_ifs), o.error_pct]
                   for o in [*figure_5, *figure_7, *figure_8, *figure_10]],
        "over_theory": float(over_theory.mean()), "shares": shares,
    }""",
    "3_your_own_transform": """{
        "own": [[o.pair.question, o.error_pct] for o in own.outcomes],
        "medians": [unseen[script].score.median_error_pct for script in ("my_batch.py", "my_batch_2.py")],
        "inside": [unseen[script].score.inside for script in ("my_batch.py", "my_batch_2.py")],
        "left": folder.exists(),
    }""",
    "4_daydream_gpu_figures": """{
        "amp": figure_5, "gpu_only": figure_6, "fused": figure_7,
        "update": {network: [float(share) for share in update_of(network)] for network in fused},
        "slower": [[*key, value] for key, value in slower.items()],
        "over_theory": (figure_9["predicted, ms"] / figure_9["theory, ms"] - 1).tolist(),
        "blueconnect": [[*key, value] for key, value in blueconnect.items()], "p3": figure_10,
    }""",
    "5_stock_trace_to_decision": """{
        "share": float(share), "curve": [point.step_ms for point in curve.points], "at_most_pct": at_most_pct,
        "baseline_ms": prediction.baseline_ms, "predicted_ms": prediction.predicted_ms, "decision": decision,
        "advised": [[*e.trial.spelled, e.trial.gain_pct] for e in (*advice.gaining, *advice.not_gaining)],
        "left": folder.exists(),
        "best": None if best is None else [" + ".join(best.spelled), best.gain_pct],
    }""",
}


def test_each_is_run_and_in_the_index() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(ASKED)
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in text for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    """And what a notebook reads lies in this repository."""
    found = json.loads(path.read_text(encoding="utf-8"))
    need("nbformat").validate(need("nbformat").from_dict(found))
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 5
    for cell in code:
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert set(found["metadata"]) == {"kernelspec", "language_info"}
    text = "".join(line for cell in found["cells"] for line in cell["source"])
    assert "/shared" not in text
    for read in re.findall(r'"(\.\./[^"]+)"', text):
        assert (FOLDER / read).exists(), read


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that runs a notebook, in a folder of its own beside the recordings, and gives what it was asked."""
    nbformat, nbclient = need("nbformat"), need("nbclient")
    need("ipykernel")
    need("matplotlib")

    def run(stem: str) -> tuple[dict[str, Any], list[Any]]:
        notebook = nbformat.read(FOLDER / f"{stem}.ipynb", as_version=4)
        asked = f"import json\nprint(json.dumps({ASKED[stem]}))"
        notebook.cells.append(nbformat.v4.new_code_cell(asked))
        place = tmp_path_factory.mktemp(stem)
        (place / "notebooks").mkdir()
        for read in ("traces", "benchmarks"):
            (place / read).symlink_to(FOLDER.parent / read)
        client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": place / "notebooks"}})
        client.execute()
        assert list((place / "notebooks").iterdir()) == []
        *outputs, last = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
        return json.loads(last["text"]), outputs

    return run


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json", "--quiet"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def some(folder: Path, place: Path, *prefixes: str) -> str:
    """A folder with those of the records and recordings whose names begin so."""
    chosen = place / folder.name
    chosen.mkdir()
    for path in folder.iterdir():
        if path.name.startswith(prefixes):
            (chosen / path.name).symlink_to(path)
    return str(chosen)


def shown(outputs: list[Any], kind: str) -> list[str]:
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


def test_a_first_analysis_says_what_the_commands_say(
    ran: Any, own_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, outputs = ran("1_first_analysis")
    trace = str(own_traces / "resnet18_cifar_cpu_loader0.json.gz")
    explained = as_json(capsys, "explain", trace)
    assert found["baseline_ms"] == explained["baseline_ms"]
    assert found["replay_error_pct"] == explained["replay_error_pct"]
    assert found["verdict"] == explained["verdict"]
    applied = as_json(capsys, "apply", "data_loading:workers=2", trace)
    assert (found["predicted_ms"], found["low_ms"]) == (applied["predicted_ms"], applied["low_ms"])
    advised = as_json(capsys, "advise", trace, "--top", "6")
    assert found["advice"] == [[entry["what_ifs"], entry["gain_pct"]] for entry in advised["advice"]]
    swept = as_json(capsys, "sweep", "data_loading:workers=2", "distributed:workers=4", trace, "--vary",
                    "bandwidth=100Mbps..100Gbps:7")  # fmt: skip
    assert found["curve"] == [point["predicted_ms"] for point in swept["points"]]
    assert abs(found["error_pct"]) < 12
    tables = shown(outputs, "text/html")
    assert any("22,1" in html or "tasks" in html for html in tables[:1])
    assert any(f"{applied['predicted_ms']:.2f}" in html for html in tables)
    assert len(shown(outputs, "image/svg+xml")) == 2
    assert all(len(text) < 300 for text in shown(outputs, "text/plain"))


def test_daydreams_figures_are_those_of_validate(
    ran: Any, own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, outputs = ran("2_daydream_figures")
    campaign = some(own_traces / "campaign_cpu", tmp_path, "vgg19-", "gnmt-")
    lab = some(own_traces / "lab_cpu", tmp_path, "mlp.", "ddp-mlp", "gpt2.", "parameter_server-")
    validated = as_json(capsys, "validate", campaign, lab)
    errors = {(pair["question"], tuple(pair["what_ifs"])): pair["error_pct"] for pair in validated["pairs"]}
    assert len(found["errors"]) > 30
    same = [(error, errors[q, tuple(w)]) for q, w, error in found["errors"] if (q, tuple(w)) in errors]
    assert len(same) == 3 + 4 + 4
    assert all(one == pytest.approx(other) for one, other in same)
    assert -0.1 < found["over_theory"] < 0.34
    assert all(0 < share < 0.5 for share in found["shares"].values())
    assert len(shown(outputs, "image/svg+xml")) == 6


def test_a_transform_of_ones_own_is_scored_as_the_librarys(
    ran: Any, own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = ran("3_your_own_transform")
    validated = as_json(capsys, "validate", some(own_traces / "campaign_cpu", tmp_path, "vgg19-", "gnmt-"))
    errors = {pair["question"]: pair["error_pct"] for pair in validated["pairs"]}
    assert len(found["own"]) == 14
    same = [(error_pct, errors[question]) for question, error_pct in found["own"] if question in errors]
    assert len(same) == 4
    assert all(one == pytest.approx(other) for one, other in same)
    first, second = found["medians"]
    assert second < first < 20
    assert found["inside"][0] < found["inside"][1]
    assert not found["left"]


def test_trends_of_daydreams_figures_on_predicted_gpu_steps(ran: Any) -> None:
    found, outputs = ran("4_daydream_gpu_figures")
    # "generally less than 2x", section 6.2; not so GNMT, whose LSTMs cuDNN runs: predicted 2.39 times.
    assert all(1 < gain < 2 for network, gain in found["amp"].items() if network != "gnmt")
    assert 1 < found["amp"]["gnmt"] < 2.5
    assert all(share > 0.9 for share in found["gpu_only"].values())  # "mostly from the reduction of GPU-only runtime"
    shares, kernels = ({network: one[n] for network, one in found["update"].items()} for n in (0, 1))
    assert shares["gnmt"] < shares["bert-base"] < shares["bert-large"]
    assert found["fused"]["gnmt"] < found["fused"]["bert-base"] < found["fused"]["bert-large"]
    assert kernels["bert-large"] == pytest.approx(2 * kernels["bert-base"], rel=0.05)  # 5,164 and 2,633 in section 6.3
    slower = {(network, gpus, gbps): value for network, gpus, gbps, value in found["slower"]}
    assert len(slower) == 3 * 3 * 3
    for (network, gpus, gbps), value in slower.items():
        assert gbps == 40 or value > slower[network, gpus, 2 * gbps]
        assert gpus == 1 or value > slower[network, gpus // 2, gbps]
    assert len(found["over_theory"]) > 5
    assert all(0 < over < 0.01 for over in found["over_theory"])
    blueconnect = {(network, gpus): gain for network, gpus, gain in found["blueconnect"]}
    assert all(1 < blueconnect[network, 2] < blueconnect[network, 4] for network in ("gnmt", "bert-base"))
    for network, balanced in (("resnet50", "2"), ("vgg19", "8")):
        gains = list(found["p3"][network].items())
        down = [gain for gbps, gain in gains if int(gbps) >= int(balanced)]
        assert all(after > before - 1e-3 for before, after in itertools.pairwise(down))
        assert down[0] == pytest.approx(1, abs=0.01)
        assert 1.2 < down[-1] < 1.6
    # A prediction of more than two seconds leaves the empty frame of its progress bar.
    tables = [page for page in shown(outputs, "text/html") if "<table" in page]
    pictures = shown(outputs, "image/svg+xml")
    assert (len(tables), len(pictures)) == (7, 1)
    assert all("predicted, not recorded" in page for page in (*tables, *pictures))
    # The last table has the numbers of the paper's text.
    assert all(said in tables[-1] for said in ("2,633 kernels", "5,164 kernels", "34 % on average", "at most 16.2 %"))


def test_a_stock_trace_leads_to_a_decision(ran: Any) -> None:
    """The times differ from run to run; what they say of each other does not."""
    found, outputs = ran("5_stock_trace_to_decision")
    assert 0 < found["share"] < 1
    one, _, four, eight, sixteen, endless = found["curve"]
    assert one == pytest.approx(found["baseline_ms"])
    assert one > four > eight > sixteen > endless > one * (1 - found["share"]) * 0.9
    assert four == pytest.approx(found["predicted_ms"])
    # A duration is a whole number of ns: of a step of some ms, shares agree to a thousandth of a percent.
    assert found["at_most_pct"] == pytest.approx(100 * (1 - endless / one), abs=1e-3)
    gains = {tuple(names): gain for *names, gain in found["advised"]}
    own = gains[("faster_gelu:speedup=4",)]
    assert own == pytest.approx(100 * (1 - four / one), abs=1e-3)
    name, gain = found["best"] or ("", 0.0)
    assert found["decision"].startswith(f"Do {name} first" if gain >= found["at_most_pct"] else "Write the kernel")
    assert len(shown(outputs, "image/svg+xml")) == 3
    assert not found["left"]
