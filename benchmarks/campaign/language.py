"""The campaign's language models, written from their papers: random weights, any size.

BERT (Devlin et al., NAACL 2019) with the question-answering head of the SQuAD task, GPT-2 (Radford et al., 2019), and
an LSTM encoder-decoder after GNMT (Wu et al., 2016). Tokens come as whole numbers of shape (batch, length).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class SelfAttention(nn.Module):
    """Multi-head attention over (batch, length, width), with one projection each for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(projection(x), self.heads) for projection in (self.query, self.key, self.value))
        rate = self.dropout if self.training else 0.0
        y: Tensor = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        merged: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return merged


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, length, width) -> (batch, heads, length, width / heads)."""
    batch, length, width = x.shape
    return x.view(batch, length, heads, width // heads).transpose(1, 2)


class BertLayer(nn.Module):
    """Attention and a feed-forward pair of four times the width, each normalised after its residual sum."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        y: Tensor = self.norm2(x + self.dropout(self.down(functional.gelu(self.up(x)))))
        return y


class Bert(nn.Module):
    """BERT with a question-answering head: scores (batch, length, 2) of where an answer starts and ends."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.segments = nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.layers = nn.ModuleList(BertLayer(width, heads, dropout) for _ in range(layers))
        self.answer = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions) + self.segments(torch.zeros_like(tokens))
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.answer(x)
        return scores


def answer_loss(scores: Tensor, spans: Tensor) -> Tensor:
    """Mean cross entropy of where the answers start and end; `spans` is (batch, 2)."""
    return functional.cross_entropy(scores, spans)


class GptBlock(nn.Module):
    """Causal attention with one projection for all three, then the feed-forward pair; normalised before each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu, self.dropout = nn.GELU(approximate="tanh"), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.query_key_value(self.norm1(x)).chunk(3, 2))
        rate = self.rate if self.training else 0.0
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        y: Tensor = x + self.dropout(self.down(self.gelu(self.up(self.norm2(x)))))
        return y


class Gpt2(nn.Module):
    """GPT-2: scores (batch, length, vocabulary) of the next tokens; the output weights are the embedding's."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GptBlock(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def next_token_loss(scores: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy over (batch, length)."""
    return functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


class Attention(nn.Module):
    """Attention of decoder states (batch, length, width) to the encoder's states: scaled dot products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)

    def forward(self, states: Tensor, memory: Tensor) -> Tensor:
        weights = (self.query(states) @ memory.transpose(1, 2) / math.sqrt(memory.shape[2])).softmax(2)
        context: Tensor = weights @ memory
        return context


class Lstm(nn.LSTM):
    """An LSTM layer over (batch, length, width) that returns only its outputs."""

    def __init__(self, width_in: int, width: int, bidirectional: bool = False) -> None:
        super().__init__(width_in, width, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        outputs: Tensor = super().forward(x)[0]
        return outputs


class Gnmt(nn.Module):
    """LSTM encoder and decoder: the first encoder layer is bidirectional, with residual sums from the third layer on.

    Every decoder layer but the first takes the attention's result. Scores are (batch, length, vocabulary).
    """

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList([Lstm(width, width, bidirectional=True), Lstm(2 * width, width)])
        self.encoder.extend(Lstm(width, width) for _ in range(layers - 2))
        self.decoder = nn.ModuleList(Lstm(width if number == 0 else 2 * width, width) for number in range(layers))
        self.attention = Attention(width)
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.source(source)
        for number, layer in enumerate(self.encoder):
            outputs = layer(memory)
            memory = outputs + memory if number >= 2 else outputs
        states = self.decoder[0](self.target(target))
        context = self.attention(states, memory)
        for number, layer in enumerate(self.decoder[1:], start=1):
            outputs = layer(torch.cat([states, context], 2))
            states = outputs + states if number >= 2 else outputs
        scores: Tensor = self.classifier(states)
        return scores
