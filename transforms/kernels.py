"""Kernels: replace durations of kernels by ones measured elsewhere.

Source: Daydream (USENIX ATC 2020) §7.4, new kernel implementations profiled outside the training run.
Model:  every kernel named in `file` takes the duration in the file, wherever it runs. The file is CSV with the
        columns name and duration_us, or a JSON object of name to microseconds; names are those of the recording.
Effort: none: a hypothetical question, until the kernels are written.
"""

import csv
import json
from pathlib import Path

import numpy as np

from whatif import TaskGraph, WhatifError


def transform(graph: TaskGraph, *, file: Path | None = None) -> TaskGraph:
    """Set the durations of the kernels that the file names."""
    if file is None:
        raise WhatifError("kernels: expected a file of durations, as in kernels:file=measured.csv, got none.")
    measured_us = read_durations(file)
    codes = {name: code for code, name in enumerate(graph.names)}
    unknown = [name for name in measured_us if name not in codes]
    duration_ns = np.full(len(graph.names), -1.0)
    for name in measured_us.keys() - unknown:
        duration_ns[codes[name]] = measured_us[name] * 1e3
    chosen = graph.on_gpu & (duration_ns.take(graph.name) >= 0)
    if not chosen.any():
        raise WhatifError(f"kernels: none of the {len(measured_us)} kernels in {file} is in the recording.")
    graph = graph.with_duration(chosen, duration_ns[graph.name[chosen]])
    missed = f"; not in the recording: {', '.join(unknown[:3])}" if unknown else ""
    return graph.note(f"kernels: {chosen.sum()} tasks take the measured duration of their kernel{missed}")


def read_durations(file: Path) -> dict[str, float]:
    """Return microseconds by kernel name. Raises WhatifError if the file is not of that form."""
    expected = f"kernels: {file}: expected CSV with columns name,duration_us or a JSON object of name to microseconds"
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            found = {str(name): float(value) for name, value in json.loads(text).items()}
        else:
            found = {row["name"]: float(row["duration_us"]) for row in csv.DictReader(text.splitlines())}
    except (OSError, UnicodeDecodeError) as error:
        raise WhatifError(f"kernels: {file}: cannot be read: {error}.") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WhatifError(f"{expected}, got something else ({error}).") from None
    if not found or not all(np.isfinite(v) and v >= 0 for v in found.values()):
        raise WhatifError(f"{expected}, all 0 or more.")
    return found
