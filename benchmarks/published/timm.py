"""timm's training steps under AMP on an RTX 3090, in NCHW and NHWC, by `whatif predict MODEL amp [channels_last]`.

    WHATIF_EXTRA_DATA=FOLDER python -m benchmarks.published.timm [--every N] [--fit]

Source of the table: huggingface/pytorch-image-models `results/` (Apache-2.0): `benchmark.py`, synthetic data, forward,
cross entropy, backward, SGD with momentum; attention is not fused. Needs timm (and torchvision, or a stand-in for it).
timm 0.6.13 builds 422 of the 430 models as measured; 1.0 has other names for many, and TResNet without
in-place activated batch norm. ``--fit`` fits the factors of ``whatif/opdb/tensor_convolutions.py`` and of the device in
``whatif/hardware/architectures.toml`` to the table and reports their error on families of
models held out; ``--every N`` takes only every Nth model (4).
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import re
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from benchmarks.extra_data import extra_data
from benchmarks.published.kept_graphs import kept
from benchmarks.published.scores import Row, Scores, rank_correlation
from whatif import WhatifError, load_transform
from whatif.from_module.operations import OperatorGraph
from whatif.from_module.predict_step import PredictedStep, predict_step
from whatif.graph.kernels import KernelFamily
from whatif.graph.types import Float64
from whatif.hardware.gpu import load_gpu
from whatif.hardware.roofline import over_other_devices
from whatif.opdb.default import estimator
from whatif.opdb.importers.described import operators_of
from whatif.opdb.tensor_convolutions import FACTORS, NHWC, kinds

DEVICE = "RTX3090"
GROUPS = {"nchw": ("amp",), "nhwc": ("amp", "channels_last")}
# Prefixes that name who trained a model: without them, the names of a family begin alike.
_TRAINERS = re.compile(r"^(tf|gluon|ssl|swsl|ig|legacy|tv|ens_adv|dm|jx|eca|ese|nf|seca|se)_?(?=[a-z])")


@dataclass(frozen=True)
class Case:
    """A row of the table, with the newest PyTorch that was measured."""

    model: str
    layout: str
    batch: int
    side: int
    step_ms: float


def cases(data: Path, every: int = 1) -> list[Case]:
    """Return the rows of ``truth/timm_rtx3090_amp_training.csv`` under ``data``, of every Nth model."""
    newest: dict[tuple[str, str], dict[str, str]] = {}
    with (data / "truth" / "timm_rtx3090_amp_training.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = row["model"], row["layout"]
            if key not in newest or int(row["torch"]) >= int(newest[key]["torch"]):
                newest[key] = row
    models = sorted({model for model, _ in newest})[::every]
    return [
        Case(model, layout, int(row["batch_size"]), int(row["image_size"]), float(row["step_ms"]))
        for (model, layout), row in sorted(newest.items())
        if model in models
    ]


def operator_graph(model: str, batch: int, side: int) -> OperatorGraph | None:
    """Return the operators of a training step, cached in the user's cache folder; None if timm lacks the model."""
    _stand_in_for_inplace_abn()  # older versions of timm import it
    import timm

    def take_down() -> OperatorGraph | None:
        _without_fused_attention()
        step = importlib.import_module("whatif.instrumentation.trace_module.step")
        wanted = step.Wanted(
            f"timm:{model}", [("", (batch, 3, side, side), "")], {}, optimizer="momentum",
            loss="cross_entropy", capability=8.6,
        )  # fmt: skip
        try:
            found = step.take_down_step(wanted)
        except WhatifError as error:
            print(f"{model}: {error}", file=sys.stderr)
            return None
        return found if isinstance(found, OperatorGraph) else None

    return kept(f"timm 4 {timm.__version__} {model} {batch} {side}", take_down)


def _without_fused_attention() -> None:
    """Disable fused attention, as in the measured versions of 2022."""
    if importlib.util.find_spec("timm.layers") is not None:  # older versions have no fused attention
        importlib.import_module("timm.layers").set_fused_attn(False)


