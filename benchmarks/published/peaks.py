"""Peaks of a 7 B GPT under Megatron-LM on eight GPUs, predicted from the model alone.

    python -m benchmarks.published.peaks

Source: NVIDIA/Megatron-LM, pull request 482, tools/get_training_info/README.md (2023): torch.cuda.max_memory_allocated
on a machine of eight H800s; bf16, sequences of 2,048, --use-flash-attn, --swiglu, --use-distributed-optimizer; shapes
as its listing of the model has them. Megatron-LM adds up gradients in fp32, twice the bytes of its parameters
(megatron/core/distributed, accumulate_allreduce_grads_in_fp32), which `whatif predict` is given here. Nothing was
fitted to the rows.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.published.scores import Row, Scores
from benchmarks.published.steps import baseline_of
from whatif.from_module.operations import OperatorGraph
from whatif.graph.memory import peak
from whatif.hardware.gpu import load_gpu
from whatif.prediction.composition import compose
from whatif.prediction.predict import Baseline
from whatif.prediction.transform import load_transform
from whatif.questions.memory_summary import SHAPES_MISS

DEVICE, CLUSTER, GIB = "H100-SXM-80", "dgx-h100", 2**30
MODEL = f"{Path(__file__).with_name('gated_gpt.py')}:GPT"
SHAPE = {"width": 4096, "inner": 10_880, "layers": 32, "heads": 32, "context": 2048, "vocabulary": 50_432}
# Micro-batch, global batch, data, pipeline and tensor parallelism; GiB.
MEASURED = (
    ((2, 2048, 8, 1, 1), 69.1), ((4, 512, 4, 1, 2), 55.7), ((2, 2048, 4, 2, 1), 49.8), ((4, 128, 1, 1, 8), 28.8),
)  # fmt: skip


@cache
def micro_batch(samples: int) -> Baseline:
    """Return the predicted step of one micro-batch on one GPU, its gradients in fp32."""
    step = importlib.import_module("whatif.instrumentation.trace_module.step")
    wanted = step.Wanted(
        MODEL, [("", (samples, SHAPE["context"]), "int64")], SHAPE, "bf16", "adamw:master", "cross_entropy", None,
        False, float(load_gpu(DEVICE).compute_capability),
    )  # fmt: skip
    operators = step.take_down_step(wanted)
    assert isinstance(operators, OperatorGraph)
    found = baseline_of(operators, DEVICE)
    graph = found.graph
    assert graph.info.memory is not None
    memory = graph.info.memory.with_layers(
        [row._replace(gradients=2 * row.gradients) for row in graph.info.memory.layers]
    )
    return replace(found, graph=graph.replace(info=replace(graph.info, memory=memory)))


def what_ifs(micro: int, batch: int, data: int, stages: int, tensor: int) -> list[str]:
    """Return the what-ifs of a row."""
    passes = batch // data // micro
    found = [f"tensor_parallel:workers={tensor},cluster={CLUSTER},vocabulary=true"] if tensor > 1 else []
    if stages > 1:
        # One micro-batch more than are in flight keeps as much as many.
        count = min(passes, stages + 1)
        found.append(f"pipeline:stages={stages},micro_batches={count},micro_batch={micro},cluster={CLUSTER}")
    elif passes > 1:
        found.append("gradient_accumulation:passes=2")
    return [*found, f"zero:stage=1,workers={data},cluster={CLUSTER}"] if data > 1 else found


def score(data: Path) -> Scores:
    """Score the four peaks; the table is here, and not in ``data``."""
    rows = []
    for way, measured in MEASURED:
        graph = compose(micro_batch(way[0]).graph, [load_transform(spec) for spec in what_ifs(*way)])
        assert graph.info.memory is not None
        found = peak(graph.info.memory).total / GIB
        micro, batch, copies, stages, tensor = way
        what = f"t {tensor} p {stages} d {copies}, micro-batch {micro}, batch {batch:,}"
        rows.append(Row("Megatron-LM's 7 B GPT", what, found, measured, found, SHAPES_MISS * found))
    return Scores("Peaks of a 7 B GPT on eight H800s", "GiB", tuple(rows))


def main() -> None:
    """Print the rows."""
    for row in score(Path()).rows:
        print(f"{row.what:45} {row.predicted:6.1f} {row.measured:6.1f} {100 * row.error:+6.1f} %")


if __name__ == "__main__":
    main()
