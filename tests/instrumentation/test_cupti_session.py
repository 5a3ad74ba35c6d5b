"""What the CUPTI backend refuses, each in one sentence, and how a session begins and ends."""

from __future__ import annotations

import enum
import mmap
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from whatif.instrumentation import gpu_events
from whatif.instrumentation.cupti import refusals, session
from whatif.instrumentation.cupti.session import (
    CuptiSession,
    load_cupti,
    loaded_cupti_libraries,
    refuse_two_libraries,
)

from tests.instrumentation import cupti_machine as machine
from tests.instrumentation.cupti_machine import Library, no_gpu_to_wait_for
from whatif import WhatifError

no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A driver beneath the binding, and a process that has not used it."""
    found = Library()
    monkeypatch.setattr(session, "load_cupti", lambda: found)
    no_gpu_to_wait_for(monkeypatch)
    return found


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti.cupti", None)
    with pytest.raises(WhatifError, match=r"expected the package cupti-python.*--no-deps cupti-python==13\.2\.0"):
        load_cupti()


def test_the_package_that_the_binding_needs_is_named() -> None:
    """With `--no-deps` it may be missing: the real binding, in a process of its own, without it."""
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "from whatif.instrumentation.cupti.session import load_cupti\n"
        "load_cupti()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "WhatifError: the backend cupti: expected the package cuda-bindings" in run.stderr


def test_a_binding_without_runtime_calls_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.SimpleNamespace(ActivityKind=enum.IntEnum("ActivityKind", {"DRIVER": 4}))
    monkeypatch.setitem(sys.modules, "cupti.cupti", old)  # type: ignore[arg-type]
    with pytest.raises(WhatifError, match=r"expected cupti-python 13\.0 or newer, which records runtime calls, got 1"):
        load_cupti()


@no_gpu_here
def test_a_machine_without_a_driver_is_refused() -> None:
    """The binding's own error, of the real package on a machine that has no driver."""
    with pytest.raises(WhatifError, match=r"expected the CUDA driver and CUPTI, got NotSupportedError .*libcuda"):
        CuptiSession()


def test_an_earlier_use_of_torch_profiler_is_found(library: Library) -> None:
    library.subscribed_by_other = True
    with pytest.raises(WhatifError, match=r"another profiler has used CUPTI.*record in a fresh process"):
        CuptiSession()


def test_profiling_that_is_not_allowed_says_so(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.refuses["activity_enable"] = "ERROR_INSUFFICIENT_PRIVILEGES"
    machine = gpu_events.Machine(admin_only=True, privileged=False)
    monkeypatch.setattr(refusals, "this_machine", lambda: machine)
    with pytest.raises(WhatifError, match=r"got CUPTI_ERROR_INSUFFICIENT_PRIVILEGES: .*NVreg_RestrictProfiling"):
        CuptiSession().start()


def test_records_come_from_start_to_stop(library: Library) -> None:
    session = CuptiSession()
    library.file(machine.memset(1, 2, 3, 4))
    session.start()
    library.file(machine.memset(5, 6, 7, 8), machine.call(machine.LAUNCH, 4, 5, 9))
    library.dropped = 3
    session.stop()
    library.file(machine.memset(9, 10, 11, 12))
    assert [row.size_bytes for row in session.records.copies] == [8]
    assert len(session.records.calls) == 1
    assert session.dropped_records == 3
    assert not library.enabled


def test_a_record_that_cannot_be_read_is_no_silent_loss(library: Library) -> None:
    session = CuptiSession()
    session.start()
    library.pending.append(types.SimpleNamespace(kind=int(machine.KIND.MEMSET)))
    with pytest.raises(WhatifError, match="reading one raised AttributeError"):
        session.stop()


def test_two_copies_of_the_library_are_refused(tmp_path: Path) -> None:
    """Two files of that name, mapped into this very process."""
    before = loaded_cupti_libraries()
    held = []
    for folder in ("one", "two"):
        path = tmp_path / folder / "libcupti.so.13"
        path.parent.mkdir()
        shutil.copy(sys.executable, path)
        with path.open("rb") as file:
            held.append(mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ))
    found = loaded_cupti_libraries() - before
    assert found == {str(tmp_path / folder / "libcupti.so.13") for folder in ("one", "two")}
    refuse_two_libraries(set(list(found)[:1]))
    with pytest.raises(WhatifError, match="expected one copy of libcupti in this process, got 2"):
        refuse_two_libraries(found)
    del held


def test_nothing_else_imports_the_binding() -> None:
    code = (
        "import sys, whatif.instrumentation.cupti.session, whatif.instrumentation.gpu_rates;"
        "print({'cupti', 'cupy'} & {name.split('.')[0] for name in sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
