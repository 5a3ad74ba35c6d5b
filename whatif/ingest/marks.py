"""The meaning of annotations and operators, by name: steps, optimizer, data loading, layers, autograd."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from msgspec import Struct

from whatif.graph.order import each_once
from whatif.graph.types import Bool

STEP = re.compile(r"^ProfilerStep#\d+$")
# What serving engines write around a step: how many sequences it begins and continues (vLLM), or its kind and how many
# (SGLang): execute_32_context_0(0)_generation_32(32), step[DECODE bs=32].
SERVED = re.compile(r"^execute_(?:\d+_)?context_(\d+)\(\d+\)_generation_(\d+)\(\d+\)|^step\[\w+ bs=(\d+)")
OPTIMIZER = re.compile(r"^Optimizer\.step#")
UPDATE = re.compile(r"^Optimizer\.(step|zero_grad)#")
LOADING = re.compile(r"^enumerate\(DataLoader\)#|DataLoader\S*\.__next__$")
MODULE = re.compile(r"^nn\.Module: (.+)$")
# What our own recorder writes around a layer's forward pass, with its qualified name.
LAYER = re.compile(r"^whatif::layer::(.*)$")
# What autograd's engine writes around each node of the backward pass.
BACKWARD_PREFIX = "autograd::engine::evaluate_function: "
# Runs once for each parameter and backward pass; its input is the finished gradient.
ACCUMULATE = "torch::autograd::AccumulateGrad"
AUTOGRAD = re.compile(r"^autograd::|Backward\d*(>)?$|AccumulateGrad|CompiledFunctionBackward")
# What our own recorder writes around a full collection of Python's garbage collector.
PAUSE = re.compile(r"^whatif::gc")
# What torch.compile writes around the code that it generated, forward and backward.
REGION = re.compile(r"^Torch-Compiled Region: (.+)$")
COMPILED = re.compile(r"^Torch-Compiled Region|CompiledFunction(Backward)?$|^## Call CompiledFxGraph ")


class NameMarks(Struct, frozen=True):
    """The meaning of each name of a trace, as masks of shape (n_names,).

    ``layer`` has the layer's name or ""; ``region`` has the layer's name of a compiled region, used if no module
    encloses it, or "".
    """

    step: Bool
    optimizer: Bool
    update: Bool
    loading: Bool
    autograd: Bool
    layer: list[str]
    compiled: Bool
    region: list[str]
    pause: Bool

    @property
    def is_layer(self) -> Bool:
        return np.fromiter((bool(name) for name in self.layer), dtype=np.bool_, count=len(self.layer))


def sequences_served(name: str) -> int | None:
    """Return the number of sequences in a step's annotation by a serving engine; None for any other name."""
    found = SERVED.match(name)
    return None if found is None else sum(int(number) for number in found.groups(default="0"))


def name_marks(names: Sequence[str]) -> NameMarks:
    """Classify every name of a trace."""
    return _name_marks(tuple(names))


@lru_cache(2)  # the ranks of a run often have the same names
def _name_marks(names: tuple[str, ...]) -> NameMarks:
    """Classify the names; a pattern is tried only on those with one of its literal texts."""

    joined = "\n".join(names)
    begins = np.cumsum([0, *(len(name) + 1 for name in names)])

    def matches(pattern: re.Pattern[str], *literals: str) -> Bool:
        found = np.zeros(len(names), dtype=np.bool_)
        at = [literal.start() for literal in re.finditer("|".join(map(re.escape, literals)), joined)]
        for code in each_once(np.searchsorted(begins, np.array(at, dtype=np.int64), side="right") - 1).tolist():
            found[code] = pattern.search(names[code]) is not None
        found.flags.writeable = False
        return found

    layer, region = [""] * len(names), [""] * len(names)
    if "nn.Module: " in joined or "whatif::layer::" in joined:
        layer = [found.group(1) if (found := MODULE.match(name) or LAYER.match(name)) else "" for name in names]
    if "Torch-Compiled Region: " in joined:
        region = [f"(compiled region {found.group(1)})" if (found := REGION.match(name)) else "" for name in names]
    return NameMarks(
        matches(STEP, "ProfilerStep#"), matches(OPTIMIZER, "Optimizer.step#"), matches(UPDATE, "Optimizer."),
        matches(LOADING, "DataLoader"), matches(AUTOGRAD, "autograd::", "Backward", "AccumulateGrad"), layer,
        matches(COMPILED, "Comp"), region, matches(PAUSE, "whatif::gc"),
    )  # fmt: skip
