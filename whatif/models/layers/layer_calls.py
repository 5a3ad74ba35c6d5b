"""The calls of a model's layers in the order of the passes, and the forward call of each backward call.

A call is a run of tasks of one layer; in a recording that names no layers, of one operator. Its role comes from the
class of its layer, else the operator that launched its tasks, else the kernel's name.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

import numpy as np
from msgspec import Struct

from whatif.graph.kernels import KernelFamily, classify_operator
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Float64,
    Int8,
    Int32,
    Int64,
    Phase,
    TaskKind,
    among,
)
from whatif.models.durations.forms import operator_names
from whatif.models.layers.layer_facts import layer_types


class CallRole(IntEnum):
    """The role of a layer's call: CONVOLUTION, NORMALIZATION, ACTIVATION, POOLING, PRODUCT or OTHER."""

    OTHER = 0
    CONVOLUTION = 1
    NORMALIZATION = 2  # batch and instance normalization
    ACTIVATION = 3  # ReLU and its capped form
    POOLING = 4
    PRODUCT = 5  # a linear layer


_OF_CLASS = (
    (CallRole.CONVOLUTION, re.compile(r"(Lazy)?Conv(Transpose)?[123]d")),
    (CallRole.NORMALIZATION, re.compile(r"(Sync|Lazy)?(BatchNorm|InstanceNorm)([123]d)?")),
    (CallRole.ACTIVATION, re.compile(r"ReLU6?")),
    (CallRole.POOLING, re.compile(r"\w*Pool[123]d")),
    (CallRole.PRODUCT, re.compile(r"(Lazy|NonDynamicallyQuantizable)?Linear|Conv1D")),  # Conv1D: transformers' GPT-2
)
_OF_FAMILY = {
    KernelFamily.CONVOLUTION: CallRole.CONVOLUTION,
    KernelFamily.NORMALIZATION: CallRole.NORMALIZATION,
    KernelFamily.POOLING: CallRole.POOLING,
    KernelFamily.GEMM: CallRole.PRODUCT,
}
# torch computes a ReLU as a clamp, and its backward pass (that of a clamp as well) as a threshold.
_ACTIVATION_OPERATOR = re.compile(r"::(relu6?|clamp_min|threshold|hardtanh)_?(_backward)?$")
_ACTIVATION_KERNEL = re.compile(r"(?i)clamp_min|clamp_scalar|threshold|relu")
# Operators between layers, such as batch counters, belong to no call.
_COUNTER_BYTES = 1024
_SKIPPED = -1


class Calls(Struct, frozen=True):
    """Calls as columns of shape (n_calls,), pass by pass and each pass in order; ids of tasks, -1 for none.

    ``call[task]`` is a task's call. ``backward_tasks()`` returns the first and last backward task of each forward call,
    and ``tasks(mask)`` selects all tasks of some calls, forward and backward.

    ``forward`` is the row of the forward call that a backward call belongs to (itself for a forward call), -1 if
    unknown. ``run`` numbers stretches of one direction in one pass, whose rows are consecutive.
    """

    step: Int64
    run: Int64
    backward: Bool
    role: Int64
    layer: Int64
    first: Int64
    last: Int64
    forward: Int64
    call: Int32  # the call of each task, shape (n_tasks,)

    def __len__(self) -> int:
        return len(self.step)

    @property
    def before(self) -> Int64:
        """The call before each one in its run, shape (n_calls,); -1 at the begin of a run."""
        rows = np.arange(len(self))
        begins = np.append(True, self.run[1:] != self.run[:-1])[: len(self)]
        return np.where(begins, -1, rows - 1)

    @property
    def behind(self) -> Int64:
        """The call after each one in its run, shape (n_calls,); -1 at the end of a run."""
        rows = np.arange(len(self))
        ends = np.append(self.run[1:] != self.run[:-1], True)[: len(self)]
        return np.where(ends, -1, rows + 1)

    def backward_tasks(self) -> tuple[Int64, Int64]:
        """First and last backward task of each forward call, shape (n_calls,) each; -1 if unknown."""
        first, last = np.full(len(self), np.iinfo(np.int64).max), np.full(len(self), -1, dtype=np.int64)
        rows = np.flatnonzero(self.backward & (self.forward >= 0))
        np.minimum.at(first, self.forward[rows], self.first[rows])
        np.maximum.at(last, self.forward[rows], self.last[rows])
        return np.where(last >= 0, first, -1), last

    def times_ns(self, graph: TaskGraph) -> tuple[Float64, Float64]:
        """Time of the forward tasks, and of the backward tasks, of each forward call, shape (n_calls,) each."""
        counted = np.flatnonzero(self.call >= 0)
        call_ns = np.bincount(self.call[counted], weights=graph.duration_ns[counted], minlength=len(self))
        known = self.backward & (self.forward >= 0)
        backward_ns = np.bincount(self.forward[known], weights=call_ns[known], minlength=len(self))
        return np.where(self.backward, 0.0, call_ns), backward_ns.astype(np.float64)

    def tasks(self, chosen: Bool) -> Bool:
        """Return a mask, shape (n_tasks,), of the tasks of the ``chosen`` forward calls and of their backward calls.

        Backward calls that cannot be distinguished are selected if all forward calls of their layer and step are.
        """
        selected = chosen & ~self.backward
        rows = np.flatnonzero(self.backward)
        known = rows[self.forward[rows] >= 0]
        selected[known] = chosen[self.forward[known]]
        key = self._keys()
        left = np.setdiff1d(key[~self.backward & selected], key[~self.backward & ~selected])
        selected |= self.backward & (self.forward < 0) & np.isin(key, left)
        return np.asarray(np.append(selected, False)[self.call], dtype=np.bool_)

    def _keys(self) -> Int64:
        return _joined(self.step, self.role, self.layer)


