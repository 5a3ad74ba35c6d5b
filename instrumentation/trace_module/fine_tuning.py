"""Chooses the trainable parameters: low-rank adapters on a frozen model as in PEFT, and parts frozen by name.

Hu et al., "LoRA: Low-rank adaptation of large language models", ICLR 2022, section 4.1.
"""

import re

import torch
from torch import nn

from whatif.from_module.lora import ALL_LINEAR, Lora
from whatif.runtime.errors import WhatifError

# PEFT's default targets (peft/utils/constants.py): the first group of which a model has all layers.
_USUAL = (
    ("q_proj", "v_proj"), ("query", "value"), ("c_attn",), ("query_key_value",), ("qkv_proj",), ("q_lin", "v_lin"),
    ("q", "v"),
)  # fmt: skip
# New classification heads, which are trained in full (PEFT's modules_to_save).
_HEADS = ("classifier", "score")


class LoraLinear(nn.Module):
    """A frozen linear layer and its adapter: base(x) + B(A(dropout(x))) · scale."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, lora: Lora, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        self.lora_A = nn.Linear(inputs, lora.rank, bias=False, device="meta", dtype=dtype)
        self.lora_B = nn.Linear(lora.rank, outputs, bias=False, device="meta", dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum in the dtype of the base layer's output."""
        result: torch.Tensor = self.base_layer(x)
        adapted = self.lora_B(self.lora_A(self.lora_dropout(x.to(self.lora_A.weight.dtype)))) * 2.0
        summed: torch.Tensor = result + adapted
        return summed.to(result.dtype)


def add_lora(model: nn.Module, lora: Lora, target: str) -> str:
    """Freeze a model on meta and add adapters to its linear layers; return a sentence on the trained parameters.

    As in PEFT, adapters of a model in 16 bits are fp32. Raises WhatifError if no layer matches.
    """
    chosen = _chosen(model, lora, target)
    model.requires_grad_(False)
    for name, module in model.named_children():
        module.requires_grad_(name in _HEADS)
    for name, (base, inputs, outputs) in chosen.items():
        parent, _, child = name.rpartition(".")
        dtype = torch.promote_types(next(base.parameters()).dtype, torch.float32)
        setattr(model.get_submodule(parent), child, LoraLinear(base, inputs, outputs, lora, dtype))
    return f"adapters of rank {lora.rank} on {len(chosen):,} linear layers; {_trains(model)}"


def freeze(model: nn.Module, pattern: str, target: str) -> str:
    """Freeze the parameters whose names match; return a sentence. Raises WhatifError if none does."""
    found = [p for name, p in model.named_parameters() if re.search(pattern, name)]
    if not found:
        names = [name for name, _ in model.named_parameters()]
        raise WhatifError(
            f"{target}: expected --freeze to match names of parameters, got none for {pattern!r}; the names are like "
            f"{', '.join(names[:3])} …"
        )
    for parameter in found:
        parameter.requires_grad_(False)
    return f"{len(found):,} tensors of parameters frozen; {_trains(model)}"


def _trains(model: nn.Module) -> str:
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return f"{sum(n for n, trains in counts if trains):,} of {sum(n for n, _ in counts):,} parameters train"


def _chosen(model: nn.Module, lora: Lora, target: str) -> dict[str, tuple[nn.Module, int, int]]:
    layers = {name: (m, *sizes) for name, m in model.named_modules() if (sizes := _sizes(m)) is not None}
    ends = {name.rpartition(".")[2] for name in layers}
    targets = lora.targets or next((usual for usual in _USUAL if ends >= set(usual)), ())
    if targets == (ALL_LINEAR,):
        output = getattr(model, "get_output_embeddings", lambda: None)()
        return {
            name: found
            for name, found in layers.items()
            if found[0] is not output and name.partition(".")[0] not in _HEADS
        }
    for layer in targets or ("",):
        if not layer or not any(_matches(name, layer) for name in layers):
            got = f"none called {layer!r}" if layer else "none of the usual names"
            raise WhatifError(
                f"{target}: expected linear layers for --lora, got {got}; give targets={ALL_LINEAR} or some of "
                f"{', '.join(sorted(ends)[:12]) or 'none'}."
            )
    return {name: found for name, found in layers.items() if any(_matches(name, layer) for layer in targets)}


def _matches(name: str, layer: str) -> bool:
    return name == layer or name.endswith(f".{layer}")


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return inputs and outputs of a linear layer, including GPT-2's (transformers' Conv1D); None for others."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":
        inputs, outputs = next(module.parameters()).shape
        return inputs, outputs
    return None
