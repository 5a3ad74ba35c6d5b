"""Parse an operator such as ``linear:m=512,n=1024,k=1024,dtype=fp16``, and look it up in the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from whatif.graph.described import (
    DEFAULTS,
    DTYPES,
    FAMILIES,
    FAMILY_OF_NAME,
    LARGEST_ATTRIBUTE,
    PHASES,
    TWO_TENSORS,
)
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.index import Index
from whatif.opdb.learned import LearnedModel
from whatif.opdb.merging import described
from whatif.opdb.provenance import Basis
from whatif.opdb.quarantine import Aside
from whatif.opdb.rows import Operators, operators
from whatif.opdb.work import work
from whatif.runtime.errors import WhatifError

_TEXTS = ("dtype", "phase", "layout")
_LAUNCHES = {"with launch": True, "without launch": False, "unknown": None}
_REASONS = {
    Aside.SOUND: "",
    Aside.IMPOSSIBLE: "faster than the device can be",
    Aside.STRAY: "far from its neighbours",
}


def parse_operator(text: str) -> Operators:
    """Parse one operator: a name, a colon, and its integers; fp32 and forward by default.

    Raises WhatifError if the name is unknown, or an integer is missing or invalid.
    """
    name, _, rest = text.partition(":")
    family = FAMILY_OF_NAME.get(name)
    if family is None:
        raise WhatifError(f"opdb: expected an operator ({', '.join(FAMILY_OF_NAME)}), got {name!r}.")
    given = {}
    for entry in filter(None, rest.split(",")):
        key, sign, value = entry.partition("=")
        keys = (*FAMILIES[family].attributes, *_TEXTS)
        if not sign or key in given or key not in keys:
            raise WhatifError(
                f"opdb: expected {name}:KEY=VALUE,... with each of {', '.join(keys)} at most once, got {entry!r}."
            )
        given[key] = value
    if family == "elementwise":
        given.setdefault("tensors", "2" if name in TWO_TENSORS else "1")
    dtype, phase = given.get("dtype", "fp32"), given.get("phase", "fwd")
    for entry, known in ((dtype, DTYPES), (phase, PHASES)):
        if entry not in known:
            raise WhatifError(f"opdb: {name}: expected one of {', '.join(known)}, got {entry!r}.")
    integers = {attribute: _integer(name, attribute, given) for attribute in FAMILIES[family].attributes}
    ops = operators(family, integers, name=name, dtype=dtype, phase=phase, layout=given.get("layout", ""))
    if not ops.possible().all() or (family in ("matmul", "conv") and not work(ops)[0].all()):
        raise WhatifError(f"opdb: {name}: expected sizes with something to compute, got {text[:200]!r}.")
    return ops


def _integer(name: str, attribute: str, given: dict[str, str]) -> int:
    if attribute not in given:
        default = DEFAULTS.get(attribute)
        if isinstance(default, int):
            return default
        if default is None:
            raise WhatifError(f"opdb: {name}: expected {attribute}=…, got nothing; `{name}` needs it.")
        return _integer(name, default, given)
    value = given[attribute]
    if not value.isascii() or not value.isdecimal() or len(value) > 15 or int(value) > LARGEST_ATTRIBUTE:
        raise WhatifError(
            f"opdb: {name}: expected a whole number from 0 to {LARGEST_ATTRIBUTE:,} for {attribute}, got "
            f"{value[:40]!r}."
        )
    return int(value)


class Measurement(Struct, frozen=True):
    """One measurement of an operator, and its origin; ``aside`` says why it does not count ("": it counts)."""

    t_s: float
    t_low_s: float | None
    t_high_s: float | None
    aside: str
    contribution: dict[str, Any]


class Reply(Struct, frozen=True):
    """The database's answer for one operator on one device: an estimate with its range, its source, and its basis.

    ``basis`` describes the measurements that it rests on, at least in part; without any, ``includes_launch``
    is as requested. ``includes_launch`` is None if unknown.
    """

    operator: dict[str, str | int]
    device: str
    answered_by: str
    t_s: float | None
    low_s: float | None
    high_s: float | None
    basis: Basis | None
    includes_launch: bool | None
    evidence: int
    outside_doublings: float
    measurements: tuple[Measurement, ...]
    known_devices: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "operator": self.operator, "device": self.device, "answered_by": self.answered_by, "t_s": self.t_s,
            "low_s": self.low_s, "high_s": self.high_s,
            "method": self.basis._asdict() if self.basis else None, "includes_launch": self.includes_launch,
            "evidence_rows": self.evidence, "outside_doublings": self.outside_doublings,
            "measurements": [
                {
                    "t_s": m.t_s, "t_low_s": m.t_low_s, "t_high_s": m.t_high_s, "set_aside": m.aside or None,
                    **m.contribution,
                }
                for m in self.measurements
            ],
        }  # fmt: skip


def ask(
    index: Index,
    ops: Operators,
    device: str,
    *,
    method: str | None = None,
    framework: str | None = None,
    launch: bool = False,
    models: Sequence[LearnedModel] = (),
) -> Reply:
    """Estimate one operator on a device (by its name in the database)."""
    estimator = Estimator(index, device, method=method, framework=framework, launch=launch, models=models)
    answers = estimator.estimate(ops)
    answered_by, place = AnswerSource(int(answers.answered_by[0])), int(answers.basis[0])
    if answered_by == AnswerSource.ANALYTIC:
        # If these answer, the data sheet's estimate is blended with theirs, and includes a launch if theirs do.
        beside = (AnswerSource.SAME_SHAPE, AnswerSource.LEARNED_ACROSS)
        place = int(estimator.restricted(beside).estimate(ops).basis[0])
    basis = estimator.bases[place] if place >= 0 else None
    t, low, high = (None if np.isnan(c[0]) else float(c[0]) for c in (answers.t_s, answers.low_s, answers.high_s))
    return Reply(
        operator=ops.described(0), device=device, answered_by=answered_by.name.lower(), t_s=t, low_s=low, high_s=high,
        basis=basis, includes_launch=_LAUNCHES[basis.launch] if basis else launch, evidence=int(answers.evidence[0]),
        outside_doublings=float(answers.outside[0]), measurements=tuple(_measurements(index, ops, device)),
        known_devices=tuple(index.devices()),
    )  # fmt: skip


def _measurements(index: Index, ops: Operators, device: str) -> list[Measurement]:
    family = index.families.get(ops.family)
    if family is None:
        return []
    first, last = family.find(ops.keys[:1])
    found = []
    for row in range(int(first[0]), int(last[0])):
        provenance = index.contributions[int(family.contribution[row])]
        if provenance.origin.device.name != device:
            continue
        low, high = float(family.t_low_s[row]), float(family.t_high_s[row])
        found.append(
            Measurement(
                float(family.t_s[row]), None if np.isnan(low) else low, None if np.isnan(high) else high,
                _REASONS[Aside(int(family.aside[row]))],
                described(provenance),
            )
        )  # fmt: skip
    return found
