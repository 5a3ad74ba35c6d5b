"""NVIDIA's AMP throughput relative to FP32 or TF32 on one GPU, by `whatif predict MODEL [amp ...]`.

    WHATIF_EXTRA_DATA=FOLDER python -m benchmarks.published.nvidia

Source of the table: README tables of NVIDIA/DeepLearningExamples. Under AMP its ResNet-50 runs in NHWC and its BERT
uses apex's fused Adam; BERT without AMP loops over the parameters. PyTorch's ResNet rows are partly bound by the
loader, MXNet's are not. MXNet's switches kernels of batch normalization with ReLU (and addition) inside on with AMP
(MxNet/Classification/RN50v1.5/runner, --fuse-bn-relu and --fuse-bn-add-relu); the nearest what-if is ``rebatchnorm``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.extra_data import extra_data
from benchmarks.published.scores import Row, Scores
from whatif import load_transform
from whatif.from_module.operations import OperatorGraph
from whatif.from_module.predict_step import PredictedStep, predict_step
from whatif.hardware.gpu import load_gpu
from whatif.opdb.default import estimator

_TABLE = "deeplearningexamples_throughput.csv"
GPUS = {
    "DGX A100 80GB": "A100-SXM-80", "DGX-1 V100 16GB": "V100-SXM2-16", "DGX-1 V100 32GB": "V100-SXM2-32",
    "DGX-2 V100 32GB": "V100-SXM2-32",
}  # fmt: skip
# Default batch, from the tables' commands (convnets/resnet50v1.5: 256 with AMP, 128 without).
RESNET_BATCH = {"amp": 256, "fp32": 128, "tf32": 256}
BERT_POSITIONS = 384
AMP = {
    ("PyTorch", "ResNet-50"): ("amp", "channels_last"), ("PyTorch", "BERT-Large"): ("amp", "fused_adam"),
    ("MXNet", "ResNet-50"): ("rebatchnorm", "amp", "channels_last"),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A row of the table: samples per second of one GPU."""

    framework: str
    model: str
    machine: str
    precision: str
    batch: int
    samples_per_s: float


def pairs(data: Path) -> Iterator[tuple[Measured, Measured]]:
    """Yield (without AMP, with AMP) of each framework, model and machine, from ``truth/`` under ``data``."""
    rows: dict[tuple[str, str, str], dict[bool, Measured]] = {}
    with (data / "truth" / _TABLE).open(newline="") as file:
        for fields in csv.DictReader(file):
            row = _measured(fields)
            if row is not None:
                rows.setdefault((row.framework, row.model, row.machine), {})[row.precision == "amp"] = row
    for row_pair in rows.values():
        if len(row_pair) == 2:
            yield row_pair[False], row_pair[True]


def _measured(row: dict[str, str]) -> Measured | None:
    """Parse a row to predict: ResNet-50, or BERT-Large's fine-tuning; pre-training is bound by its accumulation."""
    names = (name for framework, name in AMP if framework == row["framework"] and row["model"].startswith(name))
    model = next(names, None)
    if model is None or row["gpus"] != "1" or row["machine"] not in GPUS or "pre-training" in row["model"]:
        return None
    batch = int(row["batch_per_gpu"] or RESNET_BATCH[row["precision"]])
    return Measured(
        row["framework"], model, row["machine"], row["precision"], batch, float(row["throughput"])
    )  # fmt: skip


@cache
def operators(model: str, batch: int, positions: int = BERT_POSITIONS) -> OperatorGraph:
    """Return the operators of a training step in fp32; BERT's has ``positions`` positions."""
    from whatif.instrumentation.trace_module.step import Wanted, take_down_step

    if model == "ResNet-50":
        shape = (batch, 3, 224, 224)
        return take_down_step(Wanted(f"{__name__}:resnet50", [("", shape, "")], optimizer="momentum"))
    shape = batch, positions
    inputs = [("input_ids", shape, "int64"), ("token_type_ids", shape, "int64")]
    inputs += [(name, (batch,), "int64") for name in ("start_positions", "end_positions")]
    return take_down_step(Wanted(f"{__name__}:bert_large", inputs, optimizer="adamw:for-loop"))


def resnet50() -> object:
    """ResNet-50 for images of 224 px."""
    from benchmarks.campaign.cnns import ResNet

    return ResNet((3, 4, 6, 3), 64, 1000, False)


def bert_large() -> object:
    """BERT-Large with a head for SQuAD and unfused attention, as in the examples."""
    from transformers import BertConfig, BertForQuestionAnswering

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return BertForQuestionAnswering(BertConfig(**sizes, attn_implementation="eager"))


def _predicted(row: Measured) -> PredictedStep:
    device = GPUS[row.machine]
    names = AMP[row.framework, row.model] if row.precision == "amp" else ()
    return predict_step(
        operators(row.model, row.batch), estimator(device), load_gpu(device),
        tf32="none" if row.precision == "fp32" else "all",
        transforms=[load_transform(name) for name in names],
    )  # fmt: skip


def score(data: Path) -> Scores:
    """Score the ratios of throughput, AMP over the other format."""
    rows = []
    for before, after in pairs(data):
        slow, fast = _predicted(before), _predicted(after)
        samples = after.batch / before.batch
        slow_ms = slow.prediction.predicted_ms
        low_ms, high_ms = fast.range_ms
        what = f"{after.model} {after.machine}, {before.precision} {before.batch} to AMP {after.batch}"
        rows.append(
            Row(
                f"{after.framework} {after.model}", what, samples * slow_ms / fast.prediction.predicted_ms,
                after.samples_per_s / before.samples_per_s, samples * slow_ms / high_ms, samples * slow_ms / low_ms,
            )
        )  # fmt: skip
    return Scores("NVIDIA DeepLearningExamples, AMP over FP32 or TF32 on one GPU", "ratio", tuple(rows))


def main() -> None:
    """Print the rows."""
    for row in score(extra_data()).rows:
        print(
            f"{row.group:20} {row.what:60} predicted {row.predicted:5.2f} ({row.low:.2f} to {row.high:.2f}), "
            f"measured {row.measured:5.2f}, {100 * row.error:+.0f} %"
        )


if __name__ == "__main__":
    main()
