"""What a CPU's products and convolutions take for any batch: packing their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import whatif
from whatif.graph.kernels import KernelFamily
from whatif.graph.types import Phase
from whatif.models.kernels.stored_weights import CONVOLUTION_COPIES, packing_ns


@pytest.mark.parametrize("model", ["vgg", "resnet"])
def test_convolutions_pack_their_weights_for_any_batch(model: str, own_traces: Path) -> None:
    """Backward more than forward; none where PyTorch multiplies image by image (1x1 convolutions on one thread)."""
    graph = whatif.read(own_traces / "lab_pipeline_cpu" / f"{model}.trace.json.gz")
    packed = packing_ns(graph)
    convolves = graph.family == KernelFamily.CONVOLUTION
    forward, backward = (
        packed[convolves & graph.select(phase=phase)].sum() for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    own = graph.select(name="_slow_conv")
    assert own.any() == (model == "resnet")
    assert not packed[own].any()
    if model == "vgg":  # all of its convolutions are oneDNN's
        assert backward == pytest.approx(forward * CONVOLUTION_COPIES[True] / CONVOLUTION_COPIES[False], rel=0.01)
    values = {"vgg": 9 * (3 * 64 + 64 * 128 + 128 * 256 + 3 * 256 * 256), "resnet": 0}[model]
    rates = graph.info.recorded.rates
    assert rates is not None
    assert rates.copy_gbyte_s is not None
    copies_ns = graph.info.n_steps * values * 4 / rates.copy_gbyte_s
    assert forward == pytest.approx(copies_ns, rel=0.01) if values else forward > 0