def layer_calls(graph: TaskGraph) -> Calls:
    """Return the calls of layers in all forward and backward passes, in order, as columns of shape (n_calls,).

    A call is a run of kernels (CPU operators without a GPU) of one layer; without layers, of one operator. ``Calls``
    links backward and forward calls.
    """
    worker = graph.kernel_kind
    passes = among(graph.phase, (Phase.FORWARD, Phase.BACKWARD))
    tasks = np.flatnonzero((graph.kind == worker) & passes)
    role, operator = _roles(graph, tasks)
    counted = role != _SKIPPED
    tasks, role, operator = tasks[counted], role[counted].astype(np.int64), operator[counted]
    order = np.argsort(graph.step[tasks], kind="stable")
    tasks, role, operator = tasks[order], role[order], operator[order]
    step, layer = graph.step[tasks].astype(np.int64), graph.layer[tasks].astype(np.int64)
    backward = graph.phase[tasks] == Phase.BACKWARD
    # A new pass begins where forward work follows backward work.
    turns = _changed(step) | (np.append(False, backward[:-1]) & ~backward)
    number = np.cumsum(turns)
    order = np.lexsort((backward, number))
    tasks, role, operator, step, layer, backward, number = (
        column[order] for column in (tasks, role, operator, step, layer, backward, number)
    )
    begins = _changed(number) | _changed(backward) | _changed(role) | _changed(layer)
    if worker == TaskKind.KERNEL:
        # Two consecutive convolutions are two calls; two operators of a backward convolution are one.
        begins |= _changed(operator) & ~backward & (layer == 0) & (role != CallRole.OTHER) & (operator >= 0)
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(tasks))[: len(starts)] - 1
    call = np.full(len(graph), -1, dtype=np.int32)
    call[tasks] = np.cumsum(begins) - 1
    step, number, backward, role, layer = (column[starts] for column in (step, number, backward, role, layer))
    return Calls(
        step=step.astype(np.int64),
        run=np.cumsum(_changed(number) | _changed(backward)).astype(np.int64),
        backward=backward.astype(np.bool_),
        role=role.astype(np.int64),
        layer=layer.astype(np.int64),
        first=tasks[starts],
        last=tasks[ends],
        forward=_forward_calls(number, backward.astype(np.bool_), role, layer),
        call=call,
    )


def _changed(column: Array) -> Bool:
    """Mask of the values that differ from the one before; true for the first."""
    return np.append(True, column[1:] != column[:-1])[: len(column)]


