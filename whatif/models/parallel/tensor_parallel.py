"""Tensor parallel training: parts of each block are split across workers, with an all-reduce at their ends.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3 and figure 4: an all-reduce after a part's last product forward
(the operator g) and after its first one backward (f), each of one activation of the block's stream.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import structs

from whatif.graph.memory import LayerMemory, Memory
from whatif.graph.recorded import Gradient, Layer, Recorded
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Phase
from whatif.hardware.cluster.network import Network
from whatif.ingest.operator_calls import as_attention
from whatif.models.durations.estimator import put
from whatif.models.durations.half_precision import is_half
from whatif.models.durations.work_done import with_work
from whatif.models.exchange.beside_kernels import slow_kernels_beside
from whatif.models.exchange.exchanges import Exchange, exchange
from whatif.models.kernels.batch import at_batch, batch_tasks
from whatif.models.layers.calls import calls_of
from whatif.models.layers.layer_facts import layer_codes, layer_rows
from whatif.models.layers.memory_effects import change_memory, with_share
from whatif.models.parallel.passes import (
    Use,
    passes,
    uses,
)
from whatif.models.parallel.sharding import BUCKET_CALL, update_share
from whatif.models.parallel.transformer_blocks import Part, split_parts, vocabulary_parts
from whatif.runtime.errors import WhatifError
from whatif.simulation.transfers import of_activations

CHANNEL = "network, tensor parallel"


class _Span(NamedTuple):
    """The work of a part in one direction of one pass: its first and its last task."""

    first: int
    last: int
    backward: bool
    part: int


class Split(NamedTuple):
    """The parts of a graph, the spans of their work, and the bytes of an activation of their stream, (n_parts,)."""

    parts: list[Part]
    spans: list[_Span]
    size_bytes: list[int]
    n_blocks: int


def is_split(graph: TaskGraph) -> bool:
    """Return whether a what-if has inserted transfers between parts of the model."""
    return bool(of_activations(graph).any())


def find_split(graph: TaskGraph, layers: str | None, *, vocabulary: bool) -> Split:
    """Return the parts of the transformer's blocks. Raises WhatifError if none is found or sizes are unknown."""
    found = passes(graph)
    every = uses(graph, found, np.where(graph.layer > 0, graph.layer, -1).astype(np.int64))
    # A recording may begin within a pass: the pass with the most forward work is complete.
    fullest = int(np.bincount(found.number[~found.backward], minlength=1).argmax())
    first_pass = [use for use in every if not use.backward and use.number == fullest]
    parts = split_parts(graph, first_pass, layers)
    if not parts:
        raise WhatifError(
            "tensor_parallel: expected blocks of a transformer, with linear layers that widen and narrow the hidden "
            f"size, got none in {graph.info.path or 'this recording'}; record it with `whatif collect`, which records "
            "names and shapes of layers, or say which are blocks, as in tensor_parallel:layers=encoder.layers.[0-9]+."
        )
    n_blocks = len(parts)
    if vocabulary:
        parts = parts + vocabulary_parts(graph, first_pass, parts)
    use_of = {(use.number, use.backward, use.part): use for use in every}
    spans: list[_Span] = []
    code = layer_codes(graph)
    direction = found.number * 2 + found.backward
    for index, part in enumerate(parts):
        names = [product.layer for product in (*part.columns, *([part.rows] if part.rows else []))]
        for number in range(len(found.step)):
            for backward in (False, True):
                in_part = [use_of[key] for name in names if (key := (number, backward, code[name])) in use_of]
                if in_part:
                    first, last = min(use.first for use in in_part), max(use.last for use in in_part)
                    if part.rows is None:  # the loss works on its vocabulary
                        pass_tasks = found.task[direction == number * 2 + backward]
                        first = min(first, int(pass_tasks[0])) if backward else first
                        last = last if backward else max(last, int(pass_tasks[-1]))
                    spans.append(_Span(first, last, backward, index))
    return Split(parts, spans, [_stream_bytes(graph, part, parts, first_pass) for part in parts], n_blocks)


