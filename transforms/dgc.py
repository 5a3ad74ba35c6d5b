"""DGC: send only the largest gradients, and accumulate the others locally.

Source: Lin et al., "Deep Gradient Compression", ICLR 2018 (99.9 % of the gradients stay local; momentum correction,
        Algorithm 4; the threshold from a sample of 1 %, §3); Daydream (USENIX ATC 2020) §5.2 and Algorithm 12.
Model:  before each all-reduce of the graph, kernels correct the momentum, find the threshold in a sample, mask, pack
        the values with their indices and clear the sent ones; the all-reduce becomes an all-gather of values and
        indices, 8 bytes each, from every worker; after it the buffer is cleared and all entries are added up. The
        kernels only move data: 11 accesses of each gradient in 10 kernels, our count of the paper's algorithm (the
        range: from 0.6 to 2 times the time), with their launches. The wait of a recorded all-reduce for other workers
        stays: the range goes up to its recorded time. Ignored: the weights' momentum, which moves from the update into
        the compression; the denser exchange of the first epochs (warm-up). Deviations: none.
Effort: medium: a communication hook of DDP that compresses, or Horovod with the paper's published code.
"""

import numpy as np

from whatif import TaskGraph, WhatifError
from whatif.models.exchange.collective_tasks import all_reduces, recorded_workers
from whatif.models.exchange.compression import EXCHANGE, exchange_sparse
from whatif.models.exchange.hierarchy import SCATTER
from whatif.simulation.transfers import workers_of

PLACE = "sums"
WHOLE_PASSES = True


def transform(graph: TaskGraph, *, sparsity_pct: float = 99.9, workers: int | None = None) -> TaskGraph:
    """Compress before every all-reduce and decompress after it; set `workers` if the recording lacks their number."""
    if not 0 <= sparsity_pct < 100:
        raise WhatifError(f"dgc: expected sparsity_pct from 0 to below 100, got {sparsity_pct}.")
    tasks = np.flatnonzero(all_reduces(graph))
    if not len(tasks):
        if graph.select(name=f"^{EXCHANGE}$").any():
            return graph.unchanged("dgc: the gradients are compressed already; nothing changes")
        if graph.select(name=f"^{SCATTER} among").any():
            raise WhatifError("dgc: expected whole all-reduces, got the stages of blueconnect; name one of the two.")
        raise WhatifError(
            "dgc: expected all-reduces whose gradients could be compressed, got none; name distributed before it, or "
            "give the recording of one rank of data parallel training."
        )
    known = int(workers_of(graph)[tasks].max()) or recorded_workers(graph) or workers
    if known is None or not 2 <= known <= 100_000 or (workers is not None and workers != known):
        raise WhatifError(
            f"dgc: expected the number of workers that exchange gradients, got {workers or 'none'}"
            + (f" where there are {known}." if known and known != workers else "; set it, as in dgc:workers=8.")
        )
    if (graph.size_bytes[tasks] < 0).any():
        raise WhatifError(
            "dgc: this recording does not contain the sizes of its all-reduces, so the cost of "
            "compressing them is unknown; give a recording of one worker and name distributed before dgc."
        )
    return exchange_sparse(graph, tasks, known, 1 - sparsity_pct / 100)
