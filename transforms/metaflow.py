"""MetaFlow: remove, resize or merge layers, as a policy file says.

Source: Jia et al., "Optimizing DNN Computation with Relaxed Graph Substitutions" (MetaFlow), MLSys 2019; Daydream
        (USENIX ATC 2020) §5.1 and Algorithm 9.
Model:  removing a layer removes its forward and backward kernels, the calls and the Python around them (Algorithm 9
        selects GPU tasks; their launches are removed either way) and, if the recording has gradients, its part of the
        update. A scaled layer's kernels take `factor` of their time. Merged layers become the first of them, which
        takes `factor` of the time of all. The policy gives the factors, from profiling the new layers or from their
        FLOPs. For a layer with other `sizes` (out_channels = 128) the op database gives the ratio of new to recorded
        operator on the recorded device (docs/device.md). A named layer includes the layers inside it. Ignored: effects
        on the neighbours of a changed layer.

        With a mapping instead of a file it is the cost model of a search, which needs one reading of the recording:
        whatif.apply(baseline, whatif.load_transform("metaflow", policy={"remove": ["stem.2"]})).predicted_ms
Effort: medium: another model, with layers that compute the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whatif import TaskGraph, WhatifError
from whatif.models import merge_layers, remove_layers, resize_layers, scale_layers
from whatif.models.layers.policy import FORM, Policy, Resolved


def transform(graph: TaskGraph, *, policy: Path | Mapping[str, Any] | None = None) -> TaskGraph:
    """Apply the policy in a file (JSON or TOML) or a mapping; docs/metaflow.md shows one."""
    if policy is None:
        raise WhatifError(f"metaflow: expected policy=FILE, {FORM}, got none.")
    changes = Resolved.of(Policy.of(policy), graph)
    for layers, change in changes.scale:
        sizes = dict(change.sizes)
        graph = resize_layers(graph, layers, sizes) if sizes else scale_layers(graph, layers, change.factor)
    for parts, factor in changes.merge:
        graph = merge_layers(graph, parts, factor)
    if changes.remove.any():
        graph = remove_layers(graph, changes.remove)
    scaled, merged = sum(layers.sum() for layers, _ in changes.scale), sum(len(parts) for parts, _ in changes.merge)
    return graph.note(f"metaflow: {changes.remove.sum()} layers removed, {scaled} scaled, {merged} merged")
