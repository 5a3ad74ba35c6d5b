"""The networks of Pei et al.'s tables as layers, and their time by the abstract instruction queue.

The paper prints neither layers nor, for table 6, the batch: those of figure 7 are taken (AlexNet 256, ResNet-50 32).
AlexNet is the one of a single tower that TensorFlow's models have (Krizhevsky, "One weird trick", 2014).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.paper.pei_layers import linear_s, moving_s, pool_s
from whatif.graph.types import Float64
from whatif.opdb.instruction_queue import Units
from whatif.opdb.queue_layers import conv_s


@dataclass(frozen=True)
class Layer:
    """One layer: a convolution or product with its sizes, or a kind of ``pei_layers.LAYER_TRAFFIC``."""

    kind: str
    sizes: dict[str, float]


def conv(
    batch: int, c_in: int, c_out: int, side: int, kernel: int, stride: int = 1, padding: int | None = None
) -> Layer:
    """A convolution of square images; without ``padding`` the output is as large as the input."""
    pad = kernel // 2 if padding is None else padding
    sizes = {"batch": batch, "in_channels": c_in, "out_channels": c_out, "in_h": side, "in_w": side, "groups": 1}
    sizes |= {f"{what}_{axis}": value for axis in "hw" for what, value in
              (("kernel", kernel), ("stride", stride), ("padding", pad), ("dilation", 1))}  # fmt: skip
    return Layer("conv", {name: float(value) for name, value in sizes.items()})


def _moving(kind: str, batch: int, channels: int, side: int) -> Layer:
    return Layer(kind, {"elements": float(batch * channels * side * side)})


def _pool(batch: int, channels: int, side: int, out: int) -> Layer:
    return Layer("pool", {"inputs": float(batch * channels * side**2), "outputs": float(batch * channels * out**2)})


def _linear(batch: int, c_in: int, c_out: int) -> Layer:
    return Layer("linear", {"batch": float(batch), "inputs": float(c_in), "outputs": float(c_out)})


def alexnet(batch: int) -> Iterator[Layer]:
    """AlexNet, 224 x 224."""
    for c_in, c_out, side, out, kernel, stride, padding, pooled in (
        (3, 64, 224, 55, 11, 4, 2, 27), (64, 192, 27, 27, 5, 1, 2, 13), (192, 384, 13, 13, 3, 1, 1, 0),
        (384, 256, 13, 13, 3, 1, 1, 0), (256, 256, 13, 13, 3, 1, 1, 6),
    ):  # fmt: skip
        yield conv(batch, c_in, c_out, side, kernel, stride, padding)
        yield _moving("relu", batch, c_out, out)
        if pooled:
            yield _pool(batch, c_out, out, pooled)
    for c_in, c_out in ((9216, 4096), (4096, 4096), (4096, 1000)):
        yield _linear(batch, c_in, c_out)


def vgg16(batch: int) -> Iterator[Layer]:
    """VGG-16, 224 x 224."""
    c_in, side = 3, 224
    for c_out, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            yield conv(batch, c_in, c_out, side, 3)
            yield _moving("relu", batch, c_out, side)
            c_in = c_out
        yield _pool(batch, c_out, side, side // 2)
        side //= 2
    for inputs, outputs in ((25088, 4096), (4096, 4096), (4096, 1000)):
        yield _linear(batch, inputs, outputs)


def resnet50(batch: int) -> Iterator[Layer]:
    """ResNet-50, 224 x 224; the stride is in the 3 x 3 convolution."""
    yield from _conv_norm(batch, 3, 64, 224, 7, 2)
    yield _moving("relu", batch, 64, 112)
    yield _pool(batch, 64, 112, 56)
    c_in, side = 64, 56
    for width, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = first if block == 0 else 1
            out = side // stride
            yield from _conv_norm(batch, c_in, width, side, 1, 1)
            yield _moving("relu", batch, width, side)
            yield from _conv_norm(batch, width, width, side, 3, stride)
            yield _moving("relu", batch, width, out)
            yield from _conv_norm(batch, width, 4 * width, out, 1, 1)
            if block == 0:
                yield from _conv_norm(batch, c_in, 4 * width, side, 1, stride)
            yield _moving("residual", batch, 4 * width, out)
            yield _moving("relu", batch, 4 * width, out)
            c_in, side = 4 * width, out
    yield _pool(batch, 2048, 7, 1)
    yield _linear(batch, 2048, 1000)


def _conv_norm(batch: int, c_in: int, c_out: int, side: int, kernel: int, stride: int) -> Iterator[Layer]:
    yield conv(batch, c_in, c_out, side, kernel, stride)
    yield _moving("batch_norm", batch, c_out, side // stride)


def layers_s(units: Units, layers: Sequence[Layer], *, tiled: bool = False) -> tuple[Float64, Float64]:
    """Forward and backward time of each layer, seconds, shape (n_layers,) each; the first one hands no gradient on."""
    forward, backward = np.zeros(len(layers)), np.zeros(len(layers))
    for kind in sorted({layer.kind for layer in layers}):
        at = np.array([number for number, layer in enumerate(layers) if layer.kind == kind])
        sizes = {name: np.array([layers[n].sizes[name] for n in at]) for name in layers[at[0]].sizes}
        if kind == "conv":
            forward[at] = conv_s(units, sizes, tiled=tiled)
            dgrad, wgrad = (conv_s(units, sizes, phase, tiled=tiled) for phase in ("dgrad", "wgrad"))
            backward[at] = wgrad + np.where(at > 0, dgrad, 0.0)
        elif kind == "linear":
            forward[at], backward[at] = (linear_s(units, *sizes.values(), phase) for phase in ("fwd", "bwd"))
        elif kind == "pool":
            forward[at], backward[at] = (pool_s(units, *sizes.values(), phase) for phase in ("fwd", "bwd"))
        else:
            forward[at], backward[at] = (moving_s(units, kind, sizes["elements"], phase) for phase in ("fwd", "bwd"))
    return forward, backward


def weights(layer: Layer) -> float:
    """How many weights a layer has."""
    if layer.kind == "conv":
        return float(np.prod([layer.sizes[name] for name in ("in_channels", "out_channels", "kernel_h", "kernel_w")]))
    return layer.sizes["inputs"] * layer.sizes["outputs"] if layer.kind == "linear" else 0.0


def network_s(units: Units, layers: Iterable[Layer], *, tiled: bool = False) -> tuple[float, float]:
    """Forward time, and forward, backward and update together, seconds."""
    all_layers = list(layers)
    forward, backward = layers_s(units, all_layers, tiled=tiled)
    update = moving_s(units, "update", np.array([sum(map(weights, all_layers))]))
    return float(forward.sum()), float(forward.sum() + backward.sum() + update[0])
