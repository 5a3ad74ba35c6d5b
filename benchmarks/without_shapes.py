"""`amp` on recordings without shapes: compared with the same steps with shapes, and with published speedups.

    WHATIF_EXTRA_DATA=FOLDER python -m benchmarks.without_shapes

Steps of known models are predicted in fp32 and their shapes removed, as in a recording by `torch.profiler` without
``record_shapes`` or by Nsight Systems. ``amp`` then estimates each product by usual operators that take its time
(``whatif/models/durations/forms.py``). The first table compares the GPU's time with that of ``amp`` with shapes, and
says how often that lies in the range; the second scores NVIDIA's speedups (``benchmarks.published.nvidia``) and a
recording by Nsight Systems whose time under autocast is published. Last come the choices of constants, each model left
out: factors for the casts, and the errors (log) of substitutes for products. Needs torch and transformers.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from msgspec import structs

import whatif
from benchmarks.extra_data import extra_data
from benchmarks.published import neusight, nvidia
from benchmarks.published.kept_graphs import kept
from benchmarks.published.scores import Row, summary
from whatif.from_module.operations import OperatorGraph
from whatif.from_module.predict_step import predict_step
from whatif.graph.kernels import MATRIX_FAMILIES
from whatif.graph.recorded import AUTOCAST_CASTS, AUTOCAST_SHARE
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Phase, among
from whatif.hardware.gpu import load_gpu
from whatif.models.durations import forms
from whatif.models.durations.precision import in_precision
from whatif.models.kernels.mixed_precision import CAST_NAME, WEIGHT_CAST_NAME
from whatif.opdb.default import estimator
from whatif.prediction.baseline import Baseline
from whatif.prediction.ranges import RUN_TO_RUN_GPU, combined_shares, error_sums
from whatif.report.layout import markdown_table

# A device and the fp32 products that run in TF32.
DEVICES = (
    ("V100-SXM2-32", "none"), ("T4", "none"), ("RTX2080Ti", "none"), ("A100-SXM-80", "none"), ("A100-SXM-80", "all"),
    ("A100-SXM-80", "conv"), ("H100-SXM-80", "conv"), ("H100-SXM-80", "all"), ("RTX3090", "conv"),
)  # fmt: skip
# The campaign's models with the shape of their input, and NeuSight's with mode, sequence and batch.
_MODELS = {
    "resnet50": ((64, 3, 224, 224), (8, 3, 224, 224)), "vgg19": ((64, 3, 224, 224),),
    "densenet121": ((64, 3, 224, 224),), "bert-base": ((8, 384), (32, 128)), "bert-large": ((4, 384), (1, 128)),
    "gpt2-small": ((8, 512), (1, 1024)),
}  # fmt: skip
_NEUSIGHT = (
    ("gpt2_large", "train", 1024, 4), ("gpt2_large", "inf", 1024, 4), ("opt_13", "inf", 2048, 2),
    ("gpt3_27", "inf", 2048, 2), ("gpt3_xl", "train", 2048, 2), ("bert_large", "inf", 512, 16),
)  # fmt: skip
# The 2.7 B model of the recording, forward, 4 x 512 tokens, bf16 autocast: CSV of the same repository (zx3xyy), ms.
FORWARD, FORWARD_MS = "zx3xyy-a100-2.7b/result_2_7B_clean.sqlite", 149.0
# Rows, columns and terms of substitutes for products, over their size, to choose from.
_SUBSTITUTES = {
    "square": ((1, 1),), "few rows": ((1 / 8, 1),), "long sums": ((1, 16),), "square, few rows": ((1, 1), (1 / 8, 1)),
    "square, few rows, long sums": ((1, 1), (1 / 8, 1), (1, 16)),
}  # fmt: skip
_FACTORS = np.arange(1.5, 8.1, 0.5)


@dataclass(frozen=True)
class Case:
    """A step on a device: GPU time with shapes and without, its casts (weights, activations), and products, ms."""

    device: str
    model: str
    with_shapes: float
    row: Row
    casts: tuple[float, float]  # with over without shapes; NaN if the step has no such cast
    products: dict[str, float]  # log of the products' time with over without shapes, by substitute


def model(name: str) -> Any:
    """Return one of the campaign's models."""
    from benchmarks.campaign.models import FULL

    return FULL[name].build()