@lru_cache(maxsize=1)
def _stand_in_for_inplace_abn() -> None:
    """Provide the operators of in-place activated batch norm for meta tensors: its kernels need CUDA."""
    import torch
    from torch import Tensor

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return torch.empty_like(x)

    def backward(y: Tensor, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(y), torch.empty_like(weight), torch.empty_like(weight)

    ops = []
    for name, function, schema in (
        ("forward", forward, "(Tensor x, Tensor weight) -> Tensor"),
        ("backward", backward, "(Tensor y, Tensor grad, Tensor weight) -> (Tensor, Tensor, Tensor)"),
    ):
        op: Any = torch.library.custom_op(f"inplace_abn::{name}", function, mutates_args=(), schema=schema)
        op.register_fake(function)
        ops.append(op)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output, inputs[1])

    def gradients(ctx: Any, grad: Any) -> Any:
        y, weight = ctx.saved_tensors
        dx, dweight, _ = ops[1](y, grad, weight)
        return dx, dweight

    ops[0].register_autograd(gradients, setup_context=keep)
    functions: Any = types.ModuleType("inplace_abn.functions")
    functions.inplace_abn = functions.inplace_abn_sync = lambda x, weight, *rest, **options: ops[0](x, weight)
    sys.modules |= {"inplace_abn": types.ModuleType("inplace_abn"), "inplace_abn.functions": functions}


def in_half(graph: OperatorGraph) -> OperatorGraph:
    """Return the step of the model entirely in fp16, as captured with ``--dtype fp16``."""
    half = {"float": "c10::Half", "TensorList:float": "TensorList:c10::Half"}
    operations = [
        structs.replace(
            o, types=[half.get(kind, kind) for kind in o.types],
            outputs=tuple((shape, half.get(kind, kind)) for shape, kind in o.outputs),
        )
        for o in graph.operations
    ]  # fmt: skip
    return structs.replace(graph, operations=operations)


def predicted(graph: OperatorGraph, names: Sequence[str]) -> PredictedStep:
    """Predict the step under what-ifs."""
    known, gpu = estimator(DEVICE), load_gpu(DEVICE)
    return predict_step(graph, known, gpu, transforms=[load_transform(name) for name in names])


# The default subset takes two minutes of CPU time once the operators are cached.
EVERY = 4


def score(data: Path, every: int = EVERY, *, direct: bool = False) -> Scores:
    """Score the table by layout; with ``direct`` also steps predicted directly in fp16."""
    rows = []
    for case in cases(data, every):
        graph = operator_graph(case.model, case.batch, case.side)
        if graph is None:
            continue
        asked = [(f"AMP, {case.layout.upper()}", predicted(graph, GROUPS[case.layout]))]
        if direct and case.layout == "nchw":
            asked.append(("--dtype fp16", predicted(in_half(graph), ())))
        rows += [
            Row(group, case.model, step.prediction.predicted_ms, case.step_ms, *step.range_ms) for group, step in asked
        ]
    return Scores("timm, training steps on an RTX 3090", "ms", tuple(rows))


def gains(scores: Scores) -> list[Row]:
    """Return the time of NHWC over that of NCHW for each model that was scored in both."""
    by_model: defaultdict[str, dict[str, Row]] = defaultdict(dict)
    for row in scores.rows:
        by_model[row.what][row.group] = row
    pairs = [(rows.get("AMP, NHWC"), rows.get("AMP, NCHW")) for rows in by_model.values()]
    return [
        Row("NHWC over NCHW", last.what, last.predicted / first.predicted, last.measured / first.measured, 0.0, np.inf)
        for last, first in pairs
        if last and first
    ]


def family(model: str) -> str:
    """Return the family of a model: its name up to the first digit, without the prefix for who trained it."""
    found = re.match(r"[a-z]+", _TRAINERS.sub("", model))
    return found[0] if found else model


# The families whose estimates from other devices the table corrects, by their keys in ``architectures.toml``.
_CORRECTED = {
    "matmul": KernelFamily.GEMM, "elementwise": KernelFamily.ELEMENTWISE, "layer_norm": KernelFamily.LAYER_NORM,
    "softmax": KernelFamily.SOFTMAX,
}  # fmt: skip


def parts_ms(step: PredictedStep, layout: str) -> Counter[tuple[str, int]]:
    """Return the time of the convolutions of each kind in a step, ms, by layout (1: NHWC), and of some families."""
    graph = step.graph
    kind: dict[int, tuple[str, int]] = {}
    for places, ops in operators_of(graph.info.operators):
        if ops.family == "conv":
            named, layouts = kinds(ops), ops.texts["layout"].decoded()
            for place, of, lies in zip(places.tolist(), named.tolist(), layouts, strict=True):
                kind[place] = list(FACTORS)[of], int(NHWC in (layout, lies))
    convolutions = graph.on_gpu.mask & (graph.step == graph.info.steady[0]) & (graph.family == KernelFamily.CONVOLUTION)
    found: Counter[tuple[str, int]] = Counter()
    steady = graph.on_gpu.mask & (graph.step == graph.info.steady[0])
    for name, of_family in _CORRECTED.items():
        found[name, 0] = float(graph.duration_ns[steady & (graph.family == of_family)].sum()) / 1e6
    for task in np.flatnonzero(convolutions & (graph.called >= 0)).tolist():
        if graph.called[task] in kind:
            found[kind[graph.called[task]]] += graph.duration_ns[task] / 1e6
    return found


