"""The table of NVIDIA's examples: which rows make a pair, and that both ratios of a pair are predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published import nvidia
from tests.helpers import extra_data, need

ROWS = """framework,model,machine,gpus,batch_per_gpu,precision,throughput,unit
PyTorch,ResNet-50 v1.5,DGX-1 V100 16GB,1,,fp32,100,img/s
PyTorch,ResNet-50 v1.5,DGX-1 V100 16GB,1,,amp,300,img/s
PyTorch,ResNet-50 v1.5,DGX-1 V100 16GB,8,,amp,2000,img/s
PyTorch,ResNet-50 v1.5,DGX-1 V100 32GB,1,,amp,300,img/s
PyTorch,Another,DGX-1 V100 16GB,1,4,amp,300,img/s
"""


def test_pairs_are_of_one_gpu_and_both_formats(tmp_path: Path) -> None:
    (tmp_path / "truth").mkdir()
    (tmp_path / "truth" / "deeplearningexamples_throughput.csv").write_text(ROWS)
    ((before, after),) = nvidia.pairs(tmp_path)
    assert (before.precision, before.batch, before.samples_per_s) == ("fp32", 128, 100)
    assert (after.precision, after.batch, after.samples_per_s) == ("amp", 256, 300)


@pytest.mark.slow
def test_ratios_are_within_12_percent() -> None:
    """What the specification of `predict` asks for, on the rows that are shown."""
    need("transformers")
    scores = nvidia.score(extra_data("truth").parent)
    assert {summary.group: summary.rows for summary in scores.groups()} == {
        "PyTorch ResNet-50": 3, "MXNet ResNet-50": 3, "PyTorch BERT-Large": 2,
    }  # fmt: skip
    assert all(abs(row.error) < 0.12 for row in scores.rows)
    assert all(row.low < row.predicted < row.high for row in scores.rows)
