"""The lab's models: the campaign's networks with 2 to 20 MB of gradients and steps of 50 to 300 ms on one core."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.campaign.cnns import ResNet, Vgg
from benchmarks.campaign.language import Bert, Gpt2, answer_loss, next_token_loss
from benchmarks.campaign.models import Batch, images, next_tokens, spans


@dataclass(frozen=True)
class Model:
    """A model, the batch of one worker, and the loss."""

    samples: int
    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    loss: Callable[[Any, Tensor], Tensor]


def _mlp() -> nn.Module:
    """Four wide layers: many bytes for little arithmetic, so that the network dominates."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 100))


def _vectors(samples: int) -> Batch:
    return (torch.randn(samples, 1024),), torch.randint(100, (samples,))


VGG_STAGES = ((1, 64), (1, 128), (2, 256), (2, 256))

MODELS = {
    # 89 tensors in bottlenecks, 8 MB.
    "resnet": Model(8, lambda: ResNet((2, 2, 2, 2), 24, 100, True), images(32, 100), functional.cross_entropy),
    # A GPT-2 of 4 layers, 192 wide; output and embedding share their weights, 8 MB.
    "gpt2": Model(
        6,
        lambda: Gpt2(1000, 64, width=192, heads=6, layers=4, dropout=0.0),
        next_tokens(1000, 64),
        next_token_loss,
    ),
    # Convolutions with few bytes to send, then linear layers with many, 12 MB.
    "vgg": Model(8, lambda: Vgg(VGG_STAGES, 32, 512, 100, 0.0), images(32, 100), functional.cross_entropy),
    "mlp": Model(128, _mlp, _vectors, functional.cross_entropy),
    # The campaign's BERT base twin, 3 MB.
    "bert": Model(
        10,
        lambda: Bert(2000, 48, width=128, heads=4, layers=3, dropout=0.0),
        spans(2000, 48),
        answer_loss,
    ),
}


class Training:
    """A model with its batch and Adam, one tensor at a time: torch's loop over a CPU's parameters.

    A step calls `forward`, by default the model; DistributedDataParallel wraps it.
    """

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        model = MODELS[name]
        self.model = model.build().train()
        self.inputs, self.target = model.make_batch(model.samples)
        self.samples = model.samples
        self.forward: Callable[..., Any] = self.model
        self._loss = model.loss
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, foreach=False)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers, which DDP broadcasts from rank 0 in every forward pass."""
        return sum(b.numel() * b.element_size() for b in self.model.buffers())

    def gradients(self) -> None:
        """Run forward and backward."""
        loss: Any = self._loss(self.forward(*self.inputs), self.target)  # Partly untyped.
        loss.backward()

    def step(self) -> None:
        """Take one training step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients()
        self.optimizer.step()
