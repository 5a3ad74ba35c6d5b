"""NVTX ranges of a Nsight Systems report as operators, marks and layers.

Ranges that are nested in a training step and are neither operators nor marks are layers, named by their path: a range
"block2" inside "encoder" is the layer "encoder.block2". Ranges around whole phases ("forward") are no part of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.columns import one_table
from whatif.graph.order import each_once
from whatif.graph.types import Array, Bool, Int64
from whatif.ingest.events import MISSING, EventCategory
from whatif.ingest.kineto_fields import LAYER_ANNOTATION
from whatif.ingest.nsys_database import ABSENT, Database
from whatif.ingest.nsys_names import RangeKind, RangeText, is_backward, is_profiler_step, read_text, without_number
from whatif.ingest.nsys_tables import Block, process_of, timed
from whatif.simulation.intervals import interval_of, union

RANGES = "NVTX_EVENTS"
# ENUM_NSYS_EVENT_TYPE: ranges of one thread, which nest, and ranges that may end on another thread.
_PUSH_POP, _START_END = 59, 60
# Libraries (NCCL, cuDNN, cuBLAS) write their ranges into domains of their own.
_DEFAULT_DOMAIN = 0
# Ranges with the name of a step are steps if they cover this share of the time from the first to the last of them;
# else they are something inside a step, such as the optimizer's.
STEP_SHARE = 0.5
# From this many steps on, a range in only one of them is no layer ("epoch 3", "step 17 of 100").
_TELLING_STEPS = 3


class _Ranges(Struct, frozen=True):
    """The ranges of one process, sorted by (start, -end); arrays and lists of shape (n_ranges,)."""

    start_ns: Int64
    end_ns: Int64
    thread: Int64
    nests: Bool
    texts: list[RangeText]
    kind: Array

    def of(self, kind: RangeKind) -> Int64:
        return np.flatnonzero(self.kind == kind)


def read_ranges(
    database: Database, dropped: Counter[str], choose: Callable[[Int64], Bool]
) -> tuple[Block, Block, list[tuple[Any, Any, Any]]]:
    """Return operators, annotations, and the table that the operators' column ``shape`` points into.

    ``choose`` returns the mask of the ranges to read, given the process of each.
    """
    ranges = _sorted_ranges(database, dropped, choose)
    names = [text.name for text in ranges.texts]
    edges = _name_steps(ranges, names)
    _name_marks(ranges, names)
    _name_layers(ranges, names, *edges)
    operators = ranges.kind == RangeKind.OPERATOR
    shapes: dict[str, int] = {}
    table: list[tuple[Any, Any, Any]] = []
    sequence = np.array([text.sequence for text in ranges.texts], dtype=np.int64)
    shape = np.full(len(names), MISSING, dtype=np.int32)
    for row in np.flatnonzero(operators).tolist():
        dims = ranges.texts[row].dims
        if dims is not None:
            shape[row] = shapes.setdefault(repr(dims), len(table))
            if shape[row] == len(table):
                table.append((dims, None, None))
    distinct, (name,) = one_table([names])
    block = Block(
        EventCategory.ANNOTATION, ranges.start_ns, ranges.end_ns - ranges.start_ns, list(distinct), name,
        process_of(ranges.thread), ranges.thread, {"sequence": sequence, "shape": shape},
    )  # fmt: skip
    found = replace(block.take(operators), category=EventCategory.CPU_OP)
    return found, block.take(~operators), table


def _sorted_ranges(database: Database, dropped: Counter[str], choose: Callable[[Int64], Bool]) -> _Ranges:
    rows = database.integers(RANGES, ("start", "end", "eventType", "globalTid", "endGlobalTid", "domainId", "textId"))
    inline_texts = database.texts(RANGES, "text") or [None] * len(rows["start"])
    n = min(len(inline_texts), len(rows["start"]))
    rows = {name: column[:n] for name, column in rows.items()} | {"row": np.arange(n)}
    rows = {name: column[_usable(rows)] for name, column in rows.items()}
    chosen = choose(process_of(rows["globalTid"]))
    rows = timed({name: column[chosen] for name, column in rows.items()}, dropped)
    order = np.lexsort((-rows["end"], rows["start"]))
    rows = {name: column[order] for name, column in rows.items()}
    registered = database.strings(rows["textId"])
    read: dict[str, RangeText] = {}
    texts = []
    for row, key in zip(rows["row"].tolist(), rows["textId"].tolist(), strict=True):
        text = inline_texts[row] or registered.get(key, "")
        if text not in read:
            read[text] = read_text(text)
        texts.append(read[text])
    return _Ranges(
        rows["start"], rows["end"], rows["globalTid"], rows["eventType"] == _PUSH_POP, texts,
        np.array([text.kind for text in texts], dtype=np.int8),
    )  # fmt: skip


def _usable(rows: dict[str, Int64]) -> Bool:
    """Mask of the ranges of the default domain that end on the thread on which they began."""
    is_range = (rows["eventType"] == _PUSH_POP) | (rows["eventType"] == _START_END)
    foreign = (rows["domainId"] != ABSENT) & (rows["domainId"] != _DEFAULT_DOMAIN)
    moved = (rows["endGlobalTid"] > 0) & (rows["endGlobalTid"] != rows["globalTid"])
    kept: Bool = is_range & ~foreign & ~moved
    return kept


def _name_steps(ranges: _Ranges, names: list[str]) -> tuple[Int64, Int64]:
    """Give the steps the profiler's name for them, in place; return their starts and ends.

    torch.profiler's own marks take precedence. Of the user's ranges the outermost count, if they cover enough time.
    """
    marked = [row for row in ranges.of(RangeKind.MARK).tolist() if is_profiler_step(names[row])]
    if marked:
        return ranges.start_ns[marked], ranges.end_ns[marked]
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for row in ranges.of(RangeKind.STEP).tolist():
        groups[int(ranges.thread[row]), without_number(names[row])].append(row)
    by_thread: dict[int, list[int]] = defaultdict(list)
    for (thread, _), rows in groups.items():
        if _share(ranges, rows) >= STEP_SHARE:
            by_thread[thread] += rows
    candidates: list[list[int]] = [*by_thread.values(), []]
    longest = max(candidates, key=lambda rows: _covered_ns(ranges, rows))
    outermost: list[int] = []
    for row in sorted(longest):
        if not outermost or ranges.start_ns[row] >= ranges.end_ns[outermost[-1]]:
            names[row] = f"ProfilerStep#{len(outermost)}"
            outermost.append(row)
    return ranges.start_ns[outermost], ranges.end_ns[outermost]


def _share(ranges: _Ranges, rows: list[int]) -> float:
    span_ns = int(ranges.end_ns[rows].max() - ranges.start_ns[rows].min())
    return _covered_ns(ranges, rows) / max(span_ns, 1)


def _covered_ns(ranges: _Ranges, rows: list[int]) -> int:
    return int((ranges.end_ns[rows] - ranges.start_ns[rows]).sum())


def _name_marks(ranges: _Ranges, names: list[str]) -> None:
    """Give updates and data loading PyTorch's names for them, in place."""
    # PyTorch's own mark gives the optimizer's class as well, so no other is added to it.
    if not any(names[row].startswith("Optimizer.step#") for row in ranges.of(RangeKind.MARK).tolist()):
        for row in ranges.of(RangeKind.UPDATE).tolist():
            names[row] = "Optimizer.step#"
    for row in ranges.of(RangeKind.ZERO_GRAD).tolist():
        names[row] = "Optimizer.zero_grad#"
    for row in ranges.of(RangeKind.LOADING).tolist():
        names[row] = f"enumerate(DataLoader)#{names[row]}"


