"""The report of ``whatif opdb fit``: the fitted models, and their errors on held-out data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from whatif.opdb.learned import ModelFacts
from whatif.report.layout import report
from whatif.units import counted


def print_models(models: Sequence[ModelFacts], folder: Path) -> None:
    """Print the fitted models."""
    with report() as out:
        out.say(f"{folder}: {counted(len(models), 'model')} written", "bold")
        rows = [
            (
                facts.device or f"across {len(facts.devices)} devices", f"{facts.family} {facts.dtype}", facts.kind,
                f"{facts.rows:,}", f"{np.mean(list(facts.validation_pct.values()) or [np.nan]):.1f} %",
                f"{100 * np.expm1(np.median(list(facts.half.values()))):.1f} %",
            )
            for facts in models
        ]  # fmt: skip
        out.table(None, ["device", "operators", "model", "rows", "misses by", "range (90 %)"], rows, text_columns=3)
        for facts in models:
            for name, component in facts.components.items():
                out.say(f"{facts.device} {name} {facts.dtype}: principal component {component}", "dim")


def model_dict(facts: ModelFacts) -> dict[str, object]:
    """Return the facts of a fitted model as a JSON object."""
    return {
        "device": facts.device or None, "model": facts.kind, "components": facts.components,
        "family": facts.family, "dtype": facts.dtype, "names": list(facts.names),
        "devices": list(facts.devices), "rows": facts.rows, "miss_pct": facts.validation_pct,
        "half_width_log": facts.half, "before_interpolation": list(facts.before_interpolation),
    }  # fmt: skip
