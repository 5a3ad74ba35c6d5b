"""Every command on a small trace: text, JSON keys, warnings beside the result, hostile names."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import Event, call, copy, launched, mark, module, op, write_trace
from tests.memory_traces import two_linear_layers
from whatif.cli.main import main

INFO_KEYS = {
    "trace", "gpu", "steps", "step_source", "measured_ms", "untraced_ms", "baseline_ms", "replay_error_pct",
    "step_clock", "unexplained_wait_pct", "tasks", "gpu_time_with_layer_pct", "gpu_time_with_phase_pct",
    "launch_lag_us", "queue_depth", "warnings",
}  # fmt: skip
EXPLAIN_KEYS = {
    "trace", "step_clock", "baseline_ms", "breakdown", "critical_path_ms", "layers", "kernels", "verdict", "warnings",
}  # fmt: skip
APPLY_KEYS = {
    "trace", "transforms", "steps", "measured_ms", "untraced_ms", "baseline_ms", "replay_error_pct", "predicted_ms",
    "low_ms", "high_ms", "speedup", "samples_factor", "step_clock", "gpu_busy_ms", "unexplained_wait_pct", "breakdown",
    "warnings",
}  # fmt: skip
PARTS = {"cpu_only_ms", "gpu_only_ms", "cpu_gpu_ms", "communication_ms", "idle_ms"}
V100 = [{"id": 0, "name": "Tesla V100-SXM2-32GB", "totalGlobalMem": 34089730048}]


def training(layer: str = "Linear_0", kernel: str = "volta_sgemm_128x64_nn") -> list[Event]:
    """Five steps of 1 ms: a launch of 10 us, a kernel of 900 us, a synchronisation until the kernel's end."""
    events: list[Event] = []
    for step in range(5):
        t, at = 1000.0 * step, 10 * step
        events.append(mark(f"ProfilerStep#{step}", t, 1000))
        events += [module(layer, t + 5, 80), op("aten::mm", t + 10, 70)]
        events += launched(kernel, t + 20, 10, t + 32, 900, at + 1)
        events.append(call("cudaDeviceSynchronize", t + 100, 836, at + 2))
    return events


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_trace(tmp_path / "five steps.json.gz", training(), deviceProperties=V100))


