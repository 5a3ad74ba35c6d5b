"""What stays fp32 in a predicted step under autocast, by hand, and what `amp` makes of it; layouts of convolutions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from whatif.instrumentation.trace_module.step import Wanted, take_down_step

from whatif import load_transform
from whatif.from_module.operations import Operation, OperatorGraph
from whatif.from_module.predict_step import PredictedStep, predict_step
from whatif.graph.kernels import KernelFamily
from whatif.graph.recorded import AUTOCAST_CASTS, AUTOCAST_SHARE
from whatif.graph.types import Phase
from whatif.hardware.gpu import load_gpu
from whatif.opdb.default import estimator

MODELS = '''
import torch
from torch import nn

class Block(nn.Module):
    """A residual stream that starts with an embedding: norm, product, gelu, product, softmax, addition."""
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, 64), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))).softmax(-1)
        return x + x.exp()

class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(65536, 10)
        )

class OfEachSample(nn.Module):
    """A convolution with weights of each sample (CondConv), behind a usual one."""
    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Conv2d(3, 32, 3), nn.Parameter(torch.empty(8 * 64, 32, 3, 3))
    def forward(self, x):
        x = self.first(x).reshape(1, 8 * 32, 62, 62)
        return torch.nn.functional.conv2d(x, self.weight, groups=8)

class Last(nn.Module):
    """A layer norm over channels leaves them innermost."""
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(64), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)
    def forward(self, x):
        return self.second(self.first(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)))
'''
ROWS = 32 * 16


def taken(folder: Path, model: str, *inputs: tuple[str, tuple[int, ...], str], **options: Any) -> OperatorGraph:
    path = folder / "models_of_formats.py"
    path.write_text(MODELS, encoding="utf-8")
    return take_down_step(Wanted(f"{path}:{model}", list(inputs), loss="sum", optimizer="momentum", **options))


def the(graph: OperatorGraph, name: str, phase: Phase = Phase.FORWARD) -> list[Operation]:
    return [o for o in graph.operations if o.name == f"aten::{name}" and o.phase == phase]


@pytest.fixture
def block(tmp_path: Path) -> OperatorGraph:
    return taken(tmp_path, "Block", ("", (32, 16), "int64"))


def test_the_fp32_stream_is_cast_before_products_and_added_to_in_fp32(block: OperatorGraph) -> None:
    (norm,) = the(block, "native_layer_norm")
    assert (norm.autocast_share, norm.autocast_casts) == (1, 0)  # the embedding's rows are fp32 already
    up, down = the(block, "addmm")
    assert (up.autocast_casts, down.autocast_casts) == (ROWS * 64, 0)  # of the norm's result; gelu gives half
    (gelu,) = the(block, "gelu")
    assert gelu.autocast_share == 0.5
    (softmax,) = the(block, "_softmax")
    assert (softmax.autocast_share, softmax.autocast_casts) == (0.75, 0)  # reads half, writes fp32
    assert [o.autocast_share for o in the(block, "add")] == [1, 1]


def test_gradients_have_the_formats_of_their_tensors(block: OperatorGraph) -> None:
    (softmax,) = the(block, "_softmax_backward_data", Phase.BACKWARD)
    # Two of fp32 are read, one of half is written.
    assert softmax.autocast_share == pytest.approx(10 / 12)
    (gelu,) = the(block, "gelu_backward", Phase.BACKWARD)
    assert gelu.autocast_share == 0.5
    (norm,) = the(block, "native_layer_norm_backward", Phase.BACKWARD)
    assert norm.autocast_casts == ROWS * 64  # the product's gradient is half, the norm's input fp32
    # The cast that the forward product made is kept for the weight's gradient.
    assert all(o.autocast_casts == 0 for o in the(block, "mm", Phase.BACKWARD))


def test_a_convolution_net_is_half_throughout_but_for_its_input(tmp_path: Path) -> None:
    graph = taken(tmp_path, "Plain", ("", (8, 3, 34, 34), ""))
    (convolution,) = the(graph, "convolution")
    assert convolution.autocast_casts == 8 * 3 * 34 * 34
    others = [o for o in graph.operations if o.name in ("aten::relu", "aten::threshold_backward")]
    assert {o.autocast_share for o in others} == {0.5}
    (norm,) = [o for o in graph.operations if "batch_norm" in o.name and o.phase == Phase.FORWARD]
    assert norm.autocast_share == pytest.approx(0.5, abs=0.01)
    # The image, and the gradient of the last product's result, which the sum makes in fp32.
    assert sorted(o.autocast_casts for o in graph.operations if o.autocast_casts) == [80, 8 * 3 * 34 * 34]


def test_a_convolution_writes_the_layout_that_it_reads(tmp_path: Path) -> None:
    graph = taken(tmp_path, "Last", ("", (8, 64, 32, 32), ""))
    assert [o.concrete[0] for o in the(graph, "convolution")] == ["channels_last"] * 2
    assert [o.concrete[1] for o in the(graph, "convolution_backward", Phase.BACKWARD)] == ["channels_last"] * 2


def amp_of(graph: OperatorGraph, *others: str) -> PredictedStep:
    what_ifs = [load_transform(name) for name in ("amp", *others)]
    return predict_step(graph, estimator("RTX3090"), load_gpu("RTX3090"), transforms=what_ifs)


def test_a_batch_in_the_channels_of_one_image_stays_in_nchw(tmp_path: Path) -> None:
    graph = taken(tmp_path, "OfEachSample", ("", (8, 3, 64, 64), ""))
    first, last = (amp_of(graph, *names).graph for names in ((), ("channels_last",)))
    batches = np.array([dict(what.integers).get("batch", 0) for what in first.info.operators] + [0])

    def times(of: Any, batch: int) -> Any:
        called = np.append(batches, 0)[of.called]
        return of.duration_ns[(called == batch) & of.on_gpu & (of.family == KernelFamily.CONVOLUTION)]

    assert len(times(first, 1))
    assert np.array_equal(times(first, 1), times(last, 1))


def test_amp_keeps_what_stays_fp32_and_adds_the_casts_that_the_step_makes(tmp_path: Path) -> None:
    graph = taken(tmp_path, "Block", ("", (4096, 16), "int64"))
    step = amp_of(graph)
    before, after = step.prediction.baseline.graph, step.graph
    assert {AUTOCAST_SHARE, AUTOCAST_CASTS} <= set(before.attached)
    one = before.info.steady[0]

    def times(of: Any, name: str) -> Any:
        return of.duration_ns[of.select(name=name) & of.on_gpu & (of.step == one)]

    assert np.array_equal(times(before, "elementwise_add"), times(after, "elementwise_add"))
    assert (times(after, "elementwise_gelu") < 0.7 * times(before, "elementwise_gelu")).all()
    casts = [o for o in graph.operations if o.autocast_casts]
    assert len(times(after, r"cast \(autocast\)")) == len(casts)


def test_a_batch_of_twice_the_samples_casts_twice_as_much(tmp_path: Path) -> None:
    graph = taken(tmp_path, "Block", ("", (64, 16), "int64"))
    step = predict_step(
        graph, estimator("RTX3090"), load_gpu("RTX3090"), transforms=[load_transform("batch_size:factor=2")]
    )
    before, after = step.prediction.baseline.graph.attached, step.graph.attached
    assert after[AUTOCAST_CASTS].sum() == 2 * before[AUTOCAST_CASTS].sum() > 0
