"""The faults of a first GPU run, each played on the machine that is stood in for, and what whatif says of it.

python -m tests.instrumentation.faults      writes the table of docs/cupti.md
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whatif.instrumentation import collect as collecting
from whatif.instrumentation import gpu_events, machine_load
from whatif.instrumentation.cupti import refusals, session
from whatif.instrumentation.gpu_events import Machine

import whatif
from tests.helpers import need
from tests.instrumentation import cupti_machine, gpu_machine
from whatif.report.layout import markdown_table
from whatif.runtime.errors import WhatifError

PAGE = Path(__file__).resolve().parents[2] / "docs/cupti.md"
START, END = "<!-- faults played: start -->\n", "<!-- faults played: end -->"
SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
"""
Played = Callable[[pytest.MonkeyPatch, Path], str]


def recorded(patch: pytest.MonkeyPatch, folder: Path, **options: Any) -> str:
    """Run `collect` on the script; what it refuses, or what `info` finds wrong in the recording."""
    (folder / "train.py").write_text(SCRIPT)
    patch.setattr(sys, "argv", list(sys.argv))
    patch.setattr(sys, "path", ["", *sys.path])
    patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    try:
        ended = collecting.collect(
            str(folder / "train.py"), [], folder / "run.json.gz", untraced_steps=4, stop=True, **options
        )
    except WhatifError as error:
        return str(error)
    if ended.recording is None:
        return ended.failure or ""
    info = whatif.read(ended.recording).info
    wrong = [f"{found.severity.name.lower()}: {found.sentence}" for found in info.findings if found.severity > 0]
    return "; ".join(wrong) or f"recorded, {info.n_steps} steps on {info.gpu}, no problem found"


def kineto(machine: Machine | None = None, gpu: Any = None, **faults: Any) -> Played:
    """Through torch.profiler: ``faults`` of its trace, on a machine where some causes hold."""

    def play(patch: pytest.MonkeyPatch, folder: Path) -> str:
        gpu_machine.install(patch, gpu or gpu_machine.FakeGpu(), gpu_machine.FakeKineto(**faults))
        if machine is not None:
            patch.setattr(gpu_events, "this_machine", lambda: machine)
        return recorded(patch, folder)

    return play


def cupti(machine: Machine | None = None, **faults: Any) -> Played:
    """Through the backend cupti: fields of the library's are ``faults``."""

    def play(patch: pytest.MonkeyPatch, folder: Path) -> str:
        gpu_machine.install(patch, gpu_machine.FakeGpu())
        library = cupti_machine.Library()
        for name, value in faults.items():
            setattr(library, name, value)
        patch.setattr(session, "load_cupti", lambda: library)
        if machine is not None:
            patch.setattr(refusals, "this_machine", lambda: machine)
        with cupti_machine.Gpu(library):
            return recorded(patch, folder, backend="cupti")

    return play


def throttling(patch: pytest.MonkeyPatch, folder: Path) -> str:
    """A block of a campaign on a GPU that is too warm at each of the three tries."""
    timing, records, queue = (need(f"benchmarks.campaign.{name}") for name in ("timing", "records", "queue"))
    hot = {**gpu_machine.SMI_VALUES, "clocks_event_reasons.active": "0x0000000000000040"}
    gpu_machine.install(patch, gpu_machine.FakeGpu(smi_values=hot), gpu_machine.FakeKineto())

    class Timer:
        def __init__(self, device: Any) -> None: ...

        def mark(self) -> None: ...

        def times_ms(self) -> tuple[list[float], list[float]]:
            return [10.0] * 3, [5.0] * 3

        def load(self) -> dict[str, float]:
            return {}

    class Side:
        def step(self) -> None: ...

        def resume(self) -> None: ...

        def pause(self) -> None: ...

    patch.setattr(timing, "StepTimer", Timer)
    untraced = records.summarize([timing._round([timing._block(Side(), 3, "cuda")])] * 2)
    record = type("Record", (), {"data": {"untraced": untraced}})
    return str(queue._describe(type("Task", (), {"part": "untraced"}), record))


def capture(patch: pytest.MonkeyPatch, folder: Path) -> str:
    """An operator that waits for the GPU, measured by replays of a CUDA graph."""
    replay, worker = (
        need(f"whatif.instrumentation.{name}") for name in ("profile_ops.graph_replay", "operators.worker")
    )

    def refuse(work: Callable[[], Any]) -> Callable[[], None]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    gpu_machine.install(patch, gpu_machine.FakeGpu())
    patch.setattr(gpu_machine.GPU, "capture", refuse, raising=False)
    answer = worker.measure_or_skip(
        lambda: {"ns": replay.graph_rounds_ns([lambda: None], 1e3)}, worker.torch.device("cuda")
    )
    return f"left out: {answer['skipped']}"


FAULTS: dict[str, Played] = {
    "profiling for administrators only": kineto(Machine(admin_only=True, privileged=False), kernels=False),
    "the same in a container": kineto(Machine(admin_only=True, privileged=False, in_container=True), kernels=False),
    "a container without CAP_SYS_ADMIN": kineto(Machine(privileged=False, in_container=True), kernels=False),
    "Nsight Systems in the process": kineto(Machine(others=("NSYS_PROFILING_SESSION_ID",)), kernels=False),
    "two copies of libcupti": kineto(Machine(libraries=frozenset({"/a/libcupti.so", "/b/libcupti.so"})), kernels=False),
    "a MIG instance": kineto(Machine(mig=True), kernels=False),
    "no kernels, for no known cause": kineto(Machine(), kernels=False),
    "no GPU events at all": kineto(Machine(), kernels=False, calls=False),
    "torch.profiler without CUPTI": kineto(gpu=gpu_machine.FakeGpu(sees_cuda=False)),
    "Kineto lost 1 kernel of 50": kineto(loses=50),
    "two GPUs, the model on the second": kineto(gpu=gpu_machine.FakeGpu(visible=2, device=1)),
    "another subscriber": cupti(subscribed_by_other=True),
    "CUPTI: no permission": cupti(
        Machine(admin_only=True, privileged=False), refuses={"activity_enable": "ERROR_INSUFFICIENT_PRIVILEGES"}
    ),
    "CUPTI: no memory for buffers": cupti(refuses={"activity_register_callbacks": "ERROR_OUT_OF_MEMORY"}),
    "CUPTI: device busy at the flush": cupti(refuses={"activity_flush_all": "ERROR_HARDWARE_BUSY"}),
    "CUPTI: MIG": cupti(refuses={"activity_enable": "ERROR_MIG_DEVICE_NOT_SUPPORTED"}),
    "buffers late and out of order": cupti(shuffles=True),
    "1 kernel record of 100 dropped": cupti(loses=100),
    "1 kernel record of 10 dropped": cupti(loses=10),
    "a GPU that is too hot": throttling,
    "work that cannot be captured": capture,
}


def play(name: str) -> str:
    """Play a fault in a folder of its own; paths of this machine are left out of what is said."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        # What else runs on this machine is no fault of the GPU.
        patch.setattr(machine_load, "_counters", lambda: None)
        return FAULTS[name](patch, Path(folder)).replace(f"{folder}/", "")


def table() -> str:
    """Return the table of all faults."""
    return markdown_table(("fault", "what whatif says"), [(name, play(name)) for name in FAULTS]) + "\n"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + table() + END + rest.partition(END)[2])
