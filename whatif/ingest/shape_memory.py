"""The memory of a step without recorded allocations, from the shapes of its operators."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
from msgspec import Struct, field

from whatif.graph.memory import LayerMemory
from whatif.graph.types import Int64
from whatif.ingest.events import Events
from whatif.ingest.kept_tensors import Kept, has_rule, kept_by
from whatif.ingest.op_cost import Tensor, input_tensors
from whatif.ingest.resident import Resident
from whatif.ingest.step_rows import StepRows

# Of one size at most this many are searched, so that the time per operator does not grow with the step.
SEARCHED_TENSORS = 200
# Operators of the backward pass whose last input is the workspace that a library's recurrent layer kept, in bytes.
_KEPT_SPACE = frozenset(("aten::mkldnn_rnn_layer_backward", "aten::_cudnn_rnn_backward"))

# Operators of a linear layer on its weight, before the product.
_OF_WEIGHTS = frozenset(("aten::t", "aten::to", "aten::_to_copy"))


class RowShapes(Struct):
    """The memory of one row by the shapes of its operators, bytes."""

    activations: int = 0
    kept_input: int = 0
    full_precision: int = 0
    forward_workspace: int = 0
    backward_workspace: int = 0
    input: int = 0
    weights: int = 0
    tables: int = 0
    # Full-precision tensors that are kept anyway, and of which each product in 16 bits would keep a copy.
    copied: int = 0
    # Gradients of sums that wait until the other branch is done.
    waiting: int = 0
    # Part of the activations: an attention's scores, before and after dropout.
    scores: int = 0


class _Tensor(Struct):
    size: int
    row: int  # the one that made it
    kept: bool = False
    half: bool = False  # whether autocast would make it in 16 bits
    product: bool = False  # of an input with weights
    # If a softmax made it, or operators other than products made it of such a tensor: rows and the bytes they keep.
    scores: tuple[tuple[int, int], ...] | None = None
    used: bool = False


class _Tensors(Struct):
    """The tensors made so far by size, the newest last.

    A recording does not show which tensor an operator reads: the newest of its size is assumed, which is true of
    networks of consecutive layers. A tensor that several operators read counts once.
    """

    by_size: dict[int, list[_Tensor]] = field(default_factory=dict)

    def make(self, tensor: _Tensor) -> None:
        """Add the newest tensor of its size."""
        found = self.by_size.setdefault(tensor.size, [])
        found.append(tensor)
        del found[:-SEARCHED_TENSORS]

    def newest(self, size: int, nth: int, row: int, *, for_product: bool = False) -> _Tensor:
        """The nth newest tensor of a size; one that no operator made is assigned to the row before.

        For a product, products with weights are skipped: no network multiplies the product of one layer's weights
        directly with another's; queries, keys and values are products of one tensor.
        """
        found = self.by_size.setdefault(size, [])
        if for_product:
            return next((tensor for tensor in reversed(found) if not tensor.product), self.newest(size, nth, row))
        while len(found) <= nth:
            found.insert(0, _Tensor(size, max(row - 1, 0)))
        return found[-1 - nth]

    def second_term(self, size: int) -> _Tensor | None:
        """The tensor that is added to the newest of a size: another unused one, else one that is no product."""
        found = self.by_size.get(size, [])[-2::-1]
        unused = next((tensor for tensor in found if not tensor.used), None)
        return unused or next((tensor for tensor in found if not tensor.product), None)

    def share(self, size: int, parts: int, row: int) -> None:
        """Add parts of the newest tensor of a size: views, each of which keeps all of it."""
        shared = self.newest(size, 0, row)
        found = self.by_size.setdefault(size // max(parts, 1), [])
        found.extend([shared] * min(parts, SEARCHED_TENSORS))
        del found[:-SEARCHED_TENSORS]


def shapes_of_rows(events: Events, rows: StepRows, static: Resident) -> list[RowShapes] | None:
    """Return the memory of each row of a step by the recorded shapes; None if operators have no shapes."""
    shaped = rows.forward[events.shape[rows.forward] >= 0]
    if not len(shaped):
        return None
    # Dropout on a GPU is one operator inside the one that users call, on a CPU it is several.
    outer = "aten::dropout" if "aten::native_dropout" in events.names else ""
    known = np.array([has_rule(name) and name != outer for name in events.names], dtype=np.bool_)
    chosen = (events.shape[rows.forward] >= 0) & known[events.name[rows.forward]]
    found = [RowShapes() for _ in rows.names]
    tensors = _Tensors()
    end_ns, overwrites, cache = -1, False, dict[tuple[int, int], Kept | None]()
    unknown: tuple[int, Kept] | None = None  # the last operator, if the size of its result is unknown
    for event, row in zip(rows.forward[chosen].tolist(), rows.forward_row[chosen].tolist(), strict=True):
        inside = int(events.start_ns[event]) < end_ns  # an operator that was counted
        key = int(events.name[event]), int(events.shape[event])
        if inside and not (overwrites and events.names[key[0]] == "aten::clone" and events.sequence[event] >= 0):
            continue
        if key not in cache:
            cache[key] = kept_by(events.names[key[0]], *events.shapes[key[1]])
        kept = cache[key]
        if kept is None:
            continue
        if inside:  # mul_ keeps a copy of what it overwrites
            found[row].activations += kept.output
            continue
        overwrites = kept.in_place
        end_ns = int(events.end_ns[event])
        if unknown is not None:
            _count_unknown_result(found[unknown[0]], *unknown, kept.source, tensors)
        unknown = (row, kept) if kept.unknown else None
        _count(found, row, kept, tensors, static, builds=bool(events.sequence[event] >= 0))
    _add_kept_space(events, rows, found)
    _add_inputs(events, rows, found)
    return found


def _count(rows: list[RowShapes], row: int, kept: Kept, tensors: _Tensors, static: Resident, *, builds: bool) -> None:
    """Add the tensors that one operator keeps and makes to its row; ``builds``: it has a node in the backward pass."""
    if kept.parts:
        tensors.share(kept.inputs[0], kept.parts, row)
        return
    source = tensors.newest(kept.source, 0, row) if kept.source in tensors.by_size else None
    other = tensors.second_term(kept.source) if kept.adds and source is not None else None
    half = kept.half if kept.half is not None else source is not None and source.half
    scores = source.scores if source is not None and kept.half is not True else None
    if kept.scores:
        scores = ()
    if source is not None:
        source.used = True
    if source is not None and other is not None:
        half = half and other.half
        other.used = True
        # Both terms have the same gradient, which waits until the backward pass reaches the row of the other term. The
        # row of the newer term works on that gradient.
        for number in range(other.row + 1, row):
            rows[number].waiting += kept.source if number != source.row else 0
    if builds:
        _take_scores(rows, row, kept, tensors)
        _keep_inputs(rows[row], row, kept, tensors, static.inputs)
        before = rows[row].activations
        _keep_own(rows[row], row, kept, tensors)
        if scores is not None:
            scores = (*scores, (row, rows[row].activations - before))
        if 0 < kept.weight_element < static.element:  # autocast's copy of the weights
            rows[row].activations += kept.weight
            rows[row].full_precision += kept.weight
            rows[row].weights -= kept.weight
    if not kept.in_place and kept.output:
        earlier = (kept.reads[:place].count(size) for place, size in enumerate(kept.reads))
        read = [tensors.newest(size, nth, row) for size, nth in zip(kept.reads, earlier, strict=True)]
        if source is not None and other is not None:
            read = [source, other]
        passing = sum(tensor.size for tensor in read if not tensor.kept) + (0 if kept.keeps_output else kept.output)
        rows[row].forward_workspace = max(rows[row].forward_workspace, passing)
        keeps = kept.keeps_output and builds
        tensors.make(_Tensor(kept.output, row, keeps, half, kept.weight > 0, scores))


def _count_unknown_result(found: RowShapes, row: int, kept: Kept, size: int, tensors: _Tensors) -> None:
    """Count a result of unknown size: it has that of the next operator's input."""
    tensors.make(_Tensor(size, row, False, kept.half is True, kept.weight > 0))
    found.activations += kept.own_share * size
    found.full_precision += kept.own_share * size
    found.forward_workspace = max(found.forward_workspace, size)
    found.backward_workspace += size


