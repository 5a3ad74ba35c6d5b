"""A GPT as Megatron-LM builds it with --swiglu and --use-flash-attn, for predictions of its memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention in one kernel and a gated perceptron, each behind a layer norm and beside the stream."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream behind the block."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.dropout(self.down(functional.silu(gate) * value))


class GPT(nn.Module):
    """Words and positions, ``layers`` blocks, and scores of all words by the embedding's own weights."""

    def __init__(self, width: int, inner: int, layers: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, inner, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores of (batch, length) words."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores
