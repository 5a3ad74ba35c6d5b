"""A task graph as text, behind the events of a timeline file, and the graph that such a text tells.

The text is one JSON object: what is small is plain, and each column of numbers is its bytes, compressed, in base64. It
is data: nothing of it is executed or unpickled, and every size and every code is checked before it is used.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np

from whatif.errors import WhatifError
from whatif.graph import TASK_COLUMNS, GraphInfo, TaskGraph
from whatif.kernels import DTYPES, KernelFamily
from whatif.simulator import simulate
from whatif.timeline import Timeline
from whatif.types import Anchor, Array, Dependencies, DependencyKind, Thread, Waits

FORMAT = 1
# Where the events of the file end and the graph begins: no text in JSON has a line end in it, so events hold none such.
GRAPH_FIELD = '\n],\n"whatif_graph":'
# A file that asks for more tasks than this is damaged: ids have 31 bits.
MOST_ROWS = 2**31 - 1
# Thirteen days, as of one task: no lag is longer.
MOST_LAG_NS = 2**50
# Most of a column is alike: the fastest level compresses it as well as the others.
ZLIB_LEVEL = 1
# The key of a simulated graph's metadata: its ``what_ifs``, and whether its times are ``without_profiler``.
SIMULATED_KEY = "simulated"
# What says how the step is timed without the profiler. A simulated graph has nothing to correct.
_UNTRACED_KEYS = ("untraced_step_ms", "untraced_cpu_ms", "traced_step_ms", "traced_cpu_ms", "profiler_cost_ns")


class _Column(msgspec.Struct, frozen=True):
    """A column of numbers: its type as numpy writes it, how many, and their bytes."""

    dtype: Any
    count: int
    data: str


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole text."""

    format: int
    n_tasks: int
    info: dict[str, Any]
    names: tuple[str, ...]
    layers: tuple[str, ...]
    notes: tuple[str, ...]
    threads: tuple[Thread, ...]
    columns: dict[str, _Column]
    attached: dict[str, _Column]
    dependencies: dict[str, _Column]
    waits: dict[str, _Column]


def graph_text(timeline: Timeline, remark: str, what_ifs: str = "", *, without_profiler: bool = False) -> Iterator[str]:
    """Give the graph of a timeline as pieces of JSON text; ``remark`` tells its reader what it is.

    ``what_ifs`` are those of a prediction, and ``without_profiler`` says that its times are without the profiler's
    cost.

    Its measured steps are the timeline's: read again it has no replay error, and nothing is left to calibrate. Where a
    schedule of its own gave the timeline, the order in which it ran the tasks of free threads becomes dependencies.
    """
    graph = _replaying(timeline)
    known = graph.info
    before = simulated(known)
    told = {
        "what_ifs": " + ".join(filter(None, (str(before.get("what_ifs", "")), what_ifs))),
        "without_profiler": without_profiler or before.get("without_profiler") is True,
    }
    info = replace(
        known,
        path="",  # where a file lies says more of a machine than its reader needs
        ranks=tuple(replace(rank, path=Path(rank.path).name) for rank in known.ranks),
        measured_step_ns={clock: timeline.step_times_ns(clock) for clock in known.measured_step_ns},
        untraced_step_ns=None,
        quirks=(*known.quirks, remark),
        metadata={
            **{key: value for key, value in known.metadata.items() if key not in _UNTRACED_KEYS},
            SIMULATED_KEY: told,
        },
    )
    plain: dict[str, Any] = {
        "format": FORMAT, "n_tasks": len(graph), "info": info, "names": graph.names, "layers": graph.layers,
        "notes": graph.notes, "threads": graph.threads,
    }  # fmt: skip
    yield _json(plain)[:-1]
    groups: dict[str, Mapping[str, Array]] = {
        "columns": {name: getattr(graph, name) for name in TASK_COLUMNS},
        "attached": graph.attached,
        "dependencies": {name: getattr(graph.dependencies, name) for name in Dependencies.__slots__},
        "waits": {name: getattr(graph.waits, name) for name in Waits.__slots__},
    }
    for group, columns in groups.items():
        yield f',\n"{group}":{{'
        for place, (name, column) in enumerate(columns.items()):
            yield ("," if place else "") + f"{_json(name)}:{_column_text(column)}"
        yield "}"
    yield "}"


def simulated(info: GraphInfo) -> dict[str, Any]:
    """Give what a graph says of the simulation that it comes from; nothing where it was recorded."""
    told = info.metadata.get(SIMULATED_KEY)
    return told if isinstance(told, dict) else {}


def graph_of_text(text: bytes, path: str) -> TaskGraph:
    """Give the checked graph that ``graph_text`` wrote. Raises WhatifError, one sentence, where it is damaged."""
    from whatif.opdb.importers.torch_operators import check_described

    try:
        saved = msgspec.json.decode(text, type=_Saved)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if saved.format != FORMAT or list(saved.columns) != list(TASK_COLUMNS):
        raise WhatifError(
            f"{path}: expected a timeline of this version of whatif, got one of another; export it again from its "
            "recording."
        )
    try:
        info = _info(saved.info)
        for what in info.operators:
            check_described(what)
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
    graph = TaskGraph(
        **numbers(saved.columns, n),
        dependencies=Dependencies(**dependencies),
        waits=Waits(**waits),
        names=saved.names,
        threads=saved.threads,
        layers=saved.layers,
        info=replace(info, path=path),
        attached=numbers(saved.attached, n),
        notes=saved.notes,
    )
    _check_codes(graph, path)
    try:
        return graph.check()
    except (WhatifError, IndexError) as error:
        raise _damaged(path, str(error)) from error


