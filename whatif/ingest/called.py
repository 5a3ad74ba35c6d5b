"""The operator of each task, described as in the op database, for estimates of other devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.described import Described
from whatif.graph.kernels import KernelFamily
from whatif.graph.order import each_once, places
from whatif.graph.types import (
    Array,
    Bool,
    Int8,
    Int32,
    Int64,
    TaskKind,
    among,
)
from whatif.ingest.events import MISSING, EventCategory, Events
from whatif.ingest.grouped import Grouped, by_track, rows_marked, rows_named
from whatif.ingest.op_cost import OF_SPARSE
from whatif.ingest.operator_calls import describe, describe_other
from whatif.simulation.intervals import interval_of

# The two halves of a convolution's gradient in PyTorch before 1.11: neither has all three shapes, the operator around
# both has (native_functions.yaml of 1.10).
_HALVES = {"backward_input": "dgrad", "backward_weight": "wgrad"}
_HALF = re.compile(r"aten::((?:cudnn|miopen)_convolution_backward)_(input|weight)")
_WHOLE = re.compile(r"aten::(cudnn|miopen)_convolution_backward")
# Places of the output's gradient, the input and the weight among an operator's inputs.
_BACKWARD_PLACES = {"aten::convolution_backward": (0, 1, 2)}
_CONVOLUTION = re.compile(r"aten::\w*conv(?!ert)")
_FORWARD = re.compile(r"aten::(cudnn_convolution|miopen_convolution|convolution|_convolution|conv2d)")


class Calls(Struct, frozen=True):
    """The tasks inside an operator with shapes: each ``task`` and the row of its ``operator``, shape (n,).

    ``which``, shape (n,), indexes ``distinct``: pairs of a name and a shape, as codes of the events.
    """

    task: Int64
    operator: Int64
    which: Int64
    distinct: list[tuple[int, int]]


def find_calls_of_tasks(events: Events, columns: dict[str, Array], family: Array) -> Calls:
    """Return the operator calls of all kernels and CPU operators that have a family; ``columns`` are the tasks'."""
    working = among(columns["kind"], [TaskKind.KERNEL, TaskKind.CPU_OP])
    task = np.flatnonzero((family >= 0) & (columns["operator"] >= 0) & working)
    operator = columns["operator"][task].astype(np.int64)
    known = np.flatnonzero((events.shape[operator] >= 0) & ~_on_sparse_tensors(events, operator))
    task, operator = task[known], operator[known]
    # One number per pair: np.unique sorts rows of a table ten times slower.
    key = events.name[operator].astype(np.int64) * len(events.shapes) + events.shape[operator]
    codes = each_once(key)
    distinct = [divmod(code, len(events.shapes)) for code in codes.tolist()]
    return Calls(task, operator, places(codes, key), distinct)


def _on_sparse_tensors(events: Events, operator: Int64) -> Bool:
    """Mask of the operators that ask a tensor for its stored elements, whose number the shapes do not show."""
    found = np.zeros(len(operator), dtype=np.bool_)
    sparse = np.array([name.startswith(OF_SPARSE) for name in events.names], dtype=np.bool_)
    for track, rows in by_track(events, rows_named(events, EventCategory.CPU_OP, sparse)).items():
        on_track = np.flatnonzero(events.track[operator] == track)
        calls_ns, calling = events.start_ns[rows], operator[on_track]
        first, end = (places(calls_ns, edges_ns[calling]) for edges_ns in (events.start_ns, events.end_ns))
        found[on_track] = first < end
    return found


def with_convolutions(events: Events, columns: dict[str, Array], family: Int8) -> Int8:
    """Return the families, with matrix products inside a convolution without recorded shapes as convolutions.

    If shapes are recorded, ``called_operators`` finds the convolution, and its products keep their family.
    """
    convolution = np.array([_CONVOLUTION.match(name) is not None for name in events.names], dtype=np.bool_)
    if not convolution.any():
        return family
    products = np.flatnonzero((columns["operator"] >= 0) & (family == KernelFamily.GEMM))
    operator = columns["operator"][products]
    family = family.copy()
    family[products[convolution[events.name[operator]] & (events.shape[operator] < 0)]] = KernelFamily.CONVOLUTION
    return family


def called_operators(events: Events, calls: Calls, n_tasks: int) -> tuple[Int32, tuple[Described, ...]]:
    """Return each task's row in a table of distinct operators, shape (n_tasks,), -1 where none is known; and the table.

    Name, shapes, types and scalar inputs identify a call. Old recordings lack the scalar inputs; those of a
    convolution follow from its sizes.
    """
    table: dict[Described, int] = {}
    geometry: dict[str, tuple[list[int], list[int]]] | None = None
    row = np.full(len(calls.distinct), MISSING, dtype=np.int32)
    halves = []
    for at, (name_code, shape) in enumerate(calls.distinct):
        name, inputs = events.names[name_code], events.shapes[shape]
        if _HALF.fullmatch(name):
            halves.append(at)
            continue
        operator = describe(name, *inputs)
        if operator is None and _FORWARD.fullmatch(name):
            geometry = _geometries(events) if geometry is None else geometry
            operator = _forward(inputs, geometry)
        operator = operator or describe_other(name, *inputs)
        if operator is not None:
            row[at] = table.setdefault(operator, len(table))
    of_call = row[calls.which]
    if halves:
        for members, operator in _described_halves(events, calls, halves):
            of_call[members] = table.setdefault(operator, len(table))
    called = np.full(n_tasks, MISSING, dtype=np.int32)
    called[calls.task] = of_call
    return called, tuple(table)


