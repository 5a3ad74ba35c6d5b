"""The campaign really runs here: small models, a failing run, resuming, a budget, an interrupt, packing."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.helpers import need
from tests.instrumentation import warm
from whatif.questions.validate.validate import validate
from whatif.runtime.errors import WhatifError

torch = need("torch")
campaign = need("benchmarks.campaign.__main__")
queue = need("benchmarks.campaign.queue")
variants = need("benchmarks.campaign.variants")
records = need("benchmarks.campaign.records")
packing = need("benchmarks.campaign.pack")
trimming = need("benchmarks.campaign.trim")
workers = need("benchmarks.campaign.worker")

pytestmark = pytest.mark.slow
keep_whole_steps = need("whatif.instrumentation.whole_steps").keep_whole_steps

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ("gnmt", "vgg19")
VARIANTS = ("baseline", "adam_for", "batch_x0.5", "channels_last")
# Why some of them are no runs of the first model.
SKIPPED = {
    "gnmt--adam_for": "the same as the baseline",
    "gnmt--channels_last": "the model has no images",
}

# More memory than any machine has: a failure of torch's own, in the run's own process.
HUGE = variants.Job("vgg19", "huge", variants.Options(batch_factor=1e9), 0)


def plan(out: Path, **options: Any) -> Any:
    return queue.Plan(**{"out": out, "full": False, "device": "cpu", **options})


def run(jobs: list[Any], settings: Any, module: str = "tests.campaign.run_briefly") -> tuple[Any, list[str]]:
    """Run the jobs, each part as this module in a process that finds torch imported."""
    reported: list[str] = []
    made = queue.Queue(jobs, settings, lambda progress: reported.append(f"{progress.task.job.name}: {progress.text}"))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(workers, "COMMAND", (warm.executable(Path(folder)), "-m", module))
        made.run()
    return made, reported


def read_record(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models under four variants, and a run that fails before them."""
    out = tmp_path_factory.mktemp("campaign")
    jobs = variants.all_jobs(full=False, device="cpu", models=MODELS, variants=VARIANTS)
    assert len(jobs) == 8
    run([HUGE, *jobs], plan(out, timeout_s=600.0))
    return out


def test_every_run_leaves_its_times_memory_and_trace(recorded: Path) -> None:
    assert not (recorded / ".work").exists()
    for model in MODELS:
        for variant in VARIANTS:
            record = read_record(recorded, f"{model}--{variant}")
            assert (record["schema"], record["model"], record["variant"]) == (1, model, variant)
            if record["name"] in SKIPPED:
                assert (record["status"], record["reason"]) == ("skipped", SKIPPED[record["name"]])
                continue
            assert record["status"] == "complete"
            untraced = record["untraced"]
            assert 0 < untraced["min_ms"] <= untraced["q25_ms"] <= untraced["median_ms"] <= untraced["q75_ms"]
            assert len(untraced["block_medians_ms"]) == len(untraced["cpu_thread_ms"]) == 3
            assert record["memory"]["peak_allocated_bytes"] > record["memory"]["parameter_bytes"]
            assert record["machine"]["threads"] == 1
            assert record["trace"]["bytes"] == (recorded / record["trace"]["file"]).stat().st_size


def test_a_trace_holds_the_run_that_its_record_names(recorded: Path) -> None:
    half, whole = (read_record(recorded, f"vgg19--{variant}") for variant in ("batch_x0.5", "baseline"))
    assert half["batch"] * 2 == whole["batch"]
    for record in (half, whole):
        with gzip.open(recorded / record["trace"]["file"]) as file:
            metadata = json.load(file)["whatif"]
        assert metadata["batch_size"] == record["batch"]
        assert metadata["threads"] == 1
        assert len(whatif.read(recorded / record["trace"]["file"])) > 0


def test_names_neither_the_machine_nor_a_folder(recorded: Path) -> None:
    host = os.uname().nodename
    for path in recorded.glob("*.json"):
        text = path.read_text()
        assert str(recorded) not in text
        assert host not in text


def test_a_failing_run_is_recorded_and_stops_nothing(recorded: Path) -> None:
    record = read_record(recorded, HUGE.name)
    assert record["status"] == "failed"
    assert "RuntimeError" in record["failure"]
    assert "memory" in record["failure"]
    assert (recorded / "logs" / f"{HUGE.name}.time.1.log").read_text().startswith("Traceback")


