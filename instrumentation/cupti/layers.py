"""Timestamps the beginnings and ends of layers, by any clock, without synchronization and without a profiler.

Forward: hooks around every module. Backward: hooks around every node of the autograd graph, set just before the
backward pass; a node's autograd sequence number shows the module in whose forward call it was made (Daydream §4.3 maps
the phases of a layer to one another the same way). Update: hooks around the optimizer's step. Full backward hooks of
modules would wrap tensors and break in-place layers, so they are not used.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from whatif.ingest.marks import ACCUMULATE, BACKWARD_PREFIX

from ..layers import LAYER_PREFIX, hook_layers

# Kineto's name, by which readers recognize the phase.
UPDATE_NAME = "Optimizer.step#{}.step"
ATTACH_NAME = "whatif: hooks on autograd nodes"

ANNOTATION, OPERATOR, OVERHEAD = "user_annotation", "cpu_op", "overhead"


class Moment(NamedTuple):
    """A time on a thread."""

    thread: int
    time_ns: int


class Span(NamedTuple):
    """A span of time on one thread; `made_in` is a moment in the forward call that created a backward node.

    `identifier` is the external correlation id of the CUDA calls inside; 0 for none.
    """

    category: str
    name: str
    thread: int
    start_ns: int
    end_ns: int
    identifier: int = 0
    made_in: Moment | None = None


# An open span of a thread: key, start in ns, identifier, and sequence number at the start. A plain tuple and one key
# for all nodes, because the hooks of nodes run thousands of times a step.
_Open = tuple[object, int, int, int]
_NODE = object()


class _Call(NamedTuple):
    """A forward call and the autograd sequence numbers [first, last) of the nodes that it created."""

    first: int
    last: int
    moment: Moment


class _Thread(threading.local):
    """Open spans of a thread, and the forward calls that created its nodes; sequence numbers are per thread."""

    def __init__(self) -> None:
        self.id = threading.get_native_id()
        self.open: list[_Open] = []
        self.calls: list[_Call] = []
        self.creator: dict[int, Moment] = {}
        self.step = -1


class LayerStamps:
    """Records spans of layers, backward nodes and updates in `spans`, from `attach` to `remove`.

    `clock` returns ns. `push` and `pop` are called around each span with its identifier.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        clock: Callable[[], int],
        push: Callable[[int], Any] = lambda identifier: None,
        pop: Callable[[], Any] = lambda: None,
    ) -> None:
        self.spans: list[Span] = []
        self._model, self._optimizer = model, optimizer
        self._clock, self._push, self._pop = clock, push, pop
        self._sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr
        self._update = UPDATE_NAME.format(type(optimizer).__name__)
        self._identifiers = itertools.count(1)
        self._thread = _Thread()
        self._step = 0
        self._handles: list[Any] = []
        self._run_backward: Any = None

    def attach(self) -> None:
        """Register all hooks."""
        self._handles += hook_layers(self._model, self._enter_layer, self._leave_layer)
        if self._optimizer is not None:
            self._handles += [
                self._optimizer.register_step_pre_hook(self._enter_update),
                self._optimizer.register_step_post_hook(self._leave_update),
            ]
        # All entry points (Tensor.backward, autograd.backward, autograd.grad) look this name up when called.
        engine: Any = torch.autograd
        self._run_backward = engine._engine_run_backward
        engine._engine_run_backward = self._backward

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        engine: Any = torch.autograd
        if engine._engine_run_backward == self._backward:  # Else something has wrapped ours since.
            engine._engine_run_backward = self._run_backward

    def next_step(self) -> None:
        """Drop the creators of the nodes: a step's graph does not outlive the step."""
        self._step += 1

    def _enter(self, key: object, sequence: int = 0) -> None:
        identifier = next(self._identifiers)
        self._push(identifier)
        self._thread.open.append((key, self._clock(), identifier, sequence))

    def _leave(self, category: str, key: object, name: str, made_in: Moment | None = None) -> _Open | None:
        end_ns = self._clock()
        thread = self._thread
        entries = thread.open
        if not (entries and entries[-1][0] is key) and not any(entry[0] is key for entry in entries):
            return None  # Entered before the hooks were registered.
        while True:
            entry = entries.pop()
            self._pop()
            if entry[0] is key:  # Inner spans were left by an exception.
                break
        self.spans.append(Span(category, name, thread.id, entry[1], end_ns, entry[2], made_in))
        return entry

    def _enter_layer(self, name: str, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # Compiled regions must not change.
            self._enter(name, self._sequence())

    def _leave_layer(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        entry = self._leave(ANNOTATION, name, LAYER_PREFIX + name)
        if entry is not None:
            thread = self._current_thread()
            _, start_ns, _, first = entry
            thread.calls.append(_Call(first, self._sequence(), Moment(thread.id, start_ns)))

    def _enter_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._enter(self._update)

    def _leave_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._leave(ANNOTATION, self._update, self._update)

    def _current_thread(self) -> _Thread:
        thread = self._thread
        if thread.step != self._step:
            thread.step = self._step
            thread.calls.clear()
            thread.creator.clear()
        return thread

    def _backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the engine with hooks on the nodes that it will run."""
        start_ns = self._clock()
        handles = self._hook_nodes(outputs)
        self.spans.append(Span(OVERHEAD, ATTACH_NAME, self._thread.id, start_ns, self._clock()))
        try:
            return self._run_backward(outputs, *args, **kwargs)
        finally:
            start_ns = self._clock()
            # Nodes that accumulate gradients, and a retained graph, outlive the pass.
            for handle in handles:
                handle.remove()
            self.spans.append(Span(OVERHEAD, ATTACH_NAME, self._thread.id, start_ns, self._clock()))

    def _hook_nodes(self, outputs: Any) -> list[Any]:
        creator = self._creators()
        roots = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in _sequence(outputs)]
        # A node that accumulates a gradient takes the layer of the node that computed the gradient.
        pending: list[tuple[Any, Moment | None]] = [(node, None) for node in roots]
        visited: set[Any] = set()
        handles: list[Any] = []
        while pending:
            node, above = pending.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            kind = node.name()
            made_in = above if kind == ACCUMULATE else creator.get(node._sequence_nr())
            handles += [
                node.register_prehook(self._enter_node),
                node.register_hook(functools.partial(self._leave_node, BACKWARD_PREFIX + kind, made_in)),
            ]
            pending.extend((child, made_in) for child, _ in node.next_functions)
        return handles

    def _creators(self) -> dict[int, Moment]:
        """Return the forward call that created the node of each sequence number: the innermost, which ended first."""
        thread = self._current_thread()
        for call in thread.calls:
            for number in range(call.first, call.last):
                thread.creator.setdefault(number, call.moment)
        thread.calls.clear()
        return thread.creator

    def _enter_node(self, gradients: Any) -> None:
        self._enter(_NODE)

    def _leave_node(self, name: str, made_in: Moment | None, inputs: Any, outputs: Any) -> None:
        self._leave(OPERATOR, _NODE, name, made_in)


def _sequence(outputs: Any) -> Iterable[Any]:
    return outputs if isinstance(outputs, list | tuple) else (outputs,)
