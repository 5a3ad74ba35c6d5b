"""The rivals: Holistic Trace Analysis in its own virtual environment, and Daydream's Algorithm 1 on networkx."""

from __future__ import annotations

import heapq
import subprocess
import sys
import venv
from functools import cache

import networkx
from inputs import CACHE

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Anchor

# Its critical path fails with pandas 3.
HTA_REQUIREMENTS = ("traceinsight==0.6.1", "pandas<3")


@cache
def hta_python() -> str | None:
    """Return the interpreter of an environment with Holistic Trace Analysis; None if it cannot be installed."""
    folder = CACHE / "hta-venv"
    python = str(folder / "bin" / "python")
    try:
        if not (folder / "ready").is_file():
            venv.create(folder, with_pip=True, clear=True)
            command = [python, "-m", "pip", "install", "-q", *HTA_REQUIREMENTS]
            subprocess.run(command, check=True, capture_output=True)
            (folder / "ready").touch()
        return python
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"Holistic Trace Analysis cannot be installed: {error}", file=sys.stderr)
        return None


def as_networkx(graph: TaskGraph) -> networkx.DiGraph:
    """Return the graph with the order of each thread as edges, as Daydream and dPRO keep it."""
    result = networkx.DiGraph()
    columns = zip(graph.thread.tolist(), graph.duration_ns.tolist(), strict=True)
    result.add_nodes_from((task, {"thread": thread, "ns": ns}) for task, (thread, ns) in enumerate(columns))
    every = graph.all_dependencies()
    result.add_edges_from(zip(every.source.tolist(), every.target.tolist(), strict=True))
    assert not every.lag_ns.any()
    assert (every.anchor == Anchor.END).all()
    return result


def algorithm_1(graph: networkx.DiGraph) -> int:
    """Simulate as in Daydream, Algorithm 1, with the frontier in a heap; returns the makespan, ns."""
    waiting_for = dict(graph.in_degree())
    ready_ns = dict.fromkeys(graph, 0)
    free_ns: dict[int, int] = {}
    frontier = [(0, task) for task, n in waiting_for.items() if n == 0]
    heapq.heapify(frontier)
    makespan_ns = 0
    while frontier:
        ready, task = heapq.heappop(frontier)
        data = graph.nodes[task]
        end_ns = max(ready, free_ns.get(data["thread"], 0)) + data["ns"]
        free_ns[data["thread"]] = end_ns
        makespan_ns = max(makespan_ns, end_ns)
        for child in graph.successors(task):
            ready_ns[child] = max(ready_ns[child], end_ns)
            waiting_for[child] -= 1
            if waiting_for[child] == 0:
                heapq.heappush(frontier, (ready_ns[child], child))
    return makespan_ns
