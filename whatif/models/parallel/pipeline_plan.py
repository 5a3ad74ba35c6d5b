"""The division of a recorded model into a pipeline: its parts, their work and memory, and the bytes between them."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.memory import fullest, peak
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Float64, Int64
from whatif.models.exchange.exchanges import senders
from whatif.models.exchange.more_passes import passes_represented
from whatif.models.layers.memory_effects import with_batch, with_stages
from whatif.models.parallel.pipeline_memory import stage_memories
from whatif.models.parallel.pipeline_schedule import Pass, most_in_flight
from whatif.models.parallel.stage_work import (
    StepWork,
    Work,
    at_micro_batch,
    with_added,
)
from whatif.models.parallel.stages import (
    Model,
    balanced,
    blocks_of_layers,
    model_of,
    stage_of,
)
from whatif.runtime.errors import WhatifError

# Limit of passes per step: larger graphs than a few million tasks are too slow to simulate.
MOST_PASSES = 100_000
MOST_SAMPLES = 1_000_000


class Plan(Struct, frozen=True):
    """A model cut into parts: the begin, the work and the share of the parameters of each, shape (n_parts,) each.

    ``crossing_bytes`` (n_parts - 1,): the bytes of a micro-batch from each part to the next.
    """

    model: Model
    begins: Int64
    crossing_bytes: Int64
    work: Work
    shares: Float64
    recompute: bool

    @property
    def time_ns(self) -> Float64:
        """The time of each part, forward and backward, on the busier of CPU and GPU, mean of the steps, (n_parts,)."""
        passes = self.work.forward.then(self.work.backward)
        return np.asarray(passes.busy_ns.mean(axis=0), dtype=np.float64)

    def stage_gradients(self, stages: int) -> Int64:
        """Return the bytes of the gradients of each stage, shape (n_stages,); 0 if the recording has none."""
        part = np.searchsorted(self.begins[1:], np.arange(len(self.model.part)), side="right")
        each = np.bincount(part, weights=self.model.gradient_bytes).astype(np.float64)
        return by_stage(each, stages).astype(np.int64)


def part_bytes(size_bytes: Int64, begins: Int64) -> Float64:
    """Return the sums of the calls' ``size_bytes`` by part, (n_parts,); parts begin at ``begins``."""
    part = np.searchsorted(begins[1:], np.arange(len(size_bytes)), side="right")
    return np.bincount(part, weights=size_bytes, minlength=len(begins)).astype(np.float64)


def part_shares(size_bytes: Int64, begins: Int64) -> Float64:
    """Return the share of each part in the calls' ``size_bytes``, (n_parts,); parts begin at ``begins``."""
    sizes = part_bytes(size_bytes, begins)
    return sizes / sizes.sum() if sizes.sum() else np.full(len(begins), 1 / len(begins))


def by_stage(values: Float64, stages: int) -> Float64:
    """Return the sums over the parts of each stage, shape (n_stages,); part j is on stage j modulo the stages."""
    return np.bincount(np.arange(len(values)) % stages, weights=values, minlength=stages).astype(np.float64)


def check_counts(graph: TaskGraph, stages: int, micro_batches: int, chunks: int, micro_batch: int | None) -> None:
    """Raise WhatifError on numbers that make no pipeline; ``micro_batch`` is in samples, or batches."""
    if not 1 <= stages <= 10_000:
        raise WhatifError(f"pipeline: expected from 1 to 10,000 stages, got {stages}.")
    if micro_batches < 1:
        raise WhatifError(f"pipeline: expected 1 micro-batch or more, got {micro_batches}.")
    if micro_batch is not None and not 1 <= micro_batch <= MOST_SAMPLES:
        raise WhatifError(f"pipeline: expected a micro_batch of 1 to {MOST_SAMPLES:,} samples, got {micro_batch}.")
    if micro_batch is None and graph.info.batch_size and micro_batches > graph.info.batch_size:
        raise WhatifError(
            f"pipeline: expected at most as many micro-batches as the {graph.info.batch_size} samples of the recorded "
            f"batch, got {micro_batches}; micro_batch=... gives how many samples each has, whatever was recorded."
        )
    if chunks < 1:
        raise WhatifError(f"pipeline: expected 1 chunk of the model on each stage or more, got {chunks}.")
    if stages * chunks * micro_batches > MOST_PASSES:
        raise WhatifError(
            f"pipeline: expected at most {MOST_PASSES:,} forward passes a step in all stages, got "
            f"{stages * chunks * micro_batches:,}."
        )