def _joined(*columns: Array) -> Int64:
    """One number for each distinct row of several columns of small integers."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        low = int(column.min(initial=0))
        key = key * (int(column.max(initial=0)) - low + 1) + column - low
    return key


def _forward_calls(number: Array, backward: Bool, role: Array, layer: Array) -> Int64:
    """The forward call of each call: the backward pass runs the calls of one layer (and role) in reverse.

    A layer called once has all backward calls of its pass; else there must be as many as forward calls.
    """
    forward = np.where(backward, -1, np.arange(len(number))).astype(np.int64)
    if not len(number):
        return forward
    nameable = (layer > 0) | (role != CallRole.OTHER)
    key = _joined(number, role, layer)
    found: list[Int64] = []
    keys, group = np.unique(key, return_inverse=True)
    group = np.asarray(group).reshape(-1)
    n_forward, n_backward = (np.bincount(group[mask], minlength=len(keys)) for mask in (~backward, backward))
    for mask in (~backward, backward):
        rows = np.flatnonzero(mask)
        found.append(rows[np.argsort(group[rows], kind="stable")])
    first_forward = np.cumsum(n_forward) - n_forward
    first_backward = np.cumsum(n_backward) - n_backward
    rows = found[1]
    of = group[rows]
    rank = np.arange(len(rows)) - first_backward[of]
    mirrored = np.where(n_forward[of] == 1, 0, n_forward[of] - 1 - rank)
    paired = nameable[rows] & ((n_forward[of] == n_backward[of]) | (n_forward[of] == 1))
    forward[rows[paired]] = found[0][(first_forward[of] + mirrored)[paired]]
    return forward


def _roles(graph: TaskGraph, tasks: Int64) -> tuple[Int8, Int32]:
    """The role of each of ``tasks``, -1 for tasks of no call, and the number of its operator."""
    by_layer = np.array([_role_of_class(found) for found in layer_types(graph)], dtype=np.int8)
    by_family = np.zeros(128, dtype=np.int8)
    for known, means in _OF_FAMILY.items():
        by_family[known] = means
    family = graph.family[tasks]
    elementwise = np.array([_ACTIVATION_KERNEL.search(name) is not None for name in graph.names], dtype=np.bool_)
    role = by_family[family]
    role[(family == KernelFamily.ELEMENTWISE) & elementwise[graph.name[tasks]]] = CallRole.ACTIVATION

    called = _operator_names(graph, tasks)
    by_operator = np.array([role_of_operator(name) for name in graph.names], dtype=np.int8)
    role = np.where(called >= 0, by_operator[called], role)
    number = graph.operator[tasks]
    # A convolution also runs products and transposes. If a kernel's operator is missing and its name gives no role, it
    # belongs to the kernel before it. Kernels of a CUDA graph have no operator.
    launch = graph.launch_of[tasks]
    of_graph = (launch >= 0) & (np.bincount(launch[launch >= 0], minlength=len(graph) + 1)[launch] > 1)
    lost = (called < 0) & among(role, (CallRole.OTHER, CallRole.PRODUCT)) & bool((called >= 0).any())
    lost &= ~of_graph | ((number >= 0) & ~_changed(number))
    source = np.maximum.accumulate(np.where(lost, 0, np.arange(len(tasks))))
    role, number = role[source], number[source]
    size = graph.size_bytes[tasks]
    counter = (role == CallRole.OTHER) & (size >= 0) & (size < _COUNTER_BYTES)
    idle = (role == CallRole.OTHER) & (family == KernelFamily.OTHER) & (graph.kind[tasks] == TaskKind.CPU_OP)
    role = np.where(counter | idle | (family < 0), _SKIPPED, role)
    by_class = by_layer[graph.layer[tasks]]
    return np.where(by_class > CallRole.OTHER, by_class, role).astype(np.int8), number


@lru_cache(maxsize=10_000)
def _role_of_class(name: str) -> CallRole:
    return next((role for role, pattern in _OF_CLASS if pattern.fullmatch(name)), CallRole.OTHER)


# There are few names, which recur in every what-if of a search.
@lru_cache(maxsize=10_000)
@lru_cache(maxsize=10_000)
def role_of_operator(name: str) -> CallRole:
    """Return the role of an operator ("aten::conv2d")."""
    if _ACTIVATION_OPERATOR.search(name):
        return CallRole.ACTIVATION
    return _OF_FAMILY.get(classify_operator(name), CallRole.OTHER)


def _operator_names(graph: TaskGraph, tasks: Int64) -> Int32:
    """The code of the name of the operator that launched (on a CPU: is) each task; -1 if unknown."""
    if not graph.has_gpu:
        return graph.name[tasks]
    return operator_names(graph, tasks)
