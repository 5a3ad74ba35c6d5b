"""Small task graphs and small Kineto traces, written by hand."""

from __future__ import annotations

import dataclasses
import gzip
import importlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

import whatif
from whatif import (
    Anchor,
    Dependencies,
    DependencyKind,
    GraphInfo,
    Phase,
    TaskGraph,
    TaskKind,
    Thread,
    ThreadKind,
    Timeline,
)
from whatif.graph.columns import COLUMNS, TASK_COLUMNS, filled
from whatif.graph.recorded import Recorded
from whatif.graph.types import ALL_STREAMS, Waits
from whatif.ingest.recorded import recorded_of, written
from whatif.prediction.baseline import Baseline
from whatif.runtime.loops import Loops

Event = dict[str, Any]


def replace(record: Any, **changes: Any) -> Any:
    """Return a changed dataclass or struct: Python 3.13's copy.replace."""
    change = msgspec.structs.replace if isinstance(record, msgspec.Struct) else dataclasses.replace
    return change(record, **changes)


def need(module: str) -> Any:
    """An optional module; without it the tests are skipped, or fail where nothing may be skipped."""
    return importlib.import_module(module) if os.environ.get("WHATIF_STRICT") == "1" else pytest.importorskip(module)


ROOT = Path(__file__).resolve().parent.parent
# The files of hot loops, which setup.py compiles; whatif/runtime/loops.py chooses between both forms.
LOOP_FILES = sorted((ROOT / "whatif").rglob("_[a-z]*.py"))
REBUILD = "run `python -m pip install -e .` (or `make test`, which does)"


def module_of_loops(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def stale_builds() -> list[Path]:
    """The compiled loops in the tree that are older than their source."""
    built = {path: path.with_name(f"{path.stem}_aot{EXTENSION_SUFFIXES[0]}") for path in LOOP_FILES}
    return [old for path, old in built.items() if old.exists() and old.stat().st_mtime < path.stat().st_mtime]


def both_forms(module: str) -> list[Any]:
    """Return test parameters: the loops of a module as plain Python, and compiled.

    Where they were not compiled, tests of that form are skipped, or fail where nothing may be skipped.
    """
    plain, built = Loops(module, plain=True), Loops(module, plain=False)
    missing = pytest.mark.skipif(
        not built.compiled and os.environ.get("WHATIF_STRICT") != "1",
        reason=f"{module} is not compiled here; {REBUILD}",
    )
    return [pytest.param(plain, id="plain"), pytest.param(built, id="compiled", marks=missing)]


@contextmanager
def loops_in_form(form: str) -> Iterator[None]:
    """Let all loops be "plain" or "compiled"; skip or fail where they are not compiled."""
    found = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith("whatif.")
        for value in vars(module).values()
        if isinstance(value, Loops)
    }
    before = {key: dict(vars(loops)) for key, loops in found.items()}
    try:
        for loops in found.values():
            loops.__init__(loops.module, plain=form == "plain")  # type: ignore[misc]
            if form == "compiled" and not loops.compiled and os.environ.get("WHATIF_STRICT") != "1":
                pytest.skip(f"{loops.module} is not compiled here; {REBUILD}")
            assert loops.compiled == (form == "compiled"), f"{loops.module}: {REBUILD}"
        yield
    finally:
        for key, loops in found.items():
            vars(loops).clear()
            vars(loops).update(before[key])


EXTRA_DATA = "WHATIF_EXTRA_DATA"


