"""Trains a small GPT-like transformer on synthetic text: an ordinary training script that knows nothing of profilers.

python examples/train_transformer.py --steps 40 --device cpu --batch-size 8
whatif collect examples/train_transformer.py --batch-size 8
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 4096


class SyntheticText(Dataset[torch.Tensor]):
    """Token sequences in which the next token mostly follows from the one before."""

    def __init__(self, length: int, context: int) -> None:
        self.length = length
        self.context = context

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        start = torch.randint(0, VOCABULARY, (1,))
        noise = torch.randint(0, 3, (self.context + 1,))
        return (start + torch.cumsum(noise, 0) * 7) % VOCABULARY


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a normalization and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Embeddings, blocks, and a head over the vocabulary."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--adam", choices=["default", "for-loop", "foreach", "fused"], default="default")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    loader = DataLoader(SyntheticText(options.steps * options.batch_size, options.context), options.batch_size)
    model = Transformer(options.width, options.layers, heads=options.width // 64, context=options.context).to(device)
    implementation = {
        "default": {},
        "for-loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }[options.adam]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, **implementation)
    started = time.perf_counter()
    for step, tokens in enumerate(loader, start=1):
        tokens = tokens.to(device)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step:4d}  loss {loss.item():.4f}  {seconds / step * 1e3:.1f} ms a step", flush=True)


if __name__ == "__main__":
    main()