def _described_halves(events: Events, calls: Calls, halves: list[int]) -> Iterator[tuple[Array, Described]]:
    """Yield the calls (places in ``calls``) of each half of a gradient, and its operator by the shapes around it."""
    wholes = np.array([_WHOLE.fullmatch(name) is not None for name in events.names], dtype=np.bool_)
    outer = rows_named(events, EventCategory.CPU_OP, wholes)
    if not len(outer):
        return
    members = np.flatnonzero(np.isin(np.arange(len(calls.distinct)), halves)[calls.which])
    inner = calls.operator[members]
    enclosing = np.full(len(members), MISSING, dtype=np.int64)
    for track in each_once(events.track[inner]):
        enclosing_rows, on_track = outer[events.track[outer] == track], np.flatnonzero(events.track[inner] == track)
        if not len(enclosing_rows):
            continue
        end_ns = events.end_ns[enclosing_rows]
        at = interval_of(events.start_ns[inner[on_track]], events.start_ns[enclosing_rows], end_ns)
        enclosing[on_track] = np.where(at >= 0, enclosing_rows[at], MISSING)
    members, inner, enclosing = (column[enclosing >= 0] for column in (members, inner, enclosing))
    key = events.name[inner].astype(np.int64) * len(events.shapes) + events.shape[enclosing]
    codes = each_once(key)
    of_code = Grouped(members, places(codes, key))
    for number, code in enumerate(codes.tolist()):
        name, shape = divmod(code, len(events.shapes))
        half = _HALF.fullmatch(events.names[name])
        operator = (
            _gradient(events.shapes[shape], (1, 0, 2), _HALVES[f"backward_{half[2]}"]) if half and shape >= 0 else None
        )
        if operator is not None:
            yield of_code[number], operator


def _geometries(events: Events) -> dict[str, tuple[list[int], list[int]]]:
    """Stride and padding of the convolutions whose gradient the recording holds, by the sizes of input and weight."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    is_gradient = [bool(_WHOLE.fullmatch(name)) or name in _BACKWARD_PLACES for name in events.names]
    rows = rows_marked(events, np.array(is_gradient, dtype=np.bool_))
    rows = rows[events.shape[rows] >= 0]
    for code in each_once(events.name[rows].astype(np.int64) * len(events.shapes) + events.shape[rows]).tolist():
        name, shape = divmod(code, len(events.shapes))
        grad, x, weight = _BACKWARD_PLACES.get(events.names[name], (1, 0, 2))
        dims = events.shapes[shape][0]
        options = _stride_and_padding(dims, grad, x, weight)
        if options is not None:
            found.setdefault(str((dims[x], dims[weight])), options)
    return found


def _stride_and_padding(dims: Any, grad: int, x: int, weight: int) -> tuple[list[int], list[int]] | None:
    """Stride and padding of the usual convolution (dilation 1) with these sizes; None if there is none."""
    if not isinstance(dims, list) or len(dims) < 3:
        return None
    shapes = [dims[place] for place in (grad, x, weight)]
    if not all(isinstance(s, list) and len(s) == 4 and all(type(n) is int and n > 0 for n in s) for s in shapes):
        return None
    strides, paddings = [], []
    for out, size, kernel in zip(*(shape[2:] for shape in shapes), strict=True):
        stride = max(round(size / out), 1)
        # The least padding with which the output has that size.
        padding = max(-(-((out - 1) * stride + kernel - size) // 2), 0)
        if (size + 2 * padding - kernel) // stride + 1 != out:
            return None
        strides.append(stride)
        paddings.append(padding)
    return strides, paddings


def _forward(inputs: tuple[Any, Any, Any], geometry: dict[str, tuple[list[int], list[int]]]) -> Described | None:
    dims, types, _ = inputs
    options = geometry.get(str((dims[0], dims[1]))) if isinstance(dims, list) and len(dims) > 1 else None
    if options is None:
        return None
    return describe("aten::conv2d", dims, types, ["", "", "", *map(str, options), "[1, 1]"])


def _gradient(inputs: tuple[Any, Any, Any], places: tuple[int, int, int], phase: str) -> Described | None:
    dims, types, _ = inputs
    options = _stride_and_padding(dims, *places)
    if options is None:
        return None
    _, x, weight = places
    kinds = [types[place] if isinstance(types, list) and place < len(types) else "" for place in (x, weight)]
    operator = describe("aten::conv2d", [dims[x], dims[weight]], kinds, ["", "", "", *map(str, options), "[1, 1]"])
    return replace(operator, phase=phase) if operator else None