def _name_layers(ranges: _Ranges, names: list[str], starts_ns: Int64, ends_ns: Int64) -> None:
    """Give the ranges that are layers our own name for layers, in place."""
    rows = np.flatnonzero((ranges.kind == RangeKind.USER) & ranges.nests & ~_not_forward(ranges))
    if len(starts_ns):
        step = np.searchsorted(starts_ns, ranges.start_ns[rows], side="right") - 1
        inside = (step >= 0) & (ranges.end_ns[rows] <= ends_ns[np.maximum(step, 0)])
        rows, step = rows[inside], step[inside]
        if len(starts_ns) >= _TELLING_STEPS:
            rows = _in_several_steps(rows, step, names)
    for thread in each_once(ranges.thread[rows]).tolist():
        open_paths: list[tuple[int, str]] = []
        for row in rows[ranges.thread[rows] == thread].tolist():
            while open_paths and open_paths[-1][0] <= ranges.start_ns[row]:
                open_paths.pop()
            path = _joined(open_paths[-1][1] if open_paths else "", names[row])
            open_paths.append((int(ranges.end_ns[row]), path))
            names[row] = LAYER_ANNOTATION + path


def _not_forward(ranges: _Ranges) -> Bool:
    """Mask of the ranges inside an update, data loading or a backward pass of their thread: no forward layers."""
    around = np.isin(ranges.kind, [RangeKind.UPDATE, RangeKind.ZERO_GRAD, RangeKind.LOADING])
    around |= np.array(
        [text.kind == RangeKind.PHASE and is_backward(text.name) for text in ranges.texts], dtype=np.bool_
    )
    inside = np.zeros(len(around), dtype=np.bool_)
    for thread in each_once(ranges.thread[around]).tolist():
        on_thread = ranges.thread == thread
        start_ns, end_ns = union(ranges.start_ns[around & on_thread], ranges.end_ns[around & on_thread])
        inside[on_thread] = interval_of(ranges.start_ns[on_thread], start_ns, end_ns) >= 0
    return inside


def _in_several_steps(rows: Int64, step: Int64, names: list[str]) -> Int64:
    steps_of: dict[str, set[int]] = defaultdict(set)
    for row, in_step in zip(rows.tolist(), step.tolist(), strict=True):
        steps_of[names[row]].add(in_step)
    return rows[[len(steps_of[names[row]]) > 1 for row in rows.tolist()]]


def _joined(outer: str, name: str) -> str:
    """The path of a range; a qualified name stays as it is."""
    return name if not outer or name == outer or name.startswith(f"{outer}.") else f"{outer}.{name}"
