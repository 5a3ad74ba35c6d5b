"""Recordings of the same work on two GPUs, or launched in two ways: a what-if on one compared with the other.

    WHATIF_EXTRA_DATA=FOLDER python -m benchmarks.published.gpu_pairs

Another device is scored by GPU busy time, also after removing the shapes from the recording; CUDA graphs and
torch.compile by the step. The table is the recordings of `traces/`. Some constants were chosen on them
(``whatif/hardware/architectures.toml``, ``whatif/prediction/ranges.py``), so these rows do not test those.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import whatif
from benchmarks.extra_data import extra_data
from benchmarks.published.scores import Row, Scores
from whatif.graph.task_graph import TaskGraph
from whatif.prediction.ranges import RUN_TO_RUN_GPU, combined_shares, error_sums
from whatif.report.layout import markdown_table

FOLDER = "tracelens-h100-mi300"
MODELS = {
    "BERT-small, inference": "gaunernst_bert-small-uncased__1016001.json.gz",
    "ViT-base, inference": "Falconsai_nsfw_image_detection__1016002.json.gz",
}
DEVICES = {"H100-SXM-80": "h100", "MI300X": "mi300"}
_SHAPES = ("Input Dims", "Input dims", "Input type", "Concrete Inputs", "Input Strides")


def score(data: Path) -> Scores:
    """Score the pairs below the folder ``data``; times in ms. Raises FileNotFoundError if a recording is missing."""
    rows = [*_devices(data / "traces" / FOLDER), *_launches(data / "traces")]
    return Scores("GPU pairs", "ms", tuple(rows))


def busy_ms(graph: TaskGraph, column: str = "duration_ns") -> float:
    """Return the time of all GPU tasks but collectives, ms; ``column`` may select an end of its range."""
    tasks = graph.on_gpu.mask & (graph.kind != whatif.TaskKind.COMMUNICATION)
    return float(getattr(graph, column)[tasks].sum()) / 1e6


def busy_range_ms(graph: TaskGraph) -> tuple[float, float]:
    """Return the nominal 90 % range of the GPU's work, combined as for a step (``whatif.prediction.ranges``), ms."""
    total = busy_ms(graph)
    below, above = (float(share[0]) for share in combined_shares(error_sums(graph)))
    sides = below * (total - busy_ms(graph, "low_ns")), above * (busy_ms(graph, "high_ns") - total)
    low, high = (float(np.hypot(side, RUN_TO_RUN_GPU * total)) for side in sides)
    return total - low, total + high


def without_shapes(path: Path, folder: Path) -> Path:
    """Write a recording into ``folder`` as the profiler does without ``record_shapes``."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    for event in trace["traceEvents"]:
        for name in _SHAPES:
            event.get("args", {}).pop(name, None)
    bare = folder / path.name
    with gzip.open(bare, "wt", encoding="utf-8", compresslevel=1) as file:
        json.dump(trace, file)
    return bare


def _devices(folder: Path) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as bare:
        for model, file in MODELS.items():
            paths = {device: folder / f"{prefix}.{file}" for device, prefix in DEVICES.items()}
            measured = {device: busy_ms(whatif.read(path)) for device, path in paths.items()}
            for old, new in (tuple(DEVICES), tuple(DEVICES)[::-1]):
                for group, path in (
                    ("device", paths[old]), ("device, no shapes", without_shapes(paths[old], Path(bare))),
                ):  # fmt: skip
                    changed = whatif.load_transform("device", to=new)(whatif.read(path))
                    low, high = busy_range_ms(changed)
                    yield Row(group, f"{model}, {old} to {new}", busy_ms(changed), measured[new], low, high)


def _launches(traces: Path) -> Iterator[Row]:
    nano, zx = traces / "nano-vllm-h100", traces / "zx3xyy-a100-2.7b"
    for group, before, what_if, after, steps in (
        ("100 small kernels", nano / "trace_eager.json.gz", "cuda_graph", nano / "trace_graph.json.gz", 20),
        (
            "2.7 B forward pass", zx / "result_2_7B_clean.sqlite", "compile:mode=reduce-overhead",
            zx / "result_2_7B_compile_ro.sqlite", None,
        ),
    ):  # fmt: skip
        prediction = whatif.apply(whatif.read(before, step_count=steps), what_if)
        truth = whatif.read(after).info
        measured = float(np.median(truth.measured_step_ns["gpu"][slice(*truth.steady)])) / 1e6
        low, high = prediction.low_ms, prediction.high_ms
        yield Row("launches", f"{group}, {what_if}", prediction.predicted_ms, measured, low, high)


def main() -> int:
    """Print the rows and their groups."""
    with tempfile.TemporaryDirectory() as nothing:
        os.environ["WHATIF_OPDB"] = str(Path(nothing) / "no database")
        scores = score(extra_data())
    rows = [
        (row.group, row.what, f"{row.predicted:.3f}", f"{row.low:.3f} … {row.high:.3f}", f"{row.measured:.3f}",
         f"{100 * row.error:+.1f} %")
        for row in scores.rows
    ]  # fmt: skip
    print(markdown_table(("group", "pair", f"predicted, {scores.unit}", "range", "measured", "error"), rows))
    for group in scores.groups():
        print(
            f"{group.group}: {group.rows} rows, median |error| {group.median_pct:.1f} %, bias {group.bias_pct:+.1f} %, "
            f"coverage {group.coverage_pct:.0f} %, width {group.width:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
