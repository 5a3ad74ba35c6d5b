"""Helpers of this folder's scripts and tests: a command run in process, traces to damage, public data."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.test_fuzz import SEED, sound
from whatif import WhatifError
from whatif.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT / "traces"
# A small recording of a CPU, with layers: 2,619 tasks.
CPU_RECORDING = TRACES / "lab_dts" / "dnn1.trace.json.gz"

Trace = dict[str, Any]


class OutOfTimeError(BaseException):
    """More CPU time went by than was allowed."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Interrupt what takes more CPU time; a busy machine does not count."""

    def out_of_time(*_: Any) -> None:
        raise OutOfTimeError(f"more than {seconds} s of CPU time")

    previous = signal.signal(signal.SIGVTALRM, out_of_time)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


@dataclass(frozen=True)
class Outcome:
    """What a command left behind; ``status`` is -1 where it raised instead of returning."""

    status: int
    out: str
    err: str

    @property
    def is_sound(self) -> bool:
        """Whether it answered, or refused in a sentence."""
        return self.status in (0, 1, 2) and "unexpected error" not in self.err and "Traceback" not in self.err


def call(*words: str | Path, seconds: float = 30) -> Outcome:
    """Run a command of ``whatif`` in this process, within so much CPU time."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with cpu_limit(seconds), redirect_stdout(out), redirect_stderr(err):
            status = main([str(word) for word in words])
    except KeyboardInterrupt:
        raise
    except BaseException:
        return Outcome(-1, out.getvalue(), err.getvalue() + traceback.format_exc())
    return Outcome(status, out.getvalue(), err.getvalue())


def loaded(path: Path) -> Trace:
    """Return a Kineto trace as an object, also where the file is a bare list of events."""
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return trace if isinstance(trace, dict) else {"traceEvents": trace}


def written(trace: Trace, **how: Any) -> bytes:
    """Return the bytes of a trace; ``how`` goes to ``json.dumps``."""
    return json.dumps(trace, **how).encode("utf-8", "surrogatepass")


def small_traces() -> dict[str, Trace]:
    """Return the traces that need nothing from outside: one made by hand with GPU work, one recorded on a CPU."""
    return {"by hand": {"traceEvents": SEED}, "CPU": loaded(CPU_RECORDING)}


def extra_folder(name: str) -> Path:
    """A folder of other people's data; without one the test is skipped, or fails where nothing may be skipped."""
    home = os.environ.get("WHATIF_EXTRA_DATA")
    if not home:
        pytest.skip("needs other people's data: WHATIF_EXTRA_DATA is not set")
    folder = Path(home) / name
    if not folder.is_dir():
        if os.environ.get("WHATIF_STRICT") == "1":
            pytest.fail(f"expected the folder {folder}, and WHATIF_STRICT=1 allows no skip")
        pytest.skip(f"needs the folder {folder}")
    return folder


@dataclass(frozen=True)
class Read:
    """What came of reading a trace and halving its work: ``kind`` is read, refused, crash, hang or unsound."""

    kind: str
    said: str = ""
    n_tasks: int = 0
    baseline_ms: float = 0.0
    predicted_ms: float = 0.0
    low_ms: float = 0.0
    replay_error_pct: float = 0.0
    warnings: tuple[str, ...] = ()


def halved(data: bytes, suffix: str = ".json", seconds: float = 20) -> Read:
    """Read a trace from its bytes and predict its step with half the work, on the GPU where there is one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{suffix}"
        path.write_bytes(data)
        try:
            with cpu_limit(seconds):
                graph = whatif.read(path)
                graph.check()
                kind = "gpu" if graph.on_gpu.any() else "cpu"
                prediction = whatif.apply(graph, f"scale:kind={kind},factor=0.5")
                report = prediction.to_dict()
        except WhatifError as error:
            sentence = str(error)
            return Read("refused" if sentence and "\n" not in sentence else "unsound", sentence)
        except OutOfTimeError as error:
            return Read("hang", str(error))
        except Exception:
            return Read("crash", traceback.format_exc()[-900:])
    numbers = {key: value for key, value in report.items() if key not in ("calibration", "trace")}
    return Read(
        "read" if sound(numbers) else "unsound",
        n_tasks=len(graph),
        baseline_ms=prediction.baseline_ms,
        predicted_ms=prediction.predicted_ms,
        low_ms=prediction.low_ms,
        replay_error_pct=report["replay_error_pct"],
        warnings=tuple(report["warnings"]),
    )