def test_ends_at_the_first_trace_without_kernels_and_goes_on_from_there(
    tmp_path: Path,
) -> None:
    """On a machine whose CUPTI refuses: the first trace ends it, and no try of that run is used up."""
    jobs = variants.all_jobs(full=False, device="cpu", models=("gnmt",), variants=("baseline", "batch_x0.5"))
    for _ in range(2):
        with pytest.raises(WhatifError, match=r"gnmt--baseline: the campaign ends here.*launches and no kernel"):
            run(jobs, plan(tmp_path, timeout_s=600.0), "tests.campaign.run_on_a_fake_gpu")
    record = read_record(tmp_path, "gnmt--baseline")
    assert record["status"] == "timed"
    assert "failures" not in record
    assert not (tmp_path / "gnmt--batch_x0.5.json").exists()
    run(jobs, plan(tmp_path, timeout_s=600.0))
    assert read_record(tmp_path, "gnmt--baseline")["status"] == "complete"


def test_resumes_where_it_was_and_tries_a_failed_run_once_more(recorded: Path, tmp_path: Path) -> None:
    out = shutil.copytree(recorded, tmp_path / "copy")
    before = {path.name: path.read_bytes() for path in out.glob("*--*.json") if "huge" not in path.name}
    jobs = [HUGE, *variants.all_jobs(full=False, device="cpu", models=MODELS, variants=VARIANTS)]
    lines = [run(jobs, plan(out))[1] for _ in range(2)]
    assert [line.partition(":")[0] for line in lines[0]] == [HUGE.name, HUGE.name]  # its time, and no trace without it
    assert lines[1] == []
    assert {path.name: path.read_bytes() for path in out.glob("*--*.json") if "huge" not in path.name} == before


def test_further_rounds_add_to_the_times(recorded: Path, tmp_path: Path) -> None:
    for name in ("gnmt--baseline.json", "gnmt--baseline.trace.json.gz"):
        shutil.copy(recorded / name, tmp_path / name)
    jobs = variants.all_jobs(full=False, device="cpu", models=["gnmt"], variants=["baseline"])
    _, reported = run(jobs, plan(tmp_path, rounds=3, ahead=True))
    assert len(reported) == 2
    record = read_record(tmp_path, "gnmt--baseline")
    assert len(record["rounds"]) == 3
    assert len(record["untraced"]["block_medians_ms"]) == 9
    assert record["untraced"]["steps"] == sum(len(block) for row in record["rounds"] for block in row["samples_ms"])
    assert record["status"] == "complete"


def test_a_run_takes_turns_with_its_baseline(tmp_path: Path) -> None:
    jobs = variants.all_jobs(full=False, device="cpu", models=["vgg19"], variants=["baseline", "bn_eval", "adam_for"])
    jobs += variants.all_jobs(full=False, device="cpu", models=["vgg19"], variants=["adam_fused"])
    for _ in range(2):  # The second time nothing is left to do.
        _, reported = run(jobs, plan(tmp_path, goal_pct=200.0, timeout_s=600.0))
    assert reported == []
    record = read_record(tmp_path, "vgg19--adam_fused")
    assert record["beside"]["name"] == "vgg19--adam_for"
    assert len(record["beside"]["rounds"]) == len(record["rounds"]) >= 12
    for row in (*record["rounds"], *record["beside"]["rounds"]):
        assert all(load["cpu_s"] > 0 and load["involuntary_switches"] >= 0 for load in row["loads"])
    assert "beside" not in read_record(tmp_path, "vgg19--adam_for")
    (outcome,) = validate([tmp_path]).outcomes
    assert outcome.truth_spread_pct == pytest.approx(record["beside"]["spread_pct"], abs=0.01)


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    jobs = variants.all_jobs(full=False, device="cpu", models=["gnmt"], variants=["baseline"])
    run(jobs, plan(tmp_path, timeout_s=0.2))
    record = read_record(tmp_path, "gnmt--baseline")
    assert record["status"] == "failed"
    assert "took too long" in record["failure"]


