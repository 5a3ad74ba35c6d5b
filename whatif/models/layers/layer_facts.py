"""The recorded metadata of each layer: its type and parameters."""

from __future__ import annotations

import re

import numpy as np

from whatif.graph.recorded import Layer
from whatif.graph.structure_cache import newest
from whatif.graph.task_graph import TaskGraph, matching
from whatif.graph.types import Bool, Int64
from whatif.ingest.resident import own_bytes

# torch.profiler names a module "nn.Module: Conv2d_3", and ingest keeps "Conv2d_3".
_CLASS_AND_NUMBER = re.compile(r"([A-Za-z_]\w*?)_\d+")


def layer_rows(graph: TaskGraph) -> dict[str, Layer]:
    """Return the recorder's metadata of each layer by name; empty if the recording has none."""
    layers = graph.info.recorded.layers
    return newest(graph, "layer rows", (layers,), lambda: {layer.name: layer for layer in layers if layer.name})


def layer_codes(graph: TaskGraph) -> dict[str, int]:
    """Return the place of each layer in ``graph.layers``."""
    layers = graph.layers
    return newest(graph, "layer codes", (layers,), lambda: {layer: code for code, layer in enumerate(layers)})


def layer_types(graph: TaskGraph) -> tuple[str, ...]:
    """Return the class of each layer of ``graph.layers`` ("Conv2d"), in that order; "" if unknown."""
    rows = layer_rows(graph)

    def type_of(layer: str) -> str:
        row = rows.get(layer)
        if row is not None:
            return row.type
        match = _CLASS_AND_NUMBER.fullmatch(layer)
        return match[1] if match else ""

    return tuple(type_of(layer) for layer in graph.layers)


def in_layers(graph: TaskGraph, types: str) -> Bool:
    """Return a mask, shape (n_tasks,), of the tasks whose innermost layer's class fully matches ``types``.

    ``types`` is a regular expression over class names ("Conv.d"). Nothing matches if the recording names no classes.
    Raises WhatifError on an invalid expression.
    """
    return np.asarray(matching(layer_types(graph), types, whole=True).take(graph.layer), dtype=np.bool_)


def gradient_bytes(graph: TaskGraph) -> Int64:
    """Return the gradient bytes of each layer's own parameters, shape (n_layers,), in the order of ``graph.layers``.

    0 for a layer without parameters, and for all layers if the recording does not list them (``whatif collect`` does).
    """
    sizes = {name: row.gradient_bytes or 0 for name, row in layer_rows(graph).items()}
    return np.array([sizes.get(layer, 0) for layer in graph.layers], dtype=np.int64)


def frozen_bytes(graph: TaskGraph) -> Int64:
    """Return the bytes of each layer's own parameters that its gradients leave out, shape (n_layers,); 0 if unknown."""
    recorded = graph.info.recorded
    sizes = {name: own_bytes(recorded, row) - (row.gradient_bytes or 0) for name, row in layer_rows(graph).items()}
    return np.array([sizes.get(layer, 0) for layer in graph.layers], dtype=np.int64)
