"""A task graph as pandas and networkx objects, for exploration; the library itself uses neither."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from whatif.graph.columns import TASK_COLUMNS
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Anchor,
    Dependencies,
    DependencyKind,
    Int8,
    Phase,
    TaskKind,
)
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    import networkx
    import pandas


def _tables(graph: TaskGraph) -> dict[str, list[str]]:
    """The words of the columns of codes, by column. A repeated word gets its code appended."""
    tables = {
        "name": graph.names,
        "kind": [kind.name for kind in TaskKind],
        "thread": [thread.name for thread in graph.threads],
        "layer": graph.layers,
        "phase": [phase.name for phase in Phase],
        "family": [*(family.name for family in KernelFamily), ""],  # -1 is the last one
        "dtype": DTYPES,
    }
    return {column: _distinct(words) for column, words in tables.items()}


def _distinct(words: Iterable[str]) -> list[str]:
    taken: set[str] = set()
    found = []
    for code, word in enumerate(words):
        unique = f"{word} #{code}" if word in taken else word
        taken.add(unique)
        found.append(unique)
    return found


def _readable_columns(graph: TaskGraph) -> dict[str, Any]:
    """Every column, codes as words."""
    tables = _tables(graph)
    return {
        name: np.array(tables[name], dtype=object)[getattr(graph, name)] if name in tables else getattr(graph, name)
        for name in TASK_COLUMNS
    }


def to_pandas(graph: TaskGraph) -> pandas.DataFrame:
    """See ``TaskGraph.to_pandas``."""
    import pandas

    return pandas.DataFrame(_readable_columns(graph))


def to_networkx(graph: TaskGraph) -> networkx.DiGraph:
    """See ``TaskGraph.to_networkx``; nodes are task ids, every dependency (derived ones too) is an edge."""
    import networkx

    result = networkx.DiGraph()
    columns = {name: column.tolist() for name, column in _readable_columns(graph).items()}
    for task in range(len(graph)):
        result.add_node(task, **{name: column[task] for name, column in columns.items()})
    derived = len(graph.dependencies)
    edges = graph.all_dependencies()
    rows = zip(edges.source.tolist(), edges.target.tolist(), edges.kind.tolist(), edges.lag_ns.tolist(),
               edges.anchor.tolist(), strict=True)  # fmt: skip
    for row, (source, target, kind, lag_ns, anchor) in enumerate(rows):
        stored = row < derived
        if result.has_edge(source, target) and not stored:
            continue
        result.add_edge(
            source,
            target,
            kind=DependencyKind(kind).name,
            lag_ns=lag_ns,
            anchor=Anchor(anchor).name,
            derived=not stored,
        )
    return result


def from_networkx(edited: networkx.DiGraph, like: TaskGraph) -> TaskGraph:
    """See ``TaskGraph.from_networkx``: node attributes and edges that are not derived may have been edited."""
    if not hasattr(edited, "nodes"):
        raise WhatifError(f"expected a networkx graph, got {type(edited).__name__}.")
    nodes = sorted(edited.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    columns, tables = {}, _tables(like)
    for name in TASK_COLUMNS:
        values = [edited.nodes[node][name] for node in nodes]
        if name in tables:
            values = _coded(name, values, tables[name])
            if name == "family":
                values = [code if code < len(KernelFamily) else -1 for code in values]
        columns[name] = np.array(values, dtype=getattr(like, name).dtype)
    edges = [(place[s], place[t], d) for s, t, d in edited.edges(data=True) if not d.get("derived")]
    dependencies = Dependencies(
        np.array([e[0] for e in edges], dtype=np.int32),
        np.array([e[1] for e in edges], dtype=np.int32),
        _codes_of(DependencyKind, "kind", edges),
        np.array([e[2]["lag_ns"] for e in edges], dtype=np.int64),
        _codes_of(Anchor, "anchor", edges),
    )
    kept = np.array([task in place for task in like.waits.task.tolist()], dtype=np.bool_)
    waits = type(like.waits)(
        np.array([place[t] for t in like.waits.task[kept].tolist()], dtype=np.int32),
        like.waits.scope[kept],
        like.waits.lag_ns[kept],
    )
    # Words that were added during the look-up.
    named = {"names": (*like.names, *tables["name"][len(like.names) :])}
    named["layers"] = (*like.layers, *tables["layer"][len(like.layers) :])
    return like.replace(**columns, **named, dependencies=dependencies, waits=waits, attached={}).check()


def _codes_of(members: type[IntEnum], attribute: str, edges: list[tuple[int, int, dict[str, Any]]]) -> Int8:
    """The values of an attribute of the edges, given as a member or its name in ``members``."""
    words = [getattr(edge[2][attribute], "name", edge[2][attribute]) for edge in edges]
    return np.array(_coded(attribute, words, [member.name for member in members]), dtype=np.int8)


def _coded(column: str, words: list[str], table: list[str]) -> list[int]:
    """The codes of words; a new name or layer is added to its ``table``."""
    codes = {word: code for code, word in enumerate(table)}
    if new := [word for word in dict.fromkeys(words) if word not in codes]:
        if column not in ("name", "layer"):
            known = ", ".join(filter(None, table[:12]))
            raise WhatifError(f"attribute {column!r}: expected one of {known}, got {new[0]!r}; correct it.")
        codes |= {word: len(table) + place for place, word in enumerate(new)}
        table += new
    return [codes[word] for word in words]
