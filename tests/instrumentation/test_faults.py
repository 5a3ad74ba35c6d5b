"""The faults of a first GPU run: what each gives is what docs/cupti.md says."""

from __future__ import annotations

import pytest

from tests.helpers import need

need("torch")
need("cupti.cupti")
faults = need("tests.instrumentation.faults")


def documented() -> dict[str, str]:
    """The page's table."""
    text = faults.PAGE.read_text().partition(faults.START)[2].partition(faults.END)[0]
    rows = [line.strip("| \n").split(" | ", 1) for line in text.splitlines()[2:]]
    return {row[0]: row[1] for row in rows}


def test_the_page_lists_every_fault() -> None:
    assert list(documented()) == list(faults.FAULTS)


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_gives_the_sentence_of_the_page(name: str) -> None:
    assert faults.play(name) == documented()[name], "python -m tests.instrumentation.faults writes the table"