def output(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(list(words)) == status
    return capsys.readouterr().out


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The one JSON object that a command prints."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(output(capsys, *words, "--json"), parse_constant=no_constant)
    assert isinstance(found, dict)
    return found


def test_info(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "info", trace)
    assert found.keys() >= INFO_KEYS
    assert found["gpu"] == "Tesla V100-SXM2-32GB"
    assert found["gpu_known_as"] == "V100-SXM2-32"
    assert (found["steps"], found["step_clock"], found["tasks"]["kernel"]) == (5, "gpu", 5)
    assert found["gpu_time_with_layer_pct"] == pytest.approx(100)
    assert found["dtypes_pct"] == {"fp32": 100.0}
    assert found["kernel_families_pct"] == {"gemm": 100.0}
    assert found["baseline_ms"] == pytest.approx(1.0, abs=0.01)
    text = output(capsys, "info", trace)
    assert text.startswith("five steps.json.gz: No problems found in the checks below: the replay matches the recorded")
    assert "GPU            Tesla V100-SXM2-32GB (known as V100-SXM2-32)" in text
    assert "steps          5, from profiler marks" in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_explain(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "explain", trace)
    assert found.keys() >= EXPLAIN_KEYS
    assert found["breakdown"].keys() == PARTS
    assert found["verdict"].startswith("GPU-bound: the GPU is busy 0.90 of 1.00 ms (90 %)")
    layer = found["layers"][0]
    assert layer["layer"] == "Linear_0"
    assert (layer["gpu_ms"], layer["critical_ms"]) == (pytest.approx(0.9, abs=0.01), pytest.approx(0.9, abs=0.05))
    assert sum(found["critical_path_ms"].values()) == pytest.approx(found["baseline_ms"], rel=1e-6)
    text = output(capsys, "explain", trace)
    assert text.splitlines()[0].startswith("GPU-bound: ")
    assert "Linear_0" in text


def test_apply(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "apply", "scale:kind=gpu,factor=0.5", "scale:kind=gpu,factor=0.5", trace)
    assert found.keys() >= APPLY_KEYS
    assert [t["name"] for t in found["transforms"]] == ["scale", "scale"]
    assert found["predicted_ms"] == pytest.approx(1.0 - 0.75 * 0.9, abs=0.02)
    assert found["breakdown"].keys() == {"baseline", "predicted"}
    text = output(capsys, "apply", "scale:kind=gpu,factor=0.5", trace)
    assert text.startswith("scale:kind=gpu,factor=0.5: 1.000 → 0.55")
    assert "× as fast" in text.splitlines()[0]
    assert "samples" not in text


def test_apply_compares_samples_where_the_batch_is_not_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the longer step of a worker was said: eight GPUs were "0.97× as fast"."""
    trace = str(write_trace(tmp_path / "two layers.json", two_linear_layers()))
    spec = "distributed:workers=8,gradient_mb=1"
    found = report(capsys, "apply", spec, trace)
    assert found["samples_factor"] == 8
    times = f"{8 * found['speedup']:.2f}×"
    assert f"8× as many samples in a step, {times} as many a second" in output(capsys, "apply", spec, trace)


def test_options_may_stand_between_names_and_trace(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "scale:factor=0.5", "--json", "scale:factor=0.5", "--clock", "span", trace]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["transforms"]), found["step_clock"]) == (2, "span")


def test_a_clock_that_the_trace_lacks_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "cpu.json", [op("aten::mm", 0, 100)])
    assert main(["info", str(path), "--clock", "gpu"]) == 1
    assert "no steps by the clock 'gpu'" in capsys.readouterr().err


def test_a_cpu_trace_is_explained_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_trace(tmp_path / "cpu.json", [op("aten::mm", 0, 60), op("aten::relu", 60, 40)]))
    found = report(capsys, "explain", path)
    assert [part["name"] for part in found["operations"]] == ["aten::mm", "aten::relu"]
    text = output(capsys, "explain", path)
    assert text.startswith("CPU-bound: the recording has no GPU work")
    assert "GPU ms" not in text
    assert report(capsys, "info", path)["time_share_of"] == "cpu"
    assert "none: a CPU recording" in output(capsys, "info", path)


def test_warnings_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that starts 500 us late on an idle stream: nothing in the trace says what it waited for."""
    events = [*launched("a", 0, 5, 7, 100, 1), *launched("b", 200, 5, 900, 100, 2), copy("DtoH", 1200, 10, 3)]
    path = str(write_trace(tmp_path / "late.json", events))
    assert main(["apply", "scale:factor=1.0", path]) == 0
    out, err = capsys.readouterr()
    assert "whatif: warning: " in err
    assert "nothing in the recording explains" in err
    assert "warning" not in out
    found = report(capsys, "apply", "scale", path)
    assert any("nothing in the recording explains" in sentence for sentence in found["warnings"])


def test_transforms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = report(capsys, "transforms")
    scale = next(entry for entry in found["transforms"] if entry["name"] == "scale")
    assert scale["summary"].startswith("Scale: ")
    assert "scale " in output(capsys, "transforms")
    one = report(capsys, "transforms", "scale")
    assert {"name": "factor", "type": "float", "default": 1.0} in one["options"]
    text = output(capsys, "transforms", "scale")
    assert "Source: Daydream" in text
    assert "all | cpu | gpu | communication | data" in text
    assert "whatif apply scale:kind=all,factor=1.0 TRACE" in text
    script = tmp_path / "mine.py"
    script.write_text(
        '"""Mine [red]: nothing."""\ndef transform(graph, *, rate: int | None = None):\n    return graph\n'
    )
    text = output(capsys, "transforms", str(script))
    assert text.startswith("Mine [red]: nothing.")
    assert "int | none" in text
    assert f"whatif apply {script} TRACE" in text  # by its name alone it is not found


def test_a_broken_plug_in_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Point:
        name = "broken"

        def load(self) -> None:
            raise RuntimeError("no such library")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point()])
    text = output(capsys, "transforms")
    assert "broken (plug-in)" in text
    assert "it cannot be imported: RuntimeError: no such library" in " ".join(text.split())
    assert "Scale: " in text


def recorded(path: Path, cut: str = "", **metadata: Any) -> str:
    """A recording with what `collect` writes beside the events; ``cut`` ends the file early."""
    text = json.dumps({"whatif": metadata, "traceEvents": training()})
    path.write_text(text[: text.rindex(cut)] if cut else text)
    return str(path)


def test_info_says_where_a_replay_proves_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    close = recorded(tmp_path / "close.json", untraced_step_ms={"median": 0.9})
    trust = report(capsys, "info", close)["trust"]
    assert (trust["level"], trust["findings"]) == ("good", [])
    slowed = recorded(tmp_path / "slowed.json", untraced_step_ms={"median": 0.5})
    trust = report(capsys, "info", slowed)["trust"]
    assert trust["level"] == "doubtful"
    assert trust["sentence"] == "Handle with care: the profiler made the step 2.0 times as long."
    unexplained = report(capsys, "info", slowed)["calibration"]["reason"]
    assert "the GPU's work bounds it" in unexplained
    cut = recorded(tmp_path / "cut.json", cut='"ts"', untraced_step_ms={"median": 0.5})
    trust = report(capsys, "info", cut)["trust"]
    assert trust["findings"][0]["sentence"].startswith("the file ends early at byte ")
    assert trust["findings"][1]["sentence"] == "the profiler made the step 2.0 times as long"


def test_a_version_that_is_not_known_is_a_quirk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version, named in ((1, None), (99, "99"), ("x" * 1000, "unknown"), ([], "unknown")):
        warnings = report(capsys, "info", recorded(tmp_path / "run.json", version=version))["warnings"]
        reported = [f"metadata has version {named}," in sentence for sentence in warnings]
        assert reported == ([True] if named else [])


