"""Compare predicted and measured communication: writes the tables of docs/cluster.md.

python benchmarks/cluster_accuracy.py [--check]

NCCL's times on A100 and H100 machines (tests/data, NVIDIA's measurements): from the formulas and a preset alone, from
every second size, and from another operation. Table 8 of Pei et al.: a ResNet-50 on 1, 2 and 4 P40.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from whatif.graph.types import Float64
from whatif.hardware.cluster.calibration import Curve, Table
from whatif.hardware.cluster.cluster_file import load_cluster
from whatif.hardware.cluster.network import Network
from whatif.opdb.collective_table import read_table
from whatif.report.layout import markdown_table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the script finds the package `benchmarks` from any folder
pei = importlib.import_module("benchmarks.pei")
sigmoid = importlib.import_module("benchmarks.sigmoid")
PAGE = Path("docs/cluster.md")

# -- NCCL ------------------------------------------------------------------------------------------------------------

MEASURED = {
    "A100": (Path("tests/data/nccl_a100.csv"), "dgx-a100"),
    "H100": (Path("tests/data/nccl_h100.csv"), "dgx-h100"),
}
RANGES = {"≤ 64 KB": (0, 65_536), "64 KB to 4 MB": (65_537, 4 << 20), "> 4 MB": ((4 << 20) + 1, 1 << 60)}
Model = Callable[[Curve, Curve, Network], Float64]


def halves(curve: Curve) -> tuple[Curve, Curve]:
    """Return every second size for calibration, and the sizes between them to score; the ends are not extrapolated."""
    kept, held = (
        Curve(curve.operation, curve.workers, curve.size_bytes[first::2], curve.time_ns[first::2]) for first in (0, 1)
    )
    return kept, held


def from_formulas(_: Curve, held: Curve, network: Network) -> Float64:
    """Use no measurements."""
    return network.cost(held.operation, held.size_bytes).total_ns


def from_tuner(_: Curve, held: Curve, network: Network) -> Float64:
    """Use no measurements but NCCL's own constants."""
    return network.cost(held.operation, held.size_bytes, "nccl").total_ns


def from_table(kept: Curve, held: Curve, network: Network) -> Float64:
    """Interpolate between the logarithms of the calibration sizes."""
    return Table((kept,)).cost(held.operation, np.asarray(held.size_bytes), network).total_ns


def from_sigmoid(kept: Curve, held: Curve, _: Network) -> Float64:
    """Fit Pei et al.'s curve to the calibration sizes."""
    return sigmoid.fit_sigmoid(kept.size_bytes, kept.time_ns).time_ns(held.size_bytes)


def from_all_reduce(kept: Curve, held: Curve, network: Network) -> Float64:
    """Scale the all-reduce's times at the calibration sizes by nccl-tests' bus factors."""
    return Table((kept,)).cost(held.operation, np.asarray(held.size_bytes), network).total_ns


def score_nccl(
    system: str, model: Model, operations: tuple[str, ...], source: str | None = None
) -> tuple[Float64, Float64]:
    """Return the absolute errors, percent, and the sizes, for every held-out size of the operations."""
    path, preset = MEASURED[system]
    table = read_table(path)
    curves = {(curve.operation, curve.workers): curve for curve in table.curves}
    errors, sizes = [], []
    for (operation, workers), curve in curves.items():
        if operation not in operations:
            continue
        kept, held = halves(curve)
        if source is not None:
            kept = halves(curves[source, workers])[0]
        network = load_cluster(preset).network(workers)
        predicted = model(kept, held, network)
        errors.append(100 * np.abs(predicted / np.asarray(held.time_ns) - 1))
        sizes.append(np.asarray(held.size_bytes))
    return np.concatenate(errors), np.concatenate(sizes)


REDUCING = ("all_reduce", "all_gather", "reduce_scatter")
OPERATIONS = (*REDUCING, "all_to_all")
MODELS: dict[str, tuple[Model, tuple[str, ...], str | None]] = {
    "every second size, log-log": (from_table, OPERATIONS, None),
    "every second size, sigmoid": (from_sigmoid, OPERATIONS, None),
    "all-reduces by bus factors": (from_all_reduce, ("all_gather", "reduce_scatter"), "all_reduce"),
    "preset and NCCL's tuner (`algorithm=nccl`)": (from_tuner, REDUCING, None),
    "preset and formulas alone (`auto`)": (from_formulas, REDUCING, None),
}  # fmt: skip


def nccl_table() -> str:
    """Return median errors by system and size, in Markdown."""
    rows = []
    for system in MEASURED:
        for name, (model, operations, source) in MODELS.items():
            errors, sizes = score_nccl(system, model, operations, source)
            parts = [np.median(errors[(sizes >= low) & (sizes <= high)]) for low, high in RANGES.values()]
            cells = [f"{value:.1f} %" for value in (np.median(errors), errors.mean(), *parts)]
            rows.append((system, name, *cells))
    return markdown_table(("system", "from", "median", "mean", *(f"median, {name}" for name in RANGES)), rows)


# -- Pei et al., table 8 ---------------------------------------------------------------------------------------------

