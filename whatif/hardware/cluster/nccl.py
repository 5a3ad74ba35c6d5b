"""Times of collectives by the model of NCCL's tuner: the fastest of its algorithms and protocols for each size.

Source: NCCL 2.30, src/graph/tuning.cc; its constants are in `nccl_tuning.toml`. Ring and tree in three protocols each
        (LL and LL128 send small packets that carry their own flag, Simple large ones behind a flag), and the reduction
        inside of NVSwitch (NVLS: more than four Hopper or newer GPUs of one machine).
Left out: limits of a channel, which matter only if there are few; collnet; PAT; the CPU's vendor (Intel is assumed).
        The rate of NVLS is written as what was measured on 8 GPUs, 7/8 of link times efficiency (475 GB/s of bus
        bandwidth on an H200 machine, 838 on a B200), since the tuner's own depends on the channels that it finds.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from whatif.graph.types import Float64
from whatif.hardware.cluster.collectives import Cost, fastest
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from whatif.hardware.cluster.network import Network
    from whatif.hardware.gpu import Gpu

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
PROTOCOLS = ("LL", "LL128", "Simple")
# Share of each protocol's rate left by flags in a ring: half of LL's bytes are flags, 8 of LL128's 128, and some more.
_RING_SHARE = (0.5, 0.92, 1.0)
# The same in a tree: in one node, and between nodes.
_TREE_SHARE = ((0.92 / 3.8, 0.92 * 7 / 9, 0.92), (0.92 / 3.8, 0.92 * 120 / 128, 0.92))
_NVLS_SHARE, _NVLS_MORE_THAN = 7 / 8, 4
# Slowdown of a ring's Simple protocol between nodes, from 64 bytes per rank and channel on (its plateau).
_PLATEAU, _PLATEAU_BEFORE_AMPERE = 1.4, 1.9


def nccl_cost(network: Network, operation: str, size_bytes: Float64) -> Cost:
    """Return the cost of n collectives, shape (n,) each part. Raises WhatifError for an unknown GPU architecture."""
    arch = _architecture(network.gpu)
    facts = _facts()
    inside = network.levels[0]
    per_node = inside.workers if inside.kind in ("NVLink", "PCIe") else 1
    nodes, workers = network.workers // per_node, network.workers
    wire = "network" if per_node == 1 else inside.kind
    bus = network.ring_byte_s / 1e9
    doubled = 2 if operation == "all_reduce" else 1
    steps = workers if operation == "broadcast" else doubled * (workers - 1)
    between = doubled * (nodes - 1)
    most_ll = facts["ll_gbyte_s"][arch][min(nodes, 3) - 1]
    costs: list[Cost] = []

    def add(latency_us: float, rate_gbyte_s: Float64 | float) -> None:
        # 1 GB/s is 1 byte per nanosecond.
        costs.append(Cost(np.full(size_bytes.shape, latency_us * 1e3), size_bytes / rate_gbyte_s))

    for index, protocol in enumerate(PROTOCOLS):
        if protocol == "LL128" and wire == "PCIe":  # needs NVLink between all
            continue
        inner, outer = (facts["step_us"][over]["ring"][index] for over in (wire, "network"))
        latency = facts["base_us"]["ring"][index] + (
            inner if operation == "broadcast" else (steps - between) * inner + between * outer
        )
        if protocol == "Simple" and nodes > 1 and operation == "all_reduce":
            latency *= _PLATEAU if arch != "volta" else _PLATEAU_BEFORE_AMPERE
        rate = min(most_ll, bus * _RING_SHARE[index]) if protocol == "LL" else bus * _RING_SHARE[index]
        add(latency, rate * workers / steps)
        if operation == "all_reduce":
            inner, outer = (facts["step_us"][over]["tree"][index] for over in (wire, "network"))
            latency = facts["base_us"]["tree"][index] + 2 * ((per_node - 1) * inner + (nodes.bit_length() - 1) * outer)
            rate = bus * _TREE_SHARE[nodes > 1][index]
            rate = min(rate, most_ll) if protocol == "LL" else rate
            add(latency, rate / 2 * _correction(protocol, size_bytes))
    if operation == "all_reduce" and nodes == 1 and arch in facts["nvls"] and workers > _NVLS_MORE_THAN:
        rate = bus * facts["nvls"][arch] * _NVLS_SHARE
        add(facts["step_us"]["NVLink"]["nvls"], rate)
    return fastest(costs)


def _correction(protocol: str, size_bytes: Float64) -> Float64:
    """Return the share of a tree's rate that a size reaches; 1 beyond the table."""
    shares = np.array([*_facts()["tree_correction"][protocol], 1.0])
    index = np.floor(np.log2(np.maximum(size_bytes, 64.0) / 64.0)).astype(np.int64)
    return np.asarray(shares[np.minimum(index, len(shares) - 1)], dtype=np.float64)


# NCCL's tuner uses the compute capability: below 8.0 as Volta, below 9.0 as Ampere.
_TUNED_AS = {"pascal": "volta", "turing": "volta", "ada": "ampere"}


def knows(gpu: Gpu) -> bool:
    """Whether NCCL's tuner has constants for the device."""
    return _TUNED_AS.get(gpu.arch, gpu.arch) in _facts()["ll_gbyte_s"]


def start_us() -> float:
    """Return the start-up time of protocol Simple, which carries messages between two GPUs."""
    return float(_facts()["base_us"]["ring"][PROTOCOLS.index("Simple")])


def step_us(kind: str) -> float:
    """Return the time of one ring step of protocol Simple over a link of this ``kind``, including its start."""
    simple = PROTOCOLS.index("Simple")
    return start_us() + float(_facts()["step_us"][kind]["ring"][simple])


def _architecture(gpu: str | None) -> str:
    from whatif.hardware.gpu import load_gpu

    arch = load_gpu(gpu).arch if gpu else "none"
    known = _facts()["ll_gbyte_s"]
    arch = _TUNED_AS.get(arch, arch)
    if arch not in known:
        raise WhatifError(
            f"nccl: expected a GPU whose architecture NCCL's tuner knows ({', '.join(known)}), got {gpu or 'none'}; "
            "set gpu in the cluster file, or choose another algorithm."
        )
    return arch


@lru_cache(maxsize=1)
def _facts() -> dict[str, Any]:
    return tomllib.loads(
        (resources.files("whatif.hardware") / "cluster" / "nccl_tuning.toml").read_text(encoding="utf-8")
    )
