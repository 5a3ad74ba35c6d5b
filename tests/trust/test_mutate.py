"""The mutants of ``mutate.py`` apply: each quotes a line that the library has once, and its tests are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trust.mutate import MUTANTS, ROOT, TESTS, places


def test_each_mutant_applies() -> None:
    assert len(places(ROOT)) == len(MUTANTS)
    assert {mutant.group for mutant in MUTANTS} == set(TESTS)
    assert not [test for tests in TESTS.values() for test in tests if not (ROOT / test).exists()]


def test_a_text_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"the text of {MUTANTS[0].name}, "):
        places(tmp_path)
