"""Early reduce-scatter: what if large gradients left for the other ranks from a backward hook, not from step()?

Source: the change of KellerJordan/modded-nanogpt that gives Adam's embeddings a post-accumulate-grad hook; ZeRO
        (Rajbhandari et al., SC 2020), §5, reduces each gradient as soon as it is there.
Model:  the reduce-scatters with which the update of a step begins start behind the kernels that accumulate their
        gradients in the backward pass, in that order, launched by the thread that launched those. The small ones
        belong to the short kernels. What the first of them waits for the other ranks, the first one waits still: their
        backward passes are as late as before. What needs a result waits for it as before. Ignored: kernels that a
        collective slows (19 % were seen), the order of the update's calls. A full launch queue sets the marks: use gpu.
Effort: small: Tensor.register_post_accumulate_grad_hook, and the update waits for what the hook launched.
"""

import numpy as np

from whatif import DependencyKind, NewTasks, Phase, TaskGraph, TaskKind, WhatifError

LARGE_BYTES, LONG_NS = 1 << 20, 10_000  # a gradient of a megabyte is added in more than 10 us


def transform(graph: TaskGraph) -> TaskGraph:
    """Move the first reduce-scatters of each update behind the kernels that finish their gradients."""
    scatter = graph.select(kind=TaskKind.COMMUNICATION, name="ReduceScatter", phase=Phase.UPDATE)
    moves = [pairs for step in range(graph.info.n_steps) if len(pairs := pairs_of_step(graph, scatter, step))]
    if not moves:
        raise WhatifError(
            "early_reduce_scatter: expected updates that begin with reduce-scatters of gradients that the backward "
            "pass accumulated, got none; give a recording of one rank with PyTorch's autograd and NCCL."
        )
    first = np.array([pairs[:, 1].min() for pairs in moves])
    ready, old = np.concatenate(moves).T
    duration_ns = graph.duration_ns.copy()
    waits_ns = np.array([waiting_ns(graph, scatter, task) for task in first])
    duration_ns[first] -= waits_ns
    duration_ns[[pairs[0, 1] for pairs in moves]] += waits_ns
    return moved(graph.with_duration(old, duration_ns[old]), ready, old)


def pairs_of_step(graph: TaskGraph, scatter: np.ndarray, step: int) -> np.ndarray:
    """Return (kernel that finishes a gradient, its reduce-scatter), shape (n, 2), in order of the kernels."""
    mine = np.flatnonzero(scatter & (graph.step == step))
    gathers = np.flatnonzero(graph.select(kind=TaskKind.COMMUNICATION, name="AllGather", phase=Phase.UPDATE, step=step))
    gathers = gathers[gathers > mine[0]] if len(mine) else gathers  # one before them is of the update before
    mine = mine[mine < gathers[0]] if len(gathers) else mine
    waited_for = graph.dependencies.source[np.isin(graph.dependencies.target, mine[:1])]
    backward = graph.select(phase=Phase.BACKWARD, step=step)
    if not (backward & graph.on_gpu)[waited_for].any():
        return np.empty((0, 2), dtype=np.int64)  # what leaves here was put together by the update itself
    calls = np.flatnonzero(backward & (graph.kind == TaskKind.RUNTIME))
    calls = calls[graph.select(name="aten::add_")[graph.neighbours[1][calls]]]
    adds = np.flatnonzero(np.isin(graph.launch_of, calls) & graph.on_gpu)[-len(mine) :]
    if len(adds) < len(mine):
        return np.empty((0, 2), dtype=np.int64)
    small_first = [np.argsort(of, kind="stable") for of in (graph.duration_ns[adds] > LONG_NS,
                                                                  graph.size_bytes[mine] > LARGE_BYTES)]  # fmt: skip
    pairs = np.stack([adds[small_first[0]], mine[small_first[1]]], axis=1)
    return pairs[np.argsort(pairs[:, 0])]


def waiting_ns(graph: TaskGraph, scatter: np.ndarray, task: int) -> int:
    """Return how much longer a collective took than the shortest one of no more than twice its size: it waited."""
    alike = scatter & (graph.size_bytes <= 2 * graph.size_bytes[task])
    return int(graph.duration_ns[task] - graph.duration_ns[alike].min())


def moved(graph: TaskGraph, ready: np.ndarray, old: np.ndarray) -> TaskGraph:
    """Return a graph with a collective behind each of ``ready`` in place of ``old``; what waited waits for these."""
    graph = graph.attach(**{"left behind": np.isin(np.arange(len(graph)), old)})
    needed = np.isin(graph.dependencies.source, old)
    before, users = graph.dependencies.source[needed], graph.dependencies.target[needed]
    launch = graph.launch_of
    inserted = graph.insert(
        NewTasks(ready, "early ReduceScatter", TaskKind.COMMUNICATION, graph.duration_ns[old], thread=graph.thread[old],
                 size_bytes=graph.size_bytes[old], family=graph.family[old], launched_after=launch[ready],
                 launch_ns=graph.duration_ns[launch[old]])
    )  # fmt: skip
    place = dict(zip(old.tolist(), inserted.ids.tolist(), strict=True))
    source = np.concatenate([inserted.moved[ready], [place[task] for task in before.tolist()]])
    target = np.concatenate([inserted.ids, inserted.moved[users]])
    graph = inserted.graph.add_dependencies(source, target, kind=DependencyKind.EVENT)
    return graph.remove(graph.attached["left behind"] == 1)
