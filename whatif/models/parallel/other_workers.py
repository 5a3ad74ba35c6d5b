"""A recording of data parallel training on another number of workers: its collectives, reissued for that number.

Source: the collectives of DDP, FSDP and ZeRO move the same bytes for any number of workers; nccl-tests,
doc/PERFORMANCE.md, gives the rounds and the share of the bytes that passes each link. Model: of a transfer of S bytes,
``rounds`` * a + ``share`` * S * b; a and b are fitted to the recorded collectives, or those of a requested network. The
time that a collective waited for peers stays (``stragglers.waiting_for_peers``; on a CPU the time beyond the shortest
one at its place in all steps).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

from whatif.graph.info import GraphInfo
from whatif.graph.kernels import collective_of
from whatif.graph.recorded import Recorded
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Int64
from whatif.hardware.cluster.collectives import MODELS
from whatif.hardware.cluster.links import GLOO_MESSAGE_NS, LATENCY_US, Link
from whatif.hardware.cluster.nccl import COLLECTIVES
from whatif.hardware.cluster.network import Network
from whatif.ingest.ranks.merge import COLLECTIVE
from whatif.models.exchange import gloo
from whatif.models.exchange.collective_tasks import OVERLAPPED, attach_model, exchanging, recorded_workers
from whatif.models.exchange.stragglers import sizes_of_groups, waiting_for_peers
from whatif.models.layers.found_gradients import found_gradients
from whatif.models.layers.gradients import step_of
from whatif.models.parallel.sharding import update_share
from whatif.runtime.errors import WhatifError
from whatif.simulation.transfers import Parts, workers_of
from whatif.units import counted

# Attached: collectives that stay as recorded on any number of workers.
STAYING = "stays on other workers"
# Attached: the time that each reissued collective waited for peers, ns, which stays in its duration.
WAITED = "waited for peers"
_UNIT = Link(1e9, 1.0)  # a round takes 1 ns, as does a byte


class _Collectives(NamedTuple):
    """The collectives of a recording, shape (n,) each: ids, operations, bytes (-1: unknown) and waiting, ns."""

    task: Int64
    operation: list[str]
    size_bytes: Int64
    wait_ns: Int64


class _Rounds(NamedTuple):
    """The rounds of each collective, and how many times each of its bytes passes a link, shape (n,) each."""

    rounds: Float64
    share: Float64


def recorded_on_several(graph: TaskGraph) -> bool:
    """Return whether the recording has collectives, and no what-if has inserted any."""
    found = exchanging(graph)
    return bool(found.any()) and bool((graph.start_ns[found] >= 0).all())


def on_other_workers(graph: TaskGraph, name: str, workers: int, network: Network | None) -> TaskGraph:
    """Return the recording of one of several workers as one of ``workers``; ``name`` is the what-if's.

    ``network``: that of the new workers; None is the recorded one. Nothing changes for the recorded number and network;
    one worker sends nothing. Raises WhatifError if the number of recorded workers is unknown, or the operations of the
    collectives, or their bytes with another network.
    """
    recorded = recorded_workers(graph)
    path = graph.info.path or "this recording"
    if recorded is None or recorded < 2:
        raise WhatifError(f"{name}: expected a recording that shows its number of workers, got {path}.")
    exchanged = exchanging(graph)
    # One worker has no peers, whatever an unnamed collective does.
    everybody = _of_all(graph, exchanged, recorded, (*COLLECTIVES, "") if workers == 1 else COLLECTIVES)
    found, stays = _collectives(graph, np.flatnonzero(everybody)), exchanged & ~everybody
    staying = np.flatnonzero(stays)
    among = zip(graph.name[staying].tolist(), sizes_of_groups(graph, staying).tolist(), strict=True)
    others = sorted(
        {
            f"{graph.names[code].partition('(')[0]}{f' among {size}' if size > 0 and size != recorded else ''}"
            for code, size in among
        }
    )
    if not len(found.task):
        known = ", ".join(COLLECTIVES)
        raise WhatifError(
            f"{name}: expected {known} among all {recorded} workers in {path}, got {', '.join(others)} alone."
        )
    if network is not None and workers > 1 and not (found.size_bytes >= 0).any():
        raise WhatifError(
            f"{name}: expected collectives of known size for another network, got none in {path}; name no bandwidth, "
            f"cluster or table for the recorded network, or name {name} before what fuses or captures the update."
        )
    notes = [f"{name}: recorded on {counted(recorded, 'worker')}, predicted on {workers}, each with its recorded batch"]
    if network is not None and network.unused:
        notes.append(f"{name}: {network.unused}")
    if others:
        pct = 100 * graph.duration_ns[staying].sum() / max(graph.duration_ns[exchanged].sum(), 1)
        verb = "stays" if len(others) == 1 else "stay"
        notes.append(
            f"{name}: {', '.join(others)} {verb} as recorded on {recorded} workers, {pct:.0f} % of the time of "
            "communication"
        )
        graph = graph.attach(**{STAYING: stays})
    sharded = {"reduce_scatter", "all_gather"} <= set(found.operation)
    if workers > 1 and sharded == (name == "distributed"):
        kinds = " and ".join(sorted(set(found.operation)))
        notes.append(f"{name}: the recorded exchange stays ({kinds}); to predict another one, record one worker")
    if workers == 1:
        notes.append(f"{name}: copies into and out of buckets remain, though one worker has none")
        graph = graph.remove(found.task)
    elif workers != recorded or network is not None:
        notes += _on_unknown_sizes(graph, name, found, network)
        graph = _issued_again(graph, found, recorded, workers, network)
    if sharded and workers != recorded:
        graph = update_share(graph, recorded / workers)
        notes.append(f"{name}: each worker updates {recorded / workers:.3g} times the parameters that it did")
    graph = graph.replace(info=_info(graph, workers))
    for sentence in notes:
        graph = graph.note(sentence)
    return graph


def _on_unknown_sizes(graph: TaskGraph, name: str, found: _Collectives, network: Network | None) -> list[str]:
    unknown = found.size_bytes < 0
    if not unknown.any():
        return []
    took_ns = graph.duration_ns[found.task]
    pct = 100 * took_ns[unknown].sum() / max(took_ns.sum(), 1)
    unchanged = "" if network is None else "; the network that is asked for does not change it"
    return [
        f"{name}: the sizes of {unknown.sum():,} of {len(unknown):,} collectives, {pct:.0f} % of their time, are not "
        f"recorded; their time is scaled by the bytes that pass each link of a ring{unchanged}"
    ]


def _info(graph: TaskGraph, workers: int) -> GraphInfo:
    meta: Recorded = graph.info.recorded
    if meta.ddp is not None:
        meta = structs.replace(meta, ddp=structs.replace(meta.ddp, world_size=workers) if workers > 1 else None)
    return replace(graph.info, workers=workers, recorded=meta)


def _of_all(graph: TaskGraph, exchanged: Bool, count: int, kinds: Collection[str]) -> Bool:
    """Return a mask, shape (n_tasks,), of the collectives of the given ``kinds`` among all ``count`` workers."""
    known = np.array([collective_of(name, "") in kinds for name in graph.names], dtype=np.bool_)
    everybody = exchanged & known.take(graph.name)
    # Collectives that an earlier what-if kept as recorded stay so.
    everybody &= ~np.asarray(graph.attached.get(STAYING, False), dtype=np.bool_)
    tasks = np.flatnonzero(everybody)
    put_in, recorded = workers_of(graph)[tasks], sizes_of_groups(graph, tasks)
    group = np.where(put_in > 0, put_in, recorded)  # below 1: unknown
    everybody[tasks] = (group < 1) | (group == count)
    return everybody & _of_gradients(graph, everybody & (graph.group >= 0), count)


def _of_gradients(graph: TaskGraph, among: Bool, count: int) -> Bool:
    """Of the collectives ``among`` groups of the right size keep those of the ranks with the most bytes.

    With two ranks for tensor and two for data parallelism both have groups of two; gradients are the most bytes.
    """
    everybody = np.ones(len(graph), dtype=np.bool_)
    if count == graph.info.workers or not among.any():
        return everybody
    ranks = [group.ranks for group in graph.info.groups]
    of = np.array([ranks.index(each) for each in ranks])[graph.group[among]]
    most = np.bincount(of, weights=np.maximum(graph.size_bytes[among], 0)).argmax()
    everybody[among] = of == most
    return everybody


def _collectives(graph: TaskGraph, task: Int64) -> _Collectives:
    names = [collective_of(graph.names[code], "") for code in graph.name[task].tolist()]
    return _Collectives(task, names, _sizes(graph, task, names), _waiting_ns(graph, task))


def _sizes(graph: TaskGraph, task: Int64, operation: list[str]) -> Int64:
    """Bytes of each message; if none is known and each gradient is reduced alone, those of the gradients.

    A trace gives one worker's part of an all-gather.
    """
    size = graph.size_bytes[task].astype(np.int64)
    gathered = np.array(operation) == "all_gather"
    size = np.where(gathered & (size > 0), size * (recorded_workers(graph) or 1), size)
    gradients = found_gradients(graph) if len(task) and bool((size < 0).all()) else None
    if gradients is None:
        return size
    place, count = _from_the_end(graph, task)
    tensors = len(gradients.size_bytes)
    alone = (count == tensors) & (place < tensors)
    return np.where(alone, gradients.size_bytes[::-1][np.minimum(place, tensors - 1)], size)


def _from_the_end(graph: TaskGraph, task: Int64) -> tuple[Int64, Int64]:
    """Each collective's place in its step, from the end as the first step may be cut, and the number per step."""
    step = step_of(graph)[task]
    _, of, counts = np.unique(step, return_inverse=True, return_counts=True)
    order = np.argsort(of, kind="stable")
    first = np.cumsum(counts) - counts
    place = np.empty(len(task), dtype=np.int64)
    place[order] = counts[of[order]] - 1 - (np.arange(len(task)) - first[of[order]])
    return place, counts[of].astype(np.int64)


