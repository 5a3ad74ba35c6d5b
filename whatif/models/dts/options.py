"""The options of ``dts``, and the task graph of an architecture's rounds."""

from __future__ import annotations

from dataclasses import replace

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Change, Phase
from whatif.hardware.cluster.cluster_file import load_cluster
from whatif.hardware.cluster.links import TCP_SHARE
from whatif.hardware.cluster.topology import Cluster
from whatif.models.dts.built_in import BUILT_IN
from whatif.models.dts.dnn import Dnn, dnn_of
from whatif.models.dts.estimate import Estimate, estimate
from whatif.models.dts.machines import Machines, Processor, Wire
from whatif.models.dts.plan import Training
from whatif.models.dts.step_graph import step_graph
from whatif.models.exchange.collective_tasks import communicates
from whatif.runtime.errors import WhatifError
from whatif.units import Bandwidth

# Table I allows any percentage, but at 100 % a machine stops and never ends.
MOST_FLUCTUATION = 0.99
# The paper's number of clients.
CLIENTS = 3


def machines_of(cluster: Cluster, *, tcp: bool) -> Machines:
    """Return the processors and links of a cluster file; with ``tcp`` (CPU training) headers take a share of each link.

    Raises WhatifError if the file has no [[processor]] tables.
    """
    if not cluster.processors:
        raise WhatifError(
            f"{cluster.path or cluster.name}: expected [[processor]] and [[link]] tables, which DTS needs, got none; "
            "docs/dts.md has an example."
        )
    processors = tuple(
        Processor(
            found.name, found.gflop_s, min(found.power_fluctuation_pct / 100, MOST_FLUCTUATION),
            float("inf") if found.memory_gbyte is None else found.memory_gbyte * 1e9, found.parallelization_factor,
        )
        for found in cluster.processors
    )  # fmt: skip
    wires: dict[tuple[str, str], Wire] = {}
    for found in cluster.links:
        first, second = found.between
        for source, target in ((first, second), (second, first)):
            # A half-duplex link is one channel for both directions, a shared link one for all pairs of its table.
            way = "" if not found.link.full_duplex else f" {'>' if source == first else '<'}"
            channel = f"link {found.table}{way}" if found.shared else f"{source} -> {target}"
            if not found.shared and not found.link.full_duplex:
                channel = f"{first} - {second}"
            share = TCP_SHARE if tcp else 1.0
            wires[source, target] = Wire(
                channel, found.link.byte_s * share, found.link.latency_ns,
                min(found.bandwidth_fluctuation_pct / 100, MOST_FLUCTUATION),
            )  # fmt: skip
    return Machines(processors, wires)


def equal_machines(count: int, bandwidth: Bandwidth, latency_us: float, *, tcp: bool) -> Machines:
    """Return ``count`` machines like the recorded one with a separate link between any two."""
    if not 0 <= latency_us <= 1e6:
        raise WhatifError(f"dts: expected latency_us from 0 to 1,000,000, got {latency_us}.")
    return Machines.equal(count, Wire("", bandwidth.byte_s * (TCP_SHARE if tcp else 1.0), latency_us * 1e3))


def cuts_of(dnn: Dnn, cut: str) -> tuple[int, ...]:
    """Return the cuts of an option: comma-separated numbers or names of layers; empty for none."""
    return tuple(dnn.layer_number(layer.strip()) for layer in cut.split(",")) if cut else ()


def train_distributed(
    graph: TaskGraph,
    name: str,
    *,
    clients: int | None,
    workers: int | None,
    batches: int,
    cut: str | None,
    cluster: str | None,
    bandwidth: Bandwidth,
    latency_us: float,
    max_paths: int,
) -> TaskGraph:
    """Return a graph whose steps are rounds of the architecture ``name``, and note the assignment of roles.

    None means 3 clients, as few workers as hold the network, the fastest cut; ``max_paths`` 0 tries all. Without
    ``cluster`` (a file) all machines are like the recorded one. Raises WhatifError if an option is invalid or does not
    apply to the architecture, or if the roles do not fit the cluster.
    """
    requested = {"clients": clients, "workers": workers, "cut": cut}
    for option in [option for option, value in requested.items() if value is not None]:
        if option not in BUILT_IN[name].options:
            able = ", ".join(architecture.name for architecture in BUILT_IN.values() if option in architecture.options)
            raise WhatifError(f"dts: expected no option {option!r} for {name}, got it; it applies to {able}.")
    if clients is None:
        clients = CLIENTS if "clients" in BUILT_IN[name].options else 1
    if Change.ON_SEVERAL_PROCESSORS in graph.info.changes:
        return graph.unchanged("dts: the steps are those of several processors already; nothing changes")
    if communicates(graph):
        raise WhatifError("dts: expected a recording of one worker, got one whose steps communicate already.")
    dnn = dnn_of(graph)
    training = Training(clients, batches, cuts_of(dnn, cut or ""), workers or 0)
    if workers and cut and len(training.cuts) != workers - 1:
        raise WhatifError(f"dts: expected {workers - 1} cuts for {workers} workers, got {len(training.cuts)}.")
    found = _fastest(dnn, name, training, cluster, bandwidth, latency_us, max_paths, tcp=not graph.has_gpu)
    activities = found.plan(batches).activities
    graph = step_graph(graph, activities, [found.assignment[role.name] for role in found.roles])
    # Each fetch of data is one batch of one processor.
    fetched = sum(activity.phase == Phase.DATA for activity in activities)
    if dnn.batch_size:
        graph = graph.replace(info=replace(graph.info, batch_size=dnn.batch_size * fetched))
    sent = sum(activity.size_bytes for activity in activities if activity.size_bytes > 0)
    where = ", ".join(f"{role} on {at}" for role, at in found.assignment.items())
    cuts = [dnn.layers[at - 1] for at in found.training.cuts]
    after = f"cut after {', '.join(cuts)}; " if cuts else ""
    return graph.note(f"dts: {name}, {after}{where}; {sent / 1e6:,.1f} MB cross the network in a step of all of them")


def _fastest(
    dnn: Dnn, name: str, training: Training, cluster: str | None, bandwidth: Bandwidth, latency_us: float,
    max_paths: int, *, tcp: bool,
) -> Estimate:  # fmt: skip
    count = max(2 * training.clients + 1, training.workers, len(training.cuts) + 1)
    machines = (
        equal_machines(count, bandwidth, latency_us, tcp=tcp)
        if cluster is None
        else machines_of(load_cluster(cluster), tcp=tcp)
    )
    return estimate(BUILT_IN[name], dnn, machines, training, max_paths or None)
