"""A stand-in for Transformer-XL of NVIDIA's examples: relative attention over a memory; base has 192 M parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

# The examples' configurations wt103_base and wt103_large: vocabulary, cuts of the adaptive softmax; ``length`` is that
# of the target and of the memory.
WORDS, CUTS = 267_735, (20_000, 40_000, 200_000)
SIZES = {
    "base": {"width": 512, "layers": 16, "heads": 8, "inner": 2048, "length": 192},
    "large": {"width": 1024, "layers": 18, "heads": 16, "inner": 4096, "length": 384},
}
# The share of a text's tokens in the classes after the first cut: our estimate for WikiText-103.
TAILS = (0.08, 0.10, 0.02)


class Layer(nn.Module):
    """Relative attention over the memory and the sequence, and a perceptron, each followed by a layer norm."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.positions = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(width, inner), nn.ReLU(), nn.Dropout(0.1), nn.Linear(inner, width), nn.Dropout(0.1)
        )
        self.bias = nn.Parameter(torch.zeros(2, heads, width // heads))

    def forward(self, x: Tensor, memory: Tensor, places: Tensor) -> Tensor:
        """Return the output (batch, length, width) of the layer."""
        batch, length, width = x.shape
        shape = (batch, -1, self.heads, width // self.heads)
        q, k, v = self.qkv(torch.cat([memory, x], 1)).chunk(3, -1)
        q = q[:, -length:].reshape(shape)
        k, v = (part.reshape(shape).transpose(1, 2) for part in (k, v))
        r = self.positions(places).view(1, -1, self.heads, width // self.heads).transpose(1, 2)
        content = (q + self.bias[0]).transpose(1, 2) @ k.transpose(-1, -2)
        place = (q + self.bias[1]).transpose(1, 2) @ r.transpose(-1, -2)
        # The shift of the relative positions: append a column of zeros, and reshape.
        place = functional.pad(place, (1, 0)).view(batch, self.heads, -1, length)[:, :, 1:].reshape(content.shape)
        scores = ((content + place) * shape[-1] ** -0.5).masked_fill(content > 1e9, -1e9)
        mixed = (functional.dropout(torch.softmax(scores, -1), 0.0) @ v).transpose(1, 2).reshape(x.shape)
        x = self.norm1(x + self.dropout(self.projection(mixed)))
        return self.norm2(x + self.mlp(x))


class TransformerXL(nn.Module):
    """Logits of the frequent tokens for all positions, and of each rarer class for its share of them."""

    def __init__(self, width: int, layers: int, heads: int, inner: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.tokens, self.classes = nn.Embedding(WORDS, width), nn.Linear(width, len(CUTS), bias=False)
        self.layers = nn.ModuleList(Layer(width, heads, inner) for _ in range(layers))

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        """Return a scalar for (batch, length) tokens and the memory (batch, length, width) of every layer."""
        x, places = self.tokens(ids), memory[0, :1].expand(2 * self.length, -1)
        for layer in self.layers:
            x = layer(x, memory, places)
        flat, weights = x.flatten(0, 1), self.tokens.weight
        first = torch.cat([weights[: CUTS[0]], self.classes.weight])
        loss = torch.log_softmax(flat @ first.t(), -1)[:, 0].mean()
        for begin, end, share in zip(CUTS, (*CUTS[1:], WORDS), TAILS, strict=True):
            rows = flat[: max(round(share * flat.shape[0]), 1)]
            loss = loss + torch.log_softmax(rows @ weights[begin:end].t(), -1)[:, 0].mean()
        return loss
