"""Published errors for the same questions, on the authors' data, percent: for comparison with an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct


class Published(Struct, frozen=True):
    """Mean errors by the database's operator names, percent, and their source."""

    source: str
    mape_pct: Mapping[str, float]


# 11,000 random shapes an operation on a V100 (TensorFlow 1.15), a tenth of them held out. Its gradients of convolutions
# (8.33 and 12.35) have no separate names here: a phase distinguishes them.
UNSEEN_SHAPES = Published(
    "Tianshu, Table 3 (a V100, its own data)",
    MappingProxyType(
        {"add": 0.57, "sub": 1.47, "mul": 1.49, "div": 0.66, "mm": 2.92, "bmm": 2.92, "linear": 2.92, "relu": 0.29,
         "conv2d": 8.94}
    ),
)  # fmt: skip
# Its predictions for GPUs and models that it was not trained on, by operator type, against its published labels.
_ELEMENTWISE = 19.3
UNSEEN_DEVICES = Published(
    "NeuSight's summary tables, GPUs or models that it had not seen (its own labels)",
    MappingProxyType(
        {"bmm": 13.8, "linear": 13.9, "softmax": 13.9, "layer_norm": 56.7}
        | dict.fromkeys(("add", "mul", "div", "pow", "relu", "gelu", "tanh"), _ELEMENTWISE)
    ),
)
