"""The memory of a recorded step: from its allocations, else from the shapes of its operators."""

from __future__ import annotations

import numpy as np

from whatif.graph.info import GraphInfo
from whatif.graph.memory import Memory, recomputed, update_workspace
from whatif.graph.recorded import Optimizer
from whatif.graph.types import Int64
from whatif.ingest.allocation_memory import first_of_name, memory_of_allocations
from whatif.ingest.build import Parts
from whatif.ingest.events import EventCategory
from whatif.ingest.gradient_sizes import gradients_of_rows
from whatif.ingest.grouped import rows_named
from whatif.ingest.nest import outermost
from whatif.ingest.resident import Resident, resident, state_of
from whatif.ingest.shape_memory import RowShapes, as_layers, shapes_of_rows
from whatif.ingest.step_rows import StepRows

# Fewer tensors set to zero before the backward pass may be the user's, not gradients.
FEWEST_PARAMETERS = 8


def find_memory(parts: Parts, info: GraphInfo, rows: StepRows | None) -> Memory | None:
    """Return the memory of a steady step, divided into its ``rows``.

    None if a recording has neither allocations nor shapes, or no backward pass.
    """
    if rows is None or not len(rows.forward):
        return None
    static = resident(info.recorded)
    # The operators of a compiled step show only an unknown part of what it keeps, and those of a forward pass nothing
    # of what a backward pass keeps, if its gradients are differentiated again or its layers recomputed with no graph.
    labeller = parts.labeller
    unknown = "compiled" in info.execution or labeller.differentiates_gradients or labeller.recomputes_unbuilt
    shapes = None if unknown else shapes_of_rows(parts.events, rows, static)
    gradients = _gradients(parts, rows, shapes, static, info)
    if not info.recorded.layers:
        static = _from_shapes(rows, shapes, gradients, info)
    memory = memory_of_allocations(parts.events, rows, static)
    if memory is None:
        return _memory_of_shapes(parts, rows, shapes, gradients, static, info) if shapes else None
    if shapes:
        layers = [
            layer._replace(
                input=row.input,
                weights=row.weights,
                copied=row.copied,
                full_precision=min(row.full_precision, layer.activations),
                scores=min(row.scores, layer.activations),
            )
            for layer, row in zip(memory.layers, shapes, strict=True)
        ]
        memory = memory.with_layers(layers)
    return memory


def _zeroed_in_place(parts: Parts, rows: StepRows) -> bool:
    """Whether gradients are set to zero and not to None: one operator for each parameter, or one for all."""
    events = parts.events
    names = events.name[rows.forward[outermost(events.end_ns[rows.forward])]]
    each, all_at_once = (
        np.isin(names, [code for code, name in enumerate(events.names) if name == zero])
        for zero in ("aten::zero_", "aten::_foreach_zero_")
    )
    return bool(all_at_once.any() or each.sum() >= FEWEST_PARAMETERS)


def _zeroed_after_forward(parts: Parts, rows: StepRows) -> bool:
    """Whether gradients are set to None between the passes alone: those of the step before exist in the forward pass.

    Code that loads a batch may look like the begin of the forward pass: nine tenths of it have to come before.
    """
    events = parts.events
    zeroes = np.array([name.startswith("Optimizer.zero_grad#") for name in events.names], dtype=np.bool_)
    start_ns = events.start_ns[rows_named(events, EventCategory.ANNOTATION, zeroes)]
    start_ns = start_ns[(start_ns >= rows.begin_ns) & (start_ns < rows.end_ns)]
    from_ns = events.start_ns[rows.forward[9 * len(rows.forward) // 10]]
    return bool(len(start_ns) and (start_ns > from_ns).all() and (start_ns < rows.backward_ns).all())


def _gradients(
    parts: Parts, rows: StepRows, shapes: list[RowShapes] | None, static: Resident, info: GraphInfo
) -> Int64:
    """The gradients of each row, bytes, (n_rows,): of its recorded layer, else those that autograd completes.

    If it does not show them, those of all weights that the operators use.
    """
    if info.recorded.layers:
        return first_of_name(rows.names, static.gradients)
    found = gradients_of_rows(parts.events, rows)
    return _used(rows, shapes) if found is None else found


def _used(rows: StepRows, shapes: list[RowShapes] | None) -> Int64:
    """The weights and tables that the operators of each row use, bytes, (n_rows,); a shared one counts at each use."""
    used = [row.weights + row.tables for row in shapes] if shapes else [0] * len(rows.names)
    return np.array(used, dtype=np.int64)


def _from_shapes(rows: StepRows, shapes: list[RowShapes] | None, gradients: Int64, info: GraphInfo) -> Resident:
    """Parameters if no recorder wrote them: those with gradients, and weights that operators use without."""
    of_names: dict[str, int] = {}
    for name, size in zip(rows.names, gradients.tolist(), strict=True):
        of_names[name] = of_names.get(name, 0) + size
    used = _used(rows, shapes)
    # The gradient of weights that are also an embedding's table is complete at the embedding.
    tables = [row.tables for row, size in zip(shapes or [], gradients.tolist(), strict=False) if size and row.tables]
    used[(gradients == 0) & np.isin(used, tables)] = 0
    total = int(np.maximum(gradients, used).sum())
    return Resident(total, state_of(info.optimizer, int(gradients.sum())), 0, 0, of_names, frozenset())


def _memory_of_shapes(
    parts: Parts, rows: StepRows, shapes: list[RowShapes], gradients: Int64, static: Resident, info: GraphInfo
) -> Memory:
    flags = info.recorded.optimizer or Optimizer()
    foreach = flags.foreach
    kind = "fused" if flags.fused else "foreach" if foreach or (foreach is None and info.gpu) else "for_loop"
    memory = Memory(
        parameters=static.parameters,
        optimizer_state=static.optimizer_state,
        inputs=static.inputs + static.buffers,
        buffers=static.buffers,
        layers=as_layers(rows, shapes, gradients),
        update_workspace=update_workspace(
            info.optimizer or str(flags.type), kind, static.parameters, int(max(static.sizes, default=0))
        ),
        gradients_stay=rows.passes > 1 or _zeroed_in_place(parts, rows),
        gradients_in_forward=_zeroed_after_forward(parts, rows),
        source="shapes",
    )
    # A run that begins within the one before is part of it: one segment was recomputed twice.
    runs: list[tuple[int, int]] = []
    for first, last in rows.recomputed_runs:
        if not runs or first >= runs[-1][1]:
            runs.append((first, last + 1))
    return recomputed(memory, runs)
