"""The campaign's models in two sizes: as published, and a twin of each for one CPU thread; batches are synthetic.

The transformer of `examples/` has one size, that of its recordings in `traces/`.

A twin keeps its model's structure (kinds of layers, their proportions, distribution of parameters) at a step of about
50 ms. It has no dropout: drawing random numbers would be a CPU's longest operator. No batch is as large as a
layer is wide, so that a dimension of a recorded tensor is unambiguous.
"""

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .cnns import DenseNet, ResNet, Vgg
from .language import Bert, Gnmt, Gpt2, answer_loss, next_token_loss

Batch = tuple[tuple[Tensor, ...], Tensor]
"""Inputs of the model, and the loss function's target; the first dimension of each is the sample."""


@dataclass(frozen=True)
class Model:
    """A model of the campaign in one size."""

    family: str  # cnn | transformer | rnn
    samples: int  # of the baseline's batch
    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    loss: Callable[[Any, Tensor], Tensor]
    blocks: tuple[str, ...]  # classes that activation checkpointing wraps
    batch_norm: bool = False


def images(side: int, classes: int) -> Callable[[int], Batch]:
    """Return a factory of batches of square images of `side` px and their classes."""
    return lambda samples: ((torch.randn(samples, 3, side, side),), torch.randint(classes, (samples,)))


def spans(vocabulary: int, length: int) -> Callable[[int], Batch]:
    """Return a factory of batches of tokens, and the start and end of the answer in each."""

    def make(samples: int) -> Batch:
        return (torch.randint(vocabulary, (samples, length)),), torch.randint(length, (samples, 2))

    return make


def next_tokens(vocabulary: int, length: int) -> Callable[[int], Batch]:
    """Return a factory of batches of tokens, and the token that follows each."""

    def make(samples: int) -> Batch:
        tokens = torch.randint(vocabulary, (samples, length + 1))
        return (tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous()

    return make


def sentence_pairs(vocabulary: int, length: int) -> Callable[[int], Batch]:
    """Return a factory of batches of source and target sentences, and the target's next tokens."""

    def make(samples: int) -> Batch:
        source = torch.randint(vocabulary, (samples, length))
        (target,), following = next_tokens(vocabulary, length)(samples)
        return (source, target), following

    return make


def cnn(samples: int, side: int, classes: int, build: Callable[[], nn.Module], blocks: tuple[str, ...]) -> Model:
    """An image classifier; those without blocks to checkpoint have no batch normalisation either."""
    loss = functional.cross_entropy
    return Model("cnn", samples, build, images(side, classes), loss, blocks, batch_norm=bool(blocks))


def bert(samples: int, length: int, vocabulary: int, positions: int, **sizes: Any) -> Model:
    def build() -> nn.Module:
        return Bert(vocabulary, positions, **sizes)

    return Model("transformer", samples, build, spans(vocabulary, length), answer_loss, ("BertLayer",))


def gpt2(samples: int, length: int, vocabulary: int, positions: int, **sizes: Any) -> Model:
    def build() -> nn.Module:
        return Gpt2(vocabulary, positions, **sizes)

    return Model("transformer", samples, build, next_tokens(vocabulary, length), next_token_loss, ("GptBlock",))


def gnmt(samples: int, length: int, vocabulary: int, width: int, layers: int) -> Model:
    def build() -> nn.Module:
        return Gnmt(vocabulary, width, layers)

    return Model("rnn", samples, build, sentence_pairs(vocabulary, length), next_token_loss, ("Lstm",))


def example_transformer(samples: int, length: int) -> Model:
    """The model of `examples/train_transformer.py` in its default size."""
    script = runpy.run_path(str(EXAMPLES / "train_transformer.py"))

    def build() -> nn.Module:
        model: nn.Module = script["Transformer"](width=256, layers=4, heads=4, context=length)
        return model

    return Model("transformer", samples, build, next_tokens(script["VOCABULARY"], length), next_token_loss, ("Block",))


EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
EXAMPLE = {"transformer": example_transformer(4, 32)}

VGG19 = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))
VGG_TWIN = ((1, 32), (1, 64), (2, 128), (2, 128))
BOTTLENECK, DENSE = ("Bottleneck",), ("DenseLayer",)

FULL = {
    "resnet50": cnn(64, 224, 1000, lambda: ResNet((3, 4, 6, 3), 64, 1000, False), BOTTLENECK),
    "bert-base": bert(8, 384, 30522, 512, width=768, heads=12, layers=12, dropout=0.1),
    "gnmt": gnmt(128, 50, 32000, 1024, 4),
    "vgg19": cnn(64, 224, 1000, lambda: Vgg(VGG19, 224, 4096, 1000, 0.5), ()),
    "densenet121": cnn(64, 224, 1000, lambda: DenseNet((6, 12, 24, 16), 32, 1000, False), DENSE),
    "bert-large": bert(4, 384, 30522, 512, width=1024, heads=16, layers=24, dropout=0.1),
    "gpt2-small": gpt2(8, 512, 50257, 1024, width=768, heads=12, layers=12, dropout=0.1),
    **EXAMPLE,
}

TWINS = {
    "resnet50": cnn(10, 32, 100, lambda: ResNet((1, 1, 2, 1), 16, 100, True), BOTTLENECK),
    "bert-base": bert(10, 48, 2000, 48, width=128, heads=4, layers=3, dropout=0.0),
    "gnmt": gnmt(28, 12, 2000, 96, 3),
    "vgg19": cnn(14, 32, 100, lambda: Vgg(VGG_TWIN, 32, 512, 100, 0.0), ()),
    "densenet121": cnn(10, 32, 100, lambda: DenseNet((3, 4, 3), 12, 100, True), DENSE),
    "bert-large": bert(10, 28, 2000, 28, width=192, heads=6, layers=4, dropout=0.0),
    "gpt2-small": gpt2(6, 64, 2000, 64, width=128, heads=4, layers=3, dropout=0.0),
    **EXAMPLE,
}
