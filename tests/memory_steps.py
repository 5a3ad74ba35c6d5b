"""A step's memory, drawn by hand: what the tests of memory share."""

from __future__ import annotations

from tests.helpers import Event, mark, op
from tests.memory_traces import NODE, shaped
from whatif.graph.memory import LayerMemory, Memory, moments


def drawn() -> Memory:
    """Three layers; 100 of parameters, 200 of state, 10 of inputs of which 4 are buffers.

    ::

        layer   a    b.0   b.1  |  b.1   b.0    a   | update
        kept   +30   +20   +40  |  -40   -20   -30  |
        grads                   |  +10    +5   +15  |
        needs   7     3     0   |   25     6     8  |   50
        in all
          310  347   363   400  |  435   381   378  |  390
    """
    return Memory(
        parameters=100,
        optimizer_state=200,
        inputs=10,
        buffers=4,
        layers=(
            LayerMemory("a", 30, 15, 7, 8),
            LayerMemory("b.0", 20, 5, 3, 6, kept_input=20, input=20),
            LayerMemory("b.1", 40, 10, 0, 25),
        ),
        update_workspace=50,
    )


def totals(memory: Memory) -> list[int]:
    return [moment.total for moment in moments(memory)]


def slow_peak(memory: Memory) -> int:
    """The peak by an explicit list of what is held."""
    held = {"resident": memory.parameters + memory.optimizer_state + memory.inputs}
    most = 0
    if memory.gradients_stay or memory.gradients_in_forward:
        held["gradients"] = sum(row.gradients for row in memory.layers)
    for number, row in enumerate(memory.layers):
        held[f"kept {number}"] = row.activations
        most = max(most, sum(held.values()) + row.forward_workspace)
    if not memory.gradients_stay:
        held["gradients"] = 0
    for number, row in reversed(list(enumerate(memory.layers))):
        most = max(most, sum(held.values()) + row.gradients + row.backward_workspace)
        if not memory.gradients_stay:
            held["gradients"] += row.gradients
        del held[f"kept {number}"]
    return max(most, sum(held.values()) + memory.update_workspace)


def attention(*, taken: bool = True) -> list[Event]:
    """Two heads of 3 x 4 and a softmax of 3 x 3, with dropout, in one layer; then what takes it, or something else.

    ::

        keeps   bmm: two of 96    softmax 72    dropout 18 (a byte each)    bmm: 72 and 120
    """
    product = shaped([2, 3, 3], [2, 3, 5]) if taken else shaped([2, 9, 3], [2, 3, 5])
    forward = [
        ("aten::bmm", shaped([2, 3, 4], [2, 4, 3])), ("aten::_softmax", shaped([1, 2, 3, 3], [])),
        ("aten::native_dropout", shaped([1, 2, 3, 3], [], [])), ("aten::bmm", product),
    ]  # fmt: skip
    events = []
    for at in (0, 1000, 2000):
        events += [mark(f"ProfilerStep#{at}", at, 1000), mark("whatif::layer::attention", at + 5, 95)]
        for number, (name, shapes) in enumerate(forward):
            seq = {"Sequence number": at + number}
            events.append(op(name, at + 10 + 20 * number, 15, **seq, **shapes))
            back = {**seq, "Fwd thread id": 1}
            events.append(op(NODE + f"Node{number}Backward0", at + 400 - 20 * number, 15, **back))
    return events
