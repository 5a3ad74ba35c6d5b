"""``whatif memory``: text, JSON keys, what fits, a plot, and what cannot be answered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import whatif
from tests.helpers import launched, mark, need, op, write_trace
from tests.memory_steps import drawn
from tests.memory_traces import METADATA, NODE, two_linear_layers
from whatif.cli.main import main
from whatif.graph.memory import peak
from whatif.models.layers.memory_effects import with_batch
from whatif.prediction.baseline import Baseline
from whatif.questions.memory_summary import memory_summary
from whatif.questions.what_fits import first_number
from whatif.report.text_memory import capacity_sentences

KEYS = {
    "trace", "source", "peak_bytes", "high_bytes", "measured_peak_bytes", "peak", "gradients_stay", "caveats", "layers",
    "timeline", "baseline_ms", "step_clock", "what_ifs", "batch_size", "capacity_bytes", "fits", "largest_batch",
    "fewest_workers", "ranks",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two linear layers; resident 800 bytes, 2,080 at the peak: tests/memory_traces.py draws it."""
    return str(write_trace(tmp_path / "drawn.json", two_linear_layers(), whatif=METADATA))


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["memory", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["memory", *words]) in (1, 2)
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1
    return captured.err


def test_the_text_says_what_the_peak_is_made_of(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", trace, "batch_size:factor=2", "vdnn", "--capacity", "3KB"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "A step needs 2.03 KiB at its peak, in the backward pass of relu."
    assert lines[1] == "drawn.json: from its recorded allocations"
    at_peak = lines[lines.index("At the peak") + 2 :][:6]
    assert [line.rstrip(" █") for line in at_peak] == [
        "parameters 240 bytes 11.5 %",
        "gradients 80 bytes 3.8 %",
        "optimizer state 480 bytes 23.1 %",
        "activations 400 bytes 19.2 %",
        "workspace 800 bytes 38.5 %",
        "inputs, buffers and the rest 80 bytes 3.8 %",
    ]
    step = lines[lines.index("Over the step") + 2 :][:7]
    assert [line.rstrip(" █") for line in step] == [
        "forward fc1 1.17 KiB", "forward relu 1.56 KiB", "forward fc2 1.21 KiB", "backward fc2 1.68 KiB",
        "backward relu 2.03 KiB", "backward fc1 1.41 KiB", "update 1.25 KiB",
    ]  # fmt: skip
    assert "relu 400 bytes 0 bytes 800 bytes" in lines
    # 720 of parameters and state, 80 of gradients, and twice 80 of inputs, 400 of activations, 800 of workspace: 3,360.
    doubled, left = [line for line in lines if line.startswith("batch_size:factor=2 ") and "vdnn" not in line]
    assert left == "batch_size:factor=2 backward, relu workspace 47.6 %"
    assert doubled.startswith("batch_size:factor=2 3.28 KiB +61.5 %")
    assert doubled.endswith("2 x samples")
    assert any(line.startswith("vdnn") and "CPU" in line for line in lines[lines.index("Does not apply") :])
    assert "The step fits into 2.93 KiB." in lines
    assert any(line.startswith("The largest batch that fits has 8 samples: 2.78 KiB") for line in lines)
    assert any(line.startswith("The predicted peak fits; a run may need up to 2.95 KiB for tensors.") for line in lines)


def test_an_unknown_batch_is_the_unit_and_no_number_of_samples(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What counts in samples is refused as by `apply`, and a micro-batch of 1 is the recorded batch."""
    metadata = {key: value for key, value in METADATA.items() if key != "batch_size"}
    no_batch = str(write_trace(tmp_path / "untold.json", two_linear_layers(), whatif=metadata))
    found = report(capsys, no_batch, "batch_size:size=10", "batch_size:factor=2", "gradient_accumulation:passes=3")
    assert found["batch_size"] is None
    rows = {" ".join(row["transforms"]): row for row in found["what_ifs"]}
    assert "use batch_size:factor=2 instead" in rows["batch_size:size=10"]["reason"]
    assert rows["batch_size:factor=2"]["batch_factor"] == 2
    assert rows["gradient_accumulation:passes=3"]["batch_factor"] == 3
    known, unknown = (
        report(capsys, path, f"pipeline:stages=2,micro_batches=2,micro_batch={one},activation_mb=1")["what_ifs"][0]
        for path, one in ((trace, 5), (no_batch, 1))
    )
    assert unknown == known | {"transforms": unknown["transforms"]}


def test_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, trace, "batch_size:factor=2", "amp", "--capacity", "2000B")
    assert found.keys() == KEYS | {"trust", "warnings"}
    assert (found["source"], found["peak_bytes"], found["batch_size"]) == ("allocations", 2080, 5)
    assert found["peak"] == {
        "phase": "backward", "layer": "relu", "total_bytes": 2080, "parameter_bytes": 240,
        "optimizer_state_bytes": 480, "input_bytes": 80, "gradient_bytes": 80, "activation_bytes": 400,
        "workspace_bytes": 800,
    }  # fmt: skip
    assert [moment["total_bytes"] for moment in found["timeline"]] == [1200, 1600, 1240, 1720, 2080, 1440, 1280]
    rows = found["what_ifs"]
    assert [row["transforms"] for row in rows] == [
        ["batch_size:factor=2"], ["amp"], ["batch_size:factor=2", "amp"],
    ]  # fmt: skip
    assert (rows[0]["peak_bytes"], rows[0]["batch_factor"]) == (3360, 2.0)
    assert rows[0]["step_ms"] > found["baseline_ms"]
    assert (found["capacity_bytes"], found["fits"]) == (2000, False)
    # 800 and 1,280 of a batch of 5, of which autocast leaves 680: of 8 samples, 800 + 1,088.
    assert (found["largest_batch"]["batch_size"], found["largest_batch"]["peak_bytes"]) == (8, 1888)
    assert found["largest_batch"]["transforms"] == ["amp"]
    # 800 + 1,024 without a what-if: a named change of the batch gives way to the one that is searched.
    largest = report(capsys, trace, "batch_size:factor=2", "--capacity", "2000B")["largest_batch"]
    assert (largest["batch_size"], largest["peak_bytes"], largest["transforms"]) == (4, 1824, [])
    assert largest["step_ms"] < found["baseline_ms"]


def test_not_even_one_sample_fits(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, trace, "batch_size:factor=2", "--capacity", "900B")["largest_batch"]["batch_size"] == 0
    assert main(["memory", trace, "batch_size:factor=2", "--capacity", "900B"]) == 0
    out = capsys.readouterr().out
    assert "The step does not fit into 900 bytes." in out
    # In the update, which no batch makes smaller: 720 + 16 of inputs + 240 of gradients + 240.
    assert "Even a batch of one sample does not fit: it takes 1.19 KiB." in out


def test_without_a_batch_size_the_largest_is_reported_as_a_multiple(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = {key: value for key, value in METADATA.items() if key != "batch_size"}
    path = str(write_trace(tmp_path / "drawn.json", two_linear_layers(), whatif=metadata))
    largest = report(capsys, path, "batch_size:factor=2", "--capacity", "2720B")["largest_batch"]
    assert (largest["batch_size"], largest["factor"], largest["peak_bytes"]) == (None, 1.5, 2720)
    assert main(["memory", path, "batch_size:factor=2", "--capacity", "900B"]) == 0
    assert "Even a hundredth of the recorded batch does not fit" in capsys.readouterr().out


def test_no_batch_is_searched_without_end(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """1,280 bytes of a batch of 5 grow with it: of 65,536 times as large 80 MiB."""
    largest = report(capsys, trace, "batch_size:factor=2", "--capacity", "1TB")["largest_batch"]
    assert (largest["factor"], largest["peak_bytes"]) == (2**16, 800 + 2**16 * 1280)
    assert largest["step_ms"] > 0
    assert main(["memory", trace, "batch_size:factor=2", "--capacity", "1TB"]) == 0
    assert "has at least 327,680 samples" in " ".join(capsys.readouterr().out.split())


@given(st.integers(1, 7000))
def test_the_largest_batch_is_the_largest_that_fits(capacity_bytes: int) -> None:
    """Beside a search that tries one batch after the other."""
    memory = drawn()

    def does_not_fit(samples: int) -> bool:
        return peak(with_batch(memory, samples / 5)).total > capacity_bytes

    least = first_number(does_not_fit, 5, 2**20)
    assert least == next(n for n in range(1, 302) if does_not_fit(n))


@given(st.integers(1, 40), st.sets(st.integers(1, 40)), st.integers(1, 40))
def test_numbers_that_cannot_be_are_passed_over(bound: int, impossible: set[int], start: int) -> None:
    """Also doublings of ``start``: a node may have six GPUs, and a model twelve heads."""
    found = first_number(lambda n: None if n in impossible else n >= bound, start, 40)
    assert found == next((n for n in range(1, 41) if n >= bound and n not in impossible), None)


GPT2 = Path(__file__).parents[2] / "traces" / "predicted" / "gpt2_h100_predicted.json.gz"


@pytest.mark.parametrize("names", [[], ["fsdp:workers=8"], ["activation_checkpoint", "zero:workers=4"]])
@pytest.mark.parametrize("capacity", ["7GiB", "40GB"])
def test_the_largest_batch_under_what_ifs_fits_and_one_more_does_not(
    names: list[str], capacity: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result is consistent with `memory` for that batch and for one more."""
    found = report(capsys, str(GPT2), *names, "--solve", "batch", "--capacity", capacity)
    largest = found["largest_batch"]
    assert largest["transforms"] == names
    assert largest["high_bytes"] == round(largest["peak_bytes"] * (1.08 if names else 1.06))
    peaks = {}
    for samples in (largest["batch_size"], largest["batch_size"] + 1):
        rows = report(capsys, str(GPT2), f"batch_size:size={samples}", *names)["what_ifs"]
        peaks[samples] = rows[-1]["peak_bytes"]
    fits, beyond = peaks.values()
    assert fits == largest["peak_bytes"]
    assert fits <= found["capacity_bytes"] < beyond
    # Without --solve the report ends with the same answer.
    assert report(capsys, str(GPT2), *names, "--capacity", capacity)["largest_batch"] == largest


def test_the_largest_batch_of_a_pipeline_is_divided_among_its_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """With `micro_batch` the batch changed nothing: at least 1,048,576 samples fitted anywhere."""
    pipeline = "pipeline:stages=2,micro_batches=4"
    named = report(capsys, str(GPT2), f"{pipeline},micro_batch=2", "--capacity", "4GB")["largest_batch"]
    found = report(capsys, str(GPT2), pipeline, "--solve", "batch", "--capacity", "4GB")["largest_batch"]
    assert named == found
    assert 4 <= found["batch_size"] < 256
    # Fewer samples than micro-batches were an error.
    words = ["memory", str(GPT2), pipeline, "--solve", "batch", "--capacity", "100MB"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("Even a batch of 4 samples does not fit")


def test_the_smallest_batch_has_the_same_range_where_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    largest = report(capsys, str(GPT2), "fsdp:workers=8", "--capacity", "100MB")["largest_batch"]
    assert largest["batch_size"] == 0
    assert largest["high_bytes"] == round(1.08 * largest["peak_bytes"])


@pytest.mark.parametrize(
    ("names", "capacity", "before"),
    [
        (["fsdp"], "5.3GB", 1),
        (["amp", "zero:stage=1"], "5.2GiB", 1),
        # Nodes have 8 GPUs: from there on only whole ones are possible.
        (["fsdp:cluster=dgx-h100"], "5.2GB", 8),
    ],
)
def test_the_fewest_workers_fit_and_fewer_do_not(
    names: list[str], capacity: str, before: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, str(GPT2), *names, "--solve", "workers", "--capacity", capacity)
    fewest = found["fewest_workers"]
    assert fewest["workers"] > 1
    *others, shared = names
    peaks = []
    for workers in (fewest["workers"], fewest["workers"] - before):
        spec = f"{shared}{',' if ':' in shared else ':'}workers={workers}"
        rows = report(capsys, str(GPT2), *others, spec)["what_ifs"]
        peaks.append(rows[-1].get("peak_bytes", found["peak_bytes"]))
    assert peaks[0] == fewest["peak_bytes"]
    assert peaks[0] <= found["capacity_bytes"] < peaks[1]


def test_more_memory_never_takes_more_workers_or_a_smaller_batch(capsys: pytest.CaptureFixture[str]) -> None:
    workers, batches = [], []
    for capacity in ("5.2GB", "5.4GB", "6GB", "8GB"):
        words = [str(GPT2), "fsdp", "--capacity", capacity, "--solve"]
        workers.append(report(capsys, *words, "workers")["fewest_workers"]["workers"])
        batches.append(report(capsys, *words, "batch")["largest_batch"]["batch_size"])
    assert workers == sorted(workers, reverse=True)
    assert batches == sorted(batches)
    assert workers[0] > workers[-1] == 1
    assert batches[0] < batches[-1]


def test_on_another_gpu_the_memory_of_that_one_limits(capsys: pytest.CaptureFixture[str]) -> None:
    """The largest batch on an A100 of 40 GiB had 135 samples, 79.86 GiB: those of the recorded H100."""
    there, here = ["device:to=A100-SXM-40", "--solve"], report(capsys, str(GPT2), "--capacity", "40GiB")
    found = report(capsys, str(GPT2), *there, "batch")
    assert found["capacity_bytes"] == 80 * 2**30
    assert found["largest_batch"]["capacity_bytes"] == 40 * 2**30
    assert found["largest_batch"]["batch_size"] == here["largest_batch"]["batch_size"]
    fewest = report(capsys, str(GPT2), *there, "workers", "fsdp", "batch_size:factor=8.5")["fewest_workers"]
    assert fewest["peak_bytes"] <= fewest["capacity_bytes"] == 40 * 2**30
    assert fewest["workers"] > 1
    assert main(["memory", str(GPT2), *there, "batch"]) == 0
    assert "with device:to=A100-SXM-40 in 40.00 GiB has" in " ".join(capsys.readouterr().out.split())


def test_each_what_if_says_whether_it_fits_its_own_device(capsys: pytest.CaptureFixture[str]) -> None:
    """The text stated that the step fits the recorded 80 GiB, next to a what-if far beyond its device's 40 GiB."""
    words = ["device:to=A100-SXM-40", "batch_size:factor=8.5"]
    found = report(capsys, str(GPT2), *words)
    assert [row["capacity_bytes"] / 2**30 for row in found["what_ifs"]] == [40, 80, 40]
    assert [row["fits"] for row in found["what_ifs"]] == [True, True, False]
    assert (found["capacity_bytes"], found["fits"]) == (80 * 2**30, True)
    assert main(["memory", str(GPT2), *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The predicted step fits into 80.00 GiB; with device:to=A100-SXM-40 + " in text
    assert "batch_size:factor=8.5 it does not fit into 40.00 GiB." in text


def test_alternatives_are_reported_alone_and_the_largest_batch_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, str(GPT2), "zero:stage=1", "fsdp", "--capacity", "80GB")
    assert found["largest_batch"]["transforms"] == []
    assert found["largest_batch"] == report(capsys, str(GPT2), "--capacity", "80GB")["largest_batch"]


def test_the_answer_alone_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert main(["memory", str(GPT2), *words]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert said("fsdp:bandwidth=25Gbps", "--solve", "workers", "--capacity", "5.3GB").startswith(
        "11 workers of fsdp are enough, with fsdp:bandwidth=25Gbps,workers=11: 4.92 GiB"
    )
    whole_nodes = said("fsdp", "--solve", "workers", "--capacity", "5.3GB")
    assert whole_nodes.startswith("16 workers of fsdp are enough")
    none = said("distributed", "--solve", "workers", "--capacity", "1GB")
    assert none.startswith("No number of workers of distributed up to 65,536 makes the step fit: with")
    batch = said("fsdp:workers=8", "--solve", "batch", "--capacity", "80GB")
    assert batch.startswith(
        "The largest batch that fits with fsdp:workers=8 has 127 samples (1,016 in a step of all workers and passes): "
        "74.14 GiB, a step of"
    )
    assert "Even a batch of one sample does not fit with zero" in said("zero", "--solve", "batch", "--capacity", "1GB")


def test_the_fewest_workers_are_those_of_one_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer was "1 worker is enough" for two GPUs, and the workers that load data were solved for as well."""
    words = [str(GPT2), "tensor_parallel:workers=2", "fsdp:workers=8", "--solve", "workers", "--capacity", "8GB"]
    assert "got tensor_parallel and fsdp; say workers=N for the others" in refused(capsys, *words)
    words[2] = "fsdp"
    fewest = report(capsys, *words)["fewest_workers"]
    assert (fewest["of"], fewest["workers"], fewest["devices"]) == ("fsdp", 1, 2)
    assert main(["memory", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("1 worker of fsdp is enough, with tensor_parallel:workers=2 + fsdp:workers=1: ")
    assert "GiB on each of 2 devices" in said
    loaders = refused(capsys, str(GPT2), "data_loading", "--solve", "workers", "--capacity", "8GB")
    assert "expected one what-if whose number of workers is open" in loaders


def test_the_fewest_workers_need_not_be_a_power_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    """A model of 12 heads fitted "no number of workers", because 8 do not divide them: 6 were not tried."""
    words = [str(GPT2), "tensor_parallel", "--solve", "workers", "--capacity", "3.9GiB"]
    fewest = report(capsys, *words)["fewest_workers"]
    assert fewest["workers"] == 6
    assert report(capsys, str(GPT2), "tensor_parallel:workers=4")["what_ifs"][0]["peak_bytes"] > 3.9 * 2**30
    none = report(capsys, *words[:-1], "3GiB")["fewest_workers"]
    assert (none["workers"], none["transforms"]) == (None, ["tensor_parallel:workers=6"])


def test_what_cannot_be_solved(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt2 = [str(GPT2), "--capacity", "5GB", "--solve"]
    assert "expected --capacity SIZE" in refused(capsys, trace, "--solve", "batch")
    assert "expected one what-if whose number of workers is open" in refused(capsys, *gpt2, "workers")
    assert "got fsdp and tensor_parallel" in refused(capsys, *gpt2, "workers", "fsdp", "tensor_parallel")
    assert "got none; name such a what-if." in refused(capsys, *gpt2, "workers", "amp")
    metadata = {key: value for key, value in METADATA.items() if key != "batch_size"}
    unknown = str(write_trace(tmp_path / "unknown.json", two_linear_layers(), whatif=metadata))
    wrong = refused(capsys, unknown, "--solve", "batch", "--capacity", "3KB")
    assert "expected a recording that knows its batch size" in wrong
    # A what-if that cannot be applied is an error here, and in the report a row that says so.
    assert "vdnn" in refused(capsys, trace, "vdnn", "--solve", "batch", "--capacity", "3KB")


def test_what_is_not_modelled_is_not_reported_as_no_effect(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys, trace, "compile", "batch_size:factor=2")["what_ifs"]
    assert [row["memory_not_modelled"] for row in rows] == [["compile"], [], ["compile"]]
    assert main(["memory", trace, "compile", "batch_size:factor=2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"compile +2\.03 KiB +not modelled", out)
    assert re.search(r"compile \+ batch_size.* 3\.28 KiB +\+61\.5 % without compile", out)


@pytest.mark.parametrize(
    ("device", "caveat"),
    [
        ({}, "The recording lacks its parameters and optimizer state: they are not counted."),
        ({"device_type": 1, "held": 5000}, 'they and gradients that stay are in "the rest".'),
        ({"shapes": True}, "the weights that operators use are taken for them, and the state is the default of SGD"),
    ],
)
def test_unknown_parameters_are_reported(
    tmp_path: Path, device: dict[str, Any], caveat: str, capsys: pytest.CaptureFixture[str]
) -> None:
    events = two_linear_layers(**device)
    if "held" in device:
        for number in range(3):
            events += launched("gemm", 1000 * number + 15, 5, 1000 * number + 30, 20, number + 1)
    path = write_trace(tmp_path / "plain.json", events, deviceProperties=[{"id": 0, "name": "Tesla V100-SXM2-32GB"}])
    # Two of the recordings name a GPU and hold no event of it.
    assert main(["memory", str(path), "batch_size:factor=2", "--force"]) == 0
    assert caveat in " ".join(capsys.readouterr().out.split())
    assert len(report(capsys, str(path), "batch_size:factor=2", "--force")["caveats"]) == 1


def test_without_names_every_what_if_about_memory_is_tried(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, trace)
    tried = [row["transforms"][0].partition(":")[0] for row in found["what_ifs"]]
    assert {"activation_checkpoint", "vdnn", "gist", "amp", "batch_size", "optimizer_in_backward"} <= set(tried)
    for row in found["what_ifs"]:
        assert ("reason" in row) != ("peak_bytes" in row)
        assert row.get("reason", "x")
    assert found["capacity_bytes"] is None
    assert found["largest_batch"] is None


def test_what_adds_workers_is_answered_where_it_is_asked_for(
    own_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/sharding.md asks so whether a step would fit; `advise` alone leaves such what-ifs out."""
    found = report(capsys, str(own_traces / "transformer_cpu.json.gz"), "zero:stage=1", "distributed:workers=4")
    alone, buckets, _ = found["what_ifs"]
    assert alone["peak_bytes"] < 0.8 * found["peak_bytes"] < found["peak_bytes"] < buckets["peak_bytes"]


def test_the_recorded_gpu_is_the_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its measured peak, which the text compares."""
    events = [*two_linear_layers(device_type=1, held=5000)]
    for number in range(3):
        events += launched("gemm", 1000 * number + 15, 5, 1000 * number + 30, 20, number + 1)
    device = [{"id": 0, "name": "Tesla V100-SXM2-32GB", "totalGlobalMem": 34089730048}]
    path = str(write_trace(
        tmp_path / "gpu.json", events, deviceProperties=device, whatif={**METADATA, "peak_memory_bytes": 6000}
    ))  # fmt: skip
    found = report(capsys, path, "amp")
    assert (found["peak_bytes"], found["measured_peak_bytes"]) == (6280, 6000)
    assert (found["capacity_bytes"], found["fits"]) == (34089730048, True)
    assert main(["memory", path, "amp"]) == 0
    assert "the GPU's allocator measured 5.86 KiB (+4.7 %)" in capsys.readouterr().out


def test_hostile_layer_names_are_shown_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = two_linear_layers()
    for event in events:
        event["name"] = event["name"].replace("layer::relu", "layer::[bold]\x1b[31mrelu")
    path = str(write_trace(tmp_path / "drawn.json", events, whatif=METADATA))
    assert main(["memory", path, "amp"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[bold]" in out


@pytest.mark.parametrize("words", [["amp"], []])
def test_a_plot(trace: str, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    need("matplotlib")
    path = tmp_path / "memory.png"
    assert main(["memory", trace, *words, "--plot", str(path), "--capacity", "3KB"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_bad_arguments(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("16", "", "0", "0GiB", "abc", "1e999", "1e999GiB", "nanGiB", "-1GiB", "-.5GB", "-inf", "−1GB"):
        wrong = refused(capsys, trace, "--capacity", size)
        assert "memory: --capacity: expected a size of 1 byte or more with its unit" in wrong
    assert "expected a whole number of 1 or more" in refused(capsys, trace, "--top", "0")
    for plot in (str(tmp_path / "memory.txt"), "", str(tmp_path)):
        assert "ends in .png" in refused(capsys, trace, "--plot", plot)
    assert "create it first" in refused(capsys, trace, "--plot", str(tmp_path / "none" / "memory.png"))
    assert "activation_chekpoint" in refused(capsys, trace, "activation_chekpoint")
    assert "the trace comes first; try `whatif memory" in refused(capsys, "amp", trace)


def test_what_does_not_show_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inference = [mark("ProfilerStep#0", 0, 100), op("aten::mm", 10, 50), *launched("gemm", 20, 5, 30, 20, 1)]
    path = str(write_trace(tmp_path / "inference.json", inference))
    assert "without a backward pass" in refused(capsys, path)
    training = [
        *inference,
        op(NODE + "MmBackward0", 70, 20, **{"Sequence number": 3, "Fwd thread id": 1}),
        *launched("gemm", 72, 5, 80, 5, 2),
    ]
    path = str(write_trace(tmp_path / "training.json", training))
    assert "whatif collect --memory" in refused(capsys, path)


def test_a_peak_from_shapes_has_a_range_that_decides_what_fits(own_traces: Path) -> None:
    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    peak_bytes = memory_summary(baseline, None).peak.total
    high_bytes = round(1.06 * peak_bytes)
    verdicts = {}
    for capacity in (peak_bytes - 1, peak_bytes, high_bytes - 1, high_bytes):
        found = memory_summary(baseline, None, capacity_bytes=capacity)
        assert found.high_bytes == high_bytes
        verdicts[capacity] = found.fits, capacity_sentences(found)[0].partition(" into ")[0]
    assert [*verdicts.values()] == [
        (False, "The step does not fit"), (None, "The step may not fit"), (None, "The step may not fit"),
        (True, "The step fits"),
    ]  # fmt: skip


def test_a_peak_of_a_step_that_devices_share_has_a_range_to_both_sides(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, shared = report(capsys, trace, "batch_size:factor=2", "zero:stage=1,workers=2,bandwidth=10Gbps")["what_ifs"][
        :2
    ]
    assert alone["low_bytes"] == alone["peak_bytes"] < alone["high_bytes"]
    assert shared["low_bytes"] < shared["peak_bytes"] < shared["high_bytes"]
