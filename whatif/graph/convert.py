"""A task graph as pandas and networkx objects, for people who explore; the library itself uses neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from whatif.graph.columns import TASK_COLUMNS
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Anchor,
    Dependencies,
    DependencyKind,
    Phase,
    TaskKind,
)

if TYPE_CHECKING:
    import networkx
    import pandas


def to_pandas(graph: TaskGraph) -> pandas.DataFrame:
    """See ``TaskGraph.to_pandas``."""
    import pandas

    spelled: dict[str, Any] = {
        "name": np.array(graph.names, dtype=object)[graph.name],
        "kind": np.array([k.name for k in TaskKind], dtype=object)[graph.kind],
        "thread": np.array([t.name for t in graph.threads], dtype=object)[graph.thread],
        "layer": np.array(graph.layers, dtype=object)[graph.layer],
        "phase": np.array([p.name for p in Phase], dtype=object)[graph.phase],
        "family": np.array([*(f.name for f in KernelFamily), ""], dtype=object)[graph.family],
        "dtype": np.array(DTYPES, dtype=object)[graph.dtype],
    }
    return pandas.DataFrame({column: spelled.get(column, getattr(graph, column)) for column in TASK_COLUMNS})


def to_networkx(graph: TaskGraph) -> networkx.DiGraph:
    """See ``TaskGraph.to_networkx``; nodes are task ids, every dependency (derived ones too) is an edge."""
    import networkx

    result = networkx.DiGraph()
    columns = {name: getattr(graph, name).tolist() for name in TASK_COLUMNS}
    for task in range(len(graph)):
        result.add_node(task, **{name: column[task] for name, column in columns.items()})
    derived = len(graph.dependencies)
    every = graph.all_dependencies()
    rows = zip(every.source.tolist(), every.target.tolist(), every.kind.tolist(), every.lag_ns.tolist(),
               every.anchor.tolist(), strict=True)  # fmt: skip
    for row, (source, target, kind, lag_ns, anchor) in enumerate(rows):
        stored = row < derived
        if result.has_edge(source, target) and not stored:
            continue
        result.add_edge(
            source, target, kind=DependencyKind(kind), lag_ns=lag_ns, anchor=Anchor(anchor), derived=not stored
        )
    return result


def from_networkx(exchanged: networkx.DiGraph, like: TaskGraph) -> TaskGraph:
    """See ``TaskGraph.from_networkx``: node attributes and edges that are not derived may have been edited."""
    nodes = sorted(exchanged.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    columns = {
        name: np.array([exchanged.nodes[node][name] for node in nodes], dtype=getattr(like, name).dtype)
        for name in TASK_COLUMNS
    }
    edges = [(place[s], place[t], d) for s, t, d in exchanged.edges(data=True) if not d.get("derived")]
    dependencies = Dependencies(
        np.array([e[0] for e in edges], dtype=np.int32),
        np.array([e[1] for e in edges], dtype=np.int32),
        np.array([e[2]["kind"] for e in edges], dtype=np.int8),
        np.array([e[2]["lag_ns"] for e in edges], dtype=np.int64),
        np.array([e[2]["anchor"] for e in edges], dtype=np.int8),
    )
    kept = np.array([task in place for task in like.waits.task.tolist()], dtype=np.bool_)
    waits = type(like.waits)(
        np.array([place[t] for t in like.waits.task[kept].tolist()], dtype=np.int32),
        like.waits.scope[kept],
        like.waits.lag_ns[kept],
    )
    return like.replace(**columns, dependencies=dependencies, waits=waits, attached={}).check()
