"""The formats that would flow through a step under autocast: what is half, what stays fp32, and which casts appear.

Source: PyTorch's autocast op reference (docs/source/amp.rst, lists for CUDA) and `aten/src/ATen/autocast_mode.cpp`: the
products' operands are cast to half, operators of the fp32 list get theirs in fp32 (some convert while they read), all
others take the widest format of their inputs. An embedding, a parameter that is added and a layer norm give fp32, so
that what a transformer adds up stays fp32. Backward, a gradient has the format of its forward tensor.
"""

from typing import Any

import torch
from torch import Tensor

from whatif.graph.types import Phase

from ..tensors import tensors_in

_PRODUCTS = frozenset(
    ("mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "convolution_backward", "_convolution", "_grouped_mm",
     "prelu", "_prelu_kernel")
)  # fmt: skip
_ATTENTIONS = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
# The fp32 list: operands are cast before.
_SINGLE = frozenset(
    ("exp", "expm1", "log", "log10", "log2", "log1p", "pow", "rsqrt", "reciprocal", "cosh", "sinh", "tan", "acos",
     "asin", "erfinv", "softplus", "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss",
     "soft_margin_loss", "binary_cross_entropy_with_logits", "kl_div", "_cdist_forward", "renorm",
     "linalg_vector_norm", "native_layer_norm", "native_group_norm")
)  # fmt: skip
# The fp32 list: operators that convert while they read (a `dtype` of their own).
_SINGLE_AT_ONCE = frozenset(("sum", "prod", "cumsum", "cumprod", "_softmax", "_log_softmax"))
# Norms and softmax backward: the place of the forward pass's tensor among the inputs.
_SINGLE_BACKWARD = {
    "native_layer_norm_backward": 1, "native_group_norm_backward": 1, "_softmax_backward_data": 1,
    "_log_softmax_backward_data": 1,
}  # fmt: skip
# Take the format of their first input: their weights and statistics are fp32.
_LIKE_FIRST = frozenset(
    ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "native_batch_norm_backward",
     "cudnn_batch_norm_backward", "_batch_norm_impl_index", "batch_norm_backward", "_batch_norm_with_update")
)  # fmt: skip


class FormatFlow:
    """Follows the operators of a step; ``weights`` are the storages of parameters, whose casts autocast keeps."""

    def __init__(self, weights: set[int]) -> None:
        self._weights = weights
        self._half: set[int] = set()
        # fp32 tensors that a product has cast, whose half copy the backward pass finds; what a softmax read in half.
        self._has_copy: set[int] = set()
        self._from_half: set[int] = set()

    def follow(self, name: str, args: Any, kwargs: Any, result: Any, phase: Phase) -> tuple[float, int]:
        """Return the share of its bytes that an operator moves under autocast, and the elements that are cast for it.

        The share is 1 where nothing changes; casts of weights are not counted.
        """
        short = name.removeprefix("aten::").rstrip("_")
        read = _singles([*args, *kwargs.values()])
        made = _singles([result])
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
            half_made, half_read = made, read
        elif phase == Phase.FORWARD and short in _SINGLE:
            cast, half_read, half_made = narrow, [], []
        elif phase == Phase.FORWARD and short in _SINGLE_AT_ONCE:
            half_read, half_made = narrow, []
            if narrow:
                self._from_half |= {_key(t) for t in made}
        elif short in _SINGLE_BACKWARD and len(read) > 1:
            of_input = read[_SINGLE_BACKWARD[short]]
            cast = [t for t in read[:1] if _key(t) in self._half]
            half_read, half_made = [], []
            if _key(of_input) in self._from_half:
                half_made = made
            elif "softmax" not in short and _key(of_input) in self._half:
                cast, half_made = [*cast, *made[:1]], made[:1]
        elif in_place:
            half_read, half_made = narrow, [t for t in made if _key(t) in self._half]
        elif short in _LIKE_FIRST:
            half_read = narrow
            half_made = made if read and _key(read[0]) in self._half else []
        else:
            promoting = [t for t in wide if t.dim()]
            half_read, half_made = narrow, made if narrow and not promoting else []
            if phase == Phase.BACKWARD and short == "add" and narrow and promoting:
                cast = narrow
        fresh = {_key(t) for t in made}
        if not in_place:
            self._has_copy -= fresh
            if not (phase == Phase.FORWARD and short in _SINGLE_AT_ONCE and narrow):
                self._from_half -= fresh
            self._half -= fresh
        self._half |= {_key(t) for t in half_made}
        return _share(args, kwargs, result, half_read, half_made), sum(t.numel() for t in cast)


def _singles(values: Any) -> list[Tensor]:
    return [t for t in tensors_in(values) if t.dtype == torch.float32 and t.is_meta]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _share(args: Any, kwargs: Any, result: Any, half_read: list[Tensor], half_made: list[Tensor]) -> float:
    moved = sum(t.numel() * t.element_size() for t in tensors_in([*args, *kwargs.values(), result]))
    saved = sum(2 * t.numel() for t in (*half_read, *half_made))
    return 1 - saved / moved if moved else 1.0