@cache
def _info_type() -> type[msgspec.Struct]:
    """What ``GraphInfo`` holds, as the decoder checks it; those of the ranks are looked at one by one."""
    from whatif.opdb.importers.torch_operators import Described

    hints = get_type_hints(GraphInfo, localns={"Described": Described})
    hints["ranks"] = tuple[dict[str, Any], ...]
    return msgspec.defstruct("_Info", list(hints.items()), forbid_unknown_fields=True)


def _info(told: dict[str, Any]) -> GraphInfo:
    """The recording's facts; raises msgspec.ValidationError where one is of another type."""
    found = msgspec.convert(told, _info_type())
    parts = {name: getattr(found, name) for name in found.__struct_fields__}
    return GraphInfo(**{**parts, "ranks": tuple(_info(rank) for rank in parts["ranks"])})


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
    return fixed.note("the order of its communication is the one that was simulated, whatever the network")


def _column_text(column: Array) -> str:
    packed = zlib.compress(np.ascontiguousarray(column).tobytes(), ZLIB_LEVEL)
    kind = np.lib.format.dtype_to_descr(column.dtype)
    return f'{{"dtype":{_json(kind)},"count":{len(column)},"data":"{base64.b64encode(packed).decode()}"}}'


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # half a character, as of a path that is no text
        return msgspec.json.encode(_without_halves(msgspec.to_builtins(value))).decode()


def _without_halves(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_without_halves(key): _without_halves(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_halves(item) for item in value]
    return value


def _column(path: str, name: str, column: _Column, length: int | None) -> Array:
    """The numbers of a column; how many bytes they take is known before they are unpacked."""

    def damaged(why: str) -> WhatifError:
        return _damaged(path, f"column {name!r}: {why}")

    try:
        kind = column.dtype
        dtype = np.dtype(kind if isinstance(kind, str) else [(str(part), str(of)) for part, of in kind])
    except (TypeError, ValueError) as error:
        raise damaged(f"no type of numbers: {error}") from error
    parts = [dtype] if dtype.fields is None else [part for part, *_ in dtype.fields.values()]
    if any(part.kind not in "iufb" for part in parts):
        raise damaged("no numbers")
    if not 0 <= column.count <= MOST_ROWS or (length is not None and column.count != length):
        raise damaged(f"{column.count} values where {length} are expected")
    size_bytes = column.count * dtype.itemsize
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(column.data, validate=True), size_bytes + 1)
    except (zlib.error, ValueError) as error:
        raise damaged(str(error)) from error
    if len(data) != size_bytes:
        raise damaged("not as many bytes as it says")
    return np.frombuffer(data, dtype=dtype).copy()


def _check_codes(graph: TaskGraph, path: str) -> None:
    """Raise WhatifError where a code or a lag lies outside of what it stands for; ``graph.check`` sees to the rest."""
    if "" not in graph.layers[:1]:
        raise _damaged(path, "no table of layers")
    for column, most in (
        ("family", len(KernelFamily) - 1), ("dtype", len(DTYPES) - 1), ("step", 2**30),
        ("called", len(graph.info.operators) - 1),
    ):  # fmt: skip
        codes = getattr(graph, column)
        if codes.dtype.kind != "i" or int(codes.min()) < -1 or int(codes.max()) > most:
            raise _damaged(path, f"column {column!r} has codes outside -1..{most}")
    if any(getattr(graph, name).dtype.kind not in "ib" for name in TASK_COLUMNS):
        raise _damaged(path, "a column has no whole numbers")
    edges, waits = graph.dependencies, graph.waits
    for name, codes, low, high in (
        ("kind", edges.kind, 0, len(DependencyKind) - 1),
        ("anchor", edges.anchor, 0, len(Anchor) - 1),
        ("source", edges.source, 0, len(graph) - 1),
        ("target", edges.target, 0, len(graph) - 1),
        ("lag_ns", edges.lag_ns, -MOST_LAG_NS, MOST_LAG_NS),
        ("task", waits.task, 0, len(graph) - 1),
        ("scope", waits.scope, -1, len(graph.threads) - 1),
        ("lag_ns", waits.lag_ns, -MOST_LAG_NS, MOST_LAG_NS),
    ):
        if codes.dtype.kind != "i" or (len(codes) and not (low <= int(codes.min()) and int(codes.max()) <= high)):
            raise _damaged(path, f"a dependency's {name} is outside {low}..{high}")
    if any(abs(thread.lag_ns) > MOST_LAG_NS for thread in graph.threads):
        raise _damaged(path, "a thread's lag is longer than thirteen days")


def _damaged(path: str, why: str) -> WhatifError:
    return WhatifError(f"{path}: expected the graph of a timeline that whatif wrote, got a damaged one ({why[:200]}); "
                       "export it again.")  # fmt: skip