def test_nothing_is_started_that_would_outlast_the_budget(tmp_path: Path) -> None:
    jobs = variants.all_jobs(full=False, device="cpu", models=["gnmt"], variants=["baseline", "adam_fused"])
    made, reported = run(jobs, plan(tmp_path, budget_s=5.0))
    assert [task.part for task in made.left_out] == ["time", "time"]
    assert len(reported) == 4
    assert not list(tmp_path.glob("*.json"))


def test_what_the_budget_cuts_off_is_no_failure(tmp_path: Path) -> None:
    jobs = variants.all_jobs(full=False, device="cpu", models=["gnmt"], variants=["baseline"])
    record = records.Record(tmp_path, jobs[0], full=False)
    record.data["seconds"] = {"time": 0.1}  # As if it had been quick before.
    record.skip("")
    made, reported = run(jobs, plan(tmp_path, budget_s=0.5))
    assert "the time budget is used up" in reported[0]
    assert [task.part for task in made.left_out] == ["time"]
    assert "failure" not in read_record(tmp_path, "gnmt--baseline")


def test_an_interrupt_leaves_a_folder_to_go_on_from(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.campaign", str(out), "--models", "gnmt", "--tiny"]
    process = subprocess.Popen([*command, "--variants", "baseline"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    log = out / "logs" / "gnmt--baseline.time.1.log"
    while not log.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate()
    assert process.returncode == 130
    assert "run the same command to continue" in messages
    assert sorted(path.name for path in out.iterdir()) == ["logs"]


def test_times_of_two_machines_or_sizes_are_not_mixed(recorded: Path, tmp_path: Path) -> None:
    shutil.copy(recorded / "gnmt--baseline.json", tmp_path)
    job = variants.all_jobs(full=False, device="cpu", models=["gnmt"], variants=["baseline"])[0]
    record = records.Record(tmp_path, job, full=False)
    result = record.data["rounds"][0] | {"machine": record.data["machine"] | {"cpu": "another"}, "samples": 28}
    with pytest.raises(WhatifError, match="one folder per machine"):
        record.add("time", result, 1.0)
    with pytest.raises(WhatifError, match="name another folder"):
        records.Record(tmp_path, job, full=True)


def test_a_large_trace_keeps_fewer_steps(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.trace.json.gz"
    shutil.copy(recorded / "vgg19--baseline.trace.json.gz", path)
    whole = whatif.read(path)
    size = path.stat().st_size
    assert trimming.trim(path, size) == 5
    assert path.stat().st_size == size
    assert trimming.trim(path, int(size * 0.85)) == 4
    assert path.stat().st_size < size
    assert trimming.trim(path, 1) == 3
    assert 0.5 < len(whatif.read(path)) / len(whole) < 0.7


def test_gpu_work_stays_with_the_step_that_launched_it() -> None:
    """Step 1 ends at 10; the kernel of its launch runs in step 2, and that of step 2 goes with its launch.

    host    |-- step 0: launch 7 --|-- step 1: launch 8 --|
    device                  [kernel 7 .........][kernel 8]
    """
    steps = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": 10.0 * i, "dur": 10.0} for i in (0, 1)
    ]
    launches = [
        {"ph": "X", "cat": "cuda_runtime", "ts": ts, "dur": 1.0, "args": {"correlation": number}}
        for number, ts in ((7, 5.0), (8, 12.0))
    ]
    arrows = [{"ph": kind, "cat": "ac2g", "id": number, "ts": 12.5} for number in (7, 8) for kind in "f"]
    arrows += [{"ph": "s", "cat": "ac2g", "id": 7, "ts": 5.0}, {"ph": "s", "cat": "ac2g", "id": 8, "ts": 12.0}]
    kernels = [
        {"ph": "X", "cat": "kernel", "ts": ts, "dur": 4.0, "args": {"correlation": number}}
        for number, ts in ((7, 11.0), (8, 15.0))
    ]
    kept = keep_whole_steps([*steps, *launches, *arrows, *kernels], 0, 1)
    assert steps[0] in kept
    assert steps[1] not in kept
    assert [event in kept for event in (*launches, *kernels)] == [True, False, True, False]
    assert sorted((event["ph"], event["id"]) for event in kept if "id" in event) == [("f", 7), ("s", 7)]


def test_packs_the_most_valuable_first_within_its_limits(tmp_path: Path) -> None:
    names = [f"m--{letter}" for letter in "abcdef"]
    for name in names:
        (tmp_path / f"{name}.json").write_text("{}")
    for name, kilobytes in zip(names, (70, 90, 20, 500, 60, 5), strict=True):
        (tmp_path / f"{name}.trace.json.gz").write_bytes(bytes(kilobytes * 1000))
    files, left_out = packing.pack(tmp_path, tmp_path / "x.tar", names, file_bytes=120_000, files=3)
    assert [path.name for path in files] == ["x-1.tar", "x-2.tar", "x-3.tar"]
    assert left_out == ["m--d"]
    assert all(path.stat().st_size <= 120_000 for path in files)
    held = []
    for path in files:
        with tarfile.open(path) as archive:
            held.append(archive.getnames())
            if path == files[0]:
                assert archive.extractfile("left_out.txt").read() == b"m--d\n"
    assert held[0][:6] == [f"{name}.json" for name in names]
    traces = [name for part in held for name in part if name.endswith(".gz")]
    assert sorted(traces) == [f"{name}.trace.json.gz" for name in names if name != "m--d"]
    assert "m--a.trace.json.gz" in held[0]


def test_a_reader_that_ends_early_and_a_finished_campaign_are_no_surprise(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "benchmarks.campaign", str(tmp_path), "--tiny", "--list"]
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    finally:
        os.close(write)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr
    # Not for a model without batch normalisation: nothing is run.
    assert campaign.main([str(tmp_path), "--tiny", "--models", "gnmt", "--variants", "bn_eval"]) == 0
    assert "nothing is left to do" in capsys.readouterr().err


@pytest.mark.parametrize("measure_operators", [False, True])
def test_an_hour_that_ends_early_leaves_pairs(measure_operators: bool) -> None:
    """Of a GPU's campaign, at guessed step times: the most valuable pairs first, operators before none of them."""
    found = need("benchmarks.campaign.order").complete_pairs(measure_operators=measure_operators)
    assert [so_far_s for so_far_s, _ in found] == [540, 1080, 1620]
    assert {"resnet50--amp_fp16", "bert-base--amp_bf16", "gpt2-small--adam_fused"} <= set(found[0][1])
    assert {"resnet50--channels_last", "resnet50--cuda_graph"} <= set(found[1][1])
    assert {"gpt2-small--cuda_graph", "resnet50--default_precision_amp_bf16"} <= set(found[2][1])
    assert [len(names) for _, names in found] == sorted({len(names) for _, names in found})


def test_lists_and_refuses_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert campaign.main([str(tmp_path / "x"), "--tiny", "--models", "gnmt", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "gnmt--baseline" in listed
    assert "vgg19--" not in listed
    assert not (tmp_path / "x").exists()
    for wrong in (["--models", "nosuch"], ["--variants", "nosuch"], ["--rounds", "0"], ["--budget-s", "x"]):
        with pytest.raises(SystemExit) as stopped:
            campaign.main([str(tmp_path), *wrong])
        assert stopped.value.code == 2
    (tmp_path / "file").write_text("")
    assert campaign.main([str(tmp_path / "file"), "--tiny", "--models", "gnmt"]) == 1
    assert "expected a folder to write into" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_records_small_models_on_a_gpu(tmp_path: Path) -> None:
    names = ("baseline", "amp_fp16", "cuda_graph", "tf32", "offload_stream", "loader_4")
    jobs = variants.all_jobs(full=False, device="cuda", models=["resnet50"], variants=names)
    _, reported = run(jobs, plan(tmp_path, device="cuda", ahead=True))
    found = {name: read_record(tmp_path, f"resnet50--{name}") for name in names}
    assert {record["status"] for record in found.values()} == {"complete"}, reported
    assert found["baseline"]["memory"]["peak_allocated_bytes"] > found["baseline"]["memory"]["parameter_bytes"]
    assert found["cuda_graph"]["memory"]["peak_allocated_bytes"] is None
    for name in names:
        with gzip.open(tmp_path / f"resnet50--{name}.trace.json.gz") as file:
            events = json.load(file)["traceEvents"]
        assert sum(event.get("cat") == "kernel" for event in events) > 0
