"""Small recordings with allocations, written by hand: times in us, sizes in bytes."""

from __future__ import annotations

from typing import Any

from tests.helpers import Event, mark, op

NODE = "autograd::engine::evaluate_function: "
METADATA: dict[str, Any] = {
    "version": 1,
    "batch_size": 5,
    "input_shape": [5, 4],
    "input_dtype": "float32",
    "optimizer": {"type": "SGD", "state_bytes": 480},
    "layers": [
        {"name": "fc1", "type": "Linear", "parameters": 40, "gradient_bytes": 160, "shapes": {"weight": [10, 4]}},
        {"name": "relu", "type": "ReLU", "parameters": 0, "gradient_bytes": 0, "shapes": {}},
        {"name": "fc2", "type": "Linear", "parameters": 20, "gradient_bytes": 80, "shapes": {"weight": [2, 10]}},
    ],
}


class Allocator:
    """Writes allocation events; ``total`` is what the device's allocator reports."""

    def __init__(self, *, device_type: int = 0, held: int = 0, with_address: bool = True) -> None:
        self.events: list[Event] = []
        self._device_type, self._total, self._with_address = device_type, held, with_address
        self._sizes: dict[str, tuple[int, int]] = {}

    def take(self, name: str, ts: float, size: int) -> None:
        self._sizes[name] = 4096 + len(self.events), size
        self._write(ts, size, self._sizes[name][0])

    def give(self, name: str, ts: float) -> None:
        address, size = self._sizes.pop(name)
        self._write(ts, -size, address)

    def holds(self, name: str) -> bool:
        return name in self._sizes

    def _write(self, ts: float, size: int, address: int) -> None:
        self._total += size
        args = {
            "Total Reserved": 0, "Total Allocated": self._total, "Bytes": size, "Addr": address,
            "Device Type": self._device_type, "Device Id": 0 if self._device_type else -1,
        }  # fmt: skip
        if not self._with_address:
            del args["Addr"]
        self.events.append({
            "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts,
            "args": args,
        })  # fmt: skip


def shaped(*dims: list[int]) -> dict[str, Any]:
    """The arguments by which a trace gives the shapes of an operator's float inputs; [] is a number."""
    return {"Input Dims": list(dims), "Input type": ["float" if shape else "Scalar" for shape in dims]}


SHAPES = {
    "fc1": shaped([10], [5, 4], [4, 10], [], []),
    "relu": shaped([5, 10]),
    "fc2": shaped([2], [5, 10], [10, 2], [], []),
}


def two_linear_layers(
    *, steps: int = 3, zero_at: float = 5, allocations: bool = True, shapes: bool = False, **device: Any
) -> list[Event]:
    """Two products with a relu between them, three steps; gradients of one step are zeroed in the next.

    ::

        us        10      50 60     90 100    150      200      245 250       285 300      345  400   500
        layer     |fc1      | |relu   | |fc2     |      |fc2 bwd    | |relu bwd   | |fc1 bwd   |  |update|
        bytes      h +400      r +400    y +40            d +400        e +400        g1 +160     t +240
                               h -400 at 95               g2 +80        r -400        e -400      t -240
                                                          y -40         d -400
        in all     400          800 400  440              840 920 880  1280 880 480   640 240     480 240
    """
    memory = Allocator(**device)
    events: list[Event] = []
    for number in range(steps):
        at, seq = 1000 * number, 10 * number
        fc1, relu, fc2 = (SHAPES[layer] if shapes else {} for layer in ("fc1", "relu", "fc2"))
        back = {"Fwd thread id": 1}
        events += [
            mark(f"ProfilerStep#{number}", at, 1000),
            mark("Optimizer.zero_grad#SGD.zero_grad", at + zero_at - 1, 4),
            mark("whatif::layer::fc1", at + 10, 40), op("aten::addmm", at + 12, 30, **{"Sequence number": seq}, **fc1),
            mark("whatif::layer::relu", at + 60, 30),
            op("aten::relu", at + 62, 25, **{"Sequence number": seq + 1}, **relu),
            mark("whatif::layer::fc2", at + 100, 50),
            op("aten::addmm", at + 102, 30, **{"Sequence number": seq + 2}, **fc2),
            op(NODE + "AddmmBackward0", at + 200, 40, **{"Sequence number": seq + 2}, **back),
            op(NODE + "ReluBackward0", at + 250, 30, **{"Sequence number": seq + 1}, **back),
            op(NODE + "AddmmBackward0", at + 300, 40, **{"Sequence number": seq}, **back),
            mark("Optimizer.step#SGD.step", at + 400, 100), op("aten::add_", at + 405, 90),
        ]  # fmt: skip
        changes: list[tuple[float, str, int]] = [
            (20, "h", 400), (65, "r", 400), (95, "h", 0), (110, "y", 40), (210, "d", 400), (220, "g2", 80),
            (242, "y", 0), (255, "e", 400), (275, "r", 0), (284, "d", 0), (310, "g1", 160), (339, "e", 0),
            (410, "t", 240), (420, "t", 0),
        ]  # fmt: skip
        if memory.holds("g1"):
            changes += [(zero_at, "g1", 0), (zero_at + 1, "g2", 0)]
        for ts, name, size in sorted(changes):
            if size:
                memory.take(name, at + ts, size)
            else:
                memory.give(name, at + ts)
    return [*events, *memory.events] if allocations else events
