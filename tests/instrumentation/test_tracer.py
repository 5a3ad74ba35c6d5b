"""The tracers: what a backend needs is said before the first step; memory events are kept when asked for."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from whatif.runtime.errors import WhatifError

torch = need("torch")
nn = torch.nn
record = need("whatif.instrumentation").record
tracer = need("whatif.instrumentation.tracer")
parse_clocks = need("whatif.instrumentation.gpu_clocks").parse_clocks
QUICK = {"steps": 3, "warmup_steps": 1, "untraced_steps": 2}


def train(path: Path, steps: int = 99, **options: Any) -> dict[str, Any]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, path, **(QUICK | options)) as recording:
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            recording.step()
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"backend": "nsys"}, "expected a backend among kineto, cupti, got 'nsys'"),
        ({"backend": "cupti", "memory": True}, "expected backend kineto for the memory timeline, got cupti"),
    ],
)
def test_a_backend_that_cannot_do_it_is_refused(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WhatifError, match=sentence):
        train(tmp_path / "run.json", **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cupti_without_a_gpu_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match="expected an NVIDIA GPU for backend cupti, got none: use backend kineto"):
        train(tmp_path / "run.json", steps=0, backend="cupti")


def test_another_profiler_is_refused_and_left_alone(tmp_path: Path) -> None:
    with torch.profiler.profile() as profiler, pytest.raises(WhatifError, match=r"got a running torch\.profiler"):
        train(tmp_path / "run.json")
    assert profiler.events()
    assert not list(tmp_path.iterdir())


def test_a_debuggers_trace_function_is_left_in_place(tmp_path: Path) -> None:
    """There is only one: to note lines would switch it off."""
    before = sys.gettrace()

    def traced(*_: object) -> None: ...

    sys.settrace(traced)
    try:
        train(tmp_path / "plain.json")
        with pytest.raises(WhatifError, match="expected no trace function besides --lines, got that of a debugger"):
            train(tmp_path / "run.json", lines=True)
        assert sys.gettrace() is traced
    finally:
        sys.settrace(before)


def test_a_process_records_once_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "_gpu_recorded", True)
    tracer.check_session("kineto", cuda=False)
    with pytest.raises(WhatifError, match="expected one GPU recording per process, got a second"):
        tracer.check_session("cupti", cuda=True)


def test_a_profiler_that_starts_later_is_refused_as_well(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)

    def run() -> None:
        with record(model, None, tmp_path / "run.json", **QUICK) as recording:
            recording.step()
            with torch.profiler.profile():
                for _ in range(9):
                    recording.step()

    with pytest.raises(WhatifError, match=r"got a running torch\.profiler"):
        run()
    assert not torch._C._autograd._profiler_enabled()
    assert not model._forward_pre_hooks
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("memory", [False, True])
def test_allocations_are_recorded_on_request(tmp_path: Path, memory: bool) -> None:
    recorded = train(tmp_path / "run.json", memory=memory)
    allocations = [event for event in recorded["traceEvents"] if event.get("name") == "[memory]"]
    assert bool(allocations) == memory
    assert all({"Bytes", "Addr", "Total Allocated"} <= set(event["args"]) for event in allocations)
    assert recorded["whatif"]["peak_memory_bytes"] is None


def test_reads_what_nvidia_smi_reports() -> None:
    # The documented form of `--format=csv,noheader,nounits`; a field that the GPU does not report is "[N/A]".
    assert parse_clocks("1980, 2619, 412.53, 47, 580.65.06\n") == (
        {"sm_mhz": 1980.0, "memory_mhz": 2619.0, "power_w": 412.53, "temperature_c": 47.0},
        "580.65.06",
    )
    clocks, driver = parse_clocks("1410, 1593, [N/A], 31, 535.1")
    assert clocks == {"sm_mhz": 1410.0, "memory_mhz": 1593.0, "power_w": None, "temperature_c": 31.0}
    assert driver == "535.1"
    for text in ("", "No devices were found", "1, 2"):
        assert parse_clocks(text) == (None, None)