def _stream_bytes(graph: TaskGraph, part: Part, parts: list[Part], forward: list[Use]) -> int:
    """Bytes of one activation of the stream: by the FLOPs of a product of the block, else by the memory's rows."""
    candidates = [product for one in (part, *parts) for product in ((one.rows,) if one.rows else ()) + one.columns]
    code = layer_codes(graph)
    width = parts[0].columns[0].inputs
    rows = layer_rows(graph)
    for product in candidates:
        if rows[product.layer].type in ("Embedding", "MultiheadAttention"):
            continue
        use = next((use for use in forward if use.part == code[product.layer]), None)
        if use is None:
            continue
        tasks = np.arange(use.first, use.last + 1)
        tasks = tasks[(graph.layer[tasks] == use.part) & (graph.phase[tasks] == Phase.FORWARD)]
        tasks = tasks[graph.flops[tasks] > 0]
        if len(tasks):
            # An operator's tasks share its FLOPs; nested operators have the same FLOPs.
            _, inverse = np.unique(graph.operator[tasks], return_inverse=True)
            flops = float(np.bincount(np.asarray(inverse).reshape(-1), weights=graph.flops[tasks]).max())
            tokens = flops / (2 * product.inputs * product.outputs)
            half = is_half(graph.dtype[tasks[int(graph.flops[tasks].argmax())]])
            return max(round(tokens), 1) * width * (2 if half else 4)
    memory = graph.info.memory
    inputs = {row.name: row.input for row in memory.layers if row.input > 0} if memory else {}
    for column in parts[0].columns:
        if column.layer in inputs:
            return inputs[column.layer]
    raise WhatifError(
        "tensor_parallel: this recording lacks the sizes of the activations of its blocks; record it with "
        "shapes (whatif collect does)."
    )


