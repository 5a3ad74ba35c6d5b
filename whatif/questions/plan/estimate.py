"""Estimate the step of a plan from pieces: the work of one device by layer, messages between stages, exchanges.

Thousands of plans share few pieces: one graph for each way of splitting blocks and recomputing, and the passes of a
pipeline's stages, which are simulated. Source of the volumes sent: Rajbhandari et al., SC 2020, section 7. The best
plans are simulated as what-ifs by ``search``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import Struct, structs

from whatif.graph.edit import renumbered, with_rows
from whatif.graph.memory import Memory, peak
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Float64, Int64
from whatif.hardware.cluster.network import Network
from whatif.models import accumulated, with_batch
from whatif.models.durations.estimator import shortest_kernel_ns
from whatif.models.exchange import gloo
from whatif.models.exchange.buckets import step_gradients
from whatif.models.exchange.network_options import network_of
from whatif.models.exchange.stragglers import slowest_factor
from whatif.models.layers.added_gradients import adding_ns, summed_gradients
from whatif.models.layers.update_tasks import step_kernels
from whatif.models.parallel.passes import passes
from whatif.models.parallel.pipeline import stage_updates, steady_step_ns
from whatif.models.parallel.pipeline_memory import stage_memories
from whatif.models.parallel.pipeline_plan import Plan as Cut
from whatif.models.parallel.pipeline_plan import (
    by_stage,
    crossing_bytes,
    part_bytes,
    part_shares,
    planned_at,
    row_parts,
)
from whatif.models.parallel.pipeline_schedule import in_flight_at_most
from whatif.models.parallel.sharded_memory import with_sharded_gradients, with_sharded_parameters, with_sharded_state
from whatif.models.parallel.sharded_units import units_of
from whatif.models.parallel.sharding import nodes_of, units_in_memory
from whatif.models.parallel.stage_work import Pieces, StepWork, at_micro_batch, one_step, with_added
from whatif.models.parallel.stages import Model, balanced, model_of
from whatif.prediction.baseline import Baseline
from whatif.prediction.peak_fit import fits
from whatif.questions.plan.exchange import BUCKET_BYTES, Exchanged, Exchanges
from whatif.questions.plan.space import DDP, FSDP, HYBRID, ZERO_1, Plan
from whatif.runtime.errors import WhatifError
from whatif.simulation.steps import steady

# Passes of all stages together up to which a pipeline's step is estimated without extrapolation.
_PASSES = 512


class Parts(NamedTuple):
    """The parts of a step, ms: work of the slowest stage, its sums of activations, bubble, exposed exchange, update."""

    work_ms: float
    sums_ms: float
    bubble_ms: float
    exchange_ms: float
    update_ms: float

    @property
    def step_ms(self) -> float:
        """The sum of all parts."""
        return sum(self)


class Estimate(Struct, frozen=True):
    """A plan, the parts of its step, and the peak memory of its fullest device; None if memory is not recorded."""

    plan: Plan
    parts: Parts
    peak_bytes: int | None


class _Sides(NamedTuple):
    """CPU time, GPU time and sums of activations, ns; each an array over calls or parts, or a number."""

    cpu: Float64
    gpu: Float64
    sums: Float64

    @staticmethod
    def of(pieces: Pieces) -> _Sides:
        return _Sides(pieces.cpu_ns[0], pieces.gpu_ns[0], pieces.sum_ns[0])

    def plus(self, other: _Sides) -> _Sides:
        return _Sides(*(side + more for side, more in zip(self, other, strict=True)))

    def times(self, factor: float | Float64) -> _Sides:
        return _Sides(*(side * factor for side in self))

    def by(self, begins: Int64) -> _Sides:
        return _Sides(*(np.add.reduceat(side, begins) for side in self))

    def of_stages(self, stages: int) -> _Sides:
        return _Sides(*(by_stage(side, stages) for side in self))

    @property
    def busy(self) -> Float64:
        # The CPU runs ahead of the GPU, which waits for each sum.
        return np.maximum(self.cpu, self.gpu + self.sums)


class _Pass(NamedTuple):
    """The calls of one micro-batch, and the work that is done once a step."""

    forward: _Sides
    backward: _Sides
    batch: _Sides
    update: _Sides


def median_step(baseline: Baseline) -> TaskGraph:
    """Return the graph of the steady step that is closest to the median, from which the pieces are taken.

    Of a recording whose steps cannot be timed: of the middle step.
    """
    graph, clock = baseline.graph, baseline.clock
    steps = np.unique(graph.step[graph.step >= 0])
    if len(steps) < 2:
        return graph
    chosen = len(steps) // 2
    times_ns = np.array(baseline.timeline.step_times_ns(clock))
    before = len(steps) - len(times_ns)  # the clock of the GPU has no time of the first step
    if clock != "span" and before in (0, 1):
        places = np.array(steady(tuple(range(len(times_ns))), graph, clock))
        chosen = before + int(places[np.abs(times_ns[places] - baseline.step_ns).argmin()])
    rows = np.flatnonzero(graph.step == steps[chosen])
    new_id = np.full(len(graph), -1, dtype=np.int32)
    new_id[rows] = np.arange(len(rows), dtype=np.int32)
    kept = renumbered(graph.dependencies, new_id)
    return with_rows(graph, rows, kept.take((kept.source >= 0) & (kept.target >= 0)), new_id)


class Composer:
    """Estimates plans that share one graph, with its split and recomputation of blocks; everything else may vary."""

    def __init__(self, graph: TaskGraph, cluster: str) -> None:
        """Split the steps into pieces; raises WhatifError if they have no forward and backward pass."""
        self.graph, self.cluster = graph, cluster
        self.batch = graph.info.batch_size or 1
        self.model: Model = model_of(self.graph)
        found = step_gradients(graph, None, "plan")
        self.gradients = np.asarray(found.size_bytes[found.step == found.step.min()], dtype=np.int64)
        self._exchanges = Exchanges(graph, found)
        summed = summed_gradients(graph)
        work_ns, launch_ns = map(float, adding_ns(graph, *summed) if summed is not None else (0.0, 0.0))
        sides = (launch_ns, work_ns) if graph.has_gpu else (work_ns, 0.0)
        self.added = _Sides(*map(np.asarray, (*sides, 0.0)))  # adding the gradients of one more pass
        self._micro: dict[int, Memory] = {}
        self._passes: dict[int, _Pass] = {}
        self._at_micro: dict[int, StepWork] = {}
        self._parts: dict[tuple[int, bytes], Cut] = {}
        self._stages: dict[tuple[int, int, int, bytes], list[Memory]] = {}
        update_ns = graph.duration_ns[step_kernels(graph)]
        self._start_up = float(np.minimum(update_ns, shortest_kernel_ns(graph)).sum() / max(update_ns.sum(), 1))
        self._slowest: dict[int, float] = {}
        self._cuts: dict[tuple[int, int, bytes], Int64] = {}
        self._networks: dict[tuple[str, int, int], Network | None] = {}
        self._units: tuple[dict[str, int], dict[int, int]] | None = None

    @property
    def most_stages(self) -> int:
        """The number of parts into which the model can be cut."""
        return self.model.n_parts

    def estimates(self, plans: Iterator[Plan], memory_bytes: int | None) -> Iterator[Estimate]:
        """Yield estimates of the plans that are possible and fit the memory, the shortest step first."""
        found = []
        for plan in plans:
            with suppress(WhatifError):  # the cluster has no such groups
                found.append((self.parts(plan), plan))
        # A peak takes longer to compute than a step, and most are never needed.
        for parts, plan in sorted(found, key=lambda entry: entry[0].step_ms):
            peak_bytes = self.peak_bytes(plan)
            if fits(peak_bytes, None, memory_bytes) is not False:
                yield Estimate(plan, parts, peak_bytes)

    def parts(self, plan: Plan) -> Parts:
        """Return the parts of a plan's step. Raises WhatifError if the cluster has no such groups."""
        found = self._pipeline(plan) if plan.pipeline > 1 else self._alone(plan)
        if plan.data == 1:
            return found
        # Copies wait for the slowest of all devices.
        work, sums, bubble, exchange, update = found
        slower = self._slower(plan.devices)
        return Parts(work * slower, sums * slower, bubble * slower, exchange, update * slower)

    def _shared_update(self, workers: int) -> float:
        """The share of the update that each of ``workers`` runs: its kernels' start-up, and a part of the rest."""
        return self._start_up + (1 - self._start_up) / workers

    def _slower(self, devices: int) -> float:
        if devices not in self._slowest:
            self._slowest[devices] = slowest_factor(self.graph, devices)
        return self._slowest[devices]

    def peak_bytes(self, plan: Plan) -> int | None:
        """Return the peak of the fullest device, bytes; None if the recording lacks memory."""
        memory = self.graph.info.memory
        if memory is None:
            return None
        if plan.pipeline == 1:
            return peak(self._sharded(self._alone_memory(memory, plan), int(self.gradients.sum()), plan)).total
        begins = self._begins(plan)
        size_bytes = by_stage(part_bytes(self.model.gradient_bytes, begins), plan.pipeline).astype(np.int64).tolist()
        stages = zip(self._stage_memories(memory, plan, begins), size_bytes, strict=True)
        return max(peak(self._sharded(*stage, plan)).total for stage in stages)

    def _stage_memories(self, memory: Memory, plan: Plan, begins: Int64) -> list[Memory]:
        key = (plan.micro_batch, plan.passes, plan.chunks, begins.tobytes())  # copies may share state and gradients
        if key not in self._stages:
            shares, parameters = (
                by_stage(part_shares(sizes, begins), plan.pipeline)
                for sizes in (self.model.gradient_bytes, self.model.parameter_bytes)
            )
            flights = [
                in_flight_at_most(plan.order, stage, plan.pipeline, plan.passes, plan.chunks)
                for stage in range(plan.pipeline)
            ]
            self._stages[key] = stage_memories(
                memory, self._at(memory, plan), row_parts(self.model, begins, len(memory.layers)), flights, plan.passes,
                shares, parameters, plan.micro_batch / self.batch, recompute=False,
            )  # fmt: skip
        return self._stages[key]

    def _alone_memory(self, memory: Memory, plan: Plan) -> Memory:
        changed = self._at(memory, plan)
        return accumulated(changed) if plan.passes > 1 else changed

    def _at(self, memory: Memory, plan: Plan) -> Memory:
        if plan.micro_batch not in self._micro:
            self._micro[plan.micro_batch] = with_batch(memory, plan.micro_batch / self.batch)
        return self._micro[plan.micro_batch]

    def _sharded(self, memory: Memory, bucket_bytes: int, plan: Plan) -> Memory:
        if plan.data == 1:
            return memory
        if plan.level == DDP:
            return replace(memory, inputs=memory.inputs + bucket_bytes)
        if plan.level == ZERO_1:
            return with_sharded_state(memory, plan.data)
        if plan.level not in (FSDP, HYBRID):
            return with_sharded_gradients(memory, plan.data, BUCKET_BYTES)
        unit_of, sizes = self._of_units()
        return with_sharded_parameters(memory, self._sharers(plan), unit_of, sizes, limit=2, resharded=True, share=1.0)

    def _sharers(self, plan: Plan) -> int:
        """The number of copies among which the state is sharded: all of them, or those of one node."""
        if plan.level != HYBRID:
            return plan.data
        return nodes_of(self._network("fsdp", plan.data), "fsdp")[0].workers

    def _of_units(self) -> tuple[dict[str, int], dict[int, int]]:
        if self._units is None:
            graph = self.graph
            gradients = step_gradients(graph, None, "fsdp")
            self._units = units_in_memory(graph, units_of(graph, "fsdp", gradients, passes(graph), None, None))
        return self._units

    def _pass(self, plan: Plan) -> _Pass:
        found = self._passes.get(plan.micro_batch)
        if found is None:
            work = one_step(self._work(plan).of_parts(self.model.position, len(self.model.part)))
            found = _Pass(*map(_Sides.of, (work.forward, work.backward, work.batch, work.update)))
            self._passes[plan.micro_batch] = found
        return found

    def _work(self, plan: Plan) -> StepWork:
        if plan.micro_batch not in self._at_micro:
            self._at_micro[plan.micro_batch] = at_micro_batch(self.graph, self.model, plan.micro_batch / self.batch)
        return self._at_micro[plan.micro_batch]

    def _network(self, name: str, workers: int, neighbours: int = 1) -> Network:
        key = (name, workers, neighbours)
        if key not in self._networks:
            try:
                self._networks[key] = network_of(
                    self.graph, name, workers=workers, cluster=self.cluster, neighbours=neighbours
                )
            except WhatifError:
                self._networks[key] = None
        found = self._networks[key]
        if found is None:
            raise WhatifError(f"{self.cluster} has no groups of {workers} devices; take a number that fills nodes.")
        return found

    def _crossing(self, plan: Plan) -> Int64:
        return crossing_bytes(self.graph, self.model, plan.micro_batch / self.batch, None)

    def _begins(self, plan: Plan) -> Int64:
        """The first call of each part: parts as even as possible, by the busier side and the messages."""
        n_parts = plan.pipeline * plan.chunks
        message = self._network("pipeline", plan.pipeline, plan.data).cost("send", self._crossing(plan)).total_ns
        key = (plan.micro_batch, n_parts, message.tobytes())  # more stages may span more nodes
        if key not in self._cuts:
            calls = self._pass(plan)
            both = calls.forward.plus(calls.backward)
            sides = [both.cpu + both.sums, both.gpu + both.sums]
            self._cuts[key] = np.append(0, balanced(sides, self.model.part, n_parts, message))
        return self._cuts[key]

    def _alone(self, plan: Plan) -> Parts:
        calls = self._pass(plan)
        both = calls.forward.plus(calls.backward)
        totals = _Sides(*(np.asarray(side.sum()) for side in both))
        copies = totals.times(plan.passes).plus(self.added.times(plan.passes - 1))
        share = self._shared_update(self._sharers(plan)) if plan.level != DDP else 1.0
        update = _Sides(*(np.asarray(side.sum()) for side in calls.update))
        work = copies.plus(_Sides(*(np.asarray(side.sum()) for side in calls.batch)))
        cpu, gpu, exchange = self._exchange_alone(plan, calls) if plan.data > 1 else (0.0, 0.0, 0.0)
        work = work._replace(cpu=work.cpu + cpu, gpu=work.gpu + gpu)
        # On a CPU the update is the CPU's work.
        cpu_share, gpu_share = (1.0, share) if self.graph.has_gpu else (share, 1.0)
        step = work.plus(_Sides(update.cpu * cpu_share, update.gpu * gpu_share, update.sums))
        busy = float(step.busy)
        update_ns = busy - float(work.busy)
        sums = float(work.busy - np.maximum(work.cpu, work.gpu))
        return Parts(*(ns / 1e6 for ns in (busy - update_ns - sums, sums, 0.0, exchange, update_ns)))

    def _exchange_alone(self, plan: Plan, calls: _Pass) -> Exchanged:
        name = "fsdp" if plan.level in (FSDP, HYBRID) else "zero" if plan.level else "distributed"
        network = self._network(name, plan.data)
        forward_ns, backward_ns = (float(side.busy.sum()) for side in (calls.forward, calls.backward))
        # DDP and ZeRO-1 exchange gradients in the last pass alone.
        if plan.level == DDP:
            return self._exchanges.replicated(network, backward_ns)
        if plan.level not in (FSDP, HYBRID):
            return self._exchanges.sharded_state(network, backward_ns, 1 if plan.level == ZERO_1 else plan.passes)
        sizes = self._of_units()[1]
        units = [size for unit, size in sizes.items() if unit >= 0]
        within, across = nodes_of(network, name) if plan.level == HYBRID else (network, None)
        found = self._exchanges.all_sharded(within, units, sizes.get(-1, 0), forward_ns, backward_ns, across)
        return Exchanged(*(plan.passes * part for part in found))

    def _pipeline(self, plan: Plan) -> Parts:
        calls, begins = self._pass(plan), self._begins(plan)
        stages, count, cut = plan.pipeline, plan.passes, self._cut(plan, begins)
        network = self._network("pipeline", stages, plan.data)
        exchange = self._exchange_of_stages(plan, cut.stage_gradients(stages))
        update = stage_updates(cut, cut.work, stages)
        if plan.level:
            update = update._replace(gpu_ns=update.gpu_ns / plan.data)
        # A stage runs nothing during its exchange, so that update and exchange are one piece.
        side = "gpu_ns" if self.graph.has_gpu else "cpu_ns"
        ending = update._replace(**{side: getattr(update, side) + exchange})

        def step_ns(passes: int) -> int:
            return steady_step_ns(self.graph, cut, plan.order, stages, passes, plan.chunks, network, ending)

        few, more = steady_passes(stages, _PASSES)
        step = float(step_ns(min(count, few if count > more else count)))
        if count > more:
            step += (count - few) * (step_ns(more) - step) / (more - few)
        # A part of a stage is done while the CPU or the GPU still works on another one.
        shares = by_stage(cut.shares, stages)
        pass_work = calls.forward.plus(calls.backward).by(begins).of_stages(stages)
        per_stage = pass_work.times(count).plus(self.added.times(shares * (count - 1))).plus(calls.batch)
        ended = per_stage.plus(_Sides(update.cpu_ns[0], update.gpu_ns[0], update.sum_ns[0]))
        step = max(step, float(ended.busy.max()))
        # All parts are those of the slowest stage: the rest of its step is waiting for others.
        slowest = int(per_stage.busy.argmax())
        busy, until = float(per_stage.busy[slowest]), float(ended.busy[slowest])
        sums = busy - float(np.maximum(per_stage.cpu, per_stage.gpu)[slowest])
        exposed = min(float(exchange[slowest]), step - until)
        parts_ns = busy - sums, sums, step - until - exposed, exposed, until - busy
        return Parts(*(float(ns) / 1e6 for ns in parts_ns))

    def _exchange_of_stages(self, plan: Plan, stage_bytes: Int64) -> Float64:
        """The time in which each stage exchanges its gradients with the same stage of the other copies, ns."""
        if plan.data == 1:
            return np.zeros(plan.pipeline)
        among = self._network("zero" if plan.level else "distributed", plan.data)
        operations = ("reduce_scatter", "all_gather") if plan.level else ("all_reduce",)
        costs = [gloo.sent(self.graph, among, name, stage_bytes).cost.total_ns for name in operations]
        return np.asarray(np.sum(costs, axis=0), dtype=np.float64)

    def _cut(self, plan: Plan, begins: Int64) -> Cut:
        """The work of the parts, with the adding of gradients, as ``pipeline`` cuts them."""
        key = (plan.micro_batch, begins.tobytes())
        if key not in self._parts:
            cut = planned_at(begins[1:], self._work(plan), self._crossing(plan), 1, recompute=False)
            self._parts[key] = structs.replace(cut, work=one_step(cut.work))
        cut = self._parts[key]
        work = with_added(cut.work, cut.shares, plan.passes) if plan.passes > 1 else cut.work
        cpu, gpu, _ = self.added.times(plan.passes - 1)
        added = work.added.times(0.0)._replace(cpu_ns=cpu.reshape(1, 1), gpu_ns=gpu.reshape(1, 1))
        return structs.replace(cut, work=with_added(structs.replace(work, added=added), cut.shares, plan.passes))


def steady_passes(stages: int, simulated: int) -> tuple[int, int]:
    """Return two numbers of passes of a pipeline between which, and beyond, each one more adds the same time.

    With few passes a step may end with another thread than with many, of which each adds more. So the larger number is
    as large as ``simulated``, the passes of all stages together, allows, and at least four for each stage.
    """
    rounds = max(4, simulated // stages**2)  # an interleaved order needs a multiple of the stages
    return 3 * rounds // 4 * stages, rounds * stages
