"""The recorder: what is in its file, and that there is no file when something goes wrong."""

import gzip
import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from whatif.runtime.errors import WhatifError

torch = need("torch")

pytestmark = pytest.mark.slow
nn = torch.nn
instrumentation = need("whatif.instrumentation")
recording_file = need("whatif.instrumentation.recording_file")

QUICK = {"steps": 4, "warmup_steps": 1, "untraced_steps": 4}
ALL_STEPS = 1 + 4 + 3 + 4  # warm-up, untraced, the profiler's warm-up, recorded


class Residual(nn.Module):
    """An in-place activation and a shortcut: what intrusive backward hooks would break."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        return x + self.relu(self.linear(x))


def make_model(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    layers = OrderedDict(stem=nn.Linear(6, 8), body=nn.Sequential(Residual(8), Residual(8)), head=nn.Linear(8, 3))
    return nn.Sequential(layers).to(device)


def train(model: nn.Module, optimizer: Any, device: str = "cpu") -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 6, device=device)).square().mean().backward()
    optimizer.step()


def record_steps(path: Path, count: int = ALL_STEPS, **options: Any) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    with instrumentation.record(model, optimizer, path, **(QUICK | options)) as recording:
        for _ in range(count):
            train(model, optimizer)
            recording.step()


def read(path: Path) -> dict[str, Any]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def events(recording: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    found = (event for event in recording["traceEvents"] if event.get("ph") == "X" and event["name"].startswith(prefix))
    return sorted(found, key=lambda event: event["ts"])


def is_inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("record") / "run.json.gz"
    record_steps(path, count=ALL_STEPS + 2)  # Steps after the last recorded one change nothing.
    assert [file.name for file in path.parent.iterdir()] == ["run.json.gz"]
    return read(path)


def test_metadata_describes_the_run(recording: dict[str, Any]) -> None:
    metadata = recording["whatif"]
    assert metadata["version"] == 1
    assert metadata["batch_size"] == 5
    assert metadata["input_shape"] == [5, 6]
    assert metadata["optimizer"]["type"] == "Adam"
    assert metadata["optimizer"]["foreach"] is True
    assert not metadata["optimizer"]["fused"]
    assert metadata["precision"]["parameters"] == "float32"
    assert metadata["precision"]["autocast"] is None
    assert metadata["torch"] == torch.__version__
    assert metadata["threads"] == torch.get_num_threads()
    assert metadata["cpu"]
    assert 1 <= metadata["cpu_cores"] <= (os.cpu_count() or 1)
    assert metadata["backend"] == "kineto"
    assert metadata["execution"] == {"compiled": False, "cuda_graph": False}
    assert metadata["data_loading"] is None
    assert [metadata[key] for key in ("gpu", "driver", "clocks", "peak_memory_bytes")] == [None] * 4
    for clock in ("untraced_step_ms", "untraced_cpu_ms", "traced_step_ms", "traced_cpu_ms"):
        summary = metadata[clock]
        assert summary["steps"] == 4
        assert 0 < summary["q25"] <= summary["median"] <= summary["q75"]


def test_samples_are_those_of_training_steps(tmp_path: Path) -> None:
    """Two passes of 4 samples accumulate gradients; the evaluation before each step is of 32 samples."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"steps": 3, "warmup_steps": 2, "untraced_steps": 2}
    with instrumentation.record(model, optimizer, tmp_path / "run.json", **options) as recording:
        for _ in range(10):
            with torch.no_grad():
                model(torch.randn(32, 3))
            for _ in range(2):
                model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            recording.step()
    metadata = json.loads((tmp_path / "run.json").read_text())["whatif"]
    assert (metadata["batch_size"], metadata["samples_per_step"]) == (4, 8)


