"""GPT and Llama as Megatron-LM builds them, for predictions of their memory.

Gated perceptrons (--swiglu) with both halves in one product, attention in one kernel (--use-flash-attn), and a loss in
fp32 (its default, without --fp16-lm-cross-entropy). A layer norm replaces Llama's RMS norm: both save their input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a gated perceptron, each after a norm, with residual connections."""

    def __init__(self, width: int, inner: int, heads: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        bias = dropout > 0  # a GPT has both, a Llama neither
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * groups) * size, bias)
        self.projection = nn.Linear(width, width, bias)
        self.up, self.down = nn.Linear(width, 2 * inner, bias), nn.Linear(inner, width, bias)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        batch, length, width = x.shape
        mixed = self.qkv(self.norm1(x)).view(batch, length, self.heads + 2 * self.groups, -1).transpose(1, 2)
        q, k, v = mixed.split([self.heads, self.groups, self.groups], 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups < self.heads)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.dropout(self.down(functional.silu(gate) * value))


class GPT(nn.Module):
    """Token and position embeddings, ``layers`` blocks, and logits by tied or separate weights."""

    def __init__(
        self,
        width: int,
        inner: int,
        layers: int,
        heads: int,
        context: int,
        vocabulary: int,
        groups: int = 0,
        dropout: float = 0.1,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, inner, heads, groups or heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of (batch, length) tokens, fp32."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores.float()
