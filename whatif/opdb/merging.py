"""Merge databases, and compare them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import asdict

from whatif.opdb.exact import lower_medians
from whatif.opdb.provenance import Basis, Provenance
from whatif.opdb.rows import Rows
from whatif.opdb.store import CannotWriteError, Contribution, Outcome, Store
from whatif.runtime.errors import WhatifError
from whatif.runtime.progress import Progress


class Merged(Struct):
    """The result of a merge or an export: contributions by outcome, and the reason for each refusal."""

    added: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    rows: int = 0

    def keep(self, name: str, outcome: Outcome, rows: int) -> None:
        """Record the outcome of adding a contribution of ``rows`` rows."""
        (self.added if outcome == Outcome.ADDED else self.present).append(name)
        self.rows += rows if outcome == Outcome.ADDED else 0

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Record a WhatifError as a refusal; CannotWriteError propagates: the next contribution would fail too."""
        try:
            yield
        except CannotWriteError:
            raise
        except WhatifError as error:
            self.refused.append(str(error))

    def check(self) -> None:
        """Raise WhatifError with the first refusal if everything was refused."""
        if self.refused and not self.added and not self.present:
            raise WhatifError(self.refused[0])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {"added": self.added, "present": self.present, "rows_added": self.rows, "refused": self.refused}


def merge(
    source: Store,
    target: Store,
    *,
    device: str | None = None,
    family: str | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Add the contributions of ``source`` that ``target`` lacks, limited to ``device`` and ``family`` if given.

    Every shard is read, checked and written anew, so that no foreign bytes are copied. Contributions that are damaged,
    or whose times are stored under another device's name, are refused, each with a reason. Raises WhatifError if
    all of them are, or a file cannot be written.
    """
    contributions, damaged = source.contributions()
    chosen = [c for c in contributions if is_chosen(c.provenance, device, family)]
    return take_over([(c.provenance, c.read) for c in chosen], damaged, target, source.folder, progress)


def take_over(
    chosen: Sequence[tuple[Provenance, Callable[[], Rows]]],
    damaged: Sequence[str],
    target: Store,
    where: Path | str,
    progress: Progress | None,
    already_present: Container[str] = (),
) -> Merged:
    """Add contributions to ``target``, reading one at a time; ids in ``already_present`` are skipped.

    Raises WhatifError if all of them are refused, or none of ``where`` matches.
    """
    done = Merged(refused=list(damaged))
    known = target.devices_by_times()
    for place, (provenance, read) in enumerate(chosen):
        if progress:
            progress(place, len(chosen))
        if provenance.contribution in already_present:
            done.keep(provenance.contribution, Outcome.PRESENT, provenance.rows)
            continue
        with done.refusing():
            rows = read()
            outcome, name = target.add(rows, provenance.origin, known=known)
            done.keep(name, outcome, len(rows))
    done.check()
    if not done.added and not done.present:
        raise WhatifError(f"{where}: expected contributions to merge, got no matching ones.")
    return done


class Compared(Struct, frozen=True):
    """Operators that both databases measured on a device: the ratio of the second one's times to the first's."""

    device: str
    family: str
    operators: int
    ratio_median: float
    ratio_p5: float  # 5 % of the ratios lie below
    ratio_p95: float  # 5 % lie above


class Difference(Struct, frozen=True):
    """Contributions that only one of two databases has, and the operators that both measured independently."""

    only_first: tuple[Contribution, ...]
    only_second: tuple[Contribution, ...]
    both: int
    compared: tuple[Compared, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "only_first": [described(c.provenance) for c in self.only_first],
            "only_second": [described(c.provenance) for c in self.only_second],
            "both": self.both,
            "compared": [asdict(c) for c in self.compared],
        }


def diff(first: Store, second: Store) -> Difference:
    """Compare two databases: contributions by id, and the times of operators that both measured independently."""
    left, right = ({c.provenance.contribution: c for c in s.contributions()[0]} for s in (first, second))
    only_left = tuple(left[name] for name in sorted(left.keys() - right.keys()))
    only_right = tuple(right[name] for name in sorted(right.keys() - left.keys()))
    compared = []
    for kind in sorted({_kind(c) for c in only_left} & {_kind(c) for c in only_right}):
        ratios = _ratios([c for c in only_left if _kind(c) == kind], [c for c in only_right if _kind(c) == kind])
        if len(ratios):
            low, middle, high = np.quantile(ratios, (0.05, 0.5, 0.95)).tolist()
            compared.append(Compared(kind[0], kind[1], len(ratios), middle, low, high))
    return Difference(only_left, only_right, len(left.keys() & right.keys()), tuple(compared))


def described(provenance: Provenance) -> dict[str, Any]:
    """Return the entry of a contribution in a listing."""
    method, source = provenance.origin.method, provenance.origin.source
    return {
        "contribution": provenance.contribution, "device": provenance.origin.device.name, "family": provenance.family,
        "rows": provenance.rows, "method": method.name, "includes_launch": method.includes_launch,
        "cache": method.cache, "environment": provenance.origin.environment_id,
        "framework": provenance.origin.environment.framework,
        "framework_version": provenance.origin.environment.framework_version, "author": source.author,
        "date": source.date, "tool": source.tool, "licence": source.licence,
    }  # fmt: skip


def _kind(contribution: Contribution) -> tuple[str, str, Basis]:
    provenance = contribution.provenance
    return provenance.origin.device.name, provenance.family, provenance.origin.basis


def _ratios(left: list[Contribution], right: list[Contribution]) -> Any:
    """Second over first time of every operator that both measured; of repeated measurements the median."""
    (left_keys, left_s), (right_keys, right_s) = (
        lower_medians(np.concatenate([r.ops.keys for r in rows]), np.concatenate([r.t_s for r in rows]))
        for rows in ([c.read() for c in contributions] for contributions in (left, right))
    )
    _, at_left, at_right = np.intersect1d(left_keys, right_keys, return_indices=True)
    return right_s[at_right] / left_s[at_left]


def is_chosen(provenance: Provenance, device: str | None, family: str | None) -> bool:
    """Whether a contribution is of ``device`` and ``family``; None matches any."""
    return device in (None, provenance.origin.device.name) and family in (None, provenance.family)