ODD = (
    "text",
    [],
    {},
    None,
    True,
    -5,
    10**400,
    1e300,
    1e-300,
    float("nan"),
    float("inf"),
    [1, None, {"a": []}],
    "\x1b[31m",
)
ODD_FIELDS = ("version", "layers", "optimizer", "batch_size", "precision", "grad_ready_order", "rates", "gpu")


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:20])
def test_metadata_may_be_anything(odd: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = [{"name": odd, "parameters": odd, "gradient_bytes": odd}]
    headers: list[dict[str, Any]] = [
        {"whatif": odd, "deviceProperties": odd},
        {"deviceProperties": [{"name": "Tesla V100-SXM2-32GB", "totalGlobalMem": odd}]},
        {"whatif": dict.fromkeys(ODD_FIELDS, odd), "deviceProperties": [{"name": odd}]},
        {"whatif": {"untraced_step_ms": {"median": odd}, "layers": layers, "rates": {"copy_gbyte_s": odd}}},
    ]
    for header in headers:
        path = str(write_trace(tmp_path / "odd.json", training(), **header))
        for words in (["info"], ["explain"], ["apply", "amp"]):
            assert main([*words, path]) == 0
            out, err = capsys.readouterr()
            assert "\x1b" not in out + err
            report(capsys, *words, path)


HOSTILE = "[red]x[/red]\x1b[31m\x07\r\u202e:smile: <b>\x9b\u2028"


@pytest.mark.parametrize("words", [["info"], ["explain"], ["apply", "scale:factor=0.5"]])
def test_hostile_names_come_out_as_text(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = [{"id": 0, "name": "GPU " + HOSTILE}]
    path = write_trace(tmp_path / "h[red]i.json", training(HOSTILE, "kernel " + HOSTILE), deviceProperties=gpu)
    assert main([*words, str(path)]) == 0
    out, err = capsys.readouterr()
    for text in (out, err):
        assert not set(text) & {"\x1b", "\x07", "\r", "\u202e", "\x9b", "\u2028"}
    if words != ["apply", "scale:factor=0.5"]:
        assert "[red]x[/red]" in out
        assert ":smile:" in out
        assert "h[red]i.json" in out
    found = report(capsys, *words, str(path))
    assert found["trace"] == str(path)


def test_hostile_paths_come_out_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "no\x1b[31m\nsuch.json"]) == 1
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert err.count("\n") == 1


def test_collect_hands_all_that_follows_to_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[Any, ...]] = []

    def collect(script: str, args: list[str], output: Path, *, steps: int, **_: Any) -> types.SimpleNamespace:
        calls.append((script, args, output, steps))
        return types.SimpleNamespace(
            recording=output, status=0, steps=9, interrupted=False, stopped=False, caught=False, together=False
        )

    monkeypatch.setitem(sys.modules, "whatif.instrumentation.collect", types.SimpleNamespace(collect=collect))
    said: list[str] = []
    monkeypatch.setattr("whatif.instrumentation.messages.tell", said.append)
    script = tmp_path / "train.py"
    script.touch()
    assert main(["collect", "--steps", "7", str(script), "--steps", "9", "--json", "-o", "x", "--debug", "-h"]) == 0
    assert main(["collect", "-o", "run.json", str(script)]) == 0
    assert calls == [
        (str(script), ["--steps", "9", "--json", "-o", "x", "--debug", "-h"], Path("train.json.gz"), 7),
        (str(script), [], Path("run.json"), 5),
    ]
    assert "next: whatif explain run.json" in said[-1]
    assert not capsys.readouterr().out


@pytest.mark.parametrize("launcher", [[], ["torchrun"], ["-m", "torch.distributed.run"], ["accelerate", "launch"]])
def test_collect_without_torch_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launcher: list[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("collect", "collector"):
        monkeypatch.delitem(sys.modules, f"whatif.instrumentation.{name}", raising=False)
    script = tmp_path / "train.py"
    script.touch()
    assert main(["collect", *launcher, str(script)]) == 1
    err = capsys.readouterr().err
    assert 'pip install "whatif-profiler[record]"' in err
    assert err.count("\n") == 1


def test_a_large_file_on_a_terminal_has_a_progress_bar(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("whatif.cli.reading.PROGRESS_BYTES", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["info", trace]) == 0
    out, err = capsys.readouterr()
    assert "reading" in err
    assert "reading" not in out


def test_a_span_is_not_called_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_trace(tmp_path / "two.json", training()[:10]))
    text = output(capsys, "explain", path)
    assert "the whole span takes" in text
    assert "a step" not in text
    text = output(capsys, "info", path)
    assert "Whole span" in text
    assert "from profiler marks; step times need at least 4: all times are of the whole span" in " ".join(text.split())
    assert "\n  span " in output(capsys, "apply", "scale:factor=0.5", path)
