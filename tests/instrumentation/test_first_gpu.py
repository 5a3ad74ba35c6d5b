"""A user's first GPU run, on a machine that is stood in for: `collect` from end to end, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import need
from whatif.runtime.errors import WhatifError

torch = need("torch")
machines = need("tests.instrumentation.gpu_machine")
cupti_machine = need("tests.instrumentation.cupti_machine")
gpu_events = need("whatif.instrumentation.gpu_events")
collecting = need("whatif.instrumentation.collect")
session = need("whatif.instrumentation.cupti.session")
refusals = need("whatif.instrumentation.cupti.refusals")

FakeGpu, FakeKineto = machines.FakeGpu, machines.FakeKineto
Machine = gpu_events.Machine

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def collect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that records the script into a file and returns its path."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    # What a script finds, and keeps.
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run(**options: Any) -> Path:
        ended = collecting.collect(str(path), [], tmp_path / "run.json.gz", untraced_steps=4, stop=True, **options)
        if ended.recording is None:
            raise WhatifError(ended.failure)
        return Path(ended.recording)

    return run


def test_collect_with_kineto_records_kernels(collect: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeGpu(visible=2, device=1)
    machines.install(monkeypatch, machine, FakeKineto())
    graph = whatif.read(collect())
    assert graph.info.n_steps == 5
    assert graph.info.gpu == machines.NAME
    kernels = np.bincount(graph.step[graph.on_gpu & (graph.step >= 0)])
    assert len(set(kernels.tolist())) == 1
    assert kernels[0] > 20
    assert {"0", "2"} <= {graph.layers[layer] for layer in graph.layer[graph.on_gpu]}
    assert 1 in machine.asked  # not every program makes its model's GPU the current one


def test_allocator_retries_are_noted_by_step(collect: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    machines.install(monkeypatch, FakeGpu(retries_a_step=2), FakeKineto())
    graph = whatif.read(collect())
    assert graph.info.recorded.allocator_retries == (2,) * 5


def test_collect_with_cupti_records_kernels(collect: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    machines.install(monkeypatch, FakeGpu())
    library = cupti_machine.Library()
    monkeypatch.setattr(session, "load_cupti", lambda: library)
    with cupti_machine.Gpu(library):
        path = collect(backend="cupti")
    graph = whatif.read(path)
    assert graph.info.n_steps == 5
    assert graph.info.gpu == machines.NAME
    assert {"0", "2"} <= {graph.layers[layer] for layer in graph.layer[graph.on_gpu]}
    assert not [finding for finding in graph.info.findings if finding.severity > 1]


@pytest.mark.parametrize(
    ("kineto", "seen"),
    [(FakeKineto(kernels=False), "launches and no kernel"), (FakeKineto(kernels=False, calls=False), "got no kernel;")],
    ids=["calls alone", "nothing of the GPU"],
)
def test_a_trace_without_kernels_is_refused(
    collect: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kineto: Any, seen: str
) -> None:
    machines.install(monkeypatch, FakeGpu(), kineto)
    with pytest.raises(WhatifError, match=f"expected kernels in the trace of a model on a GPU.*{seen}"):
        collect()
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_no_kernels_through_cupti_are_refused(collect: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    machines.install(monkeypatch, FakeGpu())
    monkeypatch.setattr(session, "load_cupti", cupti_machine.Library)
    with pytest.raises(WhatifError, match="expected kernels"):
        collect(backend="cupti")


def test_a_profiler_built_without_cupti_is_refused_before_any_step(
    collect: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.install(monkeypatch, FakeGpu(sees_cuda=False), FakeKineto())
    with pytest.raises(WhatifError, match=r"expected a torch\.profiler that sees the GPU"):
        collect()


CAUSES = {
    "admin": (Machine(admin_only=True, privileged=False), "NVreg_RestrictProfilingToAdminUsers=1.*run as root, or set"),
    "admin in a container": (Machine(admin_only=True, privileged=False, in_container=True), "--cap-add=SYS_ADMIN, or"),
    "container": (Machine(privileged=False, in_container=True), "in a container without CAP_SYS_ADMIN"),
    "another subscriber": (
        Machine(others=("NSYS_PROFILING_SESSION_ID",)),
        r"Another profiler .*NSYS_.*run without",
    ),
    "two libraries": (Machine(libraries=frozenset({"/a", "/b"})), r"2 copies of libcupti \(/a, /b\)"),
    "MIG": (Machine(mig=True), "is a MIG instance.*whole GPU"),
    "ROCm": (Machine(is_nvidia=False), "roctracer"),
    "none that is known": (Machine(admin_only=True, privileged=True), "No known cause applies.*CUPTI_ERROR"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_has_its_remedy(name: str) -> None:
    machine, message = CAUSES[name]
    with pytest.raises(WhatifError, match=message):
        gpu_events.require_gpu_events([], Path("run.json"), machine)


def test_all_causes_are_reported_at_once() -> None:
    machine = Machine(admin_only=True, privileged=False, others=("X",), mig=True)
    assert len(gpu_events.causes_of(machine)) == 3


def test_reads_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver's parameters, a process's capabilities and its libraries, as Linux reports them."""
    (tmp_path / "params").write_text("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n")
    (tmp_path / "status").write_text("Name:\tpython\nCapEff:\t00000000a80425fb\n")  # Docker's default set
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 0 08:01 1  /opt/nsight/libToolsInjection64.so\n")
    for name, file in (("_PARAMETERS", "params"), ("_STATUS", "status"), ("_MAPS", "maps")):
        monkeypatch.setattr(gpu_events, name, tmp_path / file)
    monkeypatch.setattr(gpu_events, "_CONTAINER_MARKS", (tmp_path / "params",))
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    machines.install(monkeypatch, FakeGpu(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb"))
    assert gpu_events.this_machine() == Machine(
        admin_only=True, privileged=False, in_container=True, mig=True,
        others=("NSYS_PROFILING_SESSION_ID", "libToolsInjection64"),
    )  # fmt: skip
    (tmp_path / "status").write_text("CapEff:\t000001ffffffffff\n")
    assert gpu_events.this_machine().privileged


CALLS = (
    "set_thread_id_type", "activity_register_callbacks", "activity_enable", "activity_flush_all", "activity_disable",
    "activity_get_num_dropped_records", "activity_push_external_correlation_id",
    "activity_pop_external_correlation_id",
)  # fmt: skip


@pytest.mark.parametrize("name", refusals.NAMED)
@pytest.mark.parametrize("call", CALLS)
def test_every_error_at_every_call_is_one_sentence(call: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machines.install(monkeypatch, FakeGpu())
    library = cupti_machine.Library()
    monkeypatch.setattr(session, "load_cupti", lambda: library)
    library.refuses[call] = name

    def record() -> None:
        made = session.CuptiSession()
        made.start()
        made.push(1)
        made.pop()
        made.stop()

    with pytest.raises(WhatifError) as raised:
        record()
    message = str(raised.value)
    assert message.startswith(f"the backend cupti: expected {call} to work, got CUPTI_{name}: ")
    assert "\n" not in message
    assert len(message) > 100


def test_each_named_error_has_a_remedy_of_its_own() -> None:
    """Every name is CUPTI's, and none falls back to `look it up`."""
    known = {result.name: int(result) for result in cupti_machine.cupti.Result}
    for name in refusals.NAMED:
        error = cupti_machine.cupti.cuptiError(known[name])
        assert "look it up" not in str(refusals.refused(cupti_machine.cupti, "activity_enable", error))
    error = cupti_machine.cupti.cuptiError(known["ERROR_QUEUE_EMPTY"])
    assert "CUPTI_ERROR_QUEUE_EMPTY: look it up" in str(refusals.refused(cupti_machine.cupti, "activity_enable", error))


def test_a_call_that_cupti_cannot_name_is_called_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cupti_machine.Library()
    monkeypatch.setattr(session, "load_cupti", lambda: library)
    made = session.CuptiSession()
    library.refuses["get_callback_name"] = "ERROR_INVALID_PARAMETER"
    assert made.callback_name(False, 987) == "cudaCall987"