def _waiting_ns(graph: TaskGraph, task: Int64) -> Int64:
    """The wait for peers; on a CPU the time beyond the shortest collective of equal kind, size and place in a step.

    In a graph of several ranks early ones wait outside of their transfers.
    """
    if not len(task) or COLLECTIVE in graph.attached:
        return np.zeros(len(task), dtype=np.int64)
    if WAITED in graph.attached:  # known from an earlier what-if
        return np.asarray(np.minimum(graph.attached[WAITED][task], graph.duration_ns[task]), dtype=np.int64)
    if graph.has_gpu:
        return waiting_for_peers(graph)[task]
    place, _ = _from_the_end(graph, task)
    _, key = np.unique(np.stack([place, graph.name[task], graph.size_bytes[task]]), axis=1, return_inverse=True)
    shortest = np.full(int(key.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(shortest, key.ravel(), graph.duration_ns[task])
    return np.asarray(graph.duration_ns[task] - shortest[key.ravel()], dtype=np.int64)


def _issued_again(
    graph: TaskGraph, found: _Collectives, recorded: int, workers: int, network: Network | None
) -> TaskGraph:
    now_ns = (graph.duration_ns[found.task] - found.wait_ns).astype(np.float64)
    known = found.size_bytes >= 0
    size = np.maximum(found.size_bytes, 0).astype(np.float64)
    round_ns, byte_ns = _fitted(now_ns[known], size[known], found, known, recorded, on_gpu=graph.has_gpu)
    before = _cheapest(found.operation, recorded, size, round_ns, byte_ns, on_gpu=graph.has_gpu)
    after = _cheapest(found.operation, workers, size, round_ns, byte_ns, on_gpu=graph.has_gpu)
    cost_before = before.rounds * round_ns + before.share * size * byte_ns
    cost_after = after.rounds * round_ns + after.share * size * byte_ns
    # Without sizes a transfer may be all rounds or all bytes: the latter is more likely.
    by_share, by_rounds = after.share / before.share, after.rounds / before.rounds
    ratio = np.where(known & (cost_before > 0), cost_after / np.maximum(cost_before, 1e-9), by_share)
    transfer_ns, latency_ns = now_ns * ratio, now_ns * ratio * _latency_share(after.rounds * round_ns, cost_after)
    low_ns, high_ns = now_ns * np.minimum(ratio, by_share), now_ns * np.maximum(ratio, by_rounds)
    parts = Parts.of_network(latency_ns)
    if network is not None:
        for operation in dict.fromkeys(found.operation):
            of_operation = known & (np.array(found.operation) == operation)
            sent = gloo.sent(graph, network, operation, size[of_operation])
            transfer_ns[of_operation] = low_ns[of_operation] = sent.cost.total_ns
            high_ns[of_operation] = sent.cost.total_ns * OVERLAPPED
            for column, values in zip(parts, sent.parts, strict=True):
                column[of_operation] = values
    # The wait for peers may change on another network: from zero to the recorded one.
    graph = graph.with_duration(
        found.task, np.rint(transfer_ns + found.wait_ns), low_ns=np.rint(np.minimum(low_ns, transfer_ns)),
        high_ns=np.rint(np.maximum(high_ns, transfer_ns) + found.wait_ns),
    )  # fmt: skip
    waited_ns = np.zeros(len(graph), dtype=np.int64)
    waited_ns[found.task] = found.wait_ns
    return attach_model(graph, found.task, parts.waiting(found.wait_ns), workers).attach(**{WAITED: waited_ns})


def _latency_share(latency: Float64, total: Float64) -> Float64:
    return np.asarray(np.where(total > 0, latency / np.maximum(total, 1e-9), 0.0), dtype=np.float64)


def _rounds(operations: list[str], workers: int, model: str) -> _Rounds:
    network = Network.of(workers, _UNIT)
    terms = {}
    for name in dict.fromkeys(operations):
        terms[name] = MODELS[model if name in MODELS[model] else "ring"][name](network)
    columns = np.array([terms[name] for name in operations], dtype=np.float64).reshape(-1, 2).T
    return _Rounds(columns[0], columns[1])


def _cheapest(
    operations: list[str], workers: int, size: Float64, round_ns: float, byte_ns: float, *, on_gpu: bool
) -> _Rounds:
    """Ring or tree, whichever is faster; only the ring for gloo and for unknown sizes."""
    ring = _rounds(operations, workers, "ring")
    if not on_gpu:
        return ring
    tree = _rounds(operations, workers, "tree")
    faster = (size > 0) & ((tree.rounds - ring.rounds) * round_ns + (tree.share - ring.share) * size * byte_ns < 0)
    return _Rounds(np.where(faster, tree.rounds, ring.rounds), np.where(faster, tree.share, ring.share))


def _fitted(
    now_ns: Float64, size: Float64, found: _Collectives, known: Bool, workers: int, *, on_gpu: bool
) -> tuple[float, float]:
    """The time per round and per byte on the recorded network: least squares of relative errors, neither below 0.

    Transfers that share a link take longer and hide the time per byte, so a round takes at most its time alone: a
    message of gloo, a step of NCCL's ring over a network.
    """
    ring = _rounds(found.operation, workers, "ring")
    taken_ns = np.maximum(now_ns, 1.0)
    rounds, moved = ring.rounds[known] / taken_ns, ring.share[known] * size / taken_ns
    if not moved.any():
        return 0.0, 1.0
    most_ns = LATENCY_US * 1e3 if on_gpu else float(GLOO_MESSAGE_NS)
    both = np.linalg.lstsq(np.stack([rounds, moved], axis=1), np.ones(len(taken_ns)), rcond=None)[0]
    round_ns = float(np.clip(both[0], 0.0, most_ns))
    byte_ns = float(moved @ (1.0 - round_ns * rounds) / (moved @ moved))
    return (round_ns, byte_ns) if byte_ns > 0 else (round_ns, 0.0)