def check_divides(graph: TaskGraph, split: Split, workers: int) -> None:
    """Raise WhatifError if a matrix or the heads of an attention cannot be cut into ``workers`` equal parts."""
    parts = split.parts[: split.n_blocks]
    called = np.unique(graph.called[_inside(graph, split)])
    operators = [as_attention(graph.info.operators[number]) for number in called[called >= 0].tolist()]
    for sizes in (dict(one.integers) for one in operators if one.family == "attention"):
        # Query, key and value are three products; several queries may share a key.
        columns = [column for part in parts if len(part.columns) >= 3 for column in part.columns]
        heads = {column.layer: column.outputs // max(sizes["head_size"], 1) for column in columns}
        for layer, count in {"an attention": sizes["heads"], **heads}.items():
            if count % workers:
                raise WhatifError(
                    f"tensor_parallel: expected a number of workers that divides the {count} heads of {layer}, got "
                    f"{workers}."
                )
    for part in parts:
        sides = [(column.layer, column.outputs, "outputs") for column in part.columns]
        sides += [(part.rows.layer, part.rows.inputs, "inputs")] if part.rows else []
        for layer, length, side in sides:
            if length % workers:
                raise WhatifError(
                    f"tensor_parallel: expected a number of workers that divides the {length} {side} of {layer}, got "
                    f"{workers}."
                )


def split_blocks(graph: TaskGraph, split: Split, network: Network, *, sequence: bool) -> TaskGraph:
    """Return the graph of one worker of ``network``, which computes its part of each block and all-reduces the sums.

    ``sequence``: between the parts it works on its share of the sequence, which is gathered before a part, and a part's
    sum is scattered. It keeps only its share of the gathered input, and gathers again for the weight gradients, beside
    the product before (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
    section 4.2.2 and figure 5).
    """
    workers = network.workers
    inside = _inside(graph, split)
    split_tasks, between = inside & batch_tasks(graph), _between(graph, split) & ~inside & batch_tasks(graph)
    exchanges = _sums(graph, split, sequence=sequence)
    graph = put(graph, split_tasks, at_batch(graph, split_tasks, 1 / workers, cut_weights=True))
    graph = with_work(graph, split_tasks, 1 / workers, wider=True)
    if sequence:
        graph = put(graph, between, at_batch(graph, between, 1 / workers))
        graph = with_work(graph, between, 1 / workers, wider=True)
    before = _parameter_bytes(graph)
    recorded = _smaller(graph.info.recorded, split.parts, workers)
    graph = graph.replace(info=replace(graph.info.cut_across(workers), recorded=recorded))
    share = _parameter_bytes(graph) / before if before else 1.0
    graph = change_memory(
        graph, lambda memory: _with_less_memory(memory, split.parts, workers, share, sequence=sequence)
    )
    graph = exchange(update_share(graph, share), exchanges, network, CHANNEL, BUCKET_CALL, activations=True)
    return slow_kernels_beside(graph, activations=True)


def _inside(graph: TaskGraph, split: Split) -> Bool:
    """The tasks between the ends of a part, in its direction; none for an embedding's part: its reads do not change."""
    result = np.zeros(len(graph), dtype=np.bool_)
    for backward, phase in ((False, Phase.FORWARD), (True, Phase.BACKWARD)):
        change = np.zeros(len(graph) + 1, dtype=np.int64)
        for span in split.spans:
            if span.backward == backward and split.parts[span.part].columns:
                change[span.first] += 1
                change[span.last + 1] -= 1
        result |= (np.cumsum(change)[:-1] > 0) & (graph.phase == phase)
    return result


def _between(graph: TaskGraph, split: Split) -> Bool:
    """The tasks of each direction of each pass from the first task of its first part to the last of its last part."""
    result = np.zeros(len(graph), dtype=np.bool_)
    blocks = [span for span in split.spans if split.parts[span.part].columns and split.parts[span.part].rows]
    for backward, phase in ((False, Phase.FORWARD), (True, Phase.BACKWARD)):
        spans = sorted((span for span in blocks if span.backward == backward), key=lambda span: span.first)
        change = np.zeros(len(graph) + 1, dtype=np.int64)
        for span, following in pairwise(spans):
            if graph.step[span.last] == graph.step[following.first]:
                change[span.last] += 1
                change[following.first] -= 1
        result |= (np.cumsum(change)[:-1] > 0) & (graph.phase == phase)
    return result


def _sums(graph: TaskGraph, split: Split, *, sequence: bool) -> list[Exchange]:
    rows: list[Exchange] = []
    on_gpu = graph.has_gpu
    for span in sorted(split.spans, key=lambda span: span.last):
        part = split.parts[span.part]
        size, phase = split.size_bytes[span.part], Phase.BACKWARD if span.backward else Phase.FORWARD
        if sequence and part.columns and part.rows:
            before = int(graph.neighbours[0][span.first])
            call = int(calls_of(graph, np.array([span.first]))[0]) if on_gpu else span.first
            ahead = int(graph.neighbours[0][call])
            if before >= 0 and ahead >= 0:
                rows.append(Exchange("all_gather", size, ahead, phase, (before,), (span.first,)))
            rows += _gathered_again(graph, span, part, size, on_gpu=on_gpu) if span.backward else []
        # A part cut by rows alone (an embedding) is summed forward, one cut by columns alone (the head) backward.
        if (not part.columns) if span.backward else part.rows is None:
            continue
        call = int(calls_of(graph, np.array([span.last]))[0]) if on_gpu else span.last
        following = int(graph.neighbours[1][span.last])
        waiting = (following,) if following >= 0 else ()
        operation = "reduce_scatter" if sequence and part.columns and part.rows else "all_reduce"
        rows.append(Exchange(operation, size, call, phase, (span.last,), waiting))
    return rows


def _gathered_again(graph: TaskGraph, span: _Span, part: Part, size_bytes: int, *, on_gpu: bool) -> list[Exchange]:
    """Gather the input of a part's first products again for their weight gradients, beside the product before these."""
    tasks = np.arange(span.first, span.last + 1)
    of_columns = np.isin(graph.layer[tasks], [layer_codes(graph)[column.layer] for column in part.columns])
    work = graph.on_gpu.mask if on_gpu else graph.on_cpu.mask
    products = tasks[of_columns & work[tasks] & (graph.phase[tasks] == Phase.BACKWARD) & (graph.flops[tasks] > 0)]
    if len(products) < 2:
        return []
    first, last = int(products[0]), int(products[-1])
    call = int(calls_of(graph, np.array([first]))[0]) if on_gpu else first
    before, ahead = int(graph.neighbours[0][first]), int(graph.neighbours[0][call])
    if before < 0 or ahead < 0:
        return []
    return [Exchange("all_gather", size_bytes, ahead, Phase.BACKWARD, (before,), (last,))]


def _parameter_bytes(graph: TaskGraph) -> int:
    return sum(layer.gradient_bytes or 0 for layer in layer_rows(graph).values())


def _smaller(recorded: Recorded, parts: list[Part], workers: int) -> Recorded:
    """The recorder's metadata of one worker, for later what-ifs: its part of each split parameter."""
    cut = {product.layer for part in parts for product in part.columns}
    by_rows = {part.rows.layer for part in parts if part.rows} - cut

    def kept(layer: str, shape: tuple[int, ...] | None) -> bool:
        """A bias is added once to the sum of the parts, so every worker has all of it."""
        return layer in by_rows and shape is not None and len(shape) == 1

    def smaller_layer(layer: Layer) -> Layer:
        if layer.name not in cut | by_rows:
            return layer
        numbers = {name: int(np.prod(shape)) for name, shape in layer.shapes.items()}
        replicated = sum(count for name, count in numbers.items() if kept(layer.name, layer.shapes[name]))
        share = replicated / max(sum(numbers.values()), 1)
        share += (1 - share) / workers
        parameters, size = (
            None if count is None else round(count * share) for count in (layer.parameters, layer.gradient_bytes)
        )
        return structs.replace(layer, parameters=parameters, gradient_bytes=size)

    shapes_of = {layer.name: layer.shapes for layer in recorded.layers}

    def smaller_gradient(gradient: Gradient) -> Gradient:
        if gradient.layer not in cut | by_rows or gradient.size_bytes is None:
            return gradient
        parameter = gradient.name.removeprefix(f"{gradient.layer}.")
        if kept(gradient.layer, shapes_of.get(gradient.layer, {}).get(parameter)):
            return gradient
        return structs.replace(gradient, size_bytes=-(-gradient.size_bytes // workers))

    return structs.replace(
        recorded,
        layers=tuple(map(smaller_layer, recorded.layers)),
        gradients=tuple(map(smaller_gradient, recorded.gradients)),
    )


def _with_less_memory(memory: Memory, parts: list[Part], workers: int, share: float, *, sequence: bool) -> Memory:
    """Inside the parts everything is 1 / ``workers``, except input and output, which every worker has in full.

    ``sequence``: these exist in full while a part's first and last layers run; 1 / ``workers`` of them is kept, as of
    everything between the parts (Korthikanti et al., 2022, equation 4).
    """
    rows = list(memory.layers)
    place: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        place.setdefault(row.name, []).append(at)
    found: list[tuple[set[str], str, range | list[int]]] = []
    for part in parts:
        columns = {product.layer for product in part.columns}
        last = part.rows.layer if part.rows else ""
        part_rows = [number for name in (*columns, last) for number in place.get(name, [])]
        part_rows += [len(rows) - 1] if part_rows and not last else []  # the loss works on the head's vocabulary
        found.append((columns, last, range(min(part_rows), max(part_rows) + 1) if part_rows and columns else part_rows))
    inside = {number for _, _, numbers in found for number in numbers}
    blocks = [number for columns, last, numbers in found if columns and last for number in numbers]
    if sequence and blocks:
        for number in set(range(min(blocks), max(blocks) + 1)) - inside:
            row = rows[number]
            # Its parameters are not split.
            rows[number] = _less(row, workers, opens=False, closes=False)._replace(
                gradients=row.gradients, weights=row.weights, fixed_workspace=row.fixed_workspace,
                fixed_forward=row.fixed_forward,
            )  # fmt: skip
    for columns, last, numbers in found:
        for number in numbers:
            name = rows[number].name
            closes = bool(last) and name == last
            rows[number] = _less(rows[number], workers, opens=name in columns, closes=closes, sequence=sequence)
    return with_share(memory, share).with_layers(rows)


def _less(row: LayerMemory, workers: int, *, opens: bool, closes: bool, sequence: bool = False) -> LayerMemory:
    def part(size: int, unsplit: int = 0) -> int:
        """Keep ``unsplit`` of ``size`` and a part of the rest."""
        kept = min(size, unsplit)
        return kept - (kept - size) // workers

    name, *sizes = row
    less = LayerMemory(name, *map(part, sizes))
    if closes:
        less = less._replace(forward_workspace=row.forward_workspace)
    if not opens:
        return less
    less = less._replace(backward_workspace=part(row.backward_workspace, row.input))
    if sequence:
        # The gathered activation exists besides the share.
        return less._replace(
            forward_workspace=less.forward_workspace + row.input,
            backward_workspace=less.backward_workspace + row.input,
        )
    return less._replace(
        activations=part(row.activations, row.kept_input),
        full_precision=part(row.full_precision, row.kept_input),
        kept_input=row.kept_input,
        copied=row.copied,
        input=row.input,
    )