def operator_graphs() -> Iterator[tuple[str, OperatorGraph]]:
    """Yield the models' training and inference steps, by name."""
    from whatif.instrumentation.trace_module.step import Wanted, take_down_step

    for name, shapes in _MODELS.items():
        for shape in shapes:
            kind = "" if len(shape) == 4 else "int64"
            wanted = Wanted(f"{__file__}:model", [("", shape, kind)], keywords={"name": name})
            found = kept(f"without shapes 1 {name} {shape}", partial(take_down_step, wanted))
            assert found is not None
            yield f"{name} {'x'.join(map(str, shape))}", found
    for cell in _NEUSIGHT:
        yield " ".join(map(str, cell)), neusight.operator_graph(*cell, 8.0)


def without_shapes(graph: TaskGraph) -> TaskGraph:
    """Return a predicted step as a recording without shapes, bytes and parameters would be."""
    recorded = structs.replace(graph.info.recorded, predicted=None, layers=())
    names = (re.sub(r"^predicted_(?!conv|gemm)([a-z]+)_(.*)_fp32$", r"aten::\2 \1", name) for name in graph.names)
    nothing = np.zeros_like(graph.size_bytes)
    return graph.replace(
        info=replace(graph.info, recorded=recorded, operators=()), names=tuple(names), size_bytes=nothing,
        called=np.full_like(graph.called, -1), flops=np.zeros_like(graph.flops),
        low_ns=graph.duration_ns, high_ns=graph.duration_ns,
        attached={k: v for k, v in graph.attached.items() if k not in (AUTOCAST_SHARE, AUTOCAST_CASTS)},
    )  # fmt: skip


def gpu_ms(graph: TaskGraph, step: int, name: str = "") -> Array:
    """Return low end, time and high end of the GPU tasks of a step, of one name or all, ms, shape (3,)."""
    tasks = graph.on_gpu.mask & (graph.step == step)
    if name:
        tasks &= np.array([known == name for known in graph.names])[graph.name]
    return np.array([ends[tasks].sum() / 1e6 for ends in (graph.low_ns, graph.duration_ns, graph.high_ns)])


