"""The network graph of roles (DTS §II-D): the role of each processor, and the data flow between them."""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import networkx

from whatif.models.dts.estimate import Estimate
from whatif.report.plots import COLORS, ENDINGS, new_figure, save
from whatif.report.printable import printable
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHAPES = {"server": "box", "edge": "hexagon"}  # of the first word of a role; the others are ellipses


def network_graph(found: Estimate) -> networkx.DiGraph[str]:
    """Return the processors as nodes with their ``role``, and as edges the ``size_bytes`` of a batch and ``byte_s``."""
    graph: networkx.DiGraph[str] = networkx.DiGraph(name=found.architecture.name)
    for role, processor in found.assignment.items():
        graph.add_node(processor, role=role)
    for activity in found.plan().activities:
        ends, _, _ = activity.name.partition(":")
        source, arrow, target = ends.partition(" -> ")
        if not arrow:
            continue
        source_role, target_role = found.assignment[source], found.assignment[target]
        wire = found.machines.wire(source_role, target_role)
        before = graph.edges[source_role, target_role]["size_bytes"] if graph.has_edge(source_role, target_role) else 0
        byte_s = wire.byte_s if wire else 0.0
        graph.add_edge(source_role, target_role, size_bytes=before + activity.size_bytes, byte_s=byte_s)
    return graph


def to_dot(graph: networkx.DiGraph[str]) -> str:
    """Return the graph in Graphviz' DOT language."""
    lines = [f"digraph {_quoted(graph.graph.get('name', ''))} {{", "  rankdir=LR;"]
    for node, facts in graph.nodes(data=True):
        role = str(facts["role"])
        shape = _SHAPES.get(role.split()[0], "ellipse")
        label = _quoted(role + "\n" + node)
        lines.append(f"  {_quoted(node)} [shape={shape}, label={label}];")
    for source, target, facts in graph.edges(data=True):
        label = f"{facts['size_bytes'] / 1e6:.3g} MB, {facts['byte_s'] * 8 / 1e9:.3g} Gbit/s"
        lines.append(f"  {_quoted(source)} -> {_quoted(target)} [label={_quoted(label)}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    """A string of DOT: names may hold anything."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def check_export(path: str | Path) -> None:
    """Raise WhatifError if the suffix of ``path`` is not a supported format."""
    if Path(path).suffix.lower() not in (".dot", *ENDINGS):
        raise WhatifError(f"{path}: expected a file that ends in .dot, {', '.join(ENDINGS)}, got another ending.")


def export(found: Estimate, path: str | Path) -> None:
    """Write the network graph of roles to a file, by its suffix: DOT, or a picture."""
    check_export(path)
    graph = network_graph(found)
    if Path(path).suffix.lower() == ".dot":
        with replacing(path) as part:
            part.write_text(to_dot(graph), encoding="utf-8")
        return
    figure = new_figure(7, 5)
    draw(figure.subplots(), graph)
    save(figure, path)


def draw(axes: Axes, graph: networkx.DiGraph[str]) -> None:
    """Draw the graph: the busiest processor in the middle, the others around it."""
    nodes = list(graph)
    degree: Any = graph.degree
    centre = max(nodes, key=lambda node: degree[node])
    around = [node for node in nodes if node != centre]
    angles = {node: 2 * math.pi * number / len(around) for number, node in enumerate(around)}
    place = {centre: (0.0, 0.0)} | {node: (math.cos(angle), math.sin(angle)) for node, angle in angles.items()}
    roles = [str(graph.nodes[node]["role"]).split()[0] for node in nodes]
    kinds = list(dict.fromkeys(roles))
    networkx.draw_networkx_nodes(
        graph, place, nodelist=nodes, node_size=1600, ax=axes, edgecolors="black",
        node_color=[COLORS[kinds.index(role) % len(COLORS)] for role in roles], alpha=0.35,
    )  # fmt: skip
    networkx.draw_networkx_edges(graph, place, ax=axes, node_size=1600, connectionstyle="arc3,rad=0.08", width=0.8)
    legible = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}  # names cross arrows
    for node in nodes:
        name = "\n".join(wrap(printable(node), 18, max_lines=2, placeholder="…"))
        label = f"{graph.nodes[node]['role']}\n{name}"
        axes.text(*place[node], label, ha="center", va="center", fontsize=7, parse_math=False, bbox=legible)
    for source, target, facts in graph.edges(data=True):
        x, y = (0.62 * place[source][axis] + 0.38 * place[target][axis] for axis in (0, 1))
        axes.text(x, y, _size(facts["size_bytes"]), ha="center", va="center", fontsize=6, color="0.25", bbox=legible)
    axes.set_title(f"{graph.graph.get('name', '')}: roles, bytes of a batch", fontsize=9)
    axes.margins(0.2)
    axes.set_axis_off()


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.4g} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:,.4g} kB"
