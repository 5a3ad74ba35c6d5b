"""SimuMax's table of Llama 3 on eight B200s: its shapes, its parallel what-ifs, and how well rows are met."""

from __future__ import annotations

import pytest

from benchmarks.published import simumax
from tests.helpers import need
from whatif.prediction.predict import apply
from whatif.prediction.transform import load_transform


def test_every_row_is_of_eight_gpus_and_its_what_ifs_load() -> None:
    assert len(simumax.MEASURED) * len(simumax.MICRO_BATCHES) == 24
    for (name, ways), times_ms in simumax.MEASURED.items():
        tensor, stages, data = ways
        assert name in simumax.MODELS
        assert tensor * stages * data == 8
        assert list(times_ms) == sorted(times_ms)
        for passes in simumax.MICRO_BATCHES:
            found = [load_transform(text) for text in simumax.what_ifs(ways, passes)]
            assert [one.name for one in found] == [
                *["tensor_parallel"] * (tensor > 1), "pipeline" if stages > 1 else "gradient_accumulation",
                *["zero"] * (data > 1),
            ]  # fmt: skip


@pytest.mark.slow
def test_a_row_of_each_way_of_the_larger_model_is_met() -> None:
    """405 B in four layers, whose blocks keep the GPU busy: 0.8 to 5.1 % for four micro-batches."""
    need("transformers")
    for (name, ways), times_ms in simumax.MEASURED.items():
        if name == "405 B":
            found = apply(simumax.micro_batch(name), *simumax.what_ifs(ways, simumax.MICRO_BATCHES[0]))
            assert found.predicted_ms == pytest.approx(times_ms[0], rel=0.06), ways
            assert found.low_ms < times_ms[0] < found.high_ms
