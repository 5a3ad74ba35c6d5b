"""NVIDIA's weak-scaling table: which cells there are, and that a fit finds the constants that made them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import need

need("torch")
from benchmarks.published.weak_scaling import Cell, Steps, cells, fitted, operators  # noqa: E402

ROWS = """framework,model,machine,gpus,batch_per_gpu,precision,throughput,unit
PyTorch,ResNet-50 v1.5,DGX-1 V100 16GB,1,,fp32,100,img/s
PyTorch,ResNet-50 v1.5,DGX-1 V100 16GB,8,,fp32,760,img/s
PyTorch,BERT-Large pre-training seq 512 (accumulation 128),DGX A100 80GB,1,32,amp,50,sequences/s
PyTorch,BERT-Large pre-training seq 512 (accumulation 128),DGX A100 80GB,8,32,amp,392,sequences/s
PyTorch,Tacotron2,DGX-1 V100 16GB,1,104,amp,20,mels/s
PyTorch,Tacotron2,DGX-1 V100 16GB,8,104,amp,150,mels/s
"""


def test_a_cell_is_several_gpus_beside_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "truth").mkdir()
    (tmp_path / "truth" / "deeplearningexamples_throughput.csv").write_text(ROWS)
    first, second = cells(tmp_path)
    assert (first.family, first.batch, first.passes, first.gpus) == ("ResNet-50", 128, 1, 8)
    assert first.efficiency == pytest.approx(0.95)
    assert (second.family, second.batch, second.passes) == ("BERT-Large", 32, 128)
    assert capsys.readouterr().err == "not predicted: PyTorch Tacotron2 on DGX-1 V100 16GB\n"


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        ("BERT-Large pre-training seq 128 (accumulation 128)", 2 * 128),
        ("Transformer-XL base", 2 * 192),
        ("Transformer-XL large", 2 * 384),
    ],
)
def test_the_model_and_its_sequence_are_those_of_the_row(model: str, tokens: int) -> None:
    taken_down = operators(model, 2)
    embedding = next(op for op in taken_down.operations if op.name == "aten::embedding")
    assert np.prod(embedding.outputs[0][0][:2]) == tokens


def test_constants_are_found_again_without_the_model_that_is_left_out() -> None:
    """Cells that were made with 1.2 % and 9 bytes, but for one model's."""
    families, found = ("ResNet-50", "BERT-Large", "Transformer-XL"), {}
    for at, family in enumerate(families):
        for gpus, step in ((2, Steps(100, 101, 0.6, 0.1 + 0.2 * at)), (8, Steps(100, 102, 1.4, 0.3 + 0.1 * at))):
            value = float(step.efficiency(np.array(1.2), np.array(9.0)))
            odd = 0.5 if family == "Transformer-XL" else value
            found[Cell("PyTorch", family, "", "", 1, 1, gpus, odd)] = step
    assert fitted(found, "Transformer-XL") == pytest.approx((1.2, 9.0))
    assert fitted(found) != pytest.approx((1.2, 9.0))
