"""The network described by a transform's options, which all transforms share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from msgspec import structs

from whatif.graph.task_graph import TaskGraph
from whatif.hardware.cluster.cluster_file import load_cluster, usual_cluster
from whatif.hardware.cluster.links import LATENCY_US, TCP_SHARE, Link
from whatif.hardware.cluster.network import ALGORITHMS, Network
from whatif.hardware.cluster.topology import Cluster
from whatif.models.durations.estimator import device
from whatif.models.exchange.exchanges import tensor_workers
from whatif.opdb.collective_table import read_table
from whatif.runtime.errors import WhatifError
from whatif.units import Bandwidth

# Where the device has no usual network: eight machines on 25 Gbit Ethernet.
WORKERS, ETHERNET = 8, Bandwidth("25Gbps")
MOST_WORKERS, MOST_LATENCY_US, MOST_SPREAD_PCT = 100_000, 1e6, 100.0


def network_of(
    graph: TaskGraph,
    name: str,
    *,
    workers: int | None = None,
    bandwidth: Bandwidth | None = None,
    latency_us: float | None = None,
    cluster: str | None = None,
    algorithm: str = "auto",
    table: str | None = None,
    spread_pct: float | None = None,
    neighbours: int = 1,
) -> Network:
    """Return the network that the options of the transform ``name`` describe; None: option not given.

    ``cluster`` is a preset's name or the path of a TOML file; if that leaves the number of one-worker machines open, it
    is 8 by default. With a cluster, ``workers`` takes its first workers, and ``bandwidth`` and ``latency_us`` are those
    of its outermost links. If the model's blocks are split across neighbours (``tensor_parallel``), a worker is one of
    each such group, and one of each ``neighbours`` such groups. Without a cluster and rates it is the usual node and
    network of the device; on one that is not in ``whatif/hardware/gpus``, and with rates, all links are equal. On a CPU
    gloo sends over TCP, whose headers take a share of the rate, and all-reduces in a ring; its CPU cost is not part of
    the network (`whatif.models.exchange.gloo`). ``spread_pct`` is the spread of the workers' steps. ``table`` is a file
    of measured times (`whatif.hardware.cluster.calibration`); it gives the number of workers unless ``workers`` does,
    and applies to any algorithm. Raises WhatifError on invalid options.
    """
    _check(name, workers, bandwidth, latency_us, algorithm, table, spread_pct)
    if not 1 <= neighbours <= MOST_WORKERS:
        raise WhatifError(f"{name}: expected from 1 to {MOST_WORKERS:,} copies, got {neighbours}.")
    measured = None if table is None else read_table(Path(table))
    own = device(graph)
    usual = own if (cluster, bandwidth, latency_us, table) == (None, None, None, None) else None
    chosen = load_cluster(cluster) if cluster is not None else usual_cluster(usual) if usual is not None else None
    default_workers = WORKERS if measured is None else measured.workers or WORKERS
    if chosen is None:
        link = Link((bandwidth or ETHERNET).byte_s, (LATENCY_US if latency_us is None else latency_us) * 1e3)
        network = Network.of(workers or default_workers, link)
    else:
        network = _of_cluster(chosen, workers, default_workers, tensor_workers(graph) * neighbours, bandwidth,
                              latency_us)  # fmt: skip
    if not graph.has_gpu:
        network = _over_tcp(network)
        algorithm = "ring" if algorithm == "auto" else algorithm
    given = [key for key, value in (("bandwidth=", bandwidth), ("latency_us=", latency_us)) if value is not None]
    without = given and network.workers > 1 and network.levels[-1].workers == 1
    return structs.replace(
        network, algorithm=algorithm, table=measured, gpu=network.gpu or (own.name if own else None),
        spread_pct=spread_pct, usual_for=usual.name if usual else "",
        unused=f"{' and '.join(given)} of the outermost links, which these workers do not use" if without else "",
    )  # fmt: skip


def _check(
    name: str, workers: int | None, bandwidth: Bandwidth | None, latency_us: float | None, algorithm: str,
    table: str | None, spread_pct: float | None,
) -> None:  # fmt: skip
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise WhatifError(f"{name}: expected from 1 to {MOST_WORKERS:,} workers, got {workers}.")
    if latency_us is not None and not 0 <= latency_us <= MOST_LATENCY_US:
        raise WhatifError(f"{name}: expected latency_us from 0 to {MOST_LATENCY_US:,.0f}, got {latency_us}.")
    if spread_pct is not None and not 0 <= spread_pct <= MOST_SPREAD_PCT:
        raise WhatifError(f"{name}: expected spread_pct from 0 to {MOST_SPREAD_PCT:.0f}, got {spread_pct}.")
    if table is not None and not (bandwidth is None and latency_us is None):
        raise WhatifError(
            f"{name}: expected a table of measured times, or bandwidth and latency_us, got both; leave one of them out."
        )
    if algorithm not in ALGORITHMS:
        raise WhatifError(f"{name}: expected an algorithm of {', '.join(ALGORITHMS)}, got {algorithm!r}.")


def _of_cluster(
    cluster: Cluster, workers: int | None, default_workers: int, inner: int, bandwidth: Bandwidth | None,
    latency_us: float | None,
) -> Network:  # fmt: skip
    """The network of a cluster's first workers, each one of a group of ``inner`` neighbours."""
    network = cluster.network(workers, inner)
    if workers is None and network.workers == 1 and cluster.levels and cluster.levels[-1].workers is None:
        network = cluster.network(default_workers, inner)
    return _outermost(network, bandwidth, latency_us).around(inner)


def _outermost(network: Network, bandwidth: Bandwidth | None, latency_us: float | None) -> Network:
    *inner, level = network.levels
    link = level.link
    if bandwidth is not None:
        link = structs.replace(link, byte_s=bandwidth.byte_s)
    if latency_us is not None:
        link = structs.replace(link, latency_ns=latency_us * 1e3, growth=1.0)
    return structs.replace(network, levels=(*inner, replace(level, link=link)))


def _over_tcp(network: Network) -> Network:
    """Each link at the rate that TCP leaves."""
    levels = (
        replace(level, link=structs.replace(level.link, byte_s=level.link.byte_s * TCP_SHARE))
        for level in network.levels
    )
    return structs.replace(network, levels=tuple(levels))
