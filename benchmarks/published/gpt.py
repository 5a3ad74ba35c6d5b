"""A GPT like Megatron-LM's, for predictions: attention as separate operators, so its core can be recomputed alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Core(nn.Module):
    """Scores, softmax, dropout, weighted sum: the part of selective recomputation (Korthikanti et al., 2022, §5)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of (batch, heads, length, size) queries, keys and values."""
        # Megatron-LM's product scales by itself (baddbmm), and its softmax masks in the same kernel.
        scores = torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2), -1)
        return nn.functional.dropout(scores, 0.1, self.training) @ v


class Attention(nn.Module):
    """Self-attention with ``heads`` heads and ``width`` features per token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.core = heads, Core()
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projected attention of (batch, length, width)."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed: Tensor = self.core(q, k, v).transpose(1, 2).reshape(batch, length, width)
        return self.projection(mixed)


class Block(nn.Module):
    """Attention and a perceptron four times as wide, each after a layer norm, with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Token and position embeddings, ``layers`` blocks, and logits of 51,200 tokens."""

    def __init__(self, width: int, layers: int, heads: int, context: int, vocabulary: int = 51_200) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of (batch, length) tokens."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
