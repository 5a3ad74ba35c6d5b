"""Gist: keep feature maps in a compact encoding between forward and backward pass.

Source: Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA 2018; Daydream (USENIX ATC
        2020) §5.1 and Algorithm 11. The default sparsity follows from a mean compression of 2.6 that stores each zero
        as a bit (Rhu et al., "Compressing DMA Engine", HPCA 2018).
Model:  a ReLU's output for pooling is kept as one bit per value, that of a ReLU (or pooling after one) for a
        convolution as its values above zero with a byte of index each, and with `lossy` all others in 16, 10 or 8 bits.
        Encoding comes after the last forward use, decoding before the first backward use, each with its launch and the
        time that its bytes take; cuSPARSE may take three times as long. Deviations from the paper: it encodes sparsely
        only after pooling (Gist also after a ReLU alone), inserts the lossy kernels after everything that is no ReLU
        (here: after layers that keep a map), and omits decoding. One bit a value needs no decoding, because the
        backward work of a ReLU reads the bits. Ignored: that this reads less.
Effort: medium: torch.autograd.graph.saved_tensors_hooks with custom encoding kernels.
"""

from typing import Literal

from whatif import Change, TaskGraph, WhatifError
from whatif.models import layer_calls
from whatif.models.layers.encodings import encode, encodings
from whatif.models.layers.feature_maps import input_bytes, keep_less, keeps_input

PLACE = "maps"

# For 32-bit values with one bit left for each: 1 - (1 / 2.6 - 1 / 32).
SPARSITY = 0.65
LOSSY_BYTES = {"none": None, "fp16": 2.0, "fp10": 4 / 3, "fp8": 1.0}  # three values of 10 bits in a word


def transform(
    graph: TaskGraph, *, sparsity: float = SPARSITY, lossy: Literal["none", "fp16", "fp10", "fp8"] = "none"
) -> TaskGraph:
    """Encode and decode; `sparsity` is the share of zeros after a ReLU."""
    if not 0 <= sparsity <= 1:
        raise WhatifError(f"gist: expected a sparsity from 0 to 1, got {sparsity}.")
    if Change.ENCODES in graph.info.changes:
        return graph.unchanged("gist: feature maps are encoded already; nothing changes")
    calls = layer_calls(graph)
    size_bytes, keeps = input_bytes(graph, calls), keeps_input(graph, calls)
    maps = encodings(graph, calls, size_bytes, keeps, sparsity=sparsity, lossy_bytes=LOSSY_BYTES[lossy])
    if not len(maps):
        raise WhatifError(
            "gist: expected ReLUs before pooling or convolutions, with backward work and feature maps of known size, "
            "got none; record with shapes (whatif collect does), or encode other maps with gist:lossy=fp16."
        )
    passes = len(set(calls.run[maps.call].tolist()))
    kept, whole = maps.kept_bytes.sum() / passes / 1e6, maps.size_bytes.sum() / passes / 1e6
    graph = keep_less(graph, calls, maps.call, maps.size_bytes, maps.kept_bytes, maps.call)
    return encode(graph, calls, maps).note(
        f"gist: {len(maps) / passes:.0f} of {keeps.sum() / passes:.0f} feature maps are encoded, {whole:.0f} MB in a "
        f"pass as {kept:.0f} MB"
    )
