"""The size of the feature map that is each layer call's input, which its backward work needs again."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from whatif.graph.kernels import MATRIX_FAMILIES
from whatif.graph.memory import LayerMemory, Memory
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Int64, among
from whatif.models.layers.layer_calls import CallRole, Calls, role_of_operator
from whatif.models.layers.layer_facts import gradient_bytes
from whatif.models.layers.memory_effects import change_memory

# Calls whose backward work needs their input. A ReLU keeps its output, which is the next call's input.
_KEEP_INPUT = (CallRole.CONVOLUTION, CallRole.NORMALIZATION, CallRole.POOLING, CallRole.PRODUCT)
# Calls that read one feature map and write another of the same size.
_SAME_SIZE = (CallRole.NORMALIZATION, CallRole.ACTIVATION)


def input_bytes(graph: TaskGraph, calls: Calls) -> Int64:
    """Return the bytes of each forward call's input feature map, shape (n_calls,); -1 if unknown.

    From the recording's memory (``graph.info.memory``) if that names the layer, else from the traffic: a normalization
    or a ReLU reads one map and writes one, so that each is half of its bytes. Any other call reads the output of such a
    call before it, else the rest of its bytes without output and weights, else a map as large as its output, else half
    of its bytes.
    """
    by_memory = _from_memory(graph, calls)
    return np.where(by_memory > 0, by_memory, _from_traffic(graph, calls))


def memory_rows(graph: TaskGraph, calls: Calls) -> Int64:
    """Return the row of ``graph.info.memory.layers`` of each forward call, shape (n_calls,); -1 for none.

    By the layer's name; a layer with several calls in a pass has as many rows; if the numbers differ, the first row is
    used. In a recording without layers rows are named after operators: if there are as many as calls of one role, they
    have the same order.
    """
    found = np.full(len(calls), -1, dtype=np.int64)
    if graph.info.memory is None:
        return found
    by_name: dict[str, list[int]] = {}
    for number, row in enumerate(graph.info.memory.layers):
        by_name.setdefault(row.name, []).append(number)
    by_role: dict[int, list[int]] = {}
    for name in by_name.keys() - set(graph.layers):
        by_role.setdefault(role_of_operator(f"aten::{name}"), []).extend(by_name[name])
    forward = np.flatnonzero(~calls.backward & ((calls.layer > 0) | (calls.role != CallRole.OTHER)))
    # Group calls by layer, or by role without one.
    group = np.where(calls.layer > 0, calls.layer, -calls.role)[forward]
    order = forward[np.lexsort((forward, group, calls.run[forward]))]
    group = np.where(calls.layer > 0, calls.layer, -calls.role)[order]
    begins = (np.diff(calls.run[order]) != 0) | (np.diff(group) != 0)
    for members in np.split(order, np.flatnonzero(begins) + 1) if len(order) else ():
        layer = int(calls.layer[members[0]])
        rows = by_name.get(graph.layers[layer], []) if layer else sorted(by_role.get(int(calls.role[members[0]]), []))
        if len(rows) == len(members):
            found[members] = rows
        elif rows and layer:
            found[members] = rows[0]
    return found


def _from_memory(graph: TaskGraph, calls: Calls) -> Int64:
    row = memory_rows(graph, calls)
    layers = graph.info.memory.layers if graph.info.memory else ()
    # Recorded allocations do not contain a layer's input, but what it keeps.
    sizes = np.array([layer.input or layer.activations for layer in layers] + [-1], dtype=np.int64)
    return sizes[row]


def _from_traffic(graph: TaskGraph, calls: Calls) -> Int64:
    moved = np.full(len(calls) + 1, -1, dtype=np.int64)  # one more: no call
    same = np.append(among(calls.role, _SAME_SIZE) & ~calls.backward, False)
    # A convolution's bias is added by a separate kernel, which does not count.
    counted = (graph.size_bytes >= 0) & (same[calls.call] | among(graph.family, MATRIX_FAMILIES))
    known = np.flatnonzero((calls.call >= 0) & counted)
    np.maximum.at(moved, calls.call[known], graph.size_bytes[known])
    half = np.where(same & (moved > 0), moved // 2, -1)
    weights = gradient_bytes(graph).take(calls.layer)
    written_before, read_behind = half[calls.before], half[calls.behind]
    left = np.where((moved[:-1] > 0) & (read_behind > 0), moved[:-1] - read_behind - weights, -1)
    found = np.full(len(calls), -1, dtype=np.int64)
    for candidate in (half[:-1], written_before, left, read_behind, moved[:-1] // 2):
        found = np.where(found > 0, found, candidate)
    # A ReLU's output is the next call's input.
    found = np.where((found <= 0) & same[:-1], np.append(found, -1)[calls.behind], found)
    return np.where(calls.backward | (found <= 0), -1, found)


def keeps_input(graph: TaskGraph, calls: Calls) -> Bool:
    """Return a mask of the forward calls that keep their input for their backward work, shape (n_calls,).

    Convolutions, normalizations, pooling and products, and other layers by the recording's memory.
    """
    layers = graph.info.memory.layers if graph.info.memory else ()
    kept_input = np.array([layer.kept_input > 0 for layer in layers] + [False], dtype=np.bool_)
    kept = among(calls.role, _KEEP_INPUT) | ((calls.role == CallRole.OTHER) & kept_input[memory_rows(graph, calls)])
    return np.asarray(kept & ~calls.backward, dtype=np.bool_)


def keep_less(
    graph: TaskGraph, calls: Calls, call: Int64, size_bytes: Int64, left_bytes: Int64, back_with: Int64
) -> TaskGraph:
    """Return the graph whose memory (if known) keeps only ``left_bytes`` of the input maps of some calls.

    ``call`` are the calls' rows. The full map exists in the forward pass from the layer that keeps it to the one that
    reads it, and in the backward pass from the work of the rows ``back_with`` on. All have shape (n,).
    """
    if not len(call):
        return graph
    row = memory_rows(graph, calls)
    of_one_pass = calls.run[call] == calls.run[call[0]]
    columns = [column[of_one_pass].tolist() for column in (call, size_bytes, left_bytes, back_with)]

    def effect(memory: Memory) -> Memory:
        left = [layer.activations for layer in memory.layers]
        # Extra bytes from one row to another: a step up and a step down.
        forward, backward = ([0] * (len(left) + 1) for _ in range(2))
        for reading, size, kept, fetcher in zip(*columns, strict=True):
            reader = int(row[reading])
            keeper = next((at for at in range(reader, -1, -1) if 2 * left[at] >= size), -1)
            gone = min(size, left[keeper]) - kept if keeper >= 0 else 0
            if gone <= 0:
                continue
            left[keeper] -= gone
            for steps, end in ((forward, reader), (backward, max(int(row[fetcher]), reader))):
                steps[keeper] += gone
                steps[end + 1] -= gone
        rises = zip(accumulate(forward), accumulate(backward), strict=True)
        return memory.with_layers([_with(*changed) for changed in zip(memory.layers, left, rises, strict=False)])

    return change_memory(graph, effect)


def _with(layer: LayerMemory, left: int, rise: tuple[int, int]) -> LayerMemory:
    """A layer that keeps ``left`` bytes, with more in use while it works, forward and backward."""
    if left == layer.activations and rise == (0, 0):
        return layer
    share = left / max(layer.activations, 1)
    return layer._replace(
        activations=left,
        kept_input=round(layer.kept_input * share),
        full_precision=round(layer.full_precision * share),
        scores=round(layer.scores * share),
        forward_workspace=layer.forward_workspace + rise[0],
        backward_workspace=layer.backward_workspace + rise[1],
    )
