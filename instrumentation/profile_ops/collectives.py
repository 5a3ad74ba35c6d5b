"""Measurement of collectives: their design (names and sizes), and the parent's side of the processes that run them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from whatif.graph.described import DTYPE_BYTES, Described
from whatif.runtime.errors import WhatifError

from ..line_process import MeasuringProcess
from .machine import Way

# As in torch.distributed: in place in one buffer, or from one buffer to another.
LAYOUTS = {
    "all_reduce": "in_place", "broadcast": "in_place", "reduce": "in_place",
    "all_gather": "out_of_place", "reduce_scatter": "out_of_place", "all_to_all": "out_of_place",
}  # fmt: skip
# Octaves, from sizes dominated by the launch to sizes that saturate any link.
SIZES_BYTES = tuple(1 << power for power in range(10, 27))
# Length of the long chain; more calls do not improve the result.
CHAIN_NS, MOST_CALLS = 60e6, 300
ROUNDS, FIRST_CALLS = 7, 3


def collective_design(
    names: Sequence[str], ranks: Sequence[int], sizes_bytes: Sequence[int], dtypes: Sequence[str]
) -> list[Described]:
    """Return the collectives of each name, group, size and dtype, small ones first, so that each gets some in any case.

    Sizes are rounded so that the number of ranks divides the elements. ``bytes`` is the full buffer, as in nccl-tests.
    Raises WhatifError for an unknown name.
    """
    unknown = [name for name in names if name not in LAYOUTS]
    if unknown:
        raise WhatifError(f"opdb profile: expected collectives ({', '.join(LAYOUTS)}), got {unknown[0][:40]!r}.")
    found: dict[Described, None] = {}
    for size, dtype, count, name in itertools.product(sorted(sizes_bytes), dtypes, ranks, names):
        element_bytes = int(DTYPE_BYTES[dtype])
        elements = max(1, size // (element_bytes * count)) * count
        integers = (("bytes", elements * element_bytes), ("ranks", count), ("nodes", 1))
        found[Described("collective", name, dtype, integers, layout=LAYOUTS[name])] = None
    return list(found)


class RankGroup(ExitStack):
    """The processes of a group on this machine; has the interface of the process that measures operators."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self._way = way

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            meeting = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whatif-ranks-")), "meeting")
            setup = {"device": self._way.device, "ranks": self._way.ranks, "meeting": str(meeting)}
            self._ranks = [
                stack.enter_context(
                    MeasuringProcess(f"{__package__}.collective_rank", {**setup, "rank": rank}, threads=1)
                )
                for rank in range(self._way.ranks)
            ]
            self.push(stack.pop_all())
        return self

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the time of one call in ns by round, or the reason for none. Raises EndedError.

        The time of a chain is that of the slowest rank.
        """
        first = self._rounds(job, (FIRST_CALLS,), 1)
        if "skipped" in first:
            return first
        long = min(MOST_CALLS, max(1, int(CHAIN_NS * FIRST_CALLS / first["ns"][0][0])))
        short = long // 3
        # Both lengths alternate, so that a slow moment affects both.
        found = self._rounds(job, (long, short) if short else (long,), ROUNDS)
        if "skipped" in found:
            return found
        if short:
            return {"ns": [(long_ns - short_ns) / (long - short) for long_ns, short_ns in found["ns"]]}
        return {"ns": [long_ns / long for (long_ns,) in found["ns"]]}

    def _rounds(self, job: dict[str, Any], lengths: tuple[int, ...], rounds: int) -> dict[str, Any]:
        """Return the slowest rank's time in ns of a chain of each length, by round, or the reason for none."""
        name, dims, types, *_ = job["call"]
        message = {"name": name, "elements": dims[0][0], "type": types[0], "lengths": lengths, "rounds": rounds}
        for rank in self._ranks:
            rank.ask(message)
        answers = [rank.answer() for rank in self._ranks]
        skipped = next((answer for answer in answers if "skipped" in answer), None)
        return skipped or {"ns": np.max([answer["ns"] for answer in answers], axis=0).tolist()}