@pytest.mark.parametrize("sam", [False, True])
def test_a_second_pass_with_moved_weights_counts_its_batch_once(sam: bool, tmp_path: Path) -> None:
    """As SAM does; the same batch twice with the same weights is accumulation."""
    model, batch = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"steps": 3, "warmup_steps": 2, "untraced_steps": 2}
    with instrumentation.record(model, optimizer, tmp_path / "run.json", **options) as recording:
        for _ in range(10):
            optimizer.zero_grad()
            model(batch).sum().backward()
            if sam:
                with torch.no_grad():
                    model.weight.add_(0.1)
            model(batch).sum().backward()
            optimizer.step()
            recording.step()
    metadata = json.loads((tmp_path / "run.json").read_text())["whatif"]
    assert (metadata["batch_size"], metadata["samples_per_step"]) == (4, 4 if sam else 8)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_that_an_optimizer_repeats_counts_its_samples_once(tmp_path: Path, by_name: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, tolerance_change=0, tolerance_grad=0)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        for _ in range(2):  # gradients are accumulated
            loss: torch.Tensor = model(torch.randn(4, 3)).square().sum()
            loss.backward()
        return loss

    options = {"steps": 3, "warmup_steps": 2, "untraced_steps": 2}
    with instrumentation.record(model, optimizer, tmp_path / "run.json", **options) as recording:
        for _ in range(10):
            optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            recording.step()
    metadata = json.loads((tmp_path / "run.json").read_text())["whatif"]
    assert calls > 20  # more than one a step
    assert (metadata["batch_size"], metadata["samples_per_step"]) == (4, 8)


def test_the_profilers_own_cost_is_measured_and_not_recorded(recording: dict[str, Any]) -> None:
    # 0.4 to 1 µs on an idle machine; the bounds only distinguish ns from µs and one event from a step.
    assert 50 < recording["whatif"]["profiler_cost_ns"]["per_event"] < 50_000
    assert not events(recording, "whatif::profiler_cost")
    last = events(recording, "ProfilerStep#")[-1]
    spans = [event for event in recording["traceEvents"] if event.get("ph") == "X" and event.get("cat") == "cpu_op"]
    assert spans
    assert all(event["ts"] < last["ts"] + last["dur"] for event in spans)


