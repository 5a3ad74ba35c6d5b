"""Fit the shipped models: ``python benchmarks/shipped_models.py DATABASE [--out FOLDER]``.

DATABASE holds the rows of `whatif opdb import neusight` and `whatif opdb import aiconfigurator` (aiconfigurator-core
0.12.0). The same rows and the same scikit-learn give the same files.
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

# The choice of aiconfigurator's rows: the one framework of all five devices, one version per device, and the formats
# used in training.
FRAMEWORK = "trtllm"
VERSIONS = {"A100-SXM-80": "1.0.0"}
USUAL_VERSION = "1.3.0rc20"
SYSTEMS = ("A100-SXM-80", "H100-SXM-80", "H200-SXM-141", "B200-SXM", "L40S")
FORMATS = ("bf16", "fp8")
# Rows not used across devices: the P4's `linear` products slow down as they grow (over 0.1 TFLOP: 0.97 TFLOP/s
# at the median, against 3.0 for its batched products of the same FLOPs), unlike on other devices.
ONE_DEVICE_ALONE = {"P4": "linear"}
# Sizes for one to four megabytes in total: bf16 products need fewer trees than fp32 ones, elementwise operators few.
SMALLER = {**SAME_DEVICE, "matmul": replace(SAME_DEVICE["matmul"], rounds=400)}
SMALLER_KERNELS = Settings(rounds=300, rate=0.1, leaves=48)


def chosen(contributions: Sequence[tuple[Provenance, Rows]]) -> list[Sample]:
    """The samples of the shipped models: NeuSight's, and aiconfigurator's products named above."""
    kept = []
    for provenance, rows in contributions:
        source, origin = provenance.origin.source.tool, provenance.origin
        if source == "neusight":
            kept.append((provenance, rows))
        elif source == "aiconfigurator-core" and rows.family == "matmul" and origin.device.name in SYSTEMS:
            version = VERSIONS.get(origin.device.name, USUAL_VERSION)
            if (origin.environment.framework, origin.environment.framework_version) == (FRAMEWORK, version):
                kept.append((provenance, rows))
    samples = samples_of(kept)
    return [s for s in samples if s.kind.dtype in FORMATS or s.provenances[0].origin.source.tool == "neusight"]


def transferable(samples: Sequence[Sample]) -> list[Sample]:
    """The samples without the rows that do not carry over to other devices."""
    return [s.take(s.names != ONE_DEVICE_ALONE[s.device]) if s.device in ONE_DEVICE_ALONE else s for s in samples]


def fit_shipped(samples: Sequence[Sample], *, own: bool = True, across: bool = True) -> Iterator[Fitted]:
    """Fit models for each device (``own``) and ``across`` devices."""

    def say(text: str) -> None:
        print(f"fitting {text}", file=sys.stderr, flush=True)

    for launch in (True, False) if own else ():
        part = [s for s in samples if s.launch == launch]
        yield from fit_devices(part, settings=SMALLER if launch else {"matmul": SMALLER_KERNELS}, say=say)
    if across:
        yield from fit_across(transferable(samples), settings=ACROSS, say=say)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the database, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database")
    parser.add_argument("--out", default=str(Path(__file__).resolve().parents[1] / "whatif" / "opdb" / "fitted"))
    parser.add_argument("--devices", nargs="*", metavar="NAME", help="only of these")
    parser.add_argument("--without", nargs="*", metavar="NAME", default=[], help="none of these")
    parser.add_argument("--families", nargs="*", metavar="FAMILY", help="only of these")
    parser.add_argument("--scope", choices=("own", "across", "both"), default="both")
    args = parser.parse_args(arguments)
    contributions, damaged = read_contributions(Store.open(args.database))
    for sentence in damaged:
        print(sentence, file=sys.stderr)
    wanted = [
        (provenance, rows)
        for provenance, rows in contributions
        if provenance.origin.device.name in (args.devices or [provenance.origin.device.name])
        and provenance.origin.device.name not in args.without
        and rows.family in (args.families or [rows.family])
    ]
    samples = chosen(wanted)
    # One by one, so that an interruption keeps the fitted ones.
    for fitted in fit_shipped(samples, own=args.scope != "across", across=args.scope != "own"):
        print(*write_models(Path(args.out), [fitted]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
