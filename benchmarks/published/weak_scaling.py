"""NVIDIA's weak-scaling efficiency: throughput of n GPUs over n times that of one, by `predict` and `distributed`.

    WHATIF_EXTRA_DATA=FOLDER python -m benchmarks.published.weak_scaling [--fit]

Source of the table: README tables of NVIDIA/DeepLearningExamples. Every cell is predicted with two constants that were
fitted to the other models' cells: ``stragglers.GPU_SPREAD_PCT`` and ``beside_kernels.TRAFFIC``; ``--fit`` prints
the fits. PyTorch's ResNet-50 under AMP is partly bound by the loader, which is not predicted here.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.extra_data import extra_data
from benchmarks.published import nvidia
from benchmarks.published.kept_graphs import kept
from benchmarks.published.scores import Row, Scores
from benchmarks.published.steps import baseline_of
from benchmarks.published.transformer_xl import SIZES
from whatif.from_module.operations import OperatorGraph
from whatif.graph.types import Float64
from whatif.models.exchange import beside_kernels, stragglers
from whatif.prediction.predict import Baseline, Prediction, apply
from whatif.prediction.ranges import shares_beside

_GPUS = {**nvidia.GPUS, "DGX A100 40GB": "A100-SXM-40"}
_CLUSTERS = {"DGX A100": "dgx-a100", "DGX-1": "dgx-1", "DGX-2": "dgx-2"}
_AMP = {**nvidia.AMP, ("PyTorch", "Transformer-XL"): ("amp",)}
# Candidates of the fit: percent, and bytes of traffic for each byte that is summed.
SPREADS_PCT, TRAFFIC = np.arange(0, 3.01, 0.1), np.arange(0, 25, 1.0)


@dataclass(frozen=True)
class Cell:
    """Several GPUs compared with one; a step accumulates ``passes`` micro-batches."""

    framework: str
    model: str
    machine: str
    precision: str
    batch: int
    passes: int
    gpus: int
    efficiency: float

    @property
    def family(self) -> str:
        """The model, which is held out as a whole; empty if it is none of those that are built here."""
        known = (name for framework, name in _AMP if framework == self.framework and self.model.startswith(name))
        return next(known, "")


def cells(data: Path) -> Iterator[Cell]:
    """Yield the cells of ``truth/deeplearningexamples_throughput.csv`` under ``data`` that have a row of one GPU.

    Cells of other models and machines are named on stderr.
    """
    alone: dict[tuple[str, ...], float] = {}
    with (data / "truth" / "deeplearningexamples_throughput.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in ("framework", "model", "machine", "precision"))
            gpus, throughput = int(row["gpus"]), float(row["throughput"])
            if gpus == 1:
                alone[key] = throughput
                continue
            passes = int(row["model"].partition("(accumulation ")[2].rstrip(")") or 1)
            batch = int(row["batch_per_gpu"] or nvidia.RESNET_BATCH[row["precision"]])
            cell = Cell(*key, batch, passes, gpus, throughput / gpus / alone[key])
            if cell.family and cell.machine in _GPUS:
                yield cell
            else:
                print(f"not predicted: {cell.framework} {cell.model} on {cell.machine}", file=sys.stderr)


def operators(model: str, batch: int) -> OperatorGraph:
    """Return the operators of one GPU's step; ``model`` as the table names it, with its size or sequence."""
    from whatif.instrumentation.trace_module.step import Wanted, take_down_step

    if not model.startswith("Transformer-XL"):
        positions = int(model.partition(" seq ")[2].partition(" ")[0] or nvidia.BERT_POSITIONS)
        return nvidia.operators(next(name for _, name in nvidia.AMP if model.startswith(name)), batch, positions)
    size = SIZES[model.rpartition(" ")[2]]
    inputs = [("", (batch, size["length"]), "int64"), ("", (batch, size["length"], size["width"]), "")]
    name = "benchmarks.published.transformer_xl:TransformerXL"
    return take_down_step(Wanted(name, inputs, keywords=size, optimizer="adam"))


@cache
def step_of_one(model: str, batch: int, device: str, precision: str) -> Baseline:
    """Return the predicted step of one GPU; ``model`` as in ``operators``."""
    graph = kept(f"scaling 2 {model} {batch}", lambda: operators(model, batch))
    assert graph is not None
    return baseline_of(graph, device, tf32="none" if precision == "fp32" else "all")


