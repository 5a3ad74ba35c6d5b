"""LSTM layers as PyTorch's CPU build runs them: one operator of oneDNN for each layer and direction.

Source: `mkldnn_rnn` in aten/src/ATen/native/mkldnn/RNN.cpp, and `use_mkldnn` in aten/src/ATen/native/RNN.cpp. On meta
tensors the same call runs step by step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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
