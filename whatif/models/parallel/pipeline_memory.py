"""The memory of each stage of a pipeline: its layers, for all micro-batches in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from whatif.graph.memory import LayerMemory, Memory, recomputed
from whatif.graph.types import Int64
from whatif.models.layers.memory_effects import runs_of, with_share


def stage_memories(
    memory: Memory,
    micro: Memory,
    part_of_row: Int64,
    in_flight: Sequence[Mapping[int, int]],
    count: int,
    shares: npt.NDArray[np.float64],
    parameter_shares: npt.NDArray[np.float64],
    factor: float,
    *,
    recompute: bool,
) -> list[Memory]:
    """Return the memory of each stage, whose parts of the model keep activations between their passes.

    ``in_flight`` gives each stage's number of micro-batches for each of its parts, of ``count`` per step;
    ``part_of_row`` (n_rows,) is the part of each row of ``memory.layers``, ascending; ``shares`` (n_stages,) are those
    of the gradients, ``parameter_shares`` of all parameters, also of frozen ones. ``micro`` is the memory at a
    micro-batch of ``factor`` times the recorded batch; the first stage has the inputs of all. ``recompute``: a part
    keeps only the input of each micro-batch and recomputes the rest (GPipe, §2.3).
    """
    if recompute:
        micro = recomputed(micro, [(first, end) for first, end, _ in runs_of(part_of_row)])
    n_parts = max(part for flight in in_flight for part in flight) + 1
    first_row = np.searchsorted(part_of_row, np.arange(n_parts + 1)).tolist()
    found = []
    batches = memory.inputs - memory.buffers
    for stage, flight in enumerate(in_flight):
        share = float(shares[stage])
        rows = [
            _kept(row, times)
            for part, times in sorted(flight.items())
            for row in micro.layers[first_row[part] : first_row[part + 1]]
        ]
        found.append(
            replace(
                with_share(memory, share),
                parameters=round(memory.parameters * float(parameter_shares[stage])),
                buffers=round(memory.buffers * share),
                inputs=round(memory.buffers * share) + (round(batches * factor * count) if stage == 0 else 0),
                gradients_stay=memory.gradients_stay or count > 1,
            ).with_layers(rows)
        )
    return found


def _kept(row: LayerMemory, times: int) -> LayerMemory:
    """A layer that keeps the activations of ``times`` micro-batches and works on one at a time."""
    return row._replace(
        activations=row.activations * times, kept_input=row.kept_input * times,
        full_precision=row.full_precision * times, scores=row.scores * times,
    )  # fmt: skip
