"""What a recording says of each layer beside its tasks: its type and its parameters."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from whatif.graph import TaskGraph
from whatif.types import Bool, Int64

# torch.profiler names a module "nn.Module: Conv2d_3", and ingest keeps "Conv2d_3".
_CLASS_AND_NUMBER = re.compile(r"([A-Za-z_]\w*?)_\d+")


def layer_rows(graph: TaskGraph) -> dict[str, dict[str, Any]]:
    """Give the recorder's row of each layer by name; empty where the recording has none."""
    rows = graph.info.metadata.get("layers")
    named = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return {str(row.get("name")): row for row in named}


def layer_types(graph: TaskGraph) -> tuple[str, ...]:
    """Give the class of each layer of ``graph.layers`` ("Conv2d"), in that order; "" where nothing tells it."""
    rows = layer_rows(graph)

    def type_of(layer: str) -> str:
        row = rows.get(layer)
        if row is not None:
            return str(row.get("type") or "")
        match = _CLASS_AND_NUMBER.fullmatch(layer)
        return match[1] if match else ""

    return tuple(type_of(layer) for layer in graph.layers)


def in_layers(graph: TaskGraph, types: str) -> Bool:
    """Give the mask, shape (n_tasks,), of the tasks whose innermost layer has a class that ``types`` matches whole."""
    expression = re.compile(types)
    table = np.array([bool(expression.fullmatch(found)) for found in layer_types(graph)], dtype=np.bool_)
    return np.asarray(table[graph.layer], dtype=np.bool_)


def gradient_bytes(graph: TaskGraph) -> Int64:
    """Give the bytes of the gradients of each layer's own parameters, shape (n_layers,); 0 where none are told."""
    rows = layer_rows(graph)

    def size(layer: str) -> int:
        told = rows.get(layer, {}).get("gradient_bytes")
        return told if isinstance(told, int) and 0 <= told < 2**44 else 0

    return np.array([size(layer) for layer in graph.layers], dtype=np.int64)
