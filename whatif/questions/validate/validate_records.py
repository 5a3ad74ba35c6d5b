"""The runs of a folder: a record each, as campaigns write them, and the recording next to it."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from msgspec import Struct

from whatif.graph.order import quartiles
from whatif.ingest.record_file import as_record, read_json

# Larger numbers, of samples, milliseconds or anything else, mean a damaged record.
MOST = 10**12
# Suffixes of the recording of `NAME.json`, besides the file that the record names.
TRACE_SUFFIXES = (".trace.json.gz", ".trace.json", ".json.gz")

# Options of a training loop unless its record sets them.
DEFAULT_OPTIONS: Mapping[str, Any] = {
    "batch_factor": 1.0,
    "precision": "ieee",
    "amp": "",
    "optimizer": "adam",
    "implementation": "for",
    "capturable": False,
    "channels_last": False,
    "execution": "eager",
    "checkpoint": False,
    "accumulate": 1,
    "offload": "",
    "bn_eval": False,
    "loader_workers": -1,
    "update_in_backward": False,
    "attention": "",
}

# Records without a table of options state the change by the name of their variant alone.
VARIANT_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "tf32": {"precision": "tf32"},
    "amp_fp16": {"amp": "fp16"},
    "amp_bf16": {"amp": "bf16"},
    "adam_foreach": {"implementation": "foreach"},
    "adam_fused": {"implementation": "fused"},
    "channels_last": {"channels_last": True},
    "cuda_graph": {"execution": "cuda_graph", "implementation": "foreach"},
    "compile": {"execution": "compile"},
    "compile_ro": {"execution": "compile with CUDA graphs"},
    "ckpt": {"checkpoint": True},
    "accum4": {"accumulate": 4},
    "offload": {"offload": "sync"},
    "bn_eval": {"bn_eval": True},
    "loader0": {"loader_workers": 0},
    "loader2": {"loader_workers": 2},
    "cudnn_bench": {"cudnn_benchmark": True},
}


class StepTime(Struct, frozen=True):
    """The time of a step that was measured repeatedly, ms; ``rounds_ms`` has the median of each round."""

    median_ms: float
    q25_ms: float
    q75_ms: float
    rounds_ms: tuple[float, ...] = ()


class Beside(Struct, frozen=True):
    """The baseline that alternated with a run: its name, and its step by both clocks in those rounds."""

    name: str
    wall: StepTime
    cpu: StepTime | None


class Run(Struct, frozen=True):
    """One run of a campaign: its options, its step time without the profiler, and its recording.

    ``wall`` and ``cpu`` are None if the record lacks them; ``machine`` has to be equal within a pair. ``beside`` holds
    the baseline's times, if the run alternated with its baseline.
    """

    record: Path
    model: str
    variant: str
    status: str
    reason: str
    options: Mapping[str, Any]
    batch: int | None
    machine: tuple[str, ...]
    hardware: str
    wall: StepTime | None
    cpu: StepTime | None
    trace: Path | None
    beside: Beside | None = None

    @property
    def name(self) -> str:
        """The record's name, which is unique in its folder."""
        return self.record.stem

    @property
    def on_gpu(self) -> bool:
        """Whether the model was trained on a GPU."""
        return self.hardware != "CPU"

    @property
    def measured(self) -> bool:
        """Whether the record holds a step time."""
        return self.wall is not None


def find_files(paths: list[Path], suffix: str) -> Iterator[Path]:
    """Yield the files among ``paths``, and those in the folders among them, whose names end in ``suffix``, sorted.

    Each once, even if ``paths`` name it several times.
    """
    seen: set[Path] = set()
    for path in paths:
        for found in _files_of(path):
            if found.name.endswith(suffix) and (resolved := found.resolve()) not in seen:
                seen.add(resolved)
                yield found


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names))


def read_run(path: Path) -> Run | None:
    """Return the run of a record file: a campaign's, or the flat one of a single pair; None if it is no record."""
    found = read_json(path)
    return None if found is None else run_of(path, found)


