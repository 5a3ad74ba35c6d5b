"""Memory peaks of Megatron-LM on eight GPUs, predicted from the model alone.

    python -m benchmarks.published.peaks

Sources: NVIDIA/Megatron-LM, pull request 482, tools/get_training_info/README.md (2023): torch.cuda.max_memory_allocated
on a machine of eight H800s; bf16, sequences of 2,048, --use-flash-attn, --swiglu, --use-distributed-optimizer; shapes
as in its listing of the model. MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md, column "real alloc":
the runs whose times ``simumax`` predicts; they are the same for 4, 8 and 32 micro-batches. Megatron-LM accumulates
gradients in fp32, twice the bytes of its parameters (megatron/core/distributed, accumulate_allreduce_grads_in_fp32),
which its optimizer uses without a copy. Nothing was fitted to the rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.published import simumax
from benchmarks.published.scores import Row, Scores
from benchmarks.published.steps import training_step
from whatif.graph.memory import peak
from whatif.graph.task_graph import TaskGraph
from whatif.prediction.composition import compose
from whatif.prediction.peak_fit import peak_range_bytes
from whatif.prediction.transform import load_transform

GIB = 2**30
MODEL = f"{Path(__file__).with_name('gated_gpt.py')}:GPT"
SHAPE = {"width": 4096, "inner": 10_880, "layers": 32, "heads": 32, "context": 2048, "vocabulary": 50_432}
# Micro-batch, global batch, data, pipeline and tensor parallelism; GiB.
MEASURED = (
    ((2, 2048, 8, 1, 1), 69.1), ((4, 512, 4, 1, 2), 55.7), ((2, 2048, 4, 2, 1), 49.8), ((4, 128, 1, 1, 8), 28.8),
)  # fmt: skip
# Tensor, pipeline and data parallelism; GiB.
SIMUMAX = {
    ("70 B", (1, 2, 4)): 66.55, ("70 B", (2, 1, 4)): 60.68, ("70 B", (4, 1, 2)): 39.07, ("70 B", (8, 1, 1)): 28.29,
    ("405 B", (1, 2, 4)): 87.08, ("405 B", (2, 1, 4)): 81.59, ("405 B", (4, 1, 2)): 52.89, ("405 B", (8, 1, 1)): 38.57,
}  # fmt: skip


def micro_batch(device: str, samples: int, **shape: float) -> TaskGraph:
    """Return the predicted step of one micro-batch of a model on one GPU, with gradients in fp32."""
    inputs = [("", (samples, int(shape["context"])), "int64")]
    graph = training_step(MODEL, inputs, device, keywords=shape, dtype="bf16", loss="cross_entropy").graph
    assert graph.info.memory is not None
    rows = [row._replace(gradients=2 * row.gradients) for row in graph.info.memory.layers]
    memory = replace(graph.info.memory.with_layers(rows), update_workspace=0)
    return graph.replace(info=replace(graph.info, memory=memory))


@cache
def gpt(samples: int) -> TaskGraph:
    """Return the step of Megatron-LM's model."""
    return micro_batch("H100-SXM-80", samples, **SHAPE)


@cache
def llama(name: str) -> TaskGraph:
    """Return the step of one of SimuMax's Llamas, a sample in a micro-batch."""
    width, inner, heads, groups, layers = simumax.MODELS[name]
    return micro_batch(
        simumax.DEVICE, 1, width=width, inner=inner, layers=layers, heads=heads, context=simumax.SEQUENCE,
        vocabulary=128_256, groups=groups, dropout=0.0, tied=False,
    )  # fmt: skip


def what_ifs(micro: int, batch: int, data: int, stages: int, tensor: int) -> list[str]:
    """Return the what-ifs of a row of Megatron-LM's model."""
    passes, cluster = batch // data // micro, "cluster=dgx-h100"
    found = [f"tensor_parallel:workers={tensor},{cluster},vocabulary=true"] if tensor > 1 else []
    if stages > 1:
        # One more micro-batch than are in flight has the same peak as many.
        count = min(passes, stages + 1)
        found.append(f"pipeline:stages={stages},micro_batches={count},micro_batch={micro},even=true,{cluster}")
    elif passes > 1:
        found.append("gradient_accumulation:passes=2")
    return [*found, f"zero:stage=1,workers={data},{cluster}"] if data > 1 else found


def _row(group: str, what: str, graph: TaskGraph, specs: list[str], measured: float) -> Row:
    """The peak under the what-ifs, and the measured one, GiB."""
    transforms = [load_transform(spec) for spec in specs]
    memory = compose(graph, transforms).info.memory
    assert memory is not None
    most = peak(memory).total
    low, high = peak_range_bytes(most, transforms)
    return Row(group, what, most / GIB, measured, low / GIB, high / GIB)


def score(data: Path) -> Scores:
    """Score the twelve peaks; the tables are in this module, not in ``data``."""
    rows = []
    for way, measured in MEASURED:
        micro, batch, copies, stages, tensor = way
        what = f"t {tensor} p {stages} d {copies}, micro-batch {micro}, batch {batch:,}"
        rows.append(_row("Megatron-LM's 7 B GPT", what, gpt(micro), what_ifs(*way), measured))
    for (name, ways), measured in SIMUMAX.items():
        what = f"{name}, t {ways[0]} p {ways[1]} d {ways[2]}"
        specs = simumax.what_ifs(ways, simumax.MICRO_BATCHES[0])
        rows.append(_row("SimuMax's Llama 3", what, llama(name), specs, measured))
    return Scores("Peaks under Megatron-LM on eight GPUs", "GiB", tuple(rows))


def main() -> None:
    """Print the rows."""
    for row in score(Path()).rows:
        print(f"{row.what:45} {row.predicted:6.1f} {row.measured:6.1f} {100 * row.error:+6.1f} %")


if __name__ == "__main__":
    main()
