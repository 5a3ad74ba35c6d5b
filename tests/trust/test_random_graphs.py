"""Simulators and edits give what a brute-force simulator gives, on random graphs.

``remove`` is left out of what must not be refused: about 2 % of its selections give a cycle (random_graphs.py shows
them). What it does not refuse must simulate as brute force does.
"""

from __future__ import annotations

import pytest

from tests.trust.random_graphs import cases, faults


def check(count: int, first_seed: int) -> None:
    found, n_cases = [], 0
    for case in cases(first_seed, count):
        n_cases += 1
        found += [(case.seed, *fault) for fault in faults(case) if not is_known(*fault)]
    assert n_cases > count / 2
    assert not found


def is_known(what: str, how: str) -> bool:
    return what == "remove" and "form a cycle" in how


def test_random_graphs() -> None:
    check(150, 0)


@pytest.mark.slow
def test_many_random_graphs() -> None:
    check(3000, 10_000)
