"""Fixtures for tests of the op database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers import need
from whatif.opdb import blending


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit threads: thousands of short parallel loops take minutes if other tests run at the same time."""
    need("sklearn.ensemble")  # only what is loaded can be limited
    with need("threadpoolctl").threadpool_limits(1, "openmp"):
        yield


@pytest.fixture
def no_known_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources with unknown errors answer alone, in order of preference."""
    monkeypatch.setattr(blending, "errors", dict)
