"""What optimizations make of the memory of a step: each function gives the memory of the changed step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from whatif.memory import LayerMemory, Memory

if TYPE_CHECKING:
    from whatif.graph import TaskGraph


def change_memory(graph: TaskGraph, effect: Callable[[Memory], Memory]) -> TaskGraph:
    """Give the graph whose steps keep what ``effect`` makes of their memory; the same graph where nobody knows it."""
    memory = graph.info.memory
    return graph if memory is None else graph.replace(info=replace(graph.info, memory=effect(memory)))


def with_batch(memory: Memory, factor: float) -> Memory:
    """Let activations, inputs and workspace grow with the batch; what is as large as parameters stays."""

    def grown(size: int) -> int:
        return round(size * factor)

    return replace(memory, inputs=memory.buffers + grown(memory.inputs - memory.buffers)).with_layers(
        [
            layer._replace(
                activations=grown(layer.activations),
                forward_workspace=grown(layer.forward_workspace),
                backward_workspace=layer.fixed_workspace + grown(layer.backward_workspace - layer.fixed_workspace),
                kept_input=grown(layer.kept_input),
                full_precision=grown(layer.full_precision),
                input=grown(layer.input),
                copied=grown(layer.copied),
                scores=grown(layer.scores),
            )
            if any(layer[1:])
            else layer
            for layer in memory.layers
        ]
    )


def checkpointed(memory: Memory, segments: Sequence[str]) -> Memory:
    """Let each of ``segments`` (names of layers) keep its input alone and compute the rest again in the backward pass.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, §3.
    """
    position = {name: number for number, name in enumerate(segments)}
    segment = [_segment(row.name, position) for row in memory.layers]
    begins = [at for at in range(len(segment)) if at == 0 or segment[at] != segment[at - 1]]
    ends = [*begins[1:], len(segment)]
    return recomputed(memory, [(at, end) for at, end in zip(begins, ends, strict=True) if segment[at] >= 0])


def recomputed(memory: Memory, runs: Sequence[tuple[int, int]]) -> Memory:
    """Let the rows [first, end) of each of ``runs`` keep the input of the first alone; in the order of the rows."""
    rows = list(memory.layers)
    ended = -1
    for first, end in runs:
        # The gradient of its output, which is what flows into the layer behind it, is there all the while.
        gradient = rows[end].input if end < len(rows) else 0
        rows[first:end] = _recomputed(rows[first:end], gradient, from_segment=first == ended)
        ended = end
    return memory.with_layers(rows)


def _segment(layer: str, position: Mapping[str, int]) -> int:
    """The number of the segment that a layer lies in, -1 for none."""
    parts = layer.split(".")
    names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((position[name] for name in names if name in position), -1)


def _recomputed(rows: Sequence[LayerMemory], gradient: int, *, from_segment: bool) -> list[LayerMemory]:
    """One visit of a segment; ``from_segment``: what made its input keeps nothing any more."""
    first = rows[0]
    kept = first.input if from_segment else min(first.input, first.kept_input)
    again = 0
    most = 0
    found = []
    for row in rows:
        again += max(row.activations - kept, 0) if row is first else row.activations
        most = max(most, again + row.forward_workspace + gradient)
        found.append(
            row._replace(
                activations=kept if row is first else 0,
                kept_input=kept if row is first else 0,
                full_precision=min(row.full_precision, kept) if row is first else 0,
                forward_workspace=row.forward_workspace
                + row.activations
                - (min(kept, row.activations) if row is first else 0),
                backward_workspace=row.backward_workspace + again,
                scores=0,
            )
        )
    # The forward work of the whole segment runs before the backward work of its last layer.
    found[-1] = found[-1]._replace(backward_workspace=max(found[-1].backward_workspace, most))
    return found


def in_half(memory: Memory) -> Memory:
    """Keep activations in 16 bits where autocast computes in 16 bits, beside copies of the weights in 16 bits.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, §3.1; torch.autocast, which keeps the copies.
    """

    def half(layer: LayerMemory) -> LayerMemory:
        halved = (layer.activations - layer.full_precision) // 2
        copies = (layer.weights + layer.copied) // 2
        # Normalization and losses work in full precision, and so does what keeps nothing: sums of a residual stream.
        divisor = 2 if 10 * (halved + copies) > layer.activations else 1
        activations = layer.full_precision + halved + copies
        # Softmax works in full precision, and the product behind it keeps a copy in 16 bits.
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
            kept_input=layer.kept_input // 2,
            input=layer.input // 2,
        )

    return memory.with_layers([half(layer) if any(layer[1:]) else layer for layer in memory.layers])


def accumulated(memory: Memory) -> Memory:
    """Keep the gradients of earlier passes while the next one is made."""
    return replace(memory, gradients_stay=True)


def updated_in_backward(memory: Memory) -> Memory:
    """Let each layer be updated as soon as its gradients are there, and its gradients go."""
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
    """Let attentions be fused: no matrix of scores is kept, nor made while they work forward and backward.

    Source: Dao et al., "FlashAttention", NeurIPS 2022, §3.1: memory is linear in the length of the sequence.
    """

    def fused(layer: LayerMemory) -> LayerMemory:
        left = layer.activations - layer.scores
        # Backward the softmax alone needs the gradients of its result and of its input; those of what is left stay.
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
    """Say of the memory that what the what-if ``name`` makes of it is not known."""
    return change_memory(graph, lambda memory: replace(memory, not_modelled=(*memory.not_modelled, name)))


def updated_as(memory: Memory, optimizer: str | None, implementation: str) -> Memory:
    """Let the update run "fused" or on lists of tensors ("foreach"), with what that computes with."""
    return replace(memory, update_workspace=update_workspace(optimizer, implementation, memory.parameters, 0))


# Adam keeps a list of denominators as large as the parameters beside them; torch.optim's other foreach forms work in
# place (torch 2.13, torch/optim/adam.py, sgd.py).
_FOREACH_COPIES = {"adam": 1, "adamw": 1, "nadam": 1, "radam": 1, "adamax": 1, "rmsprop": 1, "adagrad": 1}
# Parameter by parameter, Adam makes a square root and its quotient.
_LOOP_COPIES = {"adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "adamax": 1, "rmsprop": 1, "adagrad": 1}


def update_workspace(optimizer: str | None, implementation: str, parameters: int, largest: int) -> int:
    """Give what an update of ``parameters`` bytes computes with, bytes; ``largest`` is the largest single parameter.

    ``implementation`` is one of for_loop, foreach and fused.
    """
    name = (optimizer or "").lower()
    if implementation == "foreach":
        return _FOREACH_COPIES.get(name, 0) * parameters
    return _LOOP_COPIES.get(name, 0) * largest if implementation == "for_loop" else 0