# Their measured columns, seconds.
TABLE_8 = {"PS": {1: 0.71388, 2: 0.36984, 4: 0.20364}, "NCCL": {1: 0.71838, 2: 0.37852, 4: 0.21069}}
# Their predictions, seconds, from their model of one GPU.
THEIRS = {"PS": {1: 0.72844, 2: 0.3691, 4: 0.18937}, "NCCL": {1: 0.72891, 2: 0.37351, 4: 0.19409}}
# Values that the paper does not give, as assumed in docs/cluster.md.
IMAGES, IMAGE_BYTES = 128, 224 * 224 * 3 * 4
PAGEABLE_BYTE_S = 8.33e9
BACKWARD_SHARE = 2 / 3
P40_BYTE_S, P40_SMS, HOST_BYTE_S = 346e9, 30, 76.8e9
TO_HOST_BYTE_S, TO_GPU_BYTE_S, COPY_LATENCY_NS = 13.2e9, 11.96e9, 10_000.0
RING_BYTE_S, RING_LATENCY_NS = {2: 9.16e9, 4: 6.18e9}, 5_700.0


def resnet_50() -> tuple[Float64, Float64]:
    """Return bytes of gradients and operations of one image forward, by layer from the input, shape (54,) each.

    A layer is a convolution with its batch normalization, or the last one (He et al., CVPR 2016, table 1).
    """
    layers: list[tuple[float, float]] = []

    def convolution(inputs: int, outputs: int, kernel: int, width: int) -> None:
        weights = inputs * outputs * kernel * kernel
        layers.append((4.0 * (weights + 2 * outputs), 2.0 * weights * width * width))

    convolution(3, 64, 7, 112)
    inputs = 64
    for channels, blocks, width in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            convolution(inputs, channels, 1, 2 * width if block == 0 and channels > 64 else width)
            convolution(channels, channels, 3, width)
            convolution(channels, 4 * channels, 1, width)
            if block == 0:
                convolution(inputs, 4 * channels, 1, width)
            inputs = 4 * channels
    layers.append((4.0 * (2048 * 1000 + 1000), 2.0 * 2048 * 1000))
    gradients, operations = np.array(layers).T
    return gradients, operations


def table_8_ns(mode: str, gpus: int, pageable_byte_s: float = PAGEABLE_BYTE_S) -> float:
    """Return an iteration on ``gpus`` GPUs, from that on one GPU in the same mode, ns."""
    gradients, operations = resnet_50()
    single = TABLE_8[mode][1] * 1e9
    if gpus == 1:
        return single
    read = IMAGES * IMAGE_BYTES / pageable_byte_s * 1e9
    # One GPU exchanges nothing: the extra time of NCCL's mode is its calls, for any batch.
    calls = (TABLE_8["NCCL"][1] - TABLE_8["PS"][1]) * 1e9 if mode == "NCCL" else 0.0
    update = 3 * gradients.sum() / P40_BYTE_S * 1e9
    computing = (single - read - calls - update) / gpus
    work = pei.Iteration(
        read + calls, computing * (1 - BACKWARD_SHARE), computing * BACKWARD_SHARE * operations / operations.sum(),
        update, gradients,
    )  # fmt: skip
    machine = pei.Machine(
        to_host=sigmoid.Sigmoid.of(COPY_LATENCY_NS, TO_HOST_BYTE_S),
        to_gpu=sigmoid.Sigmoid.of(COPY_LATENCY_NS, TO_GPU_BYTE_S),
        ring=sigmoid.Sigmoid.of(RING_LATENCY_NS, RING_BYTE_S[gpus]), host_byte_s=HOST_BYTE_S, gpu_byte_s=P40_BYTE_S,
        multiprocessors=P40_SMS, copy_latency_ns=COPY_LATENCY_NS,
    )  # fmt: skip
    return pei.parameter_server_ns(work, gpus, machine) if mode == "PS" else pei.nccl_ns(work, gpus, machine)


def pei_table() -> str:
    """Return the cells of table 8 with several GPUs, in Markdown."""
    rows = []
    for mode, measured in TABLE_8.items():
        for gpus in (2, 4):
            ours, theirs, true = table_8_ns(mode, gpus) / 1e9, THEIRS[mode][gpus], measured[gpus]
            rows.append(
                (
                    mode, str(gpus), f"{true * 1e3:.1f} ms", f"{ours * 1e3:.1f} ms",
                    f"{100 * (ours / true - 1):+.1f} %", f"{theirs * 1e3:.1f} ms",
                    f"{100 * (theirs / true - 1):+.1f} %",
                )
            )  # fmt: skip
    headers = ("mode", "GPUs", "measured", "predicted here", "error", "predicted by the authors", "error")
    return markdown_table(headers, rows)


def sensitivity_table() -> str:
    """Return the errors of table 8's cells for other read rates, in Markdown."""
    cells = [(mode, gpus) for mode in TABLE_8 for gpus in (2, 4)]
    rows = []
    for rate in (6e9, PAGEABLE_BYTE_S, 12e9):
        errors = [100 * (table_8_ns(mode, gpus, rate) / 1e9 / TABLE_8[mode][gpus] - 1) for mode, gpus in cells]
        rows.append((f"{rate / 1e9:.2f} GB/s", *(f"{error:+.1f} %" for error in errors)))
    return markdown_table(("rate of reading", *(f"{mode}, {gpus}" for mode, gpus in cells)), rows)


def main() -> int:
    """Write the page's tables, or check that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    os.chdir(ROOT)
    tables = {"nccl": nccl_table(), "pei": pei_table(), "sensitivity": sensitivity_table()}
    before = page = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page = mark.sub(lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2]}", page)
    if page != before and not check:
        PAGE.write_text(page, encoding="utf-8")
    if page != before:
        print(f"{PAGE} {'is out of date' if check else 'written'}")
    return int(check and page != before)


if __name__ == "__main__":
    sys.exit(main())
