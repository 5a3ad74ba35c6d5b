"""NeuSight's end-to-end latencies (fp32, eager) by `whatif predict`: on known GPUs, and with each GPU held out.

    WHATIF_EXTRA_DATA=FOLDER python -m benchmarks.published.neusight [--left-out FOLDER]

``--left-out`` names a folder with a folder of models for each device, fitted without it (``python -m
benchmarks.shipped_models DATABASE --scope across --without DEVICE --out FOLDER/DEVICE``). Source of the table:
sitar-lab/NeuSight (MIT; Lee et al., ASPLOS 2025), inference and training (forward and backward, no optimizer).
"""

from __future__ import annotations

import argparse
import csv
import importlib
from pathlib import Path
from typing import Any

from benchmarks.extra_data import extra_data
from benchmarks.published.kept_graphs import kept
from benchmarks.published.scores import Row, Scores
from whatif.from_module.operations import OperatorGraph
from whatif.from_module.predict_step import predict_step
from whatif.hardware.gpu import load_gpu
from whatif.opdb.chain import Estimator
from whatif.opdb.index import index_of
from whatif.opdb.learned import LearnedModel, models_in, shipped_models

DEVICES = {
    "Tesla_V100-PCIE-32GB": "V100-PCIE-32", "Tesla_P100-PCIE-16GB": "P100-PCIE-16", "Tesla_T4": "T4",
    "Tesla_P4": "P4", "NVIDIA_A100-PCIE-40GB": "A100-PCIE-40", "NVIDIA_A100_80GB_PCIe": "A100-PCIE-80",
    "NVIDIA_H100_80GB_HBM3": "H100-SXM-80", "NVIDIA_L4": "L4",
}  # fmt: skip
# Mixtures of experts are out of scope; NeuSight's switch model is its own code.
LEFT = ("switchxl4",)


def model(name: str, mode: str) -> Any:
    """Return one of the table's models, by the Hugging Face class that NeuSight measured (``trace.py``)."""
    import torch
    from transformers import (
        BertConfig,
        BertForPreTraining,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        OPTConfig,
        OPTForCausalLM,
    )

    # Layers, width, heads. The width of "gpt3_xl", 24 heads of 128 (Brown et al. 2020, table 2.1), follows
    # from its times, which equal those of "gpt3_27".
    gpt = {"gpt2_large": (36, 1280, 20), "gpt3_xl": (24, 3072, 24), "gpt3_27": (32, 2560, 32)}
    with torch.device("meta"):
        if name == "bert_large":
            bert = BertConfig(
                hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
                attn_implementation="eager",
            )  # fmt: skip
            return BertForPreTraining(bert) if mode == "train" else BertForSequenceClassification(bert)
        if name == "opt_13":
            opt = OPTConfig(
                hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, ffn_dim=8192, word_embed_proj_dim=2048,
                max_position_embeddings=2048, attn_implementation="eager", use_cache=False,
            )  # fmt: skip
            return OPTForCausalLM(opt)
        layers, width, heads = gpt[name]
        config = GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, n_positions=2048, attn_implementation="eager", use_cache=False
        )
        return GPT2LMHeadModel(config)


def operator_graph(name: str, mode: str, sequence: int, batch: int, capability: float) -> OperatorGraph:
    """Return the operators of one pass of a model, cached in the user's cache folder."""

    def take_down() -> OperatorGraph | None:
        step = importlib.import_module("whatif.instrumentation.trace_module.step")
        inputs = [("input_ids", (batch, sequence), "int64")]
        if name == "bert_large":  # that version of transformers adds a mask to the scores even if none is given
            inputs.append(("attention_mask", (batch, 1, 1, sequence), "fp32"))
        wanted = step.Wanted(
            f"{__file__}:model", inputs, keywords={"name": name, "mode": mode}, optimizer="none",
            loss="cross_entropy", inference=mode == "inf", capability=capability,
        )  # fmt: skip
        found = step.take_down_step(wanted)
        return found if isinstance(found, OperatorGraph) else None

    found = kept(f"neusight 3 {name} {mode} {sequence} {batch} {capability}", take_down)
    assert found is not None
    return found


def estimator(device: str, left_out: Path | None = None) -> Estimator:
    """Return the shipped chain; with ``left_out`` a chain without data of the device.

    ``left_out`` holds the models across devices that were fitted without the device.
    """
    models: list[LearnedModel] = list(shipped_models())
    if left_out is not None:
        kinds = {m.facts.family for m in models if m.facts.across and device in m.facts.devices}
        models = [
            m for m in models
            if m.facts.device != device and not (m.facts.across and m.facts.family in kinds and m.facts.dtype == "fp32")
        ]  # fmt: skip
        models += models_in(left_out)[0]
    return Estimator(index_of([]), device, models=models, kernels_alone=True)


def score(data: Path, left_out: Path | None = None) -> Scores:
    """Score the table ``truth/neusight_end_to_end.csv`` under ``data``; groups are devices."""
    rows = []
    with (data / "truth" / "neusight_end_to_end.csv").open(newline="") as file:
        cells = [row for row in csv.DictReader(file) if row["model"] not in LEFT]
    for cell in cells:
        device = DEVICES[cell["device"]]
        known = estimator(device, left_out / device if left_out else None)
        gpu = load_gpu(device)
        graph = operator_graph(
            cell["model"], cell["mode"], int(cell["sequence"]), int(cell["batch_size"]),
            float(gpu.compute_capability or 8.0),
        )  # fmt: skip
        step = predict_step(graph, known, gpu)
        low, high = step.range_ms
        what = f"{cell['model']} {cell['mode']} {cell['sequence']} x {cell['batch_size']}"
        rows.append(Row(device, what, step.prediction.predicted_ms, float(cell["end_to_end_ms"]), low, high))
    return Scores("NeuSight end to end" + (", each GPU left out" if left_out else ""), "ms", tuple(rows))


def main() -> int:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--left-out", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    scores = score(extra_data(), args.left_out)
    for row in scores.rows:
        print(f"{row.group:14s} {row.what:28s} {row.predicted:8.1f} {row.measured:8.1f} {100 * row.error:+6.1f} %")
    for group in scores.groups():
        print(group)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
