"""The text report of ``whatif anonymize``: the removed and the kept texts."""

from __future__ import annotations

from whatif.ingest.anonymize.anonymize import Anonymized
from whatif.report.layout import report

# Shown texts of each kind; ``Anonymized.kept`` has all.
MOST_SHOWN = 12


def print_anonymized(result: Anonymized) -> None:
    """Print the path of the copy, the number of removed texts of each kind, and what to check before sharing."""
    with report() as out:
        out.say(f"{result.path}: written", "bold")
        out.table(
            "Taken out", ["", ""], [(what, f"{count:,}") for what, count in result.removed.items()] or [("nothing", "")]
        )
        if result.lost:
            out.table(
                "Not copied, because it could not be read",
                ["", ""],
                [(reason, f"{count:,}") for reason, count in result.lost.items()],
            )
        if result.kept:
            rows = [(kind, f"{len(texts):,}", _some(texts)) for kind, texts in result.kept.items()]
            out.table("Free text that stays: look at it before sharing", ["", "", ""], rows)
        out.say()
        kept = "Names of kernels, operators, layers and annotations stay; all but common words are replaced."
        if result.renamed_words is not None:
            kept += f" Words of layer names numbered: {result.renamed_words}."
        out.note(kept, "dim")


def _some(texts: tuple[str, ...]) -> str:
    return ", ".join(text[:60] for text in texts[:MOST_SHOWN]) + (", …" if len(texts) > MOST_SHOWN else "")
