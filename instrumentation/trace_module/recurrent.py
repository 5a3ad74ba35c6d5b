"""Recurrent layers as devices run them: one operator of oneDNN for each layer and direction, or one of cuDNN for all.

Source: `mkldnn_rnn` in aten/src/ATen/native/mkldnn/RNN.cpp, `_cudnn_impl` in aten/src/ATen/native/cudnn/RNN.cpp, and
what chooses them in aten/src/ATen/native/RNN.cpp. On meta tensors the same calls run step by step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whatif.from_module.recurrent import CUDNN_OPERATORS, reserve_bytes

_CUDNN_MODES: dict[Callable[..., Any], int] = {torch.rnn_relu: 0, torch.rnn_tanh: 1, torch.lstm: 2, torch.gru: 3}
_CUDNN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# ideep::rnn_kind::LSTM
_LSTM = 2


def runs_in_onednn(inputs: Tensor, states: object) -> bool:
    """Return whether a CPU runs ``torch.lstm(inputs, states, ...)`` in oneDNN: no packed sequences, no projections."""
    if not isinstance(states, list | tuple) or states[0].shape != states[1].shape or not inputs.numel():
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if inputs.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return inputs.dtype == torch.float32


def onednn_lstm(
    inputs: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the result of ``torch.lstm``, with its arguments: outputs, and the last states (layers, batch, hidden)."""
    directions, group = 1 + bidirectional, 4 if has_biases else 2
    hidden_size = states[0].shape[2]
    x = (inputs.transpose(0, 1) if batch_first else inputs).contiguous()
    hidden, cells = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            layer_weights = list(weights[index * group : (index + 1) * group])
            first = [state[index] for state in states]
            layer_weights += [torch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in layer_weights[: 4 - group]]
            y, h, c, _ = torch.ops.aten.mkldnn_rnn_layer(
                x, *layer_weights, *first, direction == 1, [], _LSTM, hidden_size, num_layers,
                has_biases, bidirectional, batch_first, train,
            )  # fmt: skip
            outputs.append(y)
            hidden.append(h)
            cells.append(c)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, train)
    last = torch.stack(hidden), torch.stack(cells)
    return (x.transpose(0, 1) if batch_first else x, *last)


def runs_in_cudnn(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether an NVIDIA GPU runs the call in cuDNN, as `cudnn_is_acceptable` says."""
    if func not in _CUDNN_MODES or not torch.backends.cudnn.enabled:
        return False
    return args[0].dtype in _CUDNN_DTYPES and args[0].numel() > 0


def cudnn_rnn(func: Callable[..., Any], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the result of ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu`` with ``args``, packed or not."""
    packed = not isinstance(args[3], bool)
    if packed:
        inputs, sizes, states, weights, has_biases, layers, dropout, train, both = args
        batch_first, batch_sizes = False, sizes.tolist()
    else:
        inputs, states, weights, has_biases, layers, dropout, train, both, batch_first = args
        batch_sizes = []
    hidden, cell = states if func is torch.lstm else (states, None)
    size = hidden.shape[2] if cell is None else cell.shape[2]
    projection = hidden.shape[2] if size != hidden.shape[2] else 0
    # Weights are views of one buffer (`flatten_parameters`): the first one stands for it.
    found = torch.ops.aten._cudnn_rnn(
        inputs, weights, (4 if has_biases else 2) + (projection > 0), weights[0].detach(), hidden, cell,
        _CUDNN_MODES[func], size, projection, layers, batch_first, dropout, train, both, batch_sizes, None,
    )  # fmt: skip
    return tuple(found[:2] if cell is None else found[:3])


def cudnn_on_meta(func: Any, name: str, args: Any) -> Any:
    """Run one of ``CUDNN_OPERATORS`` on meta tensors: the forward one keeps a reserve space, which torch takes as 0."""
    if name == CUDNN_OPERATORS[0]:
        output, hidden, cell, reserve, buffer = func(*args)
        mode, size, _, layers, _, _, train, both = args[6:14]
        if train:
            rows = output.numel() // output.shape[-1]
            kept = reserve_bytes(mode, size, rows, layers, 1 + both, output.element_size())
            reserve = torch.empty(kept, dtype=torch.uint8, device="meta")
        return output, hidden, cell, reserve, buffer
    *of_states, of_weights = args[21]
    gradients = [
        torch.empty_like(tensor) if asked and tensor is not None else None
        for tensor, asked in zip((args[0], args[4], args[5]), of_states, strict=True)
    ]
    return *gradients, [torch.empty_like(weight) for weight in args[1]] if of_weights else []
