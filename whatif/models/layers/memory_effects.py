"""The effects of optimizations on the memory of a step: each function returns the memory of the changed step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from whatif.graph.memory import LayerMemory, Memory, fullest, recomputed, update_workspace
from whatif.graph.types import Int64
from whatif.models.layers.segments import places_within
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from whatif.graph.task_graph import TaskGraph


def change_memory(graph: TaskGraph, effect: Callable[[Memory], Memory]) -> TaskGraph:
    """Return the graph with its memory replaced by ``effect(memory)``; the same graph if its memory is unknown.

    ``effect`` takes and returns a ``whatif.graph.memory.Memory``, which lists bytes layer by layer. Of a pipeline it
    changes every stage: another one may then be the fullest. Raises WhatifError if it returns something else, or less
    than no memory.
    """
    if graph.info.memory is None:
        return graph
    if graph.info.stages:
        return with_stages(graph, tuple(_checked(effect(stage)) for stage in graph.info.stages))
    return graph.replace(info=replace(graph.info, memory=_checked(effect(graph.info.memory))))


def _checked(memory: object) -> Memory:
    if not isinstance(memory, Memory):
        raise WhatifError(f"change_memory: expected a function that returns a Memory, got {type(memory).__name__}.")
    of_step = (memory.parameters, memory.optimizer_state, memory.inputs, memory.update_workspace)
    least = min(*of_step, *(size for row in memory.layers for size in (row.activations, row.gradients)))
    if least < 0:
        raise WhatifError(f"change_memory: expected 0 bytes or more in each part of the memory, got {least:,}.")
    return memory


def with_stages(graph: TaskGraph, stages: Sequence[Memory]) -> TaskGraph:
    """Return the graph with the memory of each stage of a pipeline; that of a step is the fullest one's."""
    return graph.replace(info=replace(graph.info, memory=fullest(stages)[1], stages=tuple(stages)))


def with_share(memory: Memory, share: float) -> Memory:
    """Scale everything proportional to the parameters by ``share``: they, the optimizer's state and workspace."""
    return replace(
        memory,
        parameters=round(memory.parameters * share),
        optimizer_state=round(memory.optimizer_state * share),
        update_workspace=round(memory.update_workspace * share),
    )


# The fields of a layer that are proportional to the batch, besides its workspace.
_WITH_BATCH = ("activations", "kept_input", "full_precision", "input", "copied", "scores")


def with_batch(memory: Memory, factor: float) -> Memory:
    """Effect: activations, inputs and workspace are ``factor`` times as large; parameter-sized fields stay."""

    def grown(layer: LayerMemory) -> LayerMemory:
        sizes = {name: round(getattr(layer, name) * factor) for name in _WITH_BATCH}
        forward, backward = layer.fixed_forward, layer.fixed_workspace
        return layer._replace(
            **sizes,
            forward_workspace=forward + round((layer.forward_workspace - forward) * factor),
            backward_workspace=backward + round((layer.backward_workspace - backward) * factor),
        )

    inputs = memory.buffers + round((memory.inputs - memory.buffers) * factor)
    return replace(memory, inputs=inputs).with_layers([
        grown(layer) if any(layer[1:]) else layer for layer in memory.layers
    ])  # fmt: skip


def checkpointed(memory: Memory, segments: Sequence[str]) -> Memory:
    """Effect: each of ``segments`` (layer names) keeps only its input, and recomputes the rest in the backward pass.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, §3.
    """
    segment = places_within([row.name for row in memory.layers], segments)
    return recomputed(memory, [(first, end) for first, end, number in runs_of(segment) if number >= 0])


def runs_of(values: Int64) -> list[tuple[int, int, int]]:
    """Return the first and the end row of each run of equal values, and the value."""
    begins = np.flatnonzero(np.append(True, np.diff(values) != 0)[: len(values)])
    ends = np.append(begins[1:], len(values))[: len(begins)]
    return list(zip(begins.tolist(), ends.tolist(), values[begins].tolist(), strict=True))


def in_half(memory: Memory) -> Memory:
    """Effect: activations take 16 bits if autocast computes in 16 bits, with 16-bit copies of the weights.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, §3.1; torch.autocast, which keeps the copies.
    """

    return memory.with_layers([_half(layer) if any(layer[1:]) else layer for layer in memory.layers])


@lru_cache(maxsize=8192)
def _half(layer: LayerMemory) -> LayerMemory:
    """One layer under autocast, cached: all half-precision what-ifs need the same ones."""
    halved = (layer.activations - layer.full_precision) // 2
    copies = (layer.weights + layer.copied) // 2
    # Normalization and losses work in full precision, and so do layers that keep nothing: sums of a residual stream.
    divisor = 2 if 10 * (halved + copies) > layer.activations else 1
    activations = layer.full_precision + halved + copies
    # Softmax works in full precision, and the product after it keeps a copy in 16 bits.
    others = layer.activations - layer.scores
    full = max(layer.full_precision - layer.scores, 0)
    scores = activations - full - (others - full) // 2 - layer.weights // 2
    return layer._replace(
        activations=activations,
        full_precision=activations,  # twice is once
        scores=max(min(scores, layer.scores * 3 // 2), 0),
        weights=0,
        copied=0,
        forward_workspace=layer.forward_workspace // divisor,
        backward_workspace=layer.backward_workspace // divisor,
        fixed_forward=layer.fixed_forward // divisor,
        fixed_workspace=layer.fixed_workspace // divisor,
        kept_input=layer.kept_input // 2,
        input=layer.input // 2,
    )


def accumulated(memory: Memory) -> Memory:
    """Effect: the gradients of earlier passes stay in memory while the next pass computes its own."""
    return replace(memory, gradients_stay=True)


def updated_in_backward(memory: Memory) -> Memory:
    """Effect: each layer is updated as soon as its gradients are ready, and its gradients are freed."""
    largest = max((layer.gradients for layer in memory.layers), default=0)
    share = largest / max(memory.gradients, 1)
    return replace(
        memory,
        gradients_leave=True,
        gradients_stay=False,
        gradients_in_forward=False,
        update_workspace=round(memory.update_workspace * share),
    )


def without_scores(memory: Memory) -> Memory:
    """Effect: attention is fused, so no matrix of scores is kept for the backward pass or made in either pass.

    Source: Dao et al., "FlashAttention", NeurIPS 2022, §3.1: memory is linear in the length of the sequence.
    """

    def fused(layer: LayerMemory) -> LayerMemory:
        left = layer.activations - layer.scores
        # Backward only the softmax needs the gradients of its result and its input; the other gradients stay.
        backward = max(layer.backward_workspace - 2 * layer.scores, left)
        return layer._replace(
            activations=left,
            full_precision=min(layer.full_precision, left),
            kept_input=min(layer.kept_input, left),
            forward_workspace=max(layer.forward_workspace - layer.scores, 0),
            backward_workspace=min(layer.backward_workspace, backward),
            scores=0,
        )

    return memory.with_layers([fused(layer) if layer.scores else layer for layer in memory.layers])


def not_modelled(graph: TaskGraph, name: str) -> TaskGraph:
    """Return the graph whose memory report states that the memory effect of the what-if ``name`` is not modelled."""
    return change_memory(graph, lambda memory: replace(memory, not_modelled=(*memory.not_modelled, name)))


def updated_as(memory: Memory, optimizer: str | None, implementation: str) -> Memory:
    """Effect: the update runs "fused" or "foreach" (on lists of tensors), with the workspace that this needs."""
    return replace(memory, update_workspace=update_workspace(optimizer, implementation, memory.parameters, 0))
