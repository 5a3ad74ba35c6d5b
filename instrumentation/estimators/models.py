"""Models from the measurements of a database: in memory for evaluation, or as files beside the database."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from whatif.opdb.learned import PRINCIPAL, TREES, LearnedModel, write_model
from whatif.opdb.provenance import Provenance
from whatif.opdb.rows import Rows

from .fitting import Fitted, Say, fit_across, fit_devices
from .samples import samples_of

Contributions = Sequence[tuple[Provenance, Rows]]


def fit_models(
    contributions: Contributions,
    *,
    say: Say | None = None,
    own: bool = True,
    across: bool = True,
    kinds: Sequence[str] = (TREES,),
) -> list[Fitted]:
    """Fit the models that have enough measurements: of each device (``own``), and ``across`` devices.

    Networks ("principal" among ``kinds``) are of one device each, and need torch.
    """
    samples = list(samples_of(contributions))
    found = list(fit_devices(samples, say=say)) if own and TREES in kinds else []
    if own and PRINCIPAL in kinds:
        from .principal.models import fit_networks

        found += fit_networks(samples, say=say)
    return found + (list(fit_across(samples, say=say)) if across and TREES in kinds else [])


def in_memory(fitted: Sequence[Fitted]) -> list[LearnedModel]:
    """Return fitted models as the chain uses them."""
    return [LearnedModel(m.name, m.facts, partial(dict, m.arrays)) for m in fitted]


def write_models(folder: Path, fitted: Sequence[Fitted]) -> list[Path]:
    """Write models into a folder; return the paths of their .json files."""
    folder.mkdir(parents=True, exist_ok=True)
    return [write_model(folder, m.name, m.facts, m.arrays) for m in fitted]