@dataclass(frozen=True)
class Steps:
    """Steps of one GPU and of many, ms: ``many_ms`` for constants of 0, then the increase per percent and per byte."""

    one_ms: float
    many_ms: float
    by_percent: float
    by_byte: float

    def efficiency(self, spread_pct: Float64, traffic: Float64) -> Float64:
        """Return the efficiency for constants, in which the step is linear."""
        return self.one_ms / (self.many_ms + self.by_percent * spread_pct + self.by_byte * traffic)


def _what_ifs(cell: Cell) -> tuple[Baseline, list[str], str]:
    """The step of one GPU, its what-ifs, and the one that scales it to many."""
    single = step_of_one(cell.model, cell.batch, _GPUS[cell.machine], cell.precision)
    names = [*(_AMP[cell.framework, cell.family] if cell.precision == "amp" else ())]
    names += [f"gradient_accumulation:passes={cell.passes}"] if cell.passes > 1 else []
    cluster = next(preset for name, preset in _CLUSTERS.items() if cell.machine.startswith(name))
    return single, names, f"distributed:cluster={cluster},workers={cell.gpus}"


def predicted(cell: Cell, spread_pct: float, traffic: float) -> tuple[Prediction, Prediction]:
    """Return the step of one GPU and of many for the two constants."""
    one, names, many = _what_ifs(cell)
    with patch.object(stragglers, "GPU_SPREAD_PCT", spread_pct), patch.object(beside_kernels, "TRAFFIC", traffic):
        return apply(one, *names), apply(one, *names, many)


def steps(cell: Cell) -> Steps:
    """Return the linear terms of a cell's steps."""
    points = [predicted(cell, *constants) for constants in ((0.0, 0.0), (2.0, 0.0), (0.0, 10.0))]
    one, (none, spread, traffic) = points[0][0].predicted_ms, [many.predicted_ms for _, many in points]
    return Steps(one, none, (spread - none) / 2, (traffic - none) / 10)


def fitted(found: dict[Cell, Steps], left_out: str = "") -> tuple[float, float]:
    """Return the constants with the least mean error in efficiency over all models but one, weighted equally."""
    kept_cells = [cell for cell in found if cell.family != left_out]
    errors = np.zeros((len(SPREADS_PCT), len(TRAFFIC)))
    for cell in kept_cells:
        weight = 1 / sum(peer.family == cell.family for peer in kept_cells)
        errors += weight * np.abs(found[cell].efficiency(SPREADS_PCT[:, None], TRAFFIC) - cell.efficiency)
    at, byte = np.unravel_index(int(errors.argmin()), errors.shape)
    return float(SPREADS_PCT[at]), float(TRAFFIC[byte])


def score(data: Path) -> Scores:
    """Score the efficiencies, each with constants fitted to the other models."""
    found = {cell: steps(cell) for cell in cells(data)}
    constants = {family: fitted(found, family) for family in {cell.family for cell in found}}
    rows = []
    for cell in found:
        one, many = predicted(cell, *constants[cell.family])
        # As in `whatif scaling`.
        ends = tuple((step.predicted_ms, step.low_ms, step.high_ms) for step in (many, one))
        share = 1 - many.breakdown.communication_ms / many.predicted_ms
        below, above = shares_beside(*ends, on_gpu=True, share=share)
        value = one.predicted_ms / many.predicted_ms
        low, high = value / (1 + above), value / (1 - below)
        what = f"{cell.framework} {cell.model} {cell.machine}, {cell.precision}, {cell.gpus} GPUs"
        rows.append(Row(cell.family, what, value, cell.efficiency, low, high))
    return Scores("NVIDIA DeepLearningExamples, weak-scaling efficiency, each model left out", "share", tuple(rows))


def main() -> None:
    """Print the rows, or the constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print the constants, with each model left out in turn")
    if parser.parse_args().fit:
        found = {cell: steps(cell) for cell in cells(extra_data())}
        for family in ("", *dict.fromkeys(cell.family for cell in found)):
            print(f"without {family or 'none'}: %.1f %% and %.0f bytes" % fitted(found, family))
        return
    rows = score(extra_data()).rows
    points = 100 * np.array([row.predicted - row.measured for row in rows])
    for row, error in zip(rows, points.tolist(), strict=True):
        print(f"{row.what:90} {row.predicted:.3f} ({row.low:.3f} to {row.high:.3f}) {row.measured:.3f} {error:+5.1f}")
    print(f"points of efficiency: median {np.median(np.abs(points)):.1f}, bias {points.mean():+.1f}")


if __name__ == "__main__":
    main()