def check_one_pass(graph: TaskGraph) -> None:
    """Raise WhatifError if a what-if has accumulated gradients, as the micro-batches of a pipeline do."""
    if passes_represented(graph).any():
        raise WhatifError(
            "pipeline: expected one pass a step, got accumulated ones; leave gradient_accumulation out and say "
            "how many passes here, as in pipeline:micro_batches=16,micro_batch=4."
        )


# Link rates for which cuts are tried, bytes/ns: 0.25 Gbit/s to 2.5 Tbit/s, and links that take no time.
_RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, np.inf)


def plans(
    graph: TaskGraph,
    n_parts: int,
    micro_batches: int,
    *,
    factor: float,
    recompute: bool,
    activation_mb: float | None,
    even: bool = False,
) -> list[Plan]:
    """Return the cuts of the model that minimize the slowest part or message over links of some rate.

    They do not depend on the requested link, so that the best is never slower over a faster link. A micro-batch is
    ``factor`` times the recorded batch. ``recompute``: the backward pass of a part begins with its forward pass again.
    ``activation_mb``: see ``crossing_bytes``. ``even``: cut into parts with equal numbers of repeated blocks instead.
    Raises WhatifError if the recording has no passes, fewer parts, or blocks that cannot be divided evenly.
    """
    model = model_of(graph)
    if n_parts > model.n_parts:
        raise WhatifError(
            f"pipeline: expected at most {model.n_parts} stages (chunks of all stages together), as many as there are "
            f"blocks and layers between which the model can be cut, got {n_parts}."
        )
    calls = len(model.part)
    crossing = crossing_bytes(graph, model, factor, activation_mb)
    work = at_micro_batch(graph, model, factor)
    if even:
        return [planned_at(_even_cut(graph, model, n_parts), work, crossing, micro_batches, recompute=recompute)]
    every = work.of_parts(model.position, calls)
    every = _recomputed(every) if recompute else every
    busy_ns = [
        sum(getattr(one, name) + one.sum_ns for one in (every.forward, every.backward)).mean(axis=0)
        for name in ("cpu_ns", "gpu_ns")
    ]
    cuts = {tuple(balanced(busy_ns, model.part, n_parts, crossing / rate).tolist()) for rate in _RATES}
    return [
        planned_at(np.array(begins, dtype=np.int64), work, crossing, micro_batches, recompute=recompute)
        for begins in sorted(cuts)
    ]