def _take_scores(rows: list[RowShapes], row: int, kept: Kept, tensors: _Tensors) -> None:
    """Count the kept bytes of scores when the second product of an attention reads them."""
    if kept.half is not True or kept.weight:
        return
    for place, size in enumerate(kept.inputs):
        nth = kept.inputs[:place].count(size)
        same_size = tensors.by_size.get(size, [])
        tensor = same_size[-1 - nth] if nth < len(same_size) else None
        if tensor is None or tensor.scores is None:
            continue
        for number, kept_bytes in (*tensor.scores, (row, 0 if tensor.kept else tensor.size)):
            rows[number].scores += kept_bytes
        tensor.scores = None


def _keep_inputs(found: RowShapes, row: int, kept: Kept, tensors: _Tensors, batch_bytes: int) -> None:
    """Count the inputs that an operator keeps and that nothing kept before."""
    for place, size in enumerate(kept.inputs):
        if size == batch_bytes and size not in tensors.by_size:  # the batch is there anyway
            found.copied += size if kept.half else 0
            continue
        tensor = tensors.newest(size, kept.inputs[:place].count(size), row, for_product=kept.weight > 0)
        if tensor.kept:
            found.copied += tensor.size if kept.half and not tensor.half else 0
            continue
        tensor.kept = True
        found.activations += tensor.size
        found.kept_input += tensor.size if tensor.row < row else 0
        found.full_precision += tensor.size if kept.half is False else 0


