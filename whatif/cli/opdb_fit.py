"""``whatif opdb fit``: fit models to the measurements of a database."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whatif.cli.opdb_names import device_name, family_name, the_store
from whatif.runtime.errors import WhatifError

# Loaded by name: the library does not import what trains.
TRAINING = "whatif.instrumentation.estimators.models"
# As `whatif.opdb.learned.KINDS`, whose module imports too much for --help.
MODELS = ("trees", "principal")


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``whatif opdb fit``."""
    parser.add_argument("--device", help="fit only to measurements of this device")
    parser.add_argument("--family", help="fit only models of this family of operators")
    add_model_argument(parser, "model to fit")
    parser.add_argument("--across", action="store_true", help="also fit models for devices that were not measured")
    parser.add_argument(
        "--out", metavar="FOLDER", help="folder to write the models to (default: models, in the database)"
    )


def add_model_argument(parser: argparse.ArgumentParser, use: str) -> None:
    """Add ``--model``, which may be given several times."""
    parser.add_argument(
        "--model", action="append", choices=MODELS, metavar="MODEL",
        help=f"{use} (repeatable): trees (default), or principal: Tianshu's networks, which take half a minute of CPU "
        "time or more for each operator and need torch",
    )  # fmt: skip


def kinds(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the requested kinds of models. Raises WhatifError if torch is missing for one."""
    from whatif.opdb.learned import PRINCIPAL, TREES

    if PRINCIPAL in (args.model or ()):
        try:
            importlib.import_module("torch")
        except ImportError as error:
            raise WhatifError(
                f"opdb: expected torch, which trains the networks, got '{error}'; pip install torch, or take trees."
            ) from error
    return tuple(args.model or (TREES,))


def training() -> Any:
    """Return the module that trains. Raises WhatifError if scikit-learn is missing."""
    try:
        importlib.import_module("sklearn.ensemble")
        return importlib.import_module(TRAINING)
    except ImportError as error:
        raise WhatifError(
            f"opdb: expected scikit-learn, which fits the models, got '{error}'; pip install 'whatif-profiler[fit]'."
        ) from error


def run_fit(args: argparse.Namespace) -> int:
    """Fit the models, write them, and report the error of each."""
    from whatif.cli.reading import progress_bar, show, warn
    from whatif.opdb.default import MODELS as FOLDER
    from whatif.opdb.index import read_contributions
    from whatif.opdb.learned import TREES
    from whatif.report.text_models import model_dict, print_models

    store, device, family = the_store(args), device_name(args.device), family_name(args.family)
    trainer, wanted = training(), kinds(args)
    if args.across and TREES not in wanted:
        raise WhatifError("opdb: expected --across with --model trees: networks are of one device each.")
    with progress_bar("reading") as progress:
        contributions, damaged = read_contributions(store, progress)
    chosen = [
        (provenance, rows)
        for provenance, rows in contributions
        if device in (None, provenance.origin.device.name) and family in (None, rows.family)
    ]
    folder = Path(args.out) if args.out else store.folder / FOLDER
    with progress_bar("fitting") as progress:
        fitted = trainer.fit_models(chosen, say=_counted(progress), own=True, across=args.across, kinds=wanted)
    if not fitted:
        raise WhatifError(f"{store.folder}: expected 200 measurements or more of one family on one device, got fewer.")
    trainer.write_models(folder, fitted)
    facts = [m.facts for m in fitted]
    show(
        args,
        lambda: {"folder": str(folder), "models": [model_dict(one) for one in facts]},
        lambda: print_models(facts, folder),
    )
    warn(damaged)
    return 0


def _counted(progress: Callable[[int, int], None] | None) -> Callable[[str], None]:
    """Report progress by the models begun; their total is not known in advance."""
    begun = 0

    def say(_: str) -> None:
        nonlocal begun
        begun += 1
        if progress:
            progress(begun - 1, begun)

    return say
