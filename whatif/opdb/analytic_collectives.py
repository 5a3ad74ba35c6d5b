"""Collectives without measurements: NCCL's tuner on the links that a device's data sheet lists.

Within one machine only: a device's facts do not include the network between machines. All ranks use NVLink if
the device has it (two ranks at most if it is a bridge), else PCI Express. ``whatif.hardware.cluster.nccl`` has the
tuner.
"""

from __future__ import annotations

import numpy as np

from whatif.graph.types import Bool, Float64
from whatif.hardware.cluster.links import Link
from whatif.hardware.cluster.nccl import (
    COLLECTIVES,
    knows,
    nccl_cost,
    step_us,
)
from whatif.hardware.cluster.network import MOST_WORKERS, Level, Network
from whatif.hardware.gpu import Gpu
from whatif.opdb.rows import Operators

# NCCL's bandwidth of a link over the data sheet's, GB/s each: NCCL 2.30, topo.h (18 of NVLink 1's 20, 20 of 25
# of NVLink 2 and 3, 12 of GA102's 14.06, 20.6 of 25 of Hopper's, 40.1 of 50 of Blackwell's).
_NVLINK_SHARE = {
    "6.0": 18 / 20, "7.0": 20 / 25, "7.5": 20 / 25, "8.0": 20 / 25, "8.6": 12 / 14.0625, "9.0": 20.6 / 25,
    "10.0": 40.1 / 50, "10.3": 40.1 / 50,
}  # fmt: skip
# 12 of the 15.75 GB/s of 16 lanes of PCI Express 3.0, and later ones in proportion (topo.h, topo.cc).
_PCIE_SHARE = 12 / 15.75
# NCCL's tuner is nearly always optimistic, hardly ever too slow: 5 and 95 % of measured over estimated time on an A100
# and an H100 machine (aiconfigurator-core 0.12.0).
LOW_FACTOR, HIGH_FACTOR = 1.2, 2.0


def answers_collective(gpu: Gpu, ops: Operators) -> Bool:
    """Return a mask, shape (n,), of the collectives that can be estimated from the device's facts."""
    names = ops.texts["name"].among(*COLLECTIVES, "all_to_all")
    ranks = ops.integers["ranks"]
    known = names & (ops.integers["nodes"] == 1) & (ranks > 1) & (ranks <= MOST_WORKERS)
    return np.asarray(known & knows(gpu))


def collective_analytic(gpu: Gpu, ops: Operators) -> tuple[Float64, Float64, Float64]:
    """Return times of n collectives and nominal 90 % ranges, seconds, shape (n,) each; see ``answers_collective``.

    An all-to-all, which the tuner does not model, is one step of protocol Simple plus the bytes sent over a GPU's link.
    """
    t = np.full(len(ops), np.nan)
    able = answers_collective(gpu, ops)
    names, sizes, ranks = ops.texts["name"], ops.integers["bytes"].astype(np.float64), ops.integers["ranks"]
    for code, name in enumerate(names.table):
        for workers in np.unique(ranks[able & (names.codes == code)]).tolist():
            rows = np.flatnonzero(able & (names.codes == code) & (ranks == workers))
            network = machine_of(gpu, workers)
            if name == "all_to_all":
                kind, rate_byte_s = network.levels[0].kind, network.levels[0].link.byte_s
                t[rows] = step_us(kind) * 1e-6 + sizes[rows] * (workers - 1) / workers / rate_byte_s
            else:
                t[rows] = nccl_cost(network, name, sizes[rows]).total_ns * 1e-9
    return t, t / LOW_FACTOR, t * HIGH_FACTOR


def machine_of(gpu: Gpu, ranks: int) -> Network:
    """Return the network of ``ranks`` GPUs of one machine, at NCCL's rates."""
    share = _NVLINK_SHARE.get(gpu.compute_capability)
    if gpu.nvlink_gbyte_s and share and (ranks == 2 or not gpu.nvlink_bridged):
        kind, rate = "NVLink", gpu.nvlink_gbyte_s * share
    else:
        kind, rate = "PCIe", gpu.pcie_gbyte_s * _PCIE_SHARE
    return Network((Level(ranks, Link(rate * 1e9), kind=kind),), gpu=gpu.name)
