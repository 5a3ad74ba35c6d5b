"""The two measuring tools of DTS (§II-E): facts of a network from its module, and a processor's training throughput.

facts = measure_network(model, batch)
power = measure_power(lambda: training_step(), facts.flops, batch_size)
print(facts.to_dict(), power.toml("laptop"))

`measure_model` runs both on a model given by name, as `whatif dts --measure` does.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from whatif.models.dts.dnn import PASSES
from whatif.runtime.errors import WhatifError

from .gpu import GPU
from .tensors import tensors_in
from .trace_module.load import load_model
from .trace_module.losses import loss_of

WARM_UP_STEPS = 2
FEWEST_STEPS = 3


def _cudnn_flops(rows: Sequence[int], weights: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    """Count every weight matrix once for each row of the input, (time, batch, features); arguments are shapes."""
    return 2 * prod(rows[:-1]) * sum(prod(shape) for shape in weights if len(shape) == 2)


def _onednn_flops(rows: Sequence[int], of_input: Sequence[int], of_state: Sequence[int], *_: Any, **__: Any) -> int:
    return _cudnn_flops(rows, (of_input, of_state))


# Library kernels that torch's counter does not cover.
_UNCOUNTED = {torch.ops.aten.mkldnn_rnn_layer: _onednn_flops, torch.ops.aten._cudnn_rnn: _cudnn_flops}


@dataclass(frozen=True)
class LayerFacts:
    """One layer, in the order of the forward pass; FLOPs of one sample (a multiply-add is two), sizes in bytes."""

    name: str
    type: str
    flops: float
    parameters: int
    weights_bytes: int
    input_bytes: float  # of one sample: the traffic of a cut before this layer
    output_bytes: float


@dataclass(frozen=True)
class NetworkFacts:
    """A network in the terms of DTS, table I; per sample, sizes in bytes."""

    layers: tuple[LayerFacts, ...]
    sample_bytes: float

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass of one sample."""
        return sum(layer.flops for layer in self.layers)

    @property
    def macs(self) -> float:
        """Multiply-adds of the forward pass of one sample, as the paper counts first."""
        return self.flops / 2

    @property
    def parameters(self) -> int:
        """Trained weights."""
        return sum(layer.parameters for layer in self.layers)

    def memory_bytes(self, batch: int) -> float:
        """Memory of training: weights, gradients, and every layer's input, kept for the backward pass."""
        return sum(2 * layer.weights_bytes + batch * layer.input_bytes for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"flops": self.flops, "macs": self.macs, "parameters": self.parameters, **asdict(self)}


@dataclass(frozen=True)
class Power:
    """A processor's training throughput: the median of the steps, and the deviation of nine tenths of them from it."""

    gflop_s: float
    fluctuation_pct: float

    def to_dict(self) -> dict[str, float]:
        """As the fields of a [[processor]] table."""
        return {"gflop_s": self.gflop_s, "power_fluctuation_pct": self.fluctuation_pct}

    def toml(self, name: str, memory_gbyte: float | None = None) -> str:
        """As a table of a cluster file."""
        memory = "" if memory_gbyte is None else f"memory_gbyte = {memory_gbyte:g}\n"
        return (
            f"[[processor]]\nname = {json.dumps(name)}\ngflop_s = {self.gflop_s:.4g}\n"
            f"power_fluctuation_pct = {self.fluctuation_pct:.3g}\n{memory}"
        )


