"""Compare the what-if `device` with recordings of the same work on both devices: writes the tables of docs/device.md.

python -m benchmarks.devices [--check]

GPU busy time, by family of kernels. The recordings are public ones, in the folder WHATIF_EXTRA_DATA.
``--check`` writes nothing and exits 1 if the page is out of date. The
shipped models answer, not the user's own database.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import whatif
from benchmarks.extra_data import extra_data
from benchmarks.published.gpu_pairs import busy_range_ms
from benchmarks.written_table import write_or_check
from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.prediction.transform import load_transform
from whatif.report.layout import markdown_table

H100_MI300X = "tracelens-h100-mi300"
MODELS = (
    ("BERT-small, inference, bf16", "gaunernst_bert-small-uncased__1016001.json.gz"),
    ("ViT-base, inference, bf16", "Falconsai_nsfw_image_detection__1016002.json.gz"),
)
# Images/s in fp32 and TF32: NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md
# (container 21.03, one GPU, batch 256: eight times the recording's).
V100_FP32, A100_TF32, LARGER_BATCH = 367, 938, 8
RESNET = "kineto-resnet50-v100/num_workers_0.2021-06.pt.trace.json.gz"


def by_family(graph: TaskGraph) -> dict[str, float]:
    """GPU time of a steady step by family of kernels, ms, without collectives."""
    first, last = graph.info.steady
    steady = (graph.step >= first) & (graph.step < last) if last > first else np.ones(len(graph), dtype=np.bool_)
    tasks = graph.on_gpu & steady & (graph.kind != whatif.TaskKind.COMMUNICATION)
    time_ns = np.bincount(graph.family[tasks], weights=graph.duration_ns[tasks], minlength=len(KernelFamily))
    return {family.name.lower(): time_ns[family] / 1e6 / max(last - first, 1) for family in KernelFamily}


def pairs() -> Iterator[tuple[str, str, str, TaskGraph, TaskGraph, TaskGraph]]:
    """Yield model, source and target device; recorded, predicted and measured graph."""
    for model, file in MODELS:
        sides = {"H100-SXM-80": f"h100.{file}", "MI300X": f"mi300.{file}"}
        graphs = {name: whatif.read(extra_data("traces", H100_MI300X, side)) for name, side in sides.items()}
        for old, new in (("H100-SXM-80", "MI300X"), ("MI300X", "H100-SXM-80")):
            predicted = load_transform("device", to=new)(graphs[old])
            yield model, old, new, graphs[old], predicted, graphs[new]


def tables() -> str:
    """Return the tables as Markdown."""
    rows = []
    families: dict[tuple[str, str], list[str]] = {}
    for model, old, new, recorded, predicted, measured in pairs():
        before, after, truth = (by_family(graph) for graph in (recorded, predicted, measured))
        low, high = busy_range_ms(predicted)
        total, true = sum(after.values()), sum(truth.values())
        rows.append(
            (
                model, f"{old} → {new}", f"{sum(before.values()):.3f}", f"{total:.3f}", f"{low:.3f} … {high:.3f}",
                f"{true:.3f}", f"{100 * (total / true - 1):+.1f} %",
            )
        )  # fmt: skip
        families[model, f"{old} → {new}"] = [
            f"{name} {after[name] / truth[name] - 1:+.0%}".replace("%", " %")
            for name in sorted(truth, key=lambda name: -truth[name])
            if truth[name] > 0.03 * true
        ]
    headers = ("work", "from → to", "recorded", "predicted", "nominal 90 % range", "measured", "error")
    lines = [
        markdown_table(headers, rows),
        "",
        "Errors by family of kernels, for families with over 3 % of the measured time, longest first:",
        "",
    ]
    lines += [f"- {model}, {way}: {', '.join(entries)}" for (model, way), entries in families.items()]
    graph = whatif.read(extra_data("traces", RESNET))
    recorded_ms = sum(by_family(graph).values())
    lines += ["", "A training step of ResNet-50 (batch 32, fp32) that was recorded on a V100 only:", ""]
    rows = [("(V100)", f"{recorded_ms:.1f}", "1", "")]
    for spec in ("A100-SXM-80", "A100-SXM-80,tf32=no", "A100-SXM-40", "A100-PCIE-40", "H100-SXM-80", "T4"):
        predicted_ms = sum(by_family(load_transform(f"device:to={spec}")(graph)).values())
        rows.append((spec, f"{predicted_ms:.1f}", f"{recorded_ms / predicted_ms:.2f}", ""))
    grown = load_transform(f"batch_size:factor={LARGER_BATCH}")(graph)
    grown_ms, there_ms = (
        sum(by_family(each).values()) for each in (grown, load_transform("device:to=A100-SXM-80")(grown))
    )
    published = f"{A100_TF32 / V100_FP32:.2f}"
    rows.append(("A100-SXM-80, batch 256 on both", f"{there_ms:.1f}", f"{grown_ms / there_ms:.2f}", published))
    return "\n".join([*lines, markdown_table(("to", "GPU busy, ms", "speed-up", "published speed-up"), rows)])


if __name__ == "__main__":
    assert __doc__ is not None
    raise SystemExit(write_or_check("device.md", __file__, __doc__, tables))
