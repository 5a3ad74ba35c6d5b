"""Dtypes of the tensors of a step under autocast: which are half, which stay fp32, and which casts are added.

Source: PyTorch's autocast op reference (docs/source/amp.rst, lists for CUDA) and `aten/src/ATen/autocast_mode.cpp`: the
operands of products are cast to half, those of operators in the fp32 list to fp32 (some convert while reading), all
other operators use the widest dtype of their inputs. Embeddings, added parameters and layer norms return fp32, so the
residual stream of a transformer stays fp32. In the backward pass a gradient has the dtype of its forward tensor.
"""

from typing import Any

import torch
from torch import Tensor

from whatif.graph.types import Phase

from ..tensors import tensors_in

_PRODUCTS = frozenset(
    ("mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "convolution_backward", "_convolution", "_grouped_mm",
     "prelu", "_prelu_kernel", "_cudnn_rnn", "_cudnn_rnn_backward")
)  # fmt: skip
_ATTENTIONS = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
# The fp32 list: operands are cast by a separate kernel.
_SINGLE = frozenset(
    ("exp", "expm1", "log", "log10", "log2", "log1p", "pow", "rsqrt", "reciprocal", "cosh", "sinh", "tan", "acos",
     "asin", "erfinv", "softplus", "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss",
     "soft_margin_loss", "binary_cross_entropy_with_logits", "kl_div", "_cdist_forward", "renorm",
     "linalg_vector_norm", "native_layer_norm", "native_group_norm")
)  # fmt: skip
# The fp32 list: operators that convert while reading (they have a `dtype` argument).
_SINGLE_AT_ONCE = frozenset(("sum", "prod", "cumsum", "cumprod", "_softmax", "_log_softmax"))
# Backward of norms and softmax: the position of the forward tensor among the inputs.
_SINGLE_BACKWARD = {
    "native_layer_norm_backward": 1, "native_group_norm_backward": 1, "_softmax_backward_data": 1,
    "_log_softmax_backward_data": 1,
}  # fmt: skip
# Use the dtype of their first input: their weights and statistics are fp32.
_LIKE_FIRST = frozenset(
    ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "native_batch_norm_backward",
     "cudnn_batch_norm_backward", "_batch_norm_impl_index", "batch_norm_backward", "_batch_norm_with_update")
)  # fmt: skip


class FormatFlow:
    """Tracks dtypes through a step; ``weights`` are the storages of parameters, whose casts autocast caches."""

    def __init__(self, weights: set[int]) -> None:
        self._weights = weights
        self._half: set[int] = set()
        # fp32 tensors with a half copy that the backward pass reuses; fp32 results of operators that read half.
        self._has_copy: set[int] = set()
        self._from_half: set[int] = set()

    def follow(self, name: str, args: Any, kwargs: Any, result: Any, phase: Phase) -> tuple[float, int]:
        """Return the share of an operator's bytes that it moves under autocast, and the number of elements cast for it.

        The share is 1 if nothing changes; casts of weights are not counted.
        """
        short = name.removeprefix("aten::").rstrip("_")
        read = _singles([*args, *kwargs.values()])
        written = _singles([result])
        wide = [t for t in read if _key(t) not in self._half]
        narrow = [t for t in read if _key(t) in self._half]
        cast: list[Tensor] = []
        in_place = name.endswith("_") or "out" in kwargs
        if short in _PRODUCTS or short.startswith(_ATTENTIONS):
            backward = phase != Phase.FORWARD
            cast = [
                t for t in wide
                if _key(t) not in self._weights and not (backward and _key(t) in self._has_copy) and t.dim()
            ]  # fmt: skip
            self._has_copy |= {_key(t) for t in cast}
            half_written, half_read = written, read
        elif phase == Phase.FORWARD and short in _SINGLE:
            cast, half_read, half_written = narrow, [], []
        elif phase == Phase.FORWARD and short in _SINGLE_AT_ONCE:
            half_read, half_written = narrow, []
            if narrow:
                self._from_half |= {_key(t) for t in written}
        elif short in _SINGLE_BACKWARD and len(read) > 1:
            of_input = read[_SINGLE_BACKWARD[short]]
            cast = [t for t in read[:1] if _key(t) in self._half]
            half_read, half_written = [], []
            if _key(of_input) in self._from_half:
                half_written = written
            elif "softmax" not in short and _key(of_input) in self._half:
                cast, half_written = [*cast, *written[:1]], written[:1]
        elif in_place:
            half_read, half_written = narrow, [t for t in written if _key(t) in self._half]
        elif short in _LIKE_FIRST:
            half_read = narrow
            half_written = written if read and _key(read[0]) in self._half else []
        else:
            promoting = [t for t in wide if t.dim()]
            half_read, half_written = narrow, written if narrow and not promoting else []
            if phase == Phase.BACKWARD and short == "add" and narrow and promoting:
                cast = narrow
        fresh = {_key(t) for t in written}
        if not in_place:
            self._has_copy -= fresh
            if not (phase == Phase.FORWARD and short in _SINGLE_AT_ONCE and narrow):
                self._from_half -= fresh
            self._half -= fresh
        self._half |= {_key(t) for t in half_written}
        return _share(args, kwargs, result, half_read, half_written), sum(t.numel() for t in cast)


def _singles(values: Any) -> list[Tensor]:
    return [t for t in tensors_in(values) if t.dtype == torch.float32 and t.is_meta]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _share(args: Any, kwargs: Any, result: Any, half_read: list[Tensor], half_written: list[Tensor]) -> float:
    moved = sum(t.numel() * t.element_size() for t in tensors_in([*args, *kwargs.values(), result]))
    saved = sum(2 * t.numel() for t in (*half_read, *half_written))
    return 1 - saved / moved if moved else 1.0