def _keep_own(found: RowShapes, row: int, kept: Kept, tensors: _Tensors) -> None:
    """Count the tensors that an operator makes and keeps, and the workspace of its backward work."""
    found.activations += kept.own
    found.full_precision += kept.own
    found.weights += kept.weight
    found.tables += kept.table
    result = kept.input_gradients if kept.in_place else kept.output
    if kept.keeps_output:
        written = tensors.newest(result, 0, row) if kept.in_place else None
        # A view that is written, a part of a tensor, keeps all of it.
        found.activations += result if written is None else 0 if written.kept else written.size
        found.full_precision += result if kept.half is False else 0
        if written is not None:
            written.kept = True
    found.backward_workspace = max(found.backward_workspace, result + kept.input_gradients)


def _add_kept_space(events: Events, rows: StepRows, found: list[RowShapes]) -> None:
    """Add the workspace that libraries keep for the backward work of recurrent layers, known from its inputs alone."""
    special = np.array([name in _KEPT_SPACE for name in events.names], dtype=np.bool_)
    first, last = np.searchsorted(events.start_ns, [rows.backward_ns, rows.update_ns]).tolist()
    chosen = first + np.flatnonzero(special[events.name[first:last]] & (events.shape[first:last] >= 0))
    row_of = rows.row_at(events.start_ns[chosen], events.start_ns)
    for event, row in zip(chosen.tolist(), row_of.tolist(), strict=True):
        dims, types, _ = events.shapes[int(events.shape[event])]
        tensors = [tensor for tensor in input_tensors(dims, types) or [] if tensor is not None]
        if tensors and len(tensors[-1].shape) == 1:
            space = tensors[-1].elements * (tensors[-1].element_bytes or 1)
            found[row].activations += space


def _add_inputs(events: Events, rows: StepRows, found: list[RowShapes]) -> None:
    """Set the input of each row: the first tensor of its first operator with a shape that is not a weight's."""
    looks_up = np.array(["embedding" in name or "index_select" in name for name in events.names], dtype=np.bool_)
    chosen = (events.shape[rows.forward] >= 0) & ~looks_up[events.name[rows.forward]]
    names, shapes = (column[rows.forward[chosen]].tolist() for column in (events.name, events.shape))
    transposes = [name == "aten::t" for name in events.names]
    of_weights = [name in _OF_WEIGHTS for name in events.names]
    numbers, firsts = np.unique(rows.forward_row[chosen], return_index=True)

    @cache
    def tensor_of(shape: int) -> Tensor | None:
        """The first tensor with several dimensions."""
        inputs = input_tensors(*events.shapes[shape][:2]) or []
        return next((tensor for tensor in inputs if tensor is not None and len(tensor.shape) > 1), None)

    for number, (first, end) in zip(numbers.tolist(), pairwise([*firsts.tolist(), len(names)]), strict=True):
        # The first operators of a row may have numbers alone.
        called = range(first, min(first + 8, end))
        # Without a mark of the layer, a linear layer begins with its weight: cast, and transposed.
        transposed = (tensor_of(shapes[at]) for at in called if transposes[names[at]])
        weight = next((tensor.shape for tensor in transposed if tensor is not None), None)
        for at in called:
            tensor = tensor_of(shapes[at])
            if tensor is not None and (tensor.shape != weight or not of_weights[names[at]]):
                found[number].input = tensor.size_bytes
                break


def as_layers(rows: StepRows, found: list[RowShapes], gradients: Int64) -> tuple[LayerMemory, ...]:
    """Return the layers' memory as the shapes show it; ``gradients`` of each row, bytes, shape (n_rows,)."""
    return tuple(
        LayerMemory(
            name, shapes.activations, gradient, shapes.forward_workspace,
            shapes.backward_workspace + shapes.waiting,
            shapes.kept_input, shapes.full_precision, shapes.input, 0, shapes.weights, shapes.copied,
            min(shapes.scores, shapes.activations),
        )
        for name, shapes, gradient in zip(rows.names, found, gradients.tolist(), strict=True)
    )  # fmt: skip
