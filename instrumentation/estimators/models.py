"""Models from the measurements of a database: in memory for an evaluation, or as files beside the database."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from whatif.opdb.learned import PRINCIPAL, TREES, LearnedModel, write_model
from whatif.opdb.provenance import Provenance
from whatif.opdb.rows import Rows

from .fitting import Fitted, Said, fit_across, fit_devices
from .samples import samples_of

Contributions = Sequence[tuple[Provenance, Rows]]


def fit_models(
    contributions: Contributions,
    *,
    say: Said | None = None,
    own: bool = True,
    across: bool = True,
    kinds: Sequence[str] = (TREES,),
) -> list[Fitted]:
    """Fit what the measurements suffice for: models of each device (``own``), and models ``across`` devices.

    Networks ("principal" among ``kinds``) are of one device each, and need torch.
    """
    samples = list(samples_of(contributions))
    found = list(fit_devices(samples, say=say)) if own and TREES in kinds else []
    if own and PRINCIPAL in kinds:
        from .principal.models import fit_networks

        found += fit_networks(samples, say=say)
    return found + (list(fit_across(samples, say=say)) if across and TREES in kinds else [])


def in_memory(fitted: Sequence[Fitted]) -> list[LearnedModel]:
    """Return models that were just fitted as the chain asks them."""
    return [LearnedModel(m.name, m.facts, partial(dict, m.arrays)) for m in fitted]


def write_models(folder: Path, fitted: Sequence[Fitted]) -> list[Path]:
    """Write models into a folder; gives the paths of their .json files."""
    folder.mkdir(parents=True, exist_ok=True)
    return [write_model(folder, m.name, m.facts, m.arrays) for m in fitted]
