"""A mask of one graph used on an edited one: refused, followed, or another task selected in silence?

    python -m tests.trust.stale_ids

Seen today: the mask of relu_f scales gemm_e, and nothing says so.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import whatif
from tests import helpers as h
from tests.trust.common import written
from whatif import TaskGraph, WhatifError


def two_streams() -> TaskGraph:
    """Six kernels on two streams, one of them after another in turn.

    stream 7   gemm_a ------ gemm_c ------ gemm_e
    stream 8        relu_b ------ relu_d ------ relu_f
    """
    kernels = [
        ("gemm_a", 7, 7),
        ("relu_b", 8, 12),
        ("gemm_c", 7, 30),
        ("relu_d", 8, 30),
        ("gemm_e", 7, 60),
        ("relu_f", 8, 60),
    ]
    events = [h.call("cudaLaunchKernel", 5 * i, 5, i + 1) for i in range(len(kernels))]
    events += [h.kernel(name, start, 10, i + 1, stream=stream) for i, (name, stream, start) in enumerate(kernels)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "two_streams.json"
        path.write_bytes(written({"traceEvents": events}))
        return whatif.read(path)


def main() -> None:
    """Print what is seen."""
    graph = two_streams()
    first, last = graph.select(name="gemm_c"), graph.select(name="relu_f")
    edited = graph.add_dependencies(np.flatnonzero(last), np.flatnonzero(first))
    try:
        scaled = edited.scale(last, 0.1)
    except WhatifError as error:
        print("refused:", error)
        return
    shorter = [scaled.names[scaled.name[task]] for task in np.flatnonzero(scaled.duration_ns < edited.duration_ns)]
    print("followed" if shorter == ["relu_f"] else f"silent: the mask of relu_f scales {shorter}")


if __name__ == "__main__":
    main()
