"""Small networks and clusters with round numbers, and the five architectures."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from whatif.models.dts.built_in import BUILT_IN
from whatif.models.dts.dnn import Dnn
from whatif.models.dts.estimate import Estimate, estimate
from whatif.models.dts.machines import Machines, Processor, Wire
from whatif.models.dts.plan import Training


def network(**changed: object) -> Dnn:
    """Four layers; a client with two of them has 30 + 60 of the work, the rest 70 + 140 (ns, the update included)."""
    facts: dict[str, object] = {
        "layers": ("conv1", "conv2", "fc1", "fc2"),
        "forward_ns": np.array([10.0, 20.0, 30.0, 40.0]),
        "backward_ns": np.array([20.0, 38.0, 60.0, 70.0]),
        "update_ns": np.array([0.0, 2.0, 0.0, 10.0]),
        "fetch_ns": 5.0,
        "weights_bytes": np.array([8, 12, 40, 60]),
        "in_bytes": np.array([100, 90, 50, 70]),
        "kept_bytes": np.array([200, 100, 50, 20]),
        "copy_byte_s": 20e9,  # 3 + 1 models of 120 bytes take 24 ns
        "gflop_s": 10.0,
        "batch_size": 4,
    }
    return Dnn(**{**facts, **changed})  # type: ignore[arg-type]


def equal(count: int = 7, byte_s: float = 1e10, latency_ns: float = 3.0, **processor: float) -> Machines:
    """Machines like the recorded one; a byte takes 0.1 ns on every link and a message 3 ns."""
    return Machines.equal(count, Wire("", byte_s, latency_ns), Processor("", **processor))


def estimated(
    name: str,
    machines: Machines,
    dnn: Dnn | None = None,
    clients: int = 3,
    max_paths: int | None = 100,
    **training: object,
) -> Estimate:
    """The architecture of that name, cut behind the second layer unless specified otherwise."""
    cuts = {"pipeline_learning": (2, 3), "federated": ()}.get(name, (2,))
    asked = Training(clients=clients, **{"cuts": cuts, **training})  # type: ignore[arg-type]
    return estimate(BUILT_IN[name], dnn or network(), machines, asked, max_paths)


@st.composite
def networks(draw: st.DrawFn) -> Dnn:
    """Networks of two to six layers."""
    n = draw(st.integers(2, 6))

    def column(low: int, high: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)))

    return network(
        layers=tuple(f"layer {number}" for number in range(n)), forward_ns=column(0, 500).astype(float),
        backward_ns=column(0, 900).astype(float), update_ns=column(0, 50).astype(float),
        fetch_ns=float(draw(st.integers(0, 90))), weights_bytes=column(0, 900), in_bytes=column(1, 900),
        kept_bytes=column(0, 900),
    )  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn, fewest: int = 7, most: int = 9) -> Machines:
    """Unlike processors, a link of its own between any two."""
    names = [f"m{number}" for number in range(draw(st.integers(fewest, most)))]
    processors = tuple(Processor(name, draw(st.integers(1, 40))) for name in names)
    wires = {}
    for at, one in enumerate(names):
        for other in names[:at]:
            byte_s, latency_ns = draw(st.integers(1, 50)) * 1e9, draw(st.integers(0, 40))
            wires[one, other] = Wire(f"{one} > {other}", byte_s, latency_ns)
            wires[other, one] = Wire(f"{other} > {one}", byte_s, latency_ns)
    return Machines(processors, wires)