def _even_cut(graph: TaskGraph, model: Model, n_parts: int) -> Int64:
    """The calls before which the model is cut for equal numbers of blocks, (n_parts - 1,)."""
    block = blocks_of_layers(graph)[model.layer]
    starts = np.sort(np.unique(block, return_index=True)[1][int((block < 0).any()) :])
    if not len(starts) or len(starts) % n_parts:
        raise WhatifError(
            f"pipeline: expected a number of stages (chunks of all stages together) that divides the {len(starts)} "
            f"repeated blocks, got {n_parts}; without even=true they are cut as their times want it."
        )
    return starts[len(starts) // n_parts :: len(starts) // n_parts].astype(np.int64)


def planned_at(begins: Int64, whole: StepWork, crossing: Int64, micro_batches: int, *, recompute: bool) -> Plan:
    """Return the model cut before the calls ``begins``, (n_parts - 1,); see ``plans`` for the rest."""
    model = whole.model
    work = whole.of_parts(stage_of(model, begins), len(begins) + 1)
    shares = part_shares(model.gradient_bytes, np.append(0, begins))
    if micro_batches > 1:
        work = with_added(work, shares, micro_batches)
    work = _recomputed(work) if recompute else work
    return Plan(model, np.append(0, begins), crossing[begins], work, shares, recompute)


def _recomputed(work: Work) -> Work:
    return replace(work, backward=work.forward.then(work.backward))


def crossing_bytes(graph: TaskGraph, model: Model, factor: float, activation_mb: float | None) -> Int64:
    """Return the bytes that a worker sends to each call of the model at ``factor`` times the batch, (n_calls,).

    The call's input feature map, or ``activation_mb`` million bytes per batch; workers that share the blocks each send
    their part (Narayanan et al., SC 2021, section 4.1, "scatter/gather optimization"; so do DeepSpeed's pipelines).
    Raises WhatifError if neither is known.
    """
    sizes = model.input_bytes
    if activation_mb is not None:
        if not 0 <= activation_mb <= 1e7:
            raise WhatifError(f"pipeline: expected activation_mb from 0 to 10,000,000, got {activation_mb}.")
        sizes = np.full(len(sizes), activation_mb * 1e6)
    if (sizes < 0).all():
        raise WhatifError(
            "pipeline: the recording lacks the sizes of the activations between its layers (`whatif collect` "
            "records shapes); say how many megabytes cross a cut, as in pipeline:activation_mb=12."
        )
    # An unknown size is that of the next call's input, or at the end the last known one.
    calls = np.arange(len(sizes))
    known = np.flatnonzero(sizes >= 0)
    source = known[np.minimum(np.searchsorted(known, calls), len(known) - 1)]
    return np.asarray(np.rint(sizes[source] * factor / senders(graph)), dtype=np.int64)


def row_parts(model: Model, begins: Int64, n_rows: int) -> Int64:
    """Return the part of the model of each row of the step's memory, shape (n_rows,)."""
    row_part = np.full(n_rows, -1, dtype=np.int64)
    part = np.searchsorted(begins, np.arange(len(model.part)), side="right") - 1
    known = model.memory_row >= 0
    row_part[model.memory_row[known]] = part[known]
    # Rows without work belong to the part of the row before.
    source = np.maximum.accumulate(np.where(row_part >= 0, np.arange(n_rows), 0))
    return np.maximum(np.maximum.accumulate(row_part[source]), 0)


def with_stage_memory(graph: TaskGraph, planned: Plan, orders: list[list[Pass]], factor: float) -> TaskGraph:
    """Return the graph with the memory of the fullest stage, and a note on all stages; the same if unknown."""
    memory = graph.info.memory
    if memory is None:
        return graph
    row_part = row_parts(planned.model, planned.begins, len(memory.layers))
    stages = len(orders)
    shares = by_stage(planned.shares, stages)
    flights = [most_in_flight(passes) for passes in orders]
    count = len({stage_pass.micro_batch for stage_pass in orders[0]})
    micro = with_batch(memory, factor)
    parameters = by_stage(part_shares(planned.model.parameter_bytes, planned.begins), stages)
    found = stage_memories(
        memory, micro, row_part, flights, count, shares, parameters, factor, recompute=planned.recompute
    )
    sizes_gb = ", ".join(f"{peak(each).total / 1e9:.2f}" for each in found[:16]) + (", …" if stages > 16 else "")
    return with_stages(graph, found).note(
        f"pipeline: the stages need {sizes_gb} GB of memory; `memory` reports stage {fullest(found)[0]}"
    )


def described(graph: TaskGraph, planned: Plan, stages: int) -> str:
    """Return a note on the cuts and the balance of the stages."""
    time_ns = by_stage(planned.time_ns, stages)
    names = [graph.layers[planned.model.layer[begin]] or f"call {begin}" for begin in planned.begins[1:].tolist()]
    cuts = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"cut before {cuts}; the slowest stage takes {time_ns.max() / max(time_ns.mean(), 1e-9):.2f} times the mean"