def measure_network(model: nn.Module, *inputs: torch.Tensor) -> NetworkFacts:
    """Run one forward pass and return the facts of every leaf module.

    `inputs` are those of the model, batch first. A module without weights that is called several times is a layer at
    each call ("relu", "relu (call 2)"). Raises WhatifError if one with weights is called more than once: a cut between
    its calls would need them on both sides.
    """
    samples = len(inputs[0])
    found: list[LayerFacts] = []
    counting = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
    before: dict[str, int] = {}
    calls: Counter[str] = Counter()

    def watch(name: str, module: nn.Module) -> list[Any]:
        def begins(_: nn.Module, args: Any) -> None:
            before[name] = counting.get_total_flops()

        def ends(_: nn.Module, args: Any, output: Any) -> None:
            weights = [p for p in module.parameters() if p.requires_grad]
            calls[name] += 1
            if weights and calls[name] > 1:
                raise WhatifError(
                    f"dts: expected each layer with weights to be called once, got several calls of {name!r}: a cut "
                    "between them would need its weights on both sides."
                )
            flops = (counting.get_total_flops() - before[name]) / samples
            found.append(
                LayerFacts(
                    name if calls[name] == 1 else f"{name} (call {calls[name]})", type(module).__name__, flops,
                    sum(p.numel() for p in weights), sum(p.nbytes for p in weights),
                    _bytes(args) / samples, _bytes(output) / samples,
                )
            )  # fmt: skip

        return [module.register_forward_pre_hook(begins), module.register_forward_hook(ends)]

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    hooks = [hook for name, module in leaves for hook in watch(name, module)]
    try:
        with torch.no_grad(), counting:
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return NetworkFacts(tuple(found), _bytes(inputs) / samples)


def measure_power(step: Callable[[], Any], flops: float, samples: int, *, steps: int = 10) -> Power:
    """Train for some steps of `samples` samples and return the GFLOP/s that training achieves on this machine.

    `flops` are those of one sample's forward pass; the fluctuation covers nine tenths of the steps. On a GPU let `step`
    end with `torch.cuda.synchronize()`. Raises WhatifError on fewer than 3 steps.
    """
    if steps < FEWEST_STEPS or flops <= 0 or samples < 1:
        raise WhatifError(
            f"dts: expected at least {FEWEST_STEPS} steps, FLOPs above 0 and at least 1 sample, got {steps}, "
            f"{flops:g}, {samples}."
        )
    for _ in range(WARM_UP_STEPS):
        step()
    taken_s = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        taken_s.append(time.perf_counter() - begin)
    rates = [PASSES * flops * samples / seconds / 1e9 for seconds in taken_s]
    return power_of(rates)


def measure_model(
    target: str, shape: tuple[int, ...], dtype: str = "", keywords: dict[str, Any] | None = None
) -> tuple[NetworkFacts, Power]:
    """Run both tools on the model that ``target`` ("file.py:name") names, on this machine's GPU if it has one.

    ``shape`` is that of a batch; ``dtype`` "int64" makes it a batch of tokens, all zero. Weights are random. Raises
    WhatifError if there is no such model, or if it cannot be run or cut.
    """
    on_gpu = GPU.available()
    device = torch.device("cuda" if on_gpu else "cpu")
    model, _ = load_model(target, keywords or {})
    model.to_empty(device=device).train()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):  # avoid denormals, which are slow
            if tensor.dim() > 1 and tensor.is_floating_point():
                tensor.normal_(std=0.05)
            else:
                tensor.fill_(1 if tensor.is_floating_point() else 0)
    batch = torch.zeros(shape, dtype=torch.int64) if dtype == "int64" else torch.rand(shape)
    batch = batch.to(device)

    def step() -> None:
        model.zero_grad()
        loss_of(model(batch), "sum")[0].backward()  # type: ignore[no-untyped-call]
        if on_gpu:
            GPU.synchronize()

    try:
        facts = measure_network(model, batch)
        return facts, measure_power(step, facts.flops, len(batch))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:200].rstrip('.')}"
        raise WhatifError(f"{target}: expected a model that accepts --input, got {message}.") from error


def power_of(rates_gflop_s: Sequence[float]) -> Power:
    """Return the median of the rates and the deviation of nine tenths of them from it, percent."""
    middle = statistics.median(rates_gflop_s)
    deviations = sorted(abs(rate / middle - 1) for rate in rates_gflop_s)
    return Power(middle, 100 * deviations[min(int(0.9 * len(deviations)), len(deviations) - 1)])


def _bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in([value]))
