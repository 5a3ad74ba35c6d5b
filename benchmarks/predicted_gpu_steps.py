"""Compare steps from `whatif predict` with public recordings of the same models: writes a table of docs/predict.md.

python -m benchmarks.predicted_gpu_steps [--check]

The recordings are public ones, in the folder WHATIF_EXTRA_DATA. Needs torch and transformers. ``--check``
writes nothing and exits 1 if the page is out of date. The shipped models answer, not the user's
own database.
"""

from __future__ import annotations

import io
import json
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import whatif
from benchmarks.extra_data import extra_data
from benchmarks.written_table import write_or_check
from whatif.cli.main import main as whatif_command
from whatif.graph.task_graph import TaskGraph
from whatif.report.layout import markdown_table

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "tests" / "operator_graph" / "predicted_models.py"
H100, BF16 = ("--device", "H100-SXM-80"), ("--inference", "--dtype", "bf16")


class Step(NamedTuple):
    """A recording, the model of the same step, and the options of `whatif predict`."""

    what: str
    recording: str
    model: str
    options: tuple[str, ...]


STEPS = (
    Step("ResNet-50, batch 32, fp32, V100", "kineto-resnet50-v100/num_workers_4.2021-06.pt.trace.json.gz", "resnet50",
         ("--input", "32,3,224,224", "--optimizer", "momentum:for-loop", "--device", "V100-SXM2-32")),
    Step("VGG-13, batch 512, TF32 convolutions, H100", "triosim-vgg13-h100/vgg13_bs512_adam.json.gz", "Vgg13",
         ("--input", "512,3,224,224", "--optimizer", "adam", *H100)),
    Step("BERT-small, 141 tokens, bf16, H100, inference",
         "tracelens-h100-mi300/h100.gaunernst_bert-small-uncased__1016001.json.gz", "bert_small",
         ("--input", "input_ids=1,141:int64", *BF16, *H100)),
    Step("ViT-base, batch 4, bf16, H100, inference",
         "tracelens-h100-mi300/h100.Falconsai_nsfw_image_detection__1016002.json.gz", "vit_base",
         ("--input", "pixel_values=4,3,224,224:bf16", *BF16, *H100)),
)  # fmt: skip


def gpu_work(graph: TaskGraph) -> tuple[int, float]:
    """Return the number of kernels in a steady step, and their time in ms, without copies (as of the batch)."""
    first, last = graph.info.steady
    n_steps = max(last - first, 1)
    kernels = graph.select(kind=whatif.TaskKind.KERNEL).mask.copy()
    if last > first:
        kernels &= (graph.step >= first) & (graph.step < last)
    return round(kernels.sum() / n_steps), float(graph.duration_ns[kernels].sum()) / 1e6 / n_steps


def table() -> str:
    """Return the table as Markdown."""
    rows = []
    for step in STEPS:
        with tempfile.TemporaryDirectory() as folder:
            saved, output = Path(folder, "step.json.gz"), io.StringIO()
            words = [f"{MODELS}:{step.model}", *step.options, "--save", str(saved), "--json", "--quiet"]
            with redirect_stdout(output):
                status = whatif_command(["predict", *words])
            if status:
                raise SystemExit(status)
            count, busy_ms = gpu_work(whatif.read(saved))
        predicted = json.loads(output.getvalue())
        true_count, true_ms = gpu_work(whatif.read(extra_data("traces", step.recording)))
        rows.append(
            (
                step.what, f"{count:,} / {true_count:,}", f"{busy_ms:.2f}", f"{true_ms:.2f}",
                f"{100 * (busy_ms / true_ms - 1):+.0f} %", f"{predicted['predicted_ms']:.2f}",
                f"{predicted['low_ms']:.2f} … {predicted['high_ms']:.2f}",
            )
        )  # fmt: skip
    headers = (
        "step", "kernels, predicted / recorded", "GPU time, predicted", "recorded", "error", "step, predicted",
        "nominal 90 % range",
    )  # fmt: skip
    return markdown_table(headers, rows)


if __name__ == "__main__":
    assert __doc__ is not None
    raise SystemExit(write_or_check("predict.md", __file__, __doc__, table))
