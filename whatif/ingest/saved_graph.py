"""A task graph as JSON text, stored after the events of a timeline file, and the graph read back from it.

The text is one JSON object: small values are plain JSON, each column of numbers is its compressed bytes in base64.
Nothing in it is executed or unpickled, and every size and code is checked before use.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
from msgspec import structs

from whatif.graph.columns import COLUMNS, TASK_COLUMNS
from whatif.graph.edit import MAX_DURATION_NS
from whatif.graph.info import GraphInfo
from whatif.graph.recorded import AUTOCAST_CASTS, AUTOCAST_SHARE, Simulated
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Anchor,
    Array,
    Change,
    Dependencies,
    DependencyKind,
    Int64,
    TaskKind,
    Thread,
    Waits,
)
from whatif.ingest.recorded import recorded_of, written
from whatif.runtime.errors import WhatifError
from whatif.simulation.simulator import simulate
from whatif.simulation.timeline import Timeline
from whatif.simulation.transfers import GRADIENTS

FORMAT = 1
# Separates the events of the file from the graph: a JSON string has no line break in it, so no event contains this.
GRAPH_FIELD = '\n],\n"whatif_graph":'
# A file that asks for more tasks than this is damaged: ids have 31 bits.
MOST_ROWS = 2**31 - 1
MOST_STEPS = 2**30
# Columns are repetitive: the fastest level compresses them as well as the others.
ZLIB_LEVEL = 1


class _Column(msgspec.Struct, frozen=True):
    """A column of numbers: numpy's description of their type, how many there are, and their bytes."""

    dtype: Any
    count: int
    data: str


class Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a graph but its columns."""

    format: int
    n_tasks: int
    info: dict[str, Any]
    names: tuple[str, ...]
    layers: tuple[str, ...]
    notes: tuple[str, ...]
    threads: tuple[Thread, ...]


class _Saved(Plain, frozen=True, forbid_unknown_fields=True):
    """The whole JSON object."""

    columns: dict[str, _Column]
    attached: dict[str, _Column]
    dependencies: dict[str, _Column]
    waits: dict[str, _Column]


def graph_text(timeline: Timeline, remark: str, what_ifs: str, *, without_profiler: bool) -> Iterator[str]:
    """Yield the graph of a timeline as pieces of JSON text; ``remark`` becomes one of its quirks.

    ``what_ifs`` are those of a prediction, and ``without_profiler`` says whether its times exclude the profiler's cost.

    The measured steps are the timeline's, so the graph read back has no replay error and nothing to calibrate. If the
    default simulation does not give the timeline, its order of tasks on free threads becomes dependencies.
    """
    graph = _replaying(timeline)
    original = graph.info
    before = original.recorded.simulated or Simulated()
    simulated = Simulated(
        what_ifs=" + ".join(filter(None, (before.what_ifs, what_ifs))),
        without_profiler=without_profiler or before.without_profiler,
        untraced_step=original.recorded.untraced_step or before.untraced_step,
    )
    info = replace(
        original,
        path="",  # readers need not know the folders of the machine
        ranks=tuple(replace(rank, path=Path(rank.path).name) for rank in original.ranks),
        measured_step_ns={clock: timeline.step_times_ns(clock) for clock in original.measured_step_ns},
        untraced_step_ns=None,
        quirks=(*original.quirks, remark),
        # A simulated graph has nothing to correct.
        recorded=structs.replace(original.recorded.without_untraced_step(), simulated=simulated),
    )
    yield _json(plain_of(graph, info))[:-1]
    for group, columns in arrays_of(graph).items():
        yield f',\n"{group}":{{'
        for place, (name, column) in enumerate(columns.items()):
            yield ("," if place else "") + f"{_json(name)}:{_column_text(column)}"
        yield "}"
    yield "}"


def plain_of(graph: TaskGraph, info: GraphInfo) -> Plain:
    """Return all of a graph but its columns, with ``info`` in place of its own."""
    return Plain(FORMAT, len(graph), _info_table(info), graph.names, graph.layers, graph.notes, graph.threads)


def arrays_of(graph: TaskGraph) -> dict[str, Mapping[str, Array]]:
    """Return the columns of a graph, by group and name."""
    return {
        "columns": {name: getattr(graph, name) for name in TASK_COLUMNS},
        "attached": graph.attached,
        "dependencies": {name: getattr(graph.dependencies, name) for name in Dependencies.__slots__},
        "waits": {name: getattr(graph.waits, name) for name in Waits.__slots__},
    }


def graph_of(plain: Plain, info: GraphInfo, arrays: Mapping[str, Mapping[str, Array]]) -> TaskGraph:
    """Return the graph of the results of ``plain_of`` and ``arrays_of``, unchecked."""
    return TaskGraph(
        **arrays["columns"],
        dependencies=Dependencies(**arrays["dependencies"]),
        waits=Waits(**arrays["waits"]),
        names=plain.names,
        threads=plain.threads,
        layers=plain.layers,
        info=info,
        attached=dict(arrays["attached"]),
        notes=plain.notes,
        declined=(),
    )


def graph_of_text(text: bytes, path: str) -> TaskGraph:
    """Return the checked graph that ``graph_text`` wrote. Raises WhatifError, one sentence, if it is damaged."""
    from whatif.graph.described import check_described

    try:
        saved = msgspec.json.decode(text, type=_Saved)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if saved.format != FORMAT or list(saved.columns) != list(TASK_COLUMNS):
        raise WhatifError(
            f"{path}: expected a timeline of this version of whatif, got one of another version; export it again from "
            "its recording."
        )
    try:
        info = info_of(saved)
        for operator in info.operators:
            check_described(operator)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    n = saved.n_tasks
    if not 0 < n <= MOST_ROWS:
        raise _damaged(path, f"{n} tasks")

    def numbers(columns: dict[str, _Column], length: int | None) -> dict[str, Array]:
        return {name: _column(path, name, column, length) for name, column in columns.items()}

    dependencies, waits = numbers(saved.dependencies, None), numbers(saved.waits, None)
    for table, kind in ((dependencies, Dependencies), (waits, Waits)):
        lengths = {len(column) for column in table.values()}
        if tuple(table) != kind.__slots__ or len(lengths) != 1:
            raise _damaged(path, f"its {kind.__name__.lower()} are incomplete")
    arrays = {"columns": numbers(saved.columns, n), "attached": numbers(saved.attached, n)}
    graph = graph_of(saved, replace(info, path=path), {**arrays, "dependencies": dependencies, "waits": waits})
    _check_codes(graph, path)
    if GRADIENTS in graph.attached:  # older files mark stages by nothing else
        graph = graph.with_change(Change.IN_STAGES)
        if not graph.info.stages and graph.info.memory is not None:  # and have the memory of the fullest only
            graph = graph.replace(info=replace(graph.info, stages=(graph.info.memory,)))
    try:
        return graph.check()
    except (WhatifError, IndexError) as error:
        raise _damaged(path, str(error)) from error


# Fields that older files have: the device of the usual network is the graph's own.
_FORMER = ("node",)


@cache
def _info_type() -> type[msgspec.Struct]:
    """The type by which the decoder checks a ``GraphInfo``; those of the ranks are decoded one by one."""
    from whatif.graph.described import Described

    hints = get_type_hints(GraphInfo, localns={"Described": Described})
    hints["ranks"] = tuple[dict[str, Any], ...]
    del hints["recorded"]
    hints["metadata"] = dict[str, Any]
    # Fields that older files do not have.
    later = {
        "loads_in_processes": False, "changes": (), "findings": (), "checks": (), "copy_devices": 1,
        "batch_factor": 1.0, "stages": (),
    }  # fmt: skip
    columns = [(name, kind) for name, kind in hints.items() if name not in later]
    columns += [(name, hints[name], default) for name, default in later.items()]  # type: ignore[misc]
    return msgspec.defstruct("_Info", columns, forbid_unknown_fields=True)


def _info_table(info: GraphInfo) -> dict[str, Any]:
    """The ``GraphInfo`` as it is saved: what the recorder wrote is under ``metadata``."""
    table = {each.name: getattr(info, each.name) for each in fields(info) if each.name != "recorded"}
    return {**table, "ranks": [_info_table(rank) for rank in info.ranks], "metadata": written(info.recorded)}


def info_of(plain: Plain) -> GraphInfo:
    """Return the ``GraphInfo``. Raises msgspec.ValidationError if a field is of another type."""
    return _info(plain.info)


def _info(table: dict[str, Any]) -> GraphInfo:
    found = msgspec.convert({name: value for name, value in table.items() if name not in _FORMER}, _info_type())
    parts = {name: getattr(found, name) for name in found.__struct_fields__}
    recorded, _ = recorded_of(parts.pop("metadata"))
    return GraphInfo(**{**parts, "ranks": tuple(_info(rank) for rank in parts["ranks"]), "recorded": recorded})


def _replaying(timeline: Timeline) -> TaskGraph:
    """The graph whose default simulation is the timeline."""
    graph = timeline.graph
    if all(thread.ordered for thread in graph.threads):
        return graph
    if np.array_equal(simulate(graph).end_ns, timeline.end_ns):
        return graph
    order = timeline.order_of_free_threads
    fixed = graph.add_dependencies(
        order.source, order.target, kind=DependencyKind.COMMUNICATION, lag_ns=order.lag_ns, anchor=Anchor.END
    )
    return fixed.note("its communication keeps the simulated order on any network")


def _column_text(column: Array) -> str:
    packed = zlib.compress(np.ascontiguousarray(column).tobytes(), ZLIB_LEVEL)
    kind = np.lib.format.dtype_to_descr(column.dtype)
    return f'{{"dtype":{_json(kind)},"count":{len(column)},"data":"{base64.b64encode(packed).decode()}"}}'


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # a lone surrogate, as in a path that is not UTF-8
        return msgspec.json.encode(_without_surrogates(msgspec.to_builtins(value))).decode()


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


def _column(path: str, name: str, column: _Column, length: int | None) -> Array:
    """The numbers of a column, decompressed to no more bytes than its count allows."""

    def damaged(why: str) -> WhatifError:
        return _damaged(path, f"column {name!r}: {why}")

    try:
        kind = column.dtype
        dtype = np.dtype(kind if isinstance(kind, str) else [(str(part), str(part_type)) for part, part_type in kind])
    except (TypeError, ValueError) as error:
        raise damaged(f"not a numeric type: {error}") from error
    parts = [dtype] if dtype.fields is None else [part for part, *_ in dtype.fields.values()]
    if any(part.kind not in "iufb" for part in parts):
        raise damaged("not a numeric type")
    if not 0 <= column.count <= MOST_ROWS or (length is not None and column.count != length):
        raise damaged(f"{column.count} values where {length} are expected")
    size_bytes = column.count * dtype.itemsize
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(column.data, validate=True), size_bytes + 1)
    except (zlib.error, ValueError) as error:
        raise damaged(str(error)) from error
    if len(data) != size_bytes:
        raise damaged("fewer or more bytes than its count needs")
    return np.frombuffer(data, dtype=dtype).copy()


def _check_codes(graph: TaskGraph, path: str) -> None:
    """Raise WhatifError if a code or a lag is out of range; ``graph.check`` checks everything else."""
    if "" not in graph.layers[:1]:
        raise _damaged(path, "its table of layers is damaged")
    for column in COLUMNS:
        values, table = getattr(graph, column.name), graph.table_of(column)
        if values.dtype.kind not in "ib":
            raise _damaged(path, "a column does not hold integers")
        if table is None and column.name != "step":
            continue
        least, most = min(column.default, 0), MOST_STEPS if table is None else len(table) - 1
        if values.dtype.kind != "i" or int(values.min()) < least or int(values.max()) > most:
            raise _damaged(path, f"column {column.name!r} has codes outside {least}..{most}")
    edges, waits = graph.dependencies, graph.waits
    for name, codes, low, high in (
        ("kind", edges.kind, 0, len(DependencyKind) - 1),
        ("anchor", edges.anchor, 0, len(Anchor) - 1),
        ("source", edges.source, 0, len(graph) - 1),
        ("target", edges.target, 0, len(graph) - 1),
        ("lag_ns", edges.lag_ns, -MAX_DURATION_NS, MAX_DURATION_NS),
        ("task", waits.task, 0, len(graph) - 1),
        ("scope", waits.scope, -1, len(graph.threads) - 1),
        ("lag_ns", waits.lag_ns, -MAX_DURATION_NS, MAX_DURATION_NS),
    ):
        if codes.dtype.kind != "i" or (len(codes) and not (low <= int(codes.min()) and int(codes.max()) <= high)):
            raise _damaged(path, f"a dependency's {name} is outside {low}..{high}")
    if any(abs(thread.lag_ns) > MAX_DURATION_NS for thread in graph.threads):
        raise _damaged(path, "a thread's lag is longer than thirteen days")
    if any(not -1 <= number < 2**31 for each in graph.threads for number in (each.device, each.stream, each.rank)):
        raise _damaged(path, "a thread's device, stream or rank has more than 31 bits")


def _damaged(path: str, why: str) -> WhatifError:
    return WhatifError(f"{path}: expected the graph of a timeline that whatif wrote, got a damaged one ({why[:200]}); "
                       "export it again.")  # fmt: skip


# Key in the recorder's metadata: {"low_ns": [...], "high_ns": [...], ...} of one step's kernels in order.
PREDICTED = "predicted"


def with_ranges(graph: TaskGraph) -> TaskGraph:
    """Return the graph with its recording's ranges of kernels and host; unchanged if it has none.

    Raises WhatifError if they do not fit the recording's kernels.
    """
    predicted = graph.info.recorded.predicted
    if predicted is None:
        return graph
    factor = predicted.cpu_range_factor
    if factor is not None:
        cpu = graph.on_cpu
        graph = graph.scale(cpu, 1.0, low=1 / factor, high=float(factor))
    kernels = np.flatnonzero(graph.kind == TaskKind.KERNEL)
    low, high = (_range(times_ns, graph.info.path) for times_ns in (predicted.low_ns, predicted.high_ns))
    if not len(low) and not len(kernels):
        return graph
    if len(low) != len(high) or not len(low) or len(kernels) % len(low):
        raise WhatifError(
            f"{graph.info.path}: expected low and high times of all {len(kernels)} kernels of a predicted "
            f"step, got {len(low)} and {len(high)}; predict it again."
        )
    steps = len(kernels) // len(low)
    duration_ns = graph.duration_ns[kernels]
    for name, column in ((AUTOCAST_SHARE, predicted.autocast_share), (AUTOCAST_CASTS, predicted.autocast_casts)):
        if column is not None and len(column) == len(low):
            values = np.zeros(len(graph))
            values[kernels] = np.tile(np.array(column, dtype=np.float64), steps)
            graph = graph.attach(**{name: values})
    return graph.with_duration(
        kernels, duration_ns,
        low_ns=np.minimum(np.tile(low, steps), duration_ns), high_ns=np.maximum(np.tile(high, steps), duration_ns),
    )  # fmt: skip


def _range(values: tuple[int, ...] | None, path: str) -> Int64:
    if values is None:
        raise WhatifError(f"{path}: expected low and high times of a predicted step in integer ns; predict it again.")
    return np.array(values, dtype=np.int64)
