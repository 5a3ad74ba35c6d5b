"""LayerDrop: what if only a part of the blocks took part in each step?

Source: Fan, Grave and Joulin, "Reducing Transformer Depth on Demand with Structured Dropout", ICLR 2020.
Model:  of every `every` blocks the last one is left out: its forward and backward work goes, launches included. The
        paper drops blocks at random, so a step of its training drops as many on average, not the same ones. The
        update stays: it is made once for all parameters. Ignored: what the smaller network loses in accuracy.
Effort: small: skip the block in the model's forward pass when a random number says so.
"""

import re

import numpy as np

from whatif import Phase, TaskGraph, WhatifError


def transform(graph: TaskGraph, *, block: str = r"(?:blocks?|layers?|h)\.(\d+)(?:\.|$)", every: int = 2) -> TaskGraph:
    """Leave out the blocks whose number, the first group of `block`, is the last one of every `every`."""
    if every < 1:
        raise WhatifError(f"layer_drop: expected every=1 or more, got {every}.")
    expression = re.compile(block)

    def dropped(layer: str) -> bool:
        found = expression.search(layer)
        return found is not None and int(found[1]) % every == every - 1

    table = np.array([dropped(layer) for layer in graph.layers])
    if not table.any():
        raise WhatifError(f"layer_drop: expected layers with numbers, as {block!r} says, got none in this recording.")
    in_pass = graph.select(phase=Phase.FORWARD) | graph.select(phase=Phase.BACKWARD)
    return graph.remove(table[graph.layer] & in_pass & (graph.on_gpu | graph.on_cpu))
