"""``whatif recommend``: devices ranked by time and cost, and files of prices."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import whatif
from tests.helpers import launched, mark, op, replace, write_trace
from whatif.cli.main import main
from whatif.hardware.gpu import gpu_names
from whatif.prediction.baseline import Baseline
from whatif.questions.recommend.prices import Prices, parse_prices, read_prices
from whatif.questions.recommend.ranking import recommend
from whatif.runtime.errors import WhatifError

VGG = Path("triosim-vgg13-h100") / "vgg13_bs512_adam.json.gz"
PRICES = """
currency = "EUR"
[per_hour]
"A100-SXM-80" = 1.5
"NVIDIA H100 80GB HBM3" = 3
T4 = 0.3
"""


pytestmark = pytest.mark.usefixtures("no_database")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Five steps of one elementwise kernel of 900 us on a V100, which moves what it can; the CPU runs ahead::

    us      0    50   100  150  ...          900          1800
    CPU     |c| |c| |c| |c| |c|
    stream    |k 900 ------------------------|k 900 ------|k ...
    """
    events = []
    for step in range(5):
        at = 50 * step
        shapes: dict[str, Any] = {"Input Dims": [[101_250_000]], "Input type": ["float"], "Concrete Inputs": [""]}
        events += [
            mark(f"ProfilerStep#{step}", at, 49), op("aten::neg", at + 1, 20, **shapes),
            *launched("void neg_elementwise_kernel<float>", at + 5, 10, 20 + 900 * step, 900, step),
        ]  # fmt: skip
    header = {"deviceProperties": [{"id": 0, "name": "Tesla V100-SXM2-32GB", "totalGlobalMem": 34089730048}]}
    return str(write_trace(tmp_path / "neg.json", events, **header))


@pytest.fixture
def prices(tmp_path: Path) -> str:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    return str(path)