def run_of(path: Path, found: dict[str, Any]) -> Run | None:
    """Return the run that the JSON object of a file records; None if it is no record of one."""
    record = as_record(found)
    if record is None:
        return None
    is_flat = "status" not in record
    untraced = record if is_flat else _table(record, "untraced")
    machine = record if is_flat else _table(record, "machine")
    options = VARIANT_OPTIONS.get(record["variant"], {}) if is_flat else _table(record, "options")
    layers = record.get("checkpointed")
    if options.get("checkpoint") and isinstance(layers, list) and layers:
        options = {**options, "checkpoint": "|".join(re.escape(str(layer)) for layer in layers)}
    elif "checkpoint" in options:
        # A record is data: a pattern in it is never matched.
        options = {**options, "checkpoint": bool(options["checkpoint"])}
    rounds = record.get("rounds")
    wall = step_time_of(rounds, "samples_ms") or _wall(untraced)
    gpu = _gpu_name(machine)
    batch = record.get("bs" if is_flat else "batch")
    return Run(
        record=path,
        model=record["model"],
        variant=record["variant"],
        status="complete" if is_flat else str(record["status"]),
        reason=_reason(record),
        options={**DEFAULT_OPTIONS, **{key: _plain(value) for key, value in options.items()}},
        batch=batch if type(batch) is int and 0 < batch < MOST else None,
        machine=(str(path.parent), gpu, *(str(machine.get(key)) for key in ("cpu", "torch", "threads"))),
        hardware=gpu or "CPU",
        wall=wall,
        cpu=step_time_of(rounds, "cpu_samples_ms")
        or _of_samples(untraced.get("cpu_ms" if is_flat else "cpu_thread_ms")),
        trace=_trace(path, record),
        beside=_beside(_table(record, "beside")),
    )


def _beside(found: Mapping[str, Any]) -> Beside | None:
    name, rounds = found.get("name"), found.get("rounds")
    wall = step_time_of(rounds, "samples_ms")
    if not isinstance(name, str) or wall is None:
        return None
    return Beside(name, wall, step_time_of(rounds, "cpu_samples_ms"))


def _table(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _plain(value: Any) -> Any:
    """An option in a form that can be compared: "" if unset."""
    if isinstance(value, int | float):
        return value if abs(value) < MOST else "out of range"
    return "" if value is None else str(value)


def _gpu_name(machine: Mapping[str, Any]) -> str:
    """The GPU that the run used, "" for a CPU: named as text, or among the device's properties."""
    gpu = machine.get("gpu")
    name = gpu.get("name") if isinstance(gpu, dict) else gpu
    if isinstance(name, str) and name:
        return name
    return "GPU" if machine.get("device") == "cuda" else ""


def _reason(record: Mapping[str, Any]) -> str:
    """Why a run is not complete: the reason, or the last line of what failed."""
    text = record.get("reason") or record.get("failure") or ""
    lines = str(text).strip().splitlines()
    return lines[-1][:200] if lines else ""


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MOST


def _wall(untraced: Mapping[str, Any]) -> StepTime | None:
    median = untraced.get("median_ms")
    if not _is_time(median):
        return None
    q25, q75 = (
        next((float(untraced[key]) for key in (f"{name}_ms", name) if _is_time(untraced.get(key))), float(median))
        for name in ("q25", "q75")
    )
    return StepTime(float(median), q25, q75)


def _of_samples(samples: Any) -> StepTime | None:
    values = [value for value in samples if _is_time(value)] if isinstance(samples, list) else []
    if not values:
        return None
    q25, median, q75 = quartiles(values)
    return StepTime(median, q25, q75)


def step_time_of(rounds: Any, key: str) -> StepTime | None:
    """Return the median of the rounds' medians, with the median of the rounds' relative quartiles around it."""
    found = []
    for row in rounds if isinstance(rounds, list) else ():
        blocks = row.get(key) if isinstance(row, dict) else None
        steps = (
            [step for block in blocks if isinstance(block, list) for step in block] if isinstance(blocks, list) else []
        )
        time = _of_samples(steps)
        if time is None:
            return None
        found.append(time)
    if not found:
        return None
    median_ms = statistics.median(time.median_ms for time in found)
    q25, q75 = (
        statistics.median(quartile / time.median_ms for time, quartile in zip(found, quartiles, strict=True))
        for quartiles in ([time.q25_ms for time in found], [time.q75_ms for time in found])
    )
    return StepTime(median_ms, median_ms * q25, median_ms * q75, tuple(time.median_ms for time in found))


def _trace(path: Path, record: Mapping[str, Any]) -> Path | None:
    """The recording next to the record; a record names a file of its own folder only."""
    named = _table(record, "trace").get("file")
    names = [Path(named).name] if isinstance(named, str) else []
    names += [path.stem + suffix for suffix in TRACE_SUFFIXES]
    return next((path.parent / name for name in names if name and (path.parent / name).is_file()), None)