def test_nothing_of_ours_is_on_the_program_while_untraced_steps_run(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fetch = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    watched = []
    with instrumentation.record(model, optimizer, tmp_path / "run.json", **QUICK) as recording:
        for _ in range(ALL_STEPS):
            hooks = [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
            hooks += [h for p in model.parameters() for h in (p._post_accumulate_grad_hooks or ())]
            loading = torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is not fetch
            watched.append((bool(hooks), loading))
            assert not torch.nn.modules.module._has_any_global_hook()
            assert not torch._C._autograd._profiler_enabled() or recording.tracing
            train(model, optimizer)
            recording.step()
    assert watched == [(True, True)] + [(False, False)] * 4 + [(True, False)] * 7


def test_layers_have_qualified_names_and_sizes(recording: dict[str, Any]) -> None:
    layers = {layer["name"]: layer for layer in recording["whatif"]["layers"]}
    assert list(layers)[:4] == ["(root)", "stem", "body", "body.0"]
    assert layers["body.1.linear"] == {
        "name": "body.1.linear",
        "type": "Linear",
        "parameters": 72,
        "gradient_bytes": 288,
        "shapes": {"weight": [8, 8], "bias": [8]},
    }
    assert layers["body"]["parameters"] == 0


def test_gradients_get_ready_from_the_last_layer_to_the_first(recording: dict[str, Any]) -> None:
    order = recording["whatif"]["grad_ready_order"]
    layers = list(dict.fromkeys(row["layer"] for row in order))
    assert layers == ["head", "body.1.linear", "body.0.linear", "stem"]
    assert {"name": "stem.weight", "layer": "stem", "bytes": 6 * 8 * 4, "dtype": "float32"} in order


def test_every_recorded_step_has_one_mark_with_its_optimizer_step_inside(recording: dict[str, Any]) -> None:
    steps = events(recording, "ProfilerStep#")
    assert [step["name"] for step in steps] == [f"ProfilerStep#{number}" for number in (3, 4, 5, 6)]
    updates = events(recording, "Optimizer.step#")
    assert [sum(is_inside(update, step) for update in updates) for step in steps] == [1, 1, 1, 1]


def test_layer_marks_nest_like_the_modules(recording: dict[str, Any]) -> None:
    marks = events(recording, "whatif::layer::")
    names = [mark["name"].removeprefix("whatif::layer::") for mark in marks]
    in_call_order = ["(root)", "stem", "body"]
    in_call_order += [f"body.{block}{part}" for block in (0, 1) for part in ("", ".linear", ".relu")] + ["head"]
    assert names == in_call_order * 4
    outer, inner = marks[names.index("body.0")], marks[names.index("body.0.linear")]
    assert is_inside(inner, outer)
    operators = [event for event in events(recording, "aten::linear") if is_inside(event, inner)]
    assert len(operators) == 1


def test_operators_carry_shapes_and_sequence_numbers(recording: dict[str, Any]) -> None:
    assert all("Input Dims" in event["args"] for event in events(recording, "aten::addmm"))
    assert any("Sequence number" in event["args"] for event in events(recording, "AddmmBackward0"))


def test_names_neither_the_machine_nor_a_folder(recording: dict[str, Any]) -> None:
    assert not {"host_name", "traceName"} & set(recording)
    assert str(Path(__file__).parent) not in json.dumps(recording)


def test_leaves_no_hook_behind(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrumentation.record(model, optimizer, tmp_path / "run.json", **QUICK) as recording:
        while not recording.done:
            train(model, optimizer)
            recording.step()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_writes_plain_json_when_the_name_says_so(tmp_path: Path) -> None:
    record_steps(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["whatif"]["version"] == 1


def test_notes_autocast_and_counts_a_shared_parameter_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrumentation.record(model, optimizer, tmp_path / "run.json", **QUICK) as recording:
        for _ in range(ALL_STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                train(model, optimizer)
            recording.step()
    metadata = read(tmp_path / "run.json")["whatif"]
    assert metadata["precision"]["autocast"] == "bfloat16"
    assert [layer["parameters"] for layer in metadata["layers"]] == [0, 36, 0]
    assert len(metadata["grad_ready_order"]) == 1


def test_autocast_that_the_model_enters_itself_is_noted(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, x: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x)

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrumentation.record(model, optimizer, tmp_path / "run.json", **QUICK) as recording:
        for _ in range(ALL_STEPS):
            train(model, optimizer)
            recording.step()
    metadata = read(tmp_path / "run.json")["whatif"]
    assert metadata["precision"]["autocast"] == "bfloat16"
    assert metadata["input_shape"] == [5, 6]


def test_a_layer_that_raises_and_is_caught_closes_its_mark(tmp_path: Path) -> None:
    class Fallback(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picky = nn.Linear(7, 3)
            self.plain = nn.Linear(6, 3)

        def forward(self, x: Any) -> Any:
            try:
                return self.picky(x)
            except RuntimeError:
                return self.plain(x)

    model = Fallback()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrumentation.record(model, optimizer, tmp_path / "run.json", **QUICK) as recording:
        for _ in range(ALL_STEPS):
            train(model, optimizer)
            recording.step()
    recorded = read(tmp_path / "run.json")
    (picky, *_), (plain, *_) = events(recorded, "whatif::layer::picky"), events(recorded, "whatif::layer::plain")
    assert picky["ts"] + picky["dur"] <= plain["ts"]


def test_a_crash_leaves_the_old_file_and_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json.gz"
    path.write_bytes(b'{"whatif":"the recording before"}')
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = instrumentation.record(model, optimizer, path, **QUICK)

    def crash() -> None:
        with recording:
            for _ in range(ALL_STEPS - 2):  # Then the profiler is running.
                train(model, optimizer)
                recording.step()
            raise ValueError("bad\nbatch")

    with pytest.raises(ValueError, match="bad"):
        crash()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("whatif:")]
    assert lines == ["whatif: no recording was written: the training raised ValueError (bad batch) in step 11 of 12."]
    assert path.read_bytes() == b'{"whatif":"the recording before"}'
    assert list(tmp_path.iterdir()) == [path]


def test_a_loop_that_ends_early_keeps_three_whole_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_steps(tmp_path / "run.json", count=ALL_STEPS)
    assert "the training ended" not in capsys.readouterr().err
    record_steps(tmp_path / "run.json", count=ALL_STEPS - 1)
    assert "the training ended after 3 of the 4 steps to record" in capsys.readouterr().err
    steps = events(read(tmp_path / "run.json"), "ProfilerStep#")
    assert [step["name"] for step in steps] == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]


@pytest.mark.parametrize("count", [0, 1, 5, 8, ALL_STEPS - 2])
def test_a_loop_that_ends_too_early_says_how_many_steps_it_takes(tmp_path: Path, count: int) -> None:
    with pytest.raises(WhatifError, match=rf"expected at least 11 training steps \(12 for .*\), got {count}: train"):
        record_steps(tmp_path / "run.json", count=count)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording_file.os, "replace", full)
    with pytest.raises(WhatifError, match="expected to write the file, got 'No space left on device'; free some"):
        record_steps(tmp_path / "run.json.gz")
    assert not list(tmp_path.iterdir())


def test_a_profiler_that_finds_no_space_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints a line, keeps what it could write under a name of its own, and raises nothing."""
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda profiler, path: Path(f"{path}.tmp").write_text("{")
    )
    with pytest.raises(WhatifError, match=r"got no trace file from torch\.profiler: free some space or choose another"):
        record_steps(tmp_path / "run.json.gz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"steps": 2}, {"warmup_steps": 0}, {"untraced_steps": 1}])
def test_too_few_steps_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    (name,) = options
    with pytest.raises(WhatifError, match=f"expected {name} of at least"):
        record_steps(tmp_path / "run.json", **options)


def test_a_path_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match="expected a folder to write into"):
        record_steps(tmp_path / "nowhere" / "run.json")
    with pytest.raises(WhatifError, match="got something that is no file"):
        record_steps(tmp_path)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, whatif.instrumentation as package; print('torch' in sys.modules, callable(package.record))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_records_kernels_and_synchronisations_on_a_gpu(tmp_path: Path) -> None:
    model = make_model("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    with instrumentation.record(model, optimizer, tmp_path / "run.json", **QUICK) as recording:
        for _ in range(ALL_STEPS):
            train(model, optimizer, "cuda")
            torch.cuda.current_stream().synchronize()
            recording.step()
    recorded = read(tmp_path / "run.json")
    categories = {event.get("cat") for event in recorded["traceEvents"]}
    assert {"kernel", "cuda_runtime", "cuda_sync", "cpu_op"} <= categories
    assert recorded["whatif"]["untraced_step_ms"]["median"] > 0
    assert recorded["whatif"]["peak_memory_bytes"] > 0
    assert recorded["whatif"]["gpu"] == torch.cuda.get_device_name()
    assert len(events(recorded, "ProfilerStep#")) >= 4
    assert recorded["whatif"]["traced_step_ms"]["steps"] == 4
    assert recorded["whatif"]["profiler_cost_ns"]["per_event"] > 0
    assert recorded["whatif"]["clocks"]["sm_mhz"] > 0
    assert recorded["whatif"]["driver"]
    launches = {event["args"]["correlation"] for event in events(recorded, "cudaLaunchKernel")}
    kernels = {event["args"]["correlation"] for event in recorded["traceEvents"] if event.get("cat") == "kernel"}
    assert launches <= kernels
    with pytest.raises(WhatifError, match="expected one GPU recording per process, got a second"):
        instrumentation.record(model, optimizer, tmp_path / "again.json").start()


def test_ranks_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts the rank before each line of a traceback
    fake = need("torch.testing._internal.distributed.fake_pg")
    path = recording_file.of_this_rank
    assert path(tmp_path / "run.json.gz") == tmp_path / "run.json.gz"
    torch.distributed.init_process_group("fake", rank=3, world_size=32, store=fake.FakeStore())
    try:
        assert path(tmp_path / "run.json.gz") == tmp_path / "run.rank3.json.gz"
        for named in ("rank3.json", "run_rank_03.json.gz", "Rank-3.trace.json"):
            assert path(tmp_path / named) == tmp_path / named
        assert path(tmp_path / "rank31.json") == tmp_path / "rank31.rank3.json"
        record_steps(tmp_path / "run.json.gz")
    finally:
        torch.distributed.destroy_process_group()
    assert [file.name for file in tmp_path.iterdir()] == ["run.rank3.json.gz"]


def test_the_command_for_the_files_of_all_ranks_is_one_that_a_shell_expands() -> None:
    from whatif.instrumentation.messages import recorded

    assert recorded("run.rank0.json", "run.rank*.json").endswith("next: whatif explain run.rank*.json")
    assert recorded("my run.rank0.json", "my run.rank*.json").endswith("whatif explain 'my run.rank'*.json")
    assert recorded("my run.json", command="%whatif") == "my run.json: recorded; next: %whatif explain 'my run.json'"