def case(device: str, tf32: str, name: str, operators: OperatorGraph) -> Case:
    """Compare ``amp`` on a predicted step with and without its shapes."""
    graph = predict_step(operators, estimator(device), load_gpu(device), tf32=tf32).prediction.baseline.graph
    bare, step = without_shapes(graph), graph.info.n_steps // 2
    amp = whatif.load_transform("amp")
    true, guessed = amp(graph), amp(bare)
    low, ms, high = gpu_ms(guessed, step)
    below, above = (float(share[0]) for share in combined_shares(error_sums(guessed)))
    ends = (
        ms - np.hypot(below * (ms - low), RUN_TO_RUN_GPU * ms),
        ms + np.hypot(above * (high - ms), RUN_TO_RUN_GPU * ms),
    )
    true_ms = float(gpu_ms(true, step)[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        casts = tuple(
            gpu_ms(true, step, cast)[1] / gpu_ms(guessed, step, cast)[1] for cast in (WEIGHT_CAST_NAME, CAST_NAME)
        )
    label = f"{device}, {tf32}"
    row = Row(label, name, float(ms), true_ms, float(ends[0]), float(ends[1]))
    return Case(label, name, true_ms, row, (casts[0], casts[1]), products(graph, bare, step))


def products(graph: TaskGraph, bare: TaskGraph, step: int) -> dict[str, float]:
    """Return the log of the products' time in fp16 with over without shapes, by substitute; none if they are few."""
    ids = np.flatnonzero(graph.on_gpu.mask & (graph.step == step) & (graph.phase != Phase.UPDATE))
    matrix = among(graph.family[ids], MATRIX_FAMILIES)
    ids_of = ids[matrix & ~forms.of_convolutions(graph, ids)]
    if graph.duration_ns[ids_of].sum() < 0.1 * graph.duration_ns[ids].sum():
        return {}
    true_ns, found = in_precision(graph, ids_of, "fp16").duration_ns.sum(), {}
    for name, aspects in _SUBSTITUTES.items():
        series = tuple(forms.product_series(*aspect) for aspect in aspects)
        usual = tuple(known if kind % forms._KINDS else series for kind, known in enumerate(forms._USUAL))
        forms._usual_prices.cache_clear()
        with mock.patch.object(forms, "_USUAL", usual):
            found[name] = float(np.log(true_ns / in_precision(bare, ids_of, "fp16").duration_ns.sum()))
    forms._usual_prices.cache_clear()
    return found


def published() -> Iterator[Row]:
    """Yield NVIDIA's speedups of AMP predicted without shapes, and the recording by Nsight Systems."""
    for before, after in nvidia.pairs(extra_data()):
        device, names = nvidia.GPUS[before.machine], nvidia.AMP[after.framework, after.model]
        # The recorded step has the batch of the one under AMP: samples per second are compared.
        tf32 = "none" if before.precision == "fp32" else "all"
        known = estimator(device), load_gpu(device)
        slow, same = (
            predict_step(nvidia.operators(after.model, row.batch), *known, tf32=tf32).prediction
            for row in (before, after)
        )
        fast = whatif.apply(Baseline.of(without_shapes(same.graph)), *names)
        ratios = [
            after.batch / before.batch * slow.predicted_ms / ms for ms in (fast.predicted_ms, fast.high_ms, fast.low_ms)
        ]
        what = f"{after.framework} {after.model}, {before.machine}"
        yield Row("NVIDIA", what, ratios[0], after.samples_per_s / before.samples_per_s, ratios[1], ratios[2])
    fast = whatif.apply(extra_data("traces", FORWARD), "amp:target=bf16")
    yield Row("Nsight Systems", "2.7 B forward pass, ms", fast.predicted_ms, FORWARD_MS, fast.low_ms, fast.high_ms)


def factors(cases: Sequence[Case]) -> Counter[float]:
    """Return the least factor that holds 90 % of the casts in language models, counted over the models left out."""
    language = [found for found in cases if len(found.products) and not np.isnan(found.casts).any()]
    chosen: Counter[float] = Counter()
    for model_name in sorted({found.model for found in language}):
        logs = np.abs(np.log([found.casts for found in language if found.model != model_name]))
        chosen[float(next(f for f in _FACTORS if (logs <= np.log(f)).mean() >= 0.9))] += 1
    return chosen


def main() -> int:
    """Print the tables."""
    graphs = list(operator_graphs())
    cases = [case(device, tf32, name, operators) for device, tf32 in DEVICES for name, operators in graphs]
    rows = []
    for label in [*dict.fromkeys(found.device for found in cases), "all"]:
        part = [found.row for found in cases if label in (found.device, "all")]
        scores = summary(label, part)
        highest = float(np.median([row.high / row.predicted for row in part]))
        numbers = scores.median_pct, scores.bias_pct, scores.coverage_pct, scores.width, highest
        rows.append((label, str(scores.rows), *map("{:{}}".format, numbers, (".1f", "+.1f", ".0f", ".2f", ".2f"))))
    columns = (
        "device, TF32",
        "steps",
        "median error, %",
        "bias, %",
        "inside, %",
        "high over low",
        "high over predicted",
    )
    print(markdown_table(columns, rows))
    for row in published():
        print(f"{row.what}: {row.predicted:.2f} ({row.low:.2f} … {row.high:.2f}), measured {row.measured:.2f}")
    print("factor of casts, models left out:", dict(factors(cases)))
    for name in _SUBSTITUTES:
        errors = np.array([found.products[name] for found in cases if found.products])
        print(f"{name}: bias {errors.mean():+.3f}, rms {np.sqrt((errors**2).mean()):.3f} over {len(errors)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