# Measured steps that are not comparable: they page memory (VGG-13 takes twice as long as its neighbours), or run
# convolutions one sample at a time (conditional convolutions in NHWC).
_LEFT_OUT = re.compile(r"^vgg|^efficientnet_cc")


def fit(data: Path, every: int = 1) -> None:
    """Print the factors fitted to the table, those in use, and the errors on held-out families."""
    found: list[tuple[str, str, float, float, Counter[tuple[str, int]]]] = []
    for case in cases(data, every):
        graph = operator_graph(case.model, case.batch, case.side)
        if graph is None or _LEFT_OUT.match(case.model):
            continue
        step = predicted(graph, GROUPS[case.layout])
        parts = parts_ms(step, case.layout)
        found.append((family(case.model), case.layout, case.step_ms, step.prediction.predicted_ms, parts))
    names = sorted({key for *_, parts in found for key in parts})
    columns = np.array([[parts[name] for name in names] for *_, parts in found])
    totals = np.array([total for *_, total, _ in found])
    terms = np.column_stack([columns, totals - columns.sum(axis=1)])
    measured = np.array([ms for _, _, ms, *_ in found])
    families = np.array([name for name, *_ in found])
    out = np.zeros(len(found))
    for name in np.unique(families):
        held = families == name
        out[held] = (terms[held] * _shares(terms[~held], measured[~held])).sum(axis=1)
    for (kind, nhwc), share in zip(names, _shares(terms, measured)[:-1].tolist(), strict=True):
        if kind in FACTORS:
            used, layout = FACTORS[kind][nhwc], "NHWC" if nhwc else "NCHW"
        else:
            used, layout = over_other_devices(load_gpu(DEVICE), kind, "fp16"), "    "
        print(f"{kind:22s} {layout}  used {used:6.2f}  fits {share * used:6.2f}")
    for layout in GROUPS:
        of_layout = np.array([of == layout for _, of, *_ in found])
        for title, values in (("as used", totals), ("families left out", out)):
            error = values[of_layout] / measured[of_layout] - 1
            print(f"{layout} {title:18s} median {np.median(abs(error)):.1%} bias {error.mean():+.1%}")


# Prior weight that keeps a factor at its old value, in models with convolutions of its kind that take a third of
# their time in them. Our choice.
_PULL, _ROUNDS, _SMALLEST_RESIDUAL = 3.0, 40, 0.03


def _shares(terms: Float64, measured: Float64) -> Float64:
    """Return factors of the parts, all columns but the last: least absolute log error of the sum."""
    logs, held = np.zeros(terms.shape[1]), np.full(terms.shape[1], _PULL)
    held[-1] = 1e9
    for _ in range(_ROUNDS):
        parts = terms * np.exp(logs)
        total = parts.sum(axis=1)
        residual = np.log(measured / total)
        weight = 1 / np.maximum(np.abs(residual), _SMALLEST_RESIDUAL)
        slope = parts / total[:, None]
        curvature = (slope * weight[:, None]).T @ slope + np.diag(held)
        step = np.linalg.solve(curvature, (slope * weight[:, None]).T @ residual - held * logs)
        logs += np.clip(step, -0.5, 0.5)
    return np.exp(logs)


def main() -> int:
    """Print the scores, or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=EVERY, metavar="N", help="take every Nth model alone")
    parser.add_argument("--fit", action="store_true", help="fit the factors, families of models left out in turn")
    parser.add_argument("--direct", action="store_true", help="score --dtype fp16 as well")
    args = parser.parse_args()
    if args.fit:
        fit(extra_data(), args.every)
        return 0
    scores = score(extra_data(), args.every, direct=args.direct)
    for row in sorted(scores.rows, key=lambda row: row.error):
        print(f"{row.group:12s} {row.what:36s} {row.predicted:8.1f} {row.measured:8.1f} {100 * row.error:+6.1f} %"
              f"  {row.low:8.1f} to {row.high:8.1f}")  # fmt: skip
    for group in scores.groups():
        print(group)
    print(f"rank correlation of NHWC over NCHW: {rank_correlation(gains(scores)):.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
