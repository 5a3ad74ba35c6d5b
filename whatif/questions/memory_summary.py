"""The answer of ``whatif memory``: the peak and its parts, what-ifs by peak and step time, the largest batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from msgspec import Struct

from whatif.graph.info import GraphInfo
from whatif.graph.memory import (
    Memory,
    Moment,
    fullest,
    moments,
    peak,
)
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Phase
from whatif.ingest.ranks.merge import rank_numbers
from whatif.prediction.baseline import Baseline
from whatif.prediction.peak_fit import fits, high_peak_bytes, peak_range_bytes
from whatif.prediction.transform import load_transform
from whatif.questions.advice.trial import Refused, Trial, Trier
from whatif.questions.what_fits import (
    Asked,
    FewestWorkers,
    LargestBatch,
    fewest_workers,
    largest_batch,
)
from whatif.runtime.errors import WhatifError

# What-ifs that concern memory, each alone; the smaller batch also with as many samples in a step.
DEFAULT_WHAT_IFS: tuple[tuple[str, ...], ...] = (
    ("activation_checkpoint",),
    ("vdnn",),
    ("gist",),
    ("amp",),
    ("flash_attention",),
    ("batch_size:factor=0.5",),
    ("batch_size:factor=0.5", "gradient_accumulation:passes=2"),
    ("batch_size:factor=2",),
    ("optimizer_in_backward",),
    ("fused_adam",),
)
# About this many moments of a timeline are shown for each pass.
SHOWN_MOMENTS = 8


class LayerPart(Struct, frozen=True):
    """One layer's part of the memory, bytes; workspace is the larger one of forward and backward."""

    name: str
    activations: int
    gradients: int
    workspace: int