def extra_data(*parts: str) -> Path:
    """Return a file or folder of the recordings and measurements made by others, which no clone holds.

    Without WHATIF_EXTRA_DATA the test is skipped, even where WHATIF_STRICT=1 forbids other skips. Where the variable
    is set but the data is missing, the test is skipped, or fails under WHATIF_STRICT=1.
    """
    folder = os.environ.get(EXTRA_DATA)
    if not folder:
        pytest.skip(f"needs data made by others; {EXTRA_DATA} is not set (traces/fetch_public.py)")
    path = Path(folder, *parts)
    if not path.exists():
        missing = f"{EXTRA_DATA} is set, but there is no {path}"
        pytest.fail(missing) if os.environ.get("WHATIF_STRICT") == "1" else pytest.skip(missing)
    return path


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def benchmark(name: str) -> ModuleType:
    """Return a module of benchmarks/, which imports its neighbours by their names alone."""
    folder = str(Path(__file__).resolve().parent.parent / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


CPU = Thread("CPU", ThreadKind.CPU)
STREAM = Thread("stream 7", ThreadKind.STREAM, 0, 7)
CHANNEL = Thread("network", ThreadKind.CHANNEL, ordered=False)

_CPU_KIND, _GPU_KIND = TaskKind.RUNTIME, TaskKind.KERNEL


def facts_of(metadata: dict[str, Any]) -> Recorded:
    """What the recorder writes beside the events, as the reader takes it."""
    return recorded_of(metadata)[0]


def with_metadata(graph: TaskGraph, **metadata: Any) -> TaskGraph:
    """The graph of a recording that holds this as well."""
    return graph.replace(info=replace(graph.info, recorded=facts_of({**written(graph.info.recorded), **metadata})))


class Build:
    """Collects threads, tasks and what they wait for; ``graph()`` gives the checked task graph.

    A task's id is its place in the order of the calls to ``task``. ``metadata`` is that of the recorder.
    """

    def __init__(self, *threads: Thread, metadata: dict[str, Any] | None = None, **info: Any) -> None:
        self.threads = threads
        self.info = GraphInfo(**info, recorded=facts_of(metadata or {}))
        self._tasks: list[dict[str, Any]] = []
        self._names: dict[str, int] = {}
        self._layers: dict[str, int] = {"": 0}
        self._edges: list[Dependencies] = []
        self._waits: list[tuple[int, int, int]] = []

    def task(self, thread: int, duration_ns: int, name: str = "", kind: TaskKind | None = None, **columns: Any) -> int:
        on_cpu = self.threads[thread].kind == ThreadKind.CPU
        columns.setdefault("start_ns", len(self._tasks))  # recorded, not inserted
        columns.setdefault("step", 0)
        columns.setdefault("low_ns", duration_ns)
        columns.setdefault("high_ns", duration_ns)
        columns["layer"] = self._layers.setdefault(columns.get("layer", ""), len(self._layers))
        columns |= {
            "name": self._names.setdefault(name, len(self._names)),
            "kind": (_CPU_KIND if on_cpu else _GPU_KIND) if kind is None else kind,
            "thread": thread,
            "duration_ns": duration_ns,
        }
        self._tasks.append(columns)
        return len(self._tasks) - 1

    def edge(
        self,
        source: int,
        target: int,
        lag_ns: int = 0,
        kind: DependencyKind = DependencyKind.USER,
        anchor: Anchor = Anchor.END,
    ) -> None:
        self._edges.append(Dependencies.of([source], [target], kind, lag_ns, anchor))

    def launch(self, call_ns: int, kernel_ns: int, name: str = "", cpu: int = 0, stream: int = 1) -> tuple[int, int]:
        """A call on thread ``cpu`` and the kernel that it launches on thread ``stream``."""
        call = self.task(cpu, call_ns, f"launch {name}")
        kernel = self.task(stream, kernel_ns, name)
        self.edge(call, kernel, self.info.launch_lag_ns, DependencyKind.LAUNCH)
        return call, kernel

    def sync(self, call_ns: int = 0, scope: int = ALL_STREAMS, lag_ns: int = 0, cpu: int = 0) -> tuple[int, int]:
        """A synchronisation: the call, and the wait behind it for all that was launched before on ``scope``."""
        call = self.task(cpu, call_ns, "sync")
        wait = self.task(cpu, 0, "wait", TaskKind.WAIT)
        self._waits.append((wait, scope, lag_ns))
        return call, wait

    def graph(self, *, check: bool = True) -> TaskGraph:
        given = {column.name: [task.get(column.name, column.default) for task in self._tasks] for column in COLUMNS}
        waits = np.array(self._waits, dtype=np.int64).reshape(-1, 3)
        result = TaskGraph(
            **filled(len(self._tasks), given),
            dependencies=Dependencies.concatenate(self._edges),
            waits=Waits(waits[:, 0].astype(np.int32), waits[:, 1].astype(np.int32), waits[:, 2]),
            names=tuple(self._names),
            threads=self.threads,
            layers=tuple(self._layers),
            info=self.info,
        )
        return result.check() if check else result


def names(graph: TaskGraph) -> list[str]:
    """The name of every task."""
    return [graph.names[code] for code in graph.name.tolist()]


def starts(timeline: Timeline) -> dict[str, int]:
    """Start of each task by its name, for graphs in which names are distinct."""
    found = names(timeline.graph)
    assert len(set(found)) == len(found), found
    return dict(zip(found, timeline.start_ns.tolist(), strict=True))


def end_of(timeline: Timeline, name: str) -> int:
    """End of the last task of that name."""
    return max(end for n, end in zip(names(timeline.graph), timeline.end_ns.tolist(), strict=True) if n == name)


# -- traces: times in us, as Kineto writes them --------------------------------------------------------------------


def _event(cat: str, name: str, ts: float, dur: float, tid: Any, pid: Any, args: dict[str, Any]) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def op(name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    return _event("cpu_op", name, ts, dur, tid, 1, args)


def mark(name: str, ts: float, dur: float, tid: int = 1) -> Event:
    return _event("user_annotation", name, ts, dur, tid, 1, {})


def module(name: str, ts: float, dur: float, tid: int = 1) -> Event:
    return _event("python_function", f"nn.Module: {name}", ts, dur, tid, 1, {})


def call(name: str, ts: float, dur: float, correlation: int, tid: int = 1, cat: str = "cuda_runtime") -> Event:
    return _event(cat, name, ts, dur, tid, 1, {"correlation": correlation})


def kernel(name: str, ts: float, dur: float, correlation: int, stream: int = 7) -> Event:
    return _event("kernel", name, ts, dur, stream, 0, {"device": 0, "stream": stream, "correlation": correlation})


def copy(direction: str, ts: float, dur: float, correlation: int, size: int = 1_000_000, stream: int = 7) -> Event:
    args = {"device": 0, "stream": stream, "correlation": correlation, "bytes": size}
    return _event("gpu_memcpy", f"Memcpy {direction}", ts, dur, stream, 0, args)


def launched(
    name: str, call_ts: float, call_dur: float, ts: float, dur: float, correlation: int, tid: int = 1, stream: int = 7
) -> list[Event]:
    """A launch and its kernel."""
    return [
        call("cudaLaunchKernel", call_ts, call_dur, correlation, tid),
        kernel(name, ts, dur, correlation, stream),
    ]


def write_trace(path: Path, events: Sequence[Event], **header: Any) -> Path:
    """Write a trace, compressed where the name ends in .gz."""
    text = json.dumps({"schemaVersion": 1, **header, "traceEvents": list(events)}).encode()
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    return path


@cache
def baseline_of(path: Path) -> Baseline:
    """The baseline of a recording, which is read once."""
    return Baseline.of(whatif.read(path))


def read_events(folder: Path, events: Sequence[Event], **header: Any) -> TaskGraph:
    """The task graph of some events."""
    return whatif.read(write_trace(folder / "trace.json", events, **header))


# -- the step that every edit is tried on ---------------------------------------------------------------------------

OTHER = Thread("stream 8", ThreadKind.STREAM, 0, 8)


def step(*, copies: int = 3) -> TaskGraph:
    """Launch lag 2; every call is followed by a gap.

    ::

        ns      0         10        20        30        40
        CPU     |l0|g0|l1|g1|l2|g2|s|................w|
        stream       |k0--------|k1--------|k2--------|
    """
    build = Build(CPU, STREAM, launch_lag_ns=2)
    for i in range(copies):
        call = build.task(0, 3, f"l{i}")
        build.task(0, 2, f"g{i}", TaskKind.GAP)
        kernel = build.task(1, 10, f"k{i}", layer=f"layer{i}", phase=Phase.FORWARD, step=4, size_bytes=100, flops=7)
        build.edge(call, kernel, 2, DependencyKind.LAUNCH)
    build.sync(1)
    return build.graph()


def id_of(graph: TaskGraph, name: str) -> int:
    (found,) = np.flatnonzero(graph.select(name=f"^{name}$")).tolist()
    return int(found)


def ids_of(graph: TaskGraph, *wanted: str) -> np.ndarray[Any, Any]:
    return np.array([id_of(graph, name) for name in wanted], dtype=np.int64)


def ends(timeline: Timeline) -> dict[str, int]:
    return dict(zip(names(timeline.graph), timeline.end_ns.tolist(), strict=True))


def apply(graph: TaskGraph, *specs: str) -> TaskGraph:
    """The graph after each what-if in turn, checked."""
    for spec in specs:
        graph = whatif.load_transform(spec)(graph).check()
    return graph


def makespan_ns(graph: TaskGraph, spec: str) -> int:
    """How long all tasks take together under a what-if with its schedule."""
    transform = whatif.load_transform(spec)
    return whatif.simulate(transform(graph).check(), transform.schedule).makespan_ns


def equal(a: TaskGraph, b: TaskGraph) -> bool:
    columns = all(np.array_equal(getattr(a, c), getattr(b, c)) for c in TASK_COLUMNS)
    rows = all(
        np.array_equal(getattr(a.dependencies, c), getattr(b.dependencies, c))
        for c in ("source", "target", "kind", "lag_ns", "anchor")
    )
    waits = all(np.array_equal(getattr(a.waits, c), getattr(b.waits, c)) for c in ("task", "scope", "lag_ns"))
    return columns and rows and waits and a.names == b.names and a.threads == b.threads