def test_the_fastest_comes_first(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", trace, "--devices", "T4,A100-SXM-80,B200-SXM", "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert [row["device"] for row in as_json["devices"]] == ["B200-SXM", "A100-SXM-80", "V100-SXM2-32", "T4"]
    by_name = {row["device"]: row for row in as_json["devices"]}
    assert as_json["ranked_by"] == "time"
    assert by_name["V100-SXM2-32"]["recorded"]
    assert by_name["V100-SXM2-32"]["predicted_ms"] == pytest.approx(as_json["baseline_ms"])
    # A step is the kernel, whose bytes follow the bandwidth that each device sustains.
    busy = {name: row["gpu_busy_ms"] for name, row in by_name.items()}
    assert busy["A100-SXM-80"] == pytest.approx(0.9 * 900 * 0.88 / (2039 * 0.84), rel=0.02)
    assert busy["T4"] == pytest.approx(0.9 * 900 * 0.88 / (320 * 0.75), rel=0.02)
    for row in as_json["devices"]:
        assert row["low_ms"] <= row["predicted_ms"] <= row["high_ms"]
        assert row["step_cost"] is None


def test_a_predicted_step_has_no_replay_error(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(own_traces / "predicted" / "resnet50_a100_predicted.json.gz")
    assert main(["recommend", path, "--devices", "T4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replay_error_pct"] is None


def test_every_known_device_where_none_is_named(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", trace, "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    every = set(gpu_names()) - {"MI250", "MI250X"}  # boards of two dies, of which a rank has one
    assert {row["device"] for row in as_json["devices"]} == every
    assert main(["recommend", trace, "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert f"{len(every) - 3} more devices" in out
    assert main(["recommend", trace, "--devices", "MI250X,H100", "--json"]) == 0
    named = {row["device"]: row for row in json.loads(capsys.readouterr().out)["devices"]}
    assert len(named) == 3  # the recorded one too
    assert "H100-SXM-80" in named  # named without its board: the one that trains
    assert any("to=MI250X-GCD" in note for note in named["MI250X"]["notes"])


def test_prices_rank_by_cost(trace: str, prices: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", trace, "--prices", prices, "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert (as_json["ranked_by"], as_json["currency"]) == ("cost", "EUR")
    rows = {row["device"]: row for row in as_json["devices"]}
    assert set(rows) == {"A100-SXM-80", "H100-SXM-80", "T4", "V100-SXM2-32"}
    priced = [row for row in as_json["devices"] if row["step_cost"] is not None]
    assert [row["step_cost"] for row in priced] == sorted(row["step_cost"] for row in priced)
    assert rows["V100-SXM2-32"] is as_json["devices"][-1]  # it has no price
    assert rows["T4"]["step_cost"] == pytest.approx(0.3 * rows["T4"]["predicted_ms"] / 3.6e6)
    assert main(["recommend", trace, "--prices", prices, "--by", "time", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["device"] == "H100-SXM-80"


def test_the_table_fits_a_narrow_page(
    trace: str, prices: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recommend", trace, "--prices", prices]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("EUR for a thousand steps")
    assert "cheapest of those priced" in lines[0]  # the recorded device, the V100, has none
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:2] == ["V100-SXM2-32", "*"] for line in lines)
    assert "samples/s" not in " ".join(lines)  # the batch is unknown


def test_a_step_that_does_not_fit_is_left_out(
    shared_traces: Path, prices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """VGG-13 with 512 samples needs 37 GiB; the batch is unknown, so that an epoch has no hours."""
    assert main(["recommend", str(shared_traces / VGG), "--prices", prices, "--epoch-samples", "1000"]) == 0
    out = capsys.readouterr().out
    assert "left out T4: needs " in out
    assert "has 16" in out
    assert "epoch (h)" not in out
    assert "lacks its batch size" in out


def test_an_epoch_costs_its_steps(shared_traces: Path) -> None:
    graph = whatif.read(shared_traces / VGG, step_count=4)
    baseline = Baseline.of(graph.replace(info=replace(graph.info, batch_size=512)))
    (one, *_) = recommend(
        baseline, devices=["H100-SXM-80"], prices=Prices("EUR", {"H100-SXM-80": 3.6}), epoch_samples=5120
    ).candidates
    assert one.recorded
    assert one.epoch_hours == pytest.approx(10 * baseline.step_ns / 3.6e12)
    assert one.epoch_cost == pytest.approx(10 * (one.cost or 0))
    assert one.cost == pytest.approx(baseline.step_ns / 1e12)


def test_what_ifs_go_with_each_device(shared_traces: Path) -> None:
    """What a device has no units for leaves it out, with the reason."""
    baseline = Baseline.of(whatif.read(shared_traces / VGG))
    found = recommend(baseline, [whatif.load_transform("tf32")], ["A100-SXM-80", "V100-SXM2-32"])
    assert {candidate.device for candidate in found.candidates} == {"A100-SXM-80", "H100-SXM-80"}
    assert "TF32 tensor cores" in found.left_out["V100-SXM2-32"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "A100-SXM-8O"], "expected the name of a known GPU, got 'A100-SXM-8O': the closest are "),
        (["--by", "cost"], "expected a file of prices to rank by cost"),
        (["--prices", "nosuch.toml"], "expected a file of prices"),
        (["--epoch-samples", "0"], "expected --epoch-samples of 1 or more"),
        (["nosuchthing"], "nosuchthing"),
        (["--devices", ","], "expected --devices A,B, as in A100-SXM-80,L40S, got no name"),
        (["device:to=T4"], "expected what-ifs that go with each device, got device"),
    ],
)
def test_mistakes_are_one_sentence(
    trace: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend", trace, *words]) in (1, 2)
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.strip().splitlines()) == 1


@pytest.mark.parametrize("gpu", ["", "ARTEMIS"])
def test_nothing_states_the_ratio_to_an_unknown_device(trace: str, gpu: str) -> None:
    """Every other device would seem as fast as it."""
    graph = whatif.read(trace)
    baseline = Baseline.of(graph.replace(info=replace(graph.info, gpu=gpu, gpu_memory_bytes=None)))
    with pytest.raises(WhatifError, match=gpu or "does not name its GPU"):
        recommend(baseline)


def test_where_no_device_can_the_reasons_remain(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", trace, "fp8", "--devices", "T4,P4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("none of the devices can run the step")
    assert "left out T4: fp8: expected a GPU with fp8 tensor cores" in " ".join(out.split())
    assert "samples/s" not in out


def test_a_cpu_has_no_other_gpu(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", str(own_traces / "transformer_cpu.json.gz")]) == 1
    assert "expected the recording of a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[per_hour]\nT4 = -1", "per_hour.T4: expected a price above 0"),
        ("[per_hour]\nT4 = true", "expected a price above 0"),
        ("[per_hour]\nT4 = nan", "expected a price above 0"),
        ("[per_hour]\nT5 = 1", "expected the name of a known GPU, got 'T5'"),
        ('[per_hour]\n"A100-SXM-80" = 1\n"NVIDIA A100-SXM4-80GB" = 2', "each device once"),
        ("currency = 5\n[per_hour]\nT4 = 1", "expected currency as a short text"),
        ('currency = "\\u001b[31m"\n[per_hour]\nT4 = 1', "expected currency as a short text"),
        ("price = 5", "got 'price'"),
        ("", "expected a table [per_hour]"),
        ("[per_hour", "expected a file of prices (TOML), got an error"),
    ],
)
def test_files_of_prices_are_checked(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(WhatifError) as error:
        read_prices(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@given(st.binary(max_size=200))
def test_any_file_of_prices_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    with suppress(WhatifError):
        assert read_prices(path).per_hour


def test_a_high_cost_is_written_out(trace: str) -> None:
    prices = Prices("", {"V100-SXM2-32": 1e7})
    found = recommend(Baseline.of(whatif.read(trace)), prices=prices)
    assert found.verdict == "V100-SXM2-32 is cheapest: 2,503 for a thousand steps"


def test_prices_without_a_currency_are_numbers() -> None:
    prices = parse_prices({"per_hour": {"T4": 3600}}, "prices.toml")
    assert (prices.currency, prices.of("T4", 1.0), prices.of("L4", 1.0)) == ("", 1.0, None)
