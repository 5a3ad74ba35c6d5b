"""Damaged traces are read or refused in a sentence; tests/test_fuzz.py does the same to events made by hand."""

from __future__ import annotations

import pytest

from tests.trust.common import halved, small_traces
from tests.trust.fuzz_traces import cases


def check(seed: int, count: int) -> None:
    kinds = set()
    for name, trace in small_traces().items():
        for what, data, suffix in cases(trace, seed, count):
            outcome = halved(data, suffix)
            kinds.add(outcome.kind)
            assert outcome.kind in ("read", "refused"), (name, what, outcome)
    assert kinds == {"read", "refused"}


def test_damaged_traces() -> None:
    check(1, 60)


@pytest.mark.slow
def test_many_damaged_traces() -> None:
    check(2, 1500)
