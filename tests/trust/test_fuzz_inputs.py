"""Damaged inputs of every kind but traces are read or refused in a sentence."""

from __future__ import annotations

import random

import pytest

from tests.helpers import need
from tests.trust import fuzz_inputs


def check(seed: int, count: int) -> None:
    need("pyarrow")
    counts, faults = fuzz_inputs.rounds(random.Random(seed), lambda done: done < count)
    assert not faults, faults[:3]
    statuses = {key.rpartition(" ")[2] for key in counts}
    assert {"0", "1"} <= statuses, counts


def test_damaged_inputs() -> None:
    check(3, 10)


@pytest.mark.slow
def test_many_damaged_inputs() -> None:
    check(4, 150)
