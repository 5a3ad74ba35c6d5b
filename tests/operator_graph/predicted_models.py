"""Models that the tests predict: the campaign's twins with their losses inside, and those of other people's traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.campaign.cnns import ResNet
from benchmarks.campaign.models import TWINS


class WithLoss(nn.Module):
    """A model and its loss function as one module: it returns the loss."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: list[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.loss(self.model(*inputs), target)
        return found


def twin(name: str) -> tuple[nn.Module, Any]:
    """A twin of the campaign, with a batch of its own size."""
    spec = TWINS[name]
    with torch.device("cpu"):
        inputs, target = spec.make_batch(spec.samples)
    return WithLoss(spec.build(), spec.loss), [list(inputs), target]


def resnet50() -> nn.Module:
    """ResNet-50 for images of 224 px: the model of the public recording kineto-resnet50-v100."""
    return ResNet((3, 4, 6, 3), 64, 1000, False)


class Vgg13(nn.Module):
    """VGG-13 (Simonyan and Zisserman, ICLR 2015, table 1, column B): the model of the recording triosim-vgg13-h100."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (64, 128, 256, 512, 512):
            for _ in range(2):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(25088, 4096), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return scores


class TwoLinear(nn.Module):
    """Two linear layers: every size of the step can be worked out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(x).relu())
        return found


def half_with_input(input_dtype: str = "bfloat16") -> tuple[nn.Module, torch.Tensor]:
    """A model that is bf16 by its own code, with its input."""
    return TwoLinear().bfloat16(), torch.empty(4, 8, dtype=getattr(torch, input_dtype))


class HeadsOf(nn.Module):
    """Attention of 8 heads of queries, with fewer heads or other sizes of keys and values."""

    def __init__(self, heads: int, value_size: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys = nn.Linear(64, 8 * 16), nn.Linear(64, heads * 16)
        self.values = nn.Linear(64, heads * value_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = zip((self.queries, self.keys, self.values), (8, self.heads, self.heads), strict=True)
        q, k, v = (layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer, heads in parts)
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads < 8)


class Checkpointed(nn.Module):
    """A block with attention and dropout whose activations are not kept, and an output layer."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.out = nn.Linear(64, 10)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        found: torch.Tensor = self.out(checkpoint(self.block, x, use_reentrant=self.reentrant))
        return found


class LooksAtData(nn.Module):
    """Takes a branch that depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if y.sum() > 0 else -y


class KeepsSome(nn.Module):
    """Keeps as many rows as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y[y.sum(1) > 0]


class NamesItsDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            raise AssertionError("Torch not compiled with CUDA enabled")  # as a CPU build says
        y: torch.Tensor = self.linear(x.cuda())
        return y


class TwoOutputs(nn.Module):
    """Returns two outputs, of which a loss that is assumed takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def sparse_embedding() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Embedding(1000, 8, sparse=True), nn.Linear(8, 4)), torch.zeros(4, 16, dtype=torch.int64)


def bag(sparse: bool = False) -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(nn.EmbeddingBag(1000, 8, sparse=sparse), nn.Linear(8, 4))
    return net, torch.zeros(4, 16, dtype=torch.int64)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(4))


class LooksAtPositions(nn.Module):
    """Takes a branch that depends on positions alone, which follow from the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(64, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        y = x + self.table(positions)
        if bool((positions.diff() != 1).any()):
            raise ValueError("positions of one sequence follow one another")
        found: torch.Tensor = self.layer(y)
        return found


class Masked(nn.Module):
    """torch's own encoder and decoder with a causal mask; the encoder tests if its mask is causal unless stated."""

    def __init__(self, given: bool = False, is_causal: bool | None = None) -> None:
        super().__init__()
        self.is_causal = is_causal
        layers = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.TransformerDecoderLayer(64, 4, 128)
        self.encoder, self.decoder = nn.TransformerEncoder(layers[0], 1), nn.TransformerDecoder(layers[1], 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16) if given else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        mask = mask if self.mask is None else self.mask
        memory = self.encoder(x, mask, is_causal=self.is_causal).transpose(0, 1)
        found: torch.Tensor = self.decoder(memory, memory, tgt_mask=mask, tgt_is_causal=self.is_causal)
        return found


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


def built() -> nn.Module:
    """A module that is no class."""
    return TwoLinear()


no_module = 5


def gpt2() -> nn.Module:
    """A small GPT-2 of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=32, use_cache=False))


def bert() -> nn.Module:
    """A small BERT of transformers."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100,
            attn_implementation="eager",
        )
    )  # fmt: skip


def opt() -> nn.Module:
    """A small OPT of transformers."""
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, vocab_size=100, use_cache=False,
            word_embed_proj_dim=32, attn_implementation="eager",
        )
    )  # fmt: skip


def llama7() -> nn.Module:
    """Llama-2 7B: 6.74e9 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(use_cache=False))


def bert_small() -> Any:
    """The model of a recording in tracelens-h100-mi300: gaunernst/bert-small-uncased."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
    return BertForMaskedLM(BertConfig(**sizes))


def vit_base() -> Any:
    """The model of a recording in tracelens-h100-mi300: ViT-base without a head."""
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig())