class MemorySummary(Struct, frozen=True):
    """Everything that ``whatif memory`` reports."""

    baseline: Baseline
    memory: Memory
    peak: Moment
    moments: tuple[Moment, ...]
    layers: tuple[LayerPart, ...]  # largest activations first
    what_ifs: tuple[Trial | Refused, ...]
    memories: tuple[Memory | None, ...]  # under the what-ifs; None if refused
    capacities: tuple[int | None, ...]  # of the devices to which they move the step, bytes; None if unknown
    capacity_bytes: int | None
    largest: LargestBatch | None
    fewest: FewestWorkers | None = None

    @property
    def high_bytes(self) -> int:
        """The upper end of the peak's range, bytes; the lower end is the peak itself."""
        return high_peak_bytes(_of_most(self.baseline.graph)[1], self.peak.total)

    @property
    def fits(self) -> bool | None:
        """Whether the peak and its whole range fit the device; None if unknown, or if the end of the range does not."""
        return fits(self.peak.total, self.high_bytes, self.capacity_bytes)

    @property
    def fits_each(self) -> tuple[bool | None, ...]:
        """The same for the peak under each what-if, with its own range and device."""
        info = _of_most(self.baseline.graph)[1]
        return tuple(
            None if memory is None or memory.not_modelled else
            fits(peak(memory).total, high_peak_bytes(info, peak(memory).total, found.transforms), capacity)
            for found, memory, capacity in zip(self.what_ifs, self.memories, self.capacities, strict=True)
        )  # fmt: skip

    @property
    def measured_bytes(self) -> int | None:
        """The peak that the recorder read from the GPU's allocator, bytes; None if it did not."""
        return _of_most(self.baseline.graph)[1].recorded.peak_memory_bytes

    @property
    def rank_peaks(self) -> tuple[tuple[int, int | None], ...]:
        """The number and the peak of each rank, bytes, the highest first; None if unknown, empty for a single trace."""
        graph = self.baseline.graph
        numbers = rank_numbers(graph) if graph.info.ranks else []
        peaks = ((number, info.peak_bytes) for number, info in zip(numbers, graph.info.ranks, strict=True))
        return tuple(sorted(peaks, key=lambda each: -(each[1] or 0)))

    @property
    def caveats(self) -> tuple[str, ...]:
        """Caveats about the source of the numbers, one sentence each."""
        graph, memory = self.baseline.graph, self.memory
        rank, info = _of_most(graph)
        each = {rank_info.memory for rank_info in graph.info.ranks}
        same = (f"Each of the {len(graph.info.ranks)} ranks needs as much.",) if len(graph.info.ranks) > 1 else ()
        rank_note = (f"The ranks differ: this is rank {rank}, which needs most.",) if len(each) > 1 else same
        if info.recorded.layers:
            return rank_note
        if memory.parameters:
            without = "weights that operators use"
            found = f"the gradients, and {without} without one," if info.gradient_bytes else f"the {without}"
            return (
                *rank_note,
                f"Parameters were not recorded: {found} are taken for them, and "
                f"the state is the default of {info.optimizer or 'an unknown optimizer'}.",
            )
        # Only a GPU's allocator shows memory other than the step's.
        handling = 'they and gradients that stay are in "the rest"' if self.memory.inputs else "they are not counted"
        return (*rank_note, f"The recording lacks its parameters and optimizer state: {handling}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as one JSON object; sizes in bytes, times in ms."""
        info = self.baseline.graph.info
        return {
            "trace": info.path,
            "source": self.memory.source,
            "peak_bytes": self.peak.total,
            "high_bytes": self.high_bytes,
            "measured_peak_bytes": self.measured_bytes,
            "ranks": [{"rank": rank, "peak_bytes": peak_bytes} for rank, peak_bytes in self.rank_peaks],
            "peak": _moment(self.peak),
            "gradients_stay": self.memory.gradients_stay,
            "caveats": list(self.caveats),
            "layers": [
                {
                    "name": part.name,
                    "activation_bytes": part.activations,
                    "gradient_bytes": part.gradients,
                    "workspace_bytes": part.workspace,
                }
                for part in self.layers
            ],
            "timeline": [_moment(moment) for moment in self.moments],
            "baseline_ms": self.baseline.step_ms,
            "step_clock": self.baseline.clock,
            "what_ifs": [
                {**_what_if(found, memory, _of_most(self.baseline.graph)[1]), "capacity_bytes": capacity, "fits": held}
                for found, memory, capacity, held in zip(
                    self.what_ifs, self.memories, self.capacities, self.fits_each, strict=True
                )
            ],
            "batch_size": _of_most(self.baseline.graph)[1].batch_size,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "largest_batch": self.largest.to_dict() if self.largest else None,
            "fewest_workers": self.fewest.to_dict() if self.fewest else None,
        }


def memory_summary(
    baseline: Baseline,
    names: Sequence[str] | None = (),
    *,
    capacity_bytes: int | None = None,
    solve: Asked | None = None,
) -> MemorySummary:
    """Report what a step keeps in memory, what the what-ifs ``names`` change in it, and what fits.

    Without ``names`` the default what-ifs are tried, with None none. Several names are reported each alone, and all
    together in their order. ``capacity_bytes`` is the device's memory, by default that of the recorded GPU, and under
    what-ifs that of the GPU to which they move the step. The largest batch is that under all of ``names`` that apply,
    if they go together. With ``solve`` all have to apply: "batch" asks for the largest batch, "workers" for the fewest
    workers. Raises WhatifError if the recording does not show what a step keeps, or what ``solve`` needs.
    """
    graph = baseline.graph
    memory = memory_of(graph)
    trier = Trier(baseline, may_move=True)
    named = [load_transform(name) for name in names or ()]
    batch = _of_most(graph)[1].batch_size
    if solve:
        _check_solvable(capacity_bytes or trier.capacity_bytes_of(named), batch, solve)
    chosen: list[tuple[str, ...]] = [(name,) for name in names or ()]
    if names and len(names) > 1:
        chosen.append(tuple(names))
    rows = [] if names is None or (solve and not names) else chosen or DEFAULT_WHAT_IFS
    tried = [trier.attempt([load_transform(name) for name in row]) for row in rows]
    applied = named if solve else [
        what_if for what_if, alone in zip(named, tried, strict=False) if isinstance(alone, Trial)
    ]  # fmt: skip
    if not solve and len(applied) > 1 and not isinstance(trier.attempt(applied), Trial):
        applied = []  # alternatives, each reported alone
    largest = fewest = None
    device_bytes = capacity_bytes or trier.capacity_bytes_of(applied)
    if solve == "workers":
        fewest = fewest_workers(trier, named, device_bytes or 0)
    elif device_bytes:
        largest = largest_batch(trier, memory, batch, applied, device_bytes)
    return MemorySummary(
        baseline=baseline,
        memory=memory,
        peak=peak(memory),
        moments=tuple(moments(memory)),
        layers=_layers(memory),
        what_ifs=tuple(tried),
        memories=tuple(found.memory if isinstance(found, Trial) else None for found in tried),
        capacities=tuple(
            capacity_bytes or trier.capacity_bytes_of(found.transforms) if isinstance(found, Trial) else None
            for found in tried
        ),
        capacity_bytes=capacity_bytes or graph.info.gpu_memory_bytes,
        largest=largest,
        fewest=fewest,
    )


def shown_moments(found: Sequence[Moment]) -> list[tuple[str, str, Moment]]:
    """Return the fullest moment of each of several equal parts of every pass, with the part's first and last layer."""
    rows = []
    for _, group in groupby(found, key=lambda moment: moment.phase):
        part = list(group)
        size = -(-len(part) // SHOWN_MOMENTS)
        for begin in range(0, len(part), size):
            piece = part[begin : begin + size]
            rows.append((piece[0].layer, piece[-1].layer, max(piece, key=lambda moment: moment.total)))
    return rows


def _of_most(graph: TaskGraph) -> tuple[int, GraphInfo]:
    """The rank that needs most memory, and the facts of its recording."""
    if not graph.info.ranks:
        return 0, graph.info
    place = fullest([info.memory for info in graph.info.ranks])[0]
    return rank_numbers(graph)[place], graph.info.ranks[place]


def memory_of(graph: TaskGraph) -> Memory:
    """Return what a step keeps in memory; raises WhatifError if the recording lacks it."""
    memory = graph.info.memory
    if memory is not None:
        return memory
    where = Path(graph.info.path).name or "this recording"
    if not (graph.phase == Phase.BACKWARD).any():
        raise WhatifError(
            f"memory: expected training steps, got {where} without a backward pass; only what training keeps for it is "
            "modelled."
        )
    reasons = (
        ("differentiates its gradients again", graph.info.differentiates_gradients),
        ("is compiled", "compiled" in graph.info.execution),
        ("recomputes layers", bool(graph.recomputed.any())),
    )
    why = next((reason for reason, holds in reasons if holds), None)
    if why is not None:
        raise WhatifError(
            f"memory: expected recorded allocations, got {where} without, whose step {why}: the shapes of its "
            "operators show only a part of what it keeps; record it with `whatif collect --memory`, or torch.profiler "
            "with profile_memory=True."
        )
    raise WhatifError(
        f"memory: expected allocations or the shapes of operators, got {where} with neither; record it with "
        "`whatif collect --memory`, or torch.profiler with profile_memory=True or record_shapes=True."
    )


def _check_solvable(capacity_bytes: int | None, batch: int | None, solve: Asked) -> None:
    if capacity_bytes is None:
        raise WhatifError(
            f"memory: --solve {solve}: expected --capacity SIZE, as the recording names no GPU of its own."
        )
    if solve == "batch" and not batch:
        raise WhatifError(
            "memory: --solve batch: expected a recording that knows its batch size, got one that does not; leave "
            "--solve out for a multiple of the recorded batch."
        )


def _layers(memory: Memory) -> tuple[LayerPart, ...]:
    """One row for each layer, largest activations first."""
    found: dict[str, LayerPart] = {}
    for row in memory.layers:
        before = found.get(row.name, LayerPart(row.name, 0, 0, 0))
        found[row.name] = LayerPart(
            row.name,
            before.activations + row.activations,
            before.gradients + row.gradients,
            max(before.workspace, row.forward_workspace, row.backward_workspace),
        )
    return tuple(sorted(found.values(), key=lambda part: -part.activations))


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "phase": moment.phase.name.lower(),
        "layer": moment.layer,
        "total_bytes": moment.total,
        "parameter_bytes": moment.parameters,
        "optimizer_state_bytes": moment.optimizer_state,
        "input_bytes": moment.inputs,
        "gradient_bytes": moment.gradients,
        "activation_bytes": moment.activations,
        "workspace_bytes": moment.workspace,
    }


def _what_if(found: Trial | Refused, memory: Memory | None, recorded: GraphInfo) -> dict[str, Any]:
    row: dict[str, Any] = {"transforms": list(found.spelled)}
    if isinstance(found, Refused):
        return {**row, "reason": found.reason}
    most = peak(memory) if memory else None
    ends: tuple[int | None, int | None] = (None, None)
    if most and memory and not memory.not_modelled:
        low_bytes, _ = peak_range_bytes(most.total, found.transforms)
        ends = low_bytes, high_peak_bytes(recorded, most.total, found.transforms)
    return {
        **row,
        "peak_bytes": found.peak_bytes,
        "low_bytes": ends[0],
        "high_bytes": ends[1],
        "peak": _moment(most) if most else None,
        "memory_not_modelled": list(memory.not_modelled) if memory else [],
        "step_ms": found.predicted_ms,
        "batch_factor": found.samples,
        "gain_pct": found.gain_pct,
        "notes": list(found.notes),
    }
