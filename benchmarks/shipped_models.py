"""Fit the models that ship: ``python benchmarks/shipped_models.py DATABASE [--out FOLDER]``.

DATABASE holds what `whatif opdb import neusight` and `whatif opdb import aiconfigurator` (aiconfigurator-core 0.12.0)
bring. The same rows and the same scikit-learn give the same files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from whatif.instrumentation.estimators.boosting import Settings
from whatif.instrumentation.estimators.fitting import ACROSS, SAME_DEVICE, Fitted, fit_across, fit_devices
from whatif.instrumentation.estimators.models import write_models
from whatif.instrumentation.estimators.samples import Sample, samples_of

from whatif.opdb.index import read_contributions
from whatif.opdb.provenance import Provenance
from whatif.opdb.rows import Rows
from whatif.opdb.store import Store

# Of aiconfigurator's rows: one framework, that all five were measured with, one version a device, and the formats that
# training knows.
FRAMEWORK = "trtllm"
VERSIONS = {"A100-SXM-80": "1.0.0"}
USUAL_VERSION = "1.3.0rc20"
SYSTEMS = ("A100-SXM-80", "H100-SXM-80", "H200-SXM-141", "B200-SXM", "L40S")
FORMATS = ("bf16", "fp8")
# Rows that no other device learns from: the P4's `linear` products slow down as they grow (over 0.1 TFLOP: 0.97 TFLOP/s
# at the median, where its batched products of the same FLOPs do 3.0), which says nothing of other devices.
ONE_DEVICE_ALONE = {"P4": "linear"}
# A megabyte or four for all of them: products of bf16 need fewer trees than those of fp32, elementwise operators few.
SMALLER = {**SAME_DEVICE, "matmul": replace(SAME_DEVICE["matmul"], rounds=400)}
SMALLER_KERNELS = Settings(rounds=300, rate=0.1, leaves=48)


def chosen(contributions: Sequence[tuple[Provenance, Rows]]) -> list[Sample]:
    """The samples that ship: NeuSight's, and of aiconfigurator's the products named above."""
    kept = []
    for said, rows in contributions:
        source, where = said.origin.source.tool, said.origin
        if source == "neusight":
            kept.append((said, rows))
        elif source == "aiconfigurator-core" and rows.family == "matmul" and where.device.name in SYSTEMS:
            version = VERSIONS.get(where.device.name, USUAL_VERSION)
            if (where.environment.framework, where.environment.framework_version) == (FRAMEWORK, version):
                kept.append((said, rows))
    samples = samples_of(kept)
    return [s for s in samples if s.kind.dtype in FORMATS or s.provenances[0].origin.source.tool == "neusight"]


def told_to_others(samples: Sequence[Sample]) -> list[Sample]:
    """The samples without the rows that say nothing of other devices."""
    return [s.take(s.names != ONE_DEVICE_ALONE[s.device]) if s.device in ONE_DEVICE_ALONE else s for s in samples]


def fit_shipped(samples: Sequence[Sample], *, own: bool = True, across: bool = True) -> Iterator[Fitted]:
    """Fit them, of each device (``own``) and ``across`` devices."""

    def say(what: str) -> None:
        print(f"fitting {what}", file=sys.stderr, flush=True)

    for launch in (True, False) if own else ():
        part = [s for s in samples if s.launch == launch]
        yield from fit_devices(part, settings=SMALLER if launch else {"matmul": SMALLER_KERNELS}, say=say)
    if across:
        yield from fit_across(told_to_others(samples), settings=ACROSS, say=say)


def main(words: Sequence[str] | None = None) -> int:
    """Read the database, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database")
    parser.add_argument("--out", default=str(Path(__file__).resolve().parents[1] / "whatif" / "opdb" / "fitted"))
    parser.add_argument("--devices", nargs="*", metavar="NAME", help="only of these")
    parser.add_argument("--without", nargs="*", metavar="NAME", default=[], help="none of these")
    parser.add_argument("--families", nargs="*", metavar="FAMILY", help="only of these")
    parser.add_argument("--scope", choices=("own", "across", "both"), default="both")
    args = parser.parse_args(words)
    contributions, wrong = read_contributions(Store.open(args.database))
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    wanted = [
        (said, rows)
        for said, rows in contributions
        if said.origin.device.name in (args.devices or [said.origin.device.name])
        and said.origin.device.name not in args.without
        and rows.family in (args.families or [rows.family])
    ]
    samples = chosen(wanted)
    # One by one: what was fitted before an interruption is there.
    for fitted in fit_shipped(samples, own=args.scope != "across", across=args.scope != "own"):
        print(*write_models(Path(args.out), [fitted]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
