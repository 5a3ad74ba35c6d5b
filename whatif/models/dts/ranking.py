"""All architectures on one cluster, the fastest first: the report of ``whatif dts``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.types import Phase
from whatif.models.dts.built_in import Architecture
from whatif.models.dts.check import equation_ns
from whatif.models.dts.dnn import Dnn
from whatif.models.dts.estimate import Estimate, Spread, estimate
from whatif.models.dts.machines import Machines
from whatif.models.dts.plan import Training
from whatif.runtime.errors import WhatifError


class Ranked(Struct, frozen=True):
    """One architecture: its times per batch and epoch, or the reason why it cannot be used."""

    name: str
    summary: str
    found: Estimate | None = None
    batch: Spread | None = None
    epoch: Spread | None = None
    batches: int = 0  # per client in an epoch
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a JSON object; times in ms."""
        if self.found is None or self.batch is None or self.epoch is None:
            return {"name": self.name, "reason": self.reason}
        by_equation = equation_ns(self.found)
        return {
            "name": self.name,
            "batch_ms": _times(self.batch),
            "epoch_ms": _times(self.epoch),
            "batches_per_client": self.batches,
            "equation_ms": None if by_equation is None else by_equation / 1e6,
            "cut_behind": cut_layers(self.found),
            "roles": self.found.assignment,
            "paths": self.found.paths,
            "network_bytes_per_batch": network_bytes(self.found),
        }


class Ranking(Struct, frozen=True):
    """The architectures that fit the cluster, the fastest epoch first, then the others."""

    dnn: Dnn
    machines: Machines
    training: Training
    epoch_batches: int  # of the whole data
    rows: tuple[Ranked, ...]

    @property
    def possible(self) -> tuple[Ranked, ...]:
        """The rows with times."""
        return tuple(row for row in self.rows if row.found)

    def to_dict(self) -> dict[str, Any]:
        """Return the ranking as a JSON object."""
        return {
            "clients": self.training.clients,
            "batches_per_epoch": self.epoch_batches,
            "batch_size": self.dnn.batch_size,
            "recorded_gflop_s": self.dnn.gflop_s,
            "architectures": [row.to_dict() for row in self.possible],
            "not_possible": [row.to_dict() for row in self.rows if not row.found],
        }


def rank(
    architectures: Sequence[Architecture],
    dnn: Dnn,
    machines: Machines,
    training: Training,
    *,
    epoch_batches: int = 100,
    max_paths: int | None = 100,
    samples: int = 1000,
    seed: int = 0,
) -> Ranking:
    """Rank architectures by the time of an epoch over the same data, which clients share.

    ``training`` has the user's choices; its cut is between client and server and does not apply to pipeline learning.
    """
    if not 1 <= epoch_batches <= 100_000:
        raise WhatifError(f"dts: expected from 1 to 100,000 batches in an epoch, got {epoch_batches}.")
    if not 1 <= samples <= 100_000:
        raise WhatifError(f"dts: expected from 1 to 100,000 samples of the fluctuations, got {samples}.")
    rows = []
    for architecture in architectures:
        try:
            its_training = replace(training, cuts=()) if architecture.name == "pipeline_learning" else training
            found = estimate(architecture, dnn, machines, its_training, max_paths)
            batches = math.ceil(epoch_batches / batches_of_round(found))
            batch, epoch = (found.spread(number, samples=samples, seed=seed) for number in (1, batches))
            rows.append(Ranked(architecture.name, architecture.summary, found, batch, epoch, batches))
        except WhatifError as error:
            rows.append(Ranked(architecture.name, architecture.summary, reason=str(error)))
    order = sorted(rows, key=lambda row: (row.epoch is None, row.epoch.median_ns if row.epoch else 0.0))
    return Ranking(dnn, machines, training, epoch_batches, tuple(order))


def batches_of_round(found: Estimate) -> int:
    """Return the number of batches in a round of one batch per client: one for each fetch of data."""
    return max(sum(activity.phase == Phase.DATA for activity in found.plan().activities), 1)


def network_bytes(found: Estimate) -> int:
    """Return the bytes sent over all links in a round of one batch per client."""
    return sum(activity.size_bytes for activity in found.plan().activities if activity.size_bytes > 0)


def cut_layers(found: Estimate) -> list[str]:
    """Return the last layer before each cut."""
    return [found.dnn.layers[at - 1] for at in found.training.cuts]


def _times(spread: Spread) -> dict[str, float]:
    return {
        "undisturbed": spread.time_ns / 1e6,
        "median": spread.median_ns / 1e6,
        "low": spread.low_ns / 1e6,
        "high": spread.high_ns / 1e6,
    }
